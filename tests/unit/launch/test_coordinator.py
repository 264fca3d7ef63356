"""The coordinator's loop, with an agent that does nothing."""

import errno
import os
import threading
import time
from types import SimpleNamespace

import pytest

from lockstep.launch import coordinator as module
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.decisions.commands import DropNode
from lockstep.launch.failure import RankExit
from lockstep.launch.folder import election
from lockstep.launch.folder import watch as folder_watch
from lockstep.launch.folder.watch import FolderWatch
from lockstep.launch.job import Bounds, Job
from lockstep.launch.wire.messages import Hello, NodeBeat, RankExited

ADDRESS = "127.0.0.1:29400"


class IdleAgent(SimpleNamespace):
    name, nproc, secret = "host-a", Bounds(1, 1), None
    orders: list

    def do(self, message):
        self.orders.append(message)

    def poll(self):
        return []

    def node_beat(self):
        return NodeBeat()

    def sockets(self):
        return []

    def kill_and_wait(self):
        pass


@pytest.fixture
def started(tmp_path):
    """Return a function that makes a coordinator; the job needs two nodes, so that nothing starts."""

    def make(signals: list[str], nnodes: Bounds = Bounds(2, 2)) -> tuple[Coordinator, election.HeldTerm]:
        term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
        job = Job({"resume_command": "again"}, tmp_path, Bounds(1, 1), nnodes, join=ADDRESS)
        return Coordinator(job, IdleAgent(orders=[]), signals, held_term=term), term

    return make


def test_a_slow_disk_does_not_stop_the_loop(started, monkeypatch):
    coordinator, term = started([])
    answers, asked, iterations = threading.Event(), threading.Event(), []

    def slow():
        asked.set()
        answers.wait(60)

    def iterate(once=coordinator._iterate):
        once()
        if asked.is_set():
            iterations.append(time.monotonic())
        if len(iterations) == 3:
            coordinator._ending = module.JobEnd(0)

    monkeypatch.setattr(term, "beat", slow)
    monkeypatch.setattr(coordinator, "_iterate", iterate)
    monkeypatch.setattr(folder_watch, "END_S", 0.0)
    try:
        assert coordinator.run() == module.JobEnd(0)
    finally:
        answers.set()
    assert len(iterations) == 3


def test_the_thread_counts_and_notices_a_successor(started, tmp_path):
    coordinator, _ = started([])
    before = election.read_counter(tmp_path, 1)
    coordinator._watch.look_at_folder()
    assert election.read_counter(tmp_path, 1) > before
    assert not coordinator._watch.superseded
    election.begin_term(tmp_path, 1, "host-b", ADDRESS)
    assert coordinator.run() is None


def test_a_coordinator_that_was_suspended_looks_before_it_acts(started, tmp_path):
    """The thread may not have looked yet."""
    signals = []
    coordinator, _ = started(signals)
    election.begin_term(tmp_path, 1, "host-b", ADDRESS)
    signals.append("SIGTERM")
    coordinator._last_iteration -= module.SUSPENDED_S + 1
    coordinator._iterate()
    assert coordinator._superseded
    assert signals == ["SIGTERM"]  # for the successor


@pytest.mark.parametrize("superseded", [True, False])
def test_a_rank_0_that_ended_because_of_a_successor_is_no_failure(started, tmp_path, monkeypatch, superseded):
    """It may have looked before the thread has."""
    coordinator, _ = started([])
    exits = []
    monkeypatch.setattr(coordinator._state_machine, "rank_exited", lambda message, now: exits.append(message))
    ended = RankExited(0, 0, RankExit(-9))
    monkeypatch.setattr(coordinator._agent, "poll", lambda: [ended], raising=False)
    if superseded:
        election.begin_term(tmp_path, 1, "host-b", ADDRESS)
    coordinator._iterate()
    assert coordinator._superseded is superseded
    assert exits == ([] if superseded else [ended])


def test_a_node_that_asks_to_join_twice_is_dropped(started):
    """It would be admitted again, and running ranks would save and exit for it."""
    coordinator, _ = started([], nnodes=Bounds(2, 3))
    hello = Hello("host-b", Bounds(1, 1), coordinator._job.identity)
    state_machine = coordinator._state_machine
    coordinator._receive_from_node(1, hello, 0.0)
    assert sorted(state_machine.state.cluster.nodes) == [0, 1]

    coordinator._receive_from_node(1, hello, 1.0)
    assert sorted(state_machine.state.cluster.nodes) == [0]
    assert DropNode(1) in state_machine.take_commands()


def test_signals_of_a_superseded_coordinator_are_kept(started, tmp_path):
    signals = ["SIGTERM"]
    coordinator, _ = started(signals)
    coordinator._iterate()
    assert not signals
    assert coordinator.received_signals == ["SIGTERM"]


def test_what_lockstep_resize_left_is_read_once(tmp_path):
    watch = FolderWatch(tmp_path, None)
    (tmp_path / "resize").write_text("3\n")
    watch.look_at_folder()
    watch.look_at_folder()
    assert list(watch.resize_requests) == ["3"]
    assert not (tmp_path / "resize").exists()


def test_an_error_in_the_thread_ends_the_job(started, monkeypatch):
    coordinator, _ = started([])

    def fail():
        raise ValueError("unexpected")

    monkeypatch.setattr(coordinator._watch, "look_at_folder", fail)
    with pytest.raises(ValueError, match="unexpected"):
        coordinator.run()


def test_a_loop_that_is_stuck_gives_no_sign_of_life(started, tmp_path):
    """Its terminal may be held. The thread goes on, and must not hide that from the other nodes."""
    coordinator, _ = started([])
    before = election.read_counter(tmp_path, 1)
    coordinator._last_iteration -= module.LOST_AFTER_S + 1
    coordinator._watch.look_at_folder()
    assert election.read_counter(tmp_path, 1) == before
    coordinator._iterate()
    coordinator._watch.look_at_folder()
    assert election.read_counter(tmp_path, 1) > before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_an_error_of_the_disk_does_not_lose_a_request_or_the_job(tmp_path, monkeypatch, number):
    watch = FolderWatch(tmp_path, None)
    (tmp_path / "resize").write_text("3\n")
    stat, opened = os.stat, os.open

    def failing(of):
        def call(path, *arguments, **options):
            if str(path).endswith("resize"):
                raise OSError(number, os.strerror(number))
            return of(path, *arguments, **options)

        return call

    monkeypatch.setattr(os, "stat", failing(stat))
    monkeypatch.setattr(os, "open", failing(opened))
    watch.look_at_folder()
    assert not watch.resize_requests
    monkeypatch.undo()
    watch.look_at_folder()
    assert list(watch.resize_requests) == ["3"]
