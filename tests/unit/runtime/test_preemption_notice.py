"""A signal in a process without a launcher, and in the processes that were forked from it."""

import gc
import multiprocessing
import os
import signal
import sys
import time

import pytest

from lockstep.errors import Preempted
from lockstep.runtime import preemption
from lockstep.runtime.environments.launcher import FOLDER
from lockstep.runtime.preemption import WORKER_NAME, handle_signals


@pytest.fixture
def child(monkeypatch):
    """Start daemonic processes as a user's code may do, and end them after the test."""
    monkeypatch.delenv(FOLDER, raising=False)
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
