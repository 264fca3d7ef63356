"""The coordinator's loop, with an agent that does nothing."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.files.jsonl import read_jsonl
from lockstep.launch import coordinator as module
from lockstep.launch import election, folder_watch
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.decisions.commands import HangUp, RecordEvent, StartAttempt
from lockstep.launch.decisions.recovery import End
from lockstep.launch.failure import Failure, RankExit
from lockstep.launch.folder_watch import FolderWatch
from lockstep.launch.job import Bounds, Job
from lockstep.launch.wire.messages import (
    Hello,
    JobEnd,
    Kill,
    NodeHeartbeat,
    RankExited,
    RanksGone,
    Rendezvous,
    Start,
)
from lockstep.run_folder.checkpoint_facts import CheckpointFacts
from lockstep.run_folder.events import append_event
from lockstep.run_folder.names import EVENTS

ADDRESS = "127.0.0.1:29400"


class IdleAgent(SimpleNamespace):
    host, nproc, secret = "host-a", Bounds(1, 1), None
    orders: list

    def do(self, message):
        self.orders.append(message)

    def poll(self):
        return []

    def heartbeat(self):
        return NodeHeartbeat()

    def sockets(self):
        return []

    def kill_and_wait(self):
        pass


@pytest.fixture
def started(tmp_path):
    """Return a function that makes a coordinator; the job needs two nodes, so that nothing starts."""

    def make(
        signals: list[str], nnodes: Bounds = Bounds(2, 2), begins: bool = True
    ) -> tuple[Coordinator, election.Lease]:
        term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
        job = Job({}, tmp_path, Bounds(1, 1), nnodes, join=ADDRESS, resume_command="again")
        coordinator = Coordinator(job, IdleAgent(orders=[]), signals, lease=term)
        if begins:  # as `run` does
            coordinator._begin()

        return coordinator, term

    return make


def seen(watch: FolderWatch) -> CheckpointFacts:
    watch.refresh()
    return watch.checkpoints


def test_one_error_of_the_disk_does_not_look_like_lost_checkpoints(tmp_path, monkeypatch):
    """A listing that failed on NFS looked like a run without a checkpoint, and the next error ended the job."""
    checkpoints = tmp_path / "checkpoints"
    watch = FolderWatch(tmp_path, None)
    assert seen(watch) == CheckpointFacts()
    (checkpoints / "step-00000004").mkdir(parents=True)
    assert seen(watch) == CheckpointFacts(newest_step=4)

    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    (checkpoints / "step-00000006").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        assert seen(watch) == CheckpointFacts(newest_step=4)

    assert seen(watch) == CheckpointFacts(newest_step=6)


def test_one_error_of_the_disk_does_not_look_like_a_removed_folder(tmp_path, monkeypatch):
    """The coordinator said that the run folder was gone, and did not look any more."""
    run = tmp_path / "run"
    run.mkdir()
    watch = FolderWatch(run, None)

    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", fail)
        watch._notice_removal()
    assert not watch.take_removed()

    watch._notice_removal()
    assert not watch.take_removed()
    run.rename(tmp_path / "moved")
    watch._notice_removal()
    assert watch.take_removed()


def test_the_other_nodes_know_at_once_that_the_job_has_failed(started, monkeypatch):
    coordinator, _ = started([])
    coordinator._iterate()
    sent = []
    monkeypatch.setattr(coordinator, "_send_to_nodes", sent.append)
    monkeypatch.setattr(coordinator, "_heartbeat_due", float("inf"))
    coordinator._iterate()
    assert not sent
    coordinator._state_machine._next_attempt.note_decision(End(JobEnd(1), "it has failed"))
    monkeypatch.setattr(coordinator._state_machine, "tick", lambda now: None)
    coordinator._iterate()
    coordinator._iterate()
    assert [state.ending for state in sent] == [JobEnd(1)]


def test_a_node_starts_its_own_ranks_last(started, monkeypatch):
    """Its disk, or the stacks of its ranks, may hold up the coordinator before the others know."""
    coordinator, _ = started([])
    sent = []
    monkeypatch.setattr(coordinator, "_send", lambda node, order: sent.append((node, order.first_rank)))
    monkeypatch.setattr(coordinator._store, "open", lambda nodes, ranks: Rendezvous("127.0.0.1", 1))
    coordinator._carry_out(StartAttempt(0, {node: range(node, node + 1) for node in range(3)}))
    assert sent == [(1, 1), (2, 2), (0, 0)]


def test_events_do_not_hold_up_the_loop_and_are_written_in_the_end(started, tmp_path, monkeypatch):
    """Each failure and each restart waited for the disk that may have caused it."""
    coordinator, _ = started([])
    answers = threading.Event()

    def slow(folder, event):
        answers.wait(60)
        append_event(folder, event)

    monkeypatch.setattr(folder_watch, "append_event", slow)
    coordinator._watch.start()
    for number in range(3):
        coordinator._carry_out(RecordEvent({"event": "restart", "attempt": number}))
    assert not (tmp_path / EVENTS).exists()
    answers.set()
    coordinator._watch.close()
    assert [event["attempt"] for event in read_jsonl(tmp_path / EVENTS)] == [0, 1, 2]


class SlowDisk:
    """A disk that answers only when the test says so. `checkpoints` and `superseded` read it."""

    def __init__(self):
        self.answers = threading.Event()
        self.readers: set[str] = set()

    def wait(self) -> None:
        self.readers.add(threading.current_thread().name)
        self.answers.wait(60)

    def checkpoints(self, path) -> CheckpointFacts:
        self.wait()
        return CheckpointFacts(newest_step=4)

    def superseded(self) -> bool:
        self.wait()
        return False


@pytest.fixture
def slow_disk(monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(folder_watch, "HELD_UP_S", 0.05)
    yield disk
    disk.answers.set()


@pytest.mark.parametrize("thread", ["looks", "waits"])
def test_a_disk_that_does_not_answer_holds_up_a_decision_for_a_moment_only(tmp_path, monkeypatch, slow_disk, thread):
    """The loop goes on with what was seen last, or the other nodes would lose this one.

    It once read the disk itself if the thread did something else at that moment, and waited without a limit.
    """
    watch = FolderWatch(tmp_path, None)
    if thread == "waits":
        watch.start()
        watch.refresh()

    monkeypatch.setattr(folder_watch, "read_checkpoint_facts", slow_disk.checkpoints)
    if thread == "looks":
        watch.start()

    began = time.monotonic()
    watch.refresh()
    assert time.monotonic() - began < 10
    assert watch.checkpoints == CheckpointFacts()

    # As soon as the disk answers, so does the thread.
    slow_disk.answers.set()
    monkeypatch.setattr(folder_watch, "HELD_UP_S", 60)
    watch.refresh()
    watch.close()
    assert watch.checkpoints == CheckpointFacts(newest_step=4)
    assert slow_disk.readers == {"lockstep-folder"}


def test_a_disk_that_does_not_answer_does_not_keep_the_end_of_a_rank(started, monkeypatch, slow_disk):
    """The loop looked for a successor itself, without a limit."""
    coordinator, term = started([])
    exits, ended = [], RankExited(0, 0, RankExit(-9))
    monkeypatch.setattr(
        coordinator._state_machine._rank_exits, "rank_exited", lambda message, now: exits.append(message)
    )
    monkeypatch.setattr(coordinator._agent, "poll", lambda: [ended], raising=False)
    monkeypatch.setattr(term, "superseded", slow_disk.superseded)
    monkeypatch.setattr(folder_watch, "END_S", 0.0)
    coordinator._watch.start()
    coordinator._iterate()
    coordinator._watch.close()
    assert exits == [ended]
    assert slow_disk.readers == {"lockstep-folder"}


def test_a_request_during_a_look_is_answered_by_the_next(tmp_path, monkeypatch):
    """What the thread looks at may have changed since."""
    watch = FolderWatch(tmp_path, None)
    looks, goes_on = [], threading.Event()

    def count(path):
        looks.append(len(looks))
        if looks == [0]:
            goes_on.wait(60)
        return CheckpointFacts(newest_step=len(looks))

    monkeypatch.setattr(folder_watch, "read_checkpoint_facts", count)
    watch.start()
    while not looks:
        time.sleep(0.001)
    threading.Timer(0.05, goes_on.set).start()
    assert seen(watch) == CheckpointFacts(newest_step=2)
    watch.close()


def test_the_checkpoints_are_looked_at_when_a_rank_has_ended(started, tmp_path):
    """The rank may have saved since the thread looked, less than a second ago: then its error may be restarted."""
    coordinator, _ = started([])
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    coordinator._iterate()
    assert coordinator._state_machine.facts.checkpoints.newest_step is None
    coordinator._agent.poll = lambda: [RankExited(0, 0, RankExit(0))]
    coordinator._iterate()
    assert coordinator._state_machine.facts.checkpoints.newest_step == 4


def test_two_things_that_hold_up_the_loop_do_not_add_up(started, monkeypatch):
    """A disk that does not answer, and then stacks: in between, the other nodes hear of this one."""
    coordinator, _ = started([])
    clock, happened = [1000.0], []

    def hold_up(what: str):
        clock[0] += 3.0
        happened.append(what)

    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(coordinator, "_heartbeat_due", clock[0])
    monkeypatch.setattr(coordinator._watch, "refresh", lambda: hold_up("disk"))
    monkeypatch.setattr(coordinator, "_must_refresh", lambda *arguments: True)
    monkeypatch.setattr(coordinator, "_send_to_nodes", lambda message: happened.append("heartbeat"))
    monkeypatch.setattr(coordinator, "_carry_out", lambda command: hold_up("stacks"))
    monkeypatch.setattr(coordinator._state_machine, "take_commands", lambda: ["collect"])
    monkeypatch.setattr(coordinator._state_machine, "tick", lambda now: None)
    coordinator._iterate()
    coordinator._iterate()
    assert happened == ["heartbeat", "disk", "heartbeat", "stacks"] * 2


def test_the_loop_waits_for_the_disk_once_per_iteration(started, monkeypatch):
    """It waited up to three times for a rank that had died, and again for the next attempt."""
    coordinator, _ = started([], nnodes=Bounds(1, 1))
    looks, arrived, sent = [], [], []
    monkeypatch.setattr(coordinator._watch, "refresh", lambda: looks.append(len(looks)))
    monkeypatch.setattr(coordinator._agent, "poll", lambda: [arrived.pop()] if arrived else [], raising=False)
    monkeypatch.setattr(coordinator, "_send", lambda node, order: sent.append(type(order)))
    coordinator._watch.last_iteration_at -= module.LATE_S + 1
    killed = RankExit(-9, Failure(0, "host-a", 0.0, "SIGKILL", "killed", origin="signal"))
    for message in (None, None, RankExited(0, 0, killed), RanksGone(0), None):
        looks.append("iteration")
        if message is not None:
            arrived.append(message)
        coordinator._iterate()
    assert [look == "iteration" for look in looks] == [True, False, True, True, False, True, False, True]
    assert sent == [Start, Kill, Start]


def test_a_slow_disk_does_not_stop_the_loop(started, monkeypatch):
    coordinator, term = started([], begins=False)
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

    monkeypatch.setattr(term, "renew", slow)
    monkeypatch.setattr(coordinator, "_iterate", iterate)
    monkeypatch.setattr(folder_watch, "END_S", 0.0)
    try:
        assert coordinator.run() == module.JobEnd(0)
    finally:
        answers.set()
    assert len(iterations) == 3


def test_the_thread_counts_and_notices_a_successor(started, tmp_path):
    coordinator, _ = started([], begins=False)
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
    coordinator._watch.last_iteration_at -= module.LATE_S + 1
    coordinator._iterate()
    assert coordinator._watch.superseded
    assert signals == ["SIGTERM"]  # for the successor


@pytest.mark.parametrize("superseded", [True, False])
def test_a_rank_0_that_ended_because_of_a_successor_is_no_failure(started, tmp_path, monkeypatch, superseded):
    """It may have looked before the thread has."""
    coordinator, _ = started([])
    exits = []
    monkeypatch.setattr(
        coordinator._state_machine._rank_exits, "rank_exited", lambda message, now: exits.append(message)
    )
    ended = RankExited(0, 0, RankExit(-9))
    monkeypatch.setattr(coordinator._agent, "poll", lambda: [ended], raising=False)
    if superseded:
        election.begin_term(tmp_path, 1, "host-b", ADDRESS)
    coordinator._iterate()
    assert coordinator._watch.superseded is superseded
    assert exits == ([] if superseded else [ended])


def test_a_node_that_asks_to_join_twice_is_lost(started):
    """It would be admitted again, and running ranks would save and exit for it."""
    coordinator, _ = started([], nnodes=Bounds(2, 3))
    hello = Hello("host-b", Bounds(1, 1), coordinator._job.identity)
    state_machine = coordinator._state_machine
    coordinator._receive_from_node(1, hello, 0.0)
    assert sorted(state_machine.nodes.joined) == [0, 1]

    coordinator._receive_from_node(1, hello, 1.0)
    assert sorted(state_machine.nodes.joined) == [0]
    assert HangUp(1) in state_machine.take_commands()


def test_the_coordinator_is_no_node_that_returns(started):
    """A message that named its number removed it from its own job, and the other nodes trained on without it."""
    coordinator, term = started([], nnodes=Bounds(2, 3))
    hello = Hello("host-b", Bounds(1, 1), coordinator._job.identity, term=term.term.number)
    coordinator._receive_from_node(1, hello, 0.0)
    assert sorted(coordinator._state_machine.nodes.joined) == [0, 1]


def test_failures_of_two_machines_are_compared_by_one_clock(started, monkeypatch):
    """The clock of node 1 is an hour ahead. Its rank failed two seconds ago, before the rank of this node."""
    coordinator, _ = started([], nnodes=Bounds(2, 2))
    exits = []
    monkeypatch.setattr(
        coordinator._state_machine._rank_exits, "rank_exited", lambda message, now: exits.append(message)
    )
    coordinator._receive_from_node(1, Hello("host-b", Bounds(1, 1), coordinator._job.identity), 0.0)

    here = time.time()
    raised = RankExit(1, Failure(1, "host-b", here + 3600.0, "ValueError", "mine"))
    coordinator._receive_from_node(1, RankExited(0, 1, raised, age=2.0), 0.0)
    assert exits[0].exit.failure.time == pytest.approx(here - 2.0, abs=1.0)


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


def test_a_request_that_a_shell_has_only_begun_to_write_is_not_lost(tmp_path):
    watch = FolderWatch(tmp_path, None)
    with (tmp_path / "resize").open("w") as shell:
        watch.look_at_folder()
        shell.write("3\n")
    watch.look_at_folder()
    assert list(watch.resize_requests) == ["3"]


def test_an_error_in_the_thread_ends_the_job(started, monkeypatch):
    coordinator, _ = started([], begins=False)

    def fail():
        raise ValueError("unexpected")

    monkeypatch.setattr(coordinator._watch, "look_at_folder", fail)
    with pytest.raises(ValueError, match="unexpected"):
        coordinator.run()


def test_a_loop_that_is_stuck_gives_no_sign_of_life(started, tmp_path):
    """Its terminal may be held. The thread goes on, and must not hide that from the other nodes."""
    coordinator, _ = started([])
    before = election.read_counter(tmp_path, 1)
    coordinator._watch.last_iteration_at -= folder_watch.LOST_AFTER_S + 1
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
