"""A signal in a process without a launcher, and in the processes that were forked from it."""

import multiprocessing
import os
import signal
import sys
import time

import pytest

from lockstep.errors import Preempted
from lockstep.runtime import preemption
from lockstep.runtime.heartbeat import FOLDER
from lockstep.runtime.preemption import WORKER_NAME, handle_signals, starting_workers


@pytest.fixture
def child(monkeypatch):
    """Start daemonic processes as a user's code may do, and end them after the test."""
    monkeypatch.delenv(FOLDER, raising=False)
    context = multiprocessing.get_context("fork")
    started = []

    def start(name: str) -> multiprocessing.process.BaseProcess:
        made = context.Process(target=time.sleep, args=(600,), daemon=True, name=name)
        made.start()
        started.append(made)
        return made

    yield start
    for process in started:
        process.kill()
        process.join()


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


def test_workers_that_are_starting_stay_until_the_run_has_ended(child):
    with handle_signals() as notice:
        with starting_workers():
            worker = child("without its name yet")
        worker.terminate()
        worker.join(0.3)
        assert worker.is_alive()
        assert notice.signal is None
    worker.terminate()
    worker.join(60)
    assert worker.exitcode == -signal.SIGTERM


def test_a_process_that_the_user_forks_during_a_run_can_be_terminated(child):
    with handle_signals() as notice:
        notice.waits = True  # the first step has begun
        users = child("the user's")
        users.terminate()  # perhaps before it runs
        users.join(60)
        assert users.exitcode == -signal.SIGTERM
        assert notice.signal is None


def test_a_process_that_the_user_forks_has_the_handlers_from_before_the_run(monkeypatch):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    try:
        with handle_signals():
            users = context.Process(target=lambda: found.put(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN))
            users.start()
            users.join(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found.get()


def test_leaving_kills_workers_that_have_no_name_yet(child):
    """A signal during `iter(loader)`: at exit Python would wait for them."""
    with handle_signals():
        users = child("the user's")
        with starting_workers():
            worker = child("Process-1")
            with pytest.raises(Preempted):
                os.kill(os.getpid(), signal.SIGTERM)
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL
    assert users.is_alive()


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
