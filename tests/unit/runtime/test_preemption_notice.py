"""A signal in a process without a launcher, and in the processes that were forked from it."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from lockstep.errors import Preempted
from lockstep.runtime import preemption
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.runtime.preemption import WORKER_NAME, handle_signals


@pytest.fixture
def child(monkeypatch):
    """Start daemonic processes as a user's code may do, and end them after the test."""
    monkeypatch.delenv(ATTEMPT_FOLDER, raising=False)
    context = multiprocessing.get_context("fork")
    started = []

    # Torch's handler raises if a worker of an earlier test, which Python has not collected yet, is killed as well.
    gc.collect()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def start(name: str) -> multiprocessing.process.BaseProcess:
        made = context.Process(target=time.sleep, args=(600,), daemon=True, name=name)
        made.start()
        started.append(made)
        return made

    yield start
    for process in started:
        process.kill()
        process.join()
    signal.signal(signal.SIGCHLD, before)


def test_leaving_kills_workers_and_not_the_processes_of_the_user(child):
    with handle_signals():
        worker, users = child(WORKER_NAME), child("the user's")
        with pytest.raises(Preempted):
            os.kill(os.getpid(), signal.SIGTERM)
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    assert users.is_alive()

    # Python ends daemonic processes at exit, with SIGTERM, and waits for them.
    users.terminate()
    users.join(60)
    assert users.exitcode == -signal.SIGTERM


def test_forked_processes_stay_until_the_run_has_ended(child):
    with handle_signals() as notice:
        users = child("the user's")
        users.terminate()
        users.join(0.3)
        assert users.is_alive()
        assert notice.signal is None
    users.terminate()
    users.join(60)
    assert users.exitcode == -signal.SIGTERM


class Reentrant:
    """A file in the middle of a write, which a signal handler has interrupted."""

    def write(self, text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    flush = write


@pytest.mark.parametrize("waits", [False, True])
def test_a_signal_in_the_middle_of_a_print(monkeypatch, capfd, waits):
    monkeypatch.setattr(sys, "stdout", Reentrant())
    monkeypatch.setattr(sys, "stderr", Reentrant())
    notice = preemption.PreemptionNotice(waits)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD)
    try:
        if waits:
            notice.receive(signal.SIGINT, None)
        else:
            with pytest.raises(Preempted):
                notice.receive(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGCHLD, before[1])
    assert ("saving after this step" if waits else "there is nothing to save") in capfd.readouterr().err


# ---- Ray Train's notice -----------------------------------------------------------------------------------


class RayTrain:
    """What a worker of Ray Train has in `sys.modules`, as far as it is read."""

    def __init__(self) -> None:
        self.preemption_context = self
        self.preemption_info: object | None = None

    def get_train_context(self) -> "RayTrain":
        return self


@pytest.fixture
def ray_train(monkeypatch) -> RayTrain:
    made = RayTrain()
    monkeypatch.setitem(sys.modules, preemption.RAY_TRAIN_CONTEXT, made)
    return made


def test_each_notice_of_ray_train_asks_for_one_save(ray_train):
    notice = preemption.PreemptionNotice()
    assert not notice.asks_for_save()
    for info in ("node a", "nodes a and b"):
        ray_train.preemption_info = info
        assert notice.asks_for_save()
        assert notice.signal is None  # the run goes on
        notice.saved()
        assert not notice.asks_for_save()


def test_there_is_no_notice_without_ray_train_or_in_its_older_versions(monkeypatch):
    monkeypatch.delitem(sys.modules, preemption.RAY_TRAIN_CONTEXT, raising=False)
    assert preemption.ray_train_notice() is None
    monkeypatch.setitem(sys.modules, preemption.RAY_TRAIN_CONTEXT, SimpleNamespace(get_train_context=object))
    assert preemption.ray_train_notice() is None


def test_a_run_saves_once_on_a_notice_and_goes_on(ray_train, tmp_path):
    """With one rank; the flag is the one that saves by the clock, which all ranks follow."""
    from lockstep import fit
    from lockstep.recipes.char_lm import TASK

    class Announced(TASK):
        def after_step(self, run, result) -> None:
            ray_train.preemption_info = "a node" if run.steps_done >= 2 else None

    settings = {
        "preset": "tiny",
        "steps": 6,
        "checkpoint": {"every": None, "minutes": None},
        "log": {"progress": "off"},
    }
    result = fit(Announced, settings, run_dir=str(tmp_path / "run"))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(saved) == 2, saved
    assert saved[-1] == "step-00000006"
    assert result.summary["step"] == 6
