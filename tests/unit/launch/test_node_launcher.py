"""What a node does that has lost its coordinator, with a clock and connections of the test's own."""

import socket
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from lockstep.launch import election, node_launcher
from lockstep.launch.election import TermInfo
from lockstep.launch.job import Bounds, Job
from lockstep.launch.node_launcher import GONE_S, HOUR_S, MAX_RECONNECTS, CoordinatorRole, NodeLauncher
from lockstep.launch.wire.messages import CoordinatorState, JobEnd, Welcome

ADDRESS = "127.0.0.1:29400"


class Clock:
    """A clock that goes only while the code sleeps, and what happens meanwhile."""

    def __init__(self):
        self.now = 1000.0
        self.meanwhile = lambda: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(node_launcher, "time", made)
    return made


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Node 2 of three, which followed the coordinator of term 1 and can reach no other node."""
    monkeypatch.setattr(node_launcher, "Agent", lambda job, name, secret: SimpleNamespace(close=lambda: None))
    job = Job({"resume_command": "again"}, tmp_path, Bounds(1, 1), Bounds(2, 3), join=ADDRESS)
    made = NodeLauncher(job, "host-c", [])
    made._followed, made._number = TermInfo(1, "host-a", ADDRESS), 2
    made._last_state = CoordinatorState([0, 1, 2], 0)
    monkeypatch.setattr(made, "_reach", lambda *addresses: None)
    return made


def test_a_node_that_returns_withdraws_what_it_said_under_its_old_number(node, tmp_path):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    election.report_cut_off(tmp_path, 1, 2)
    node._adopt(Welcome(str(tmp_path), [], "again", number=3, term=1))
    assert election.cut_off_nodes(tmp_path, 1) == set()


def test_a_job_is_over_when_its_record_is_gone_for_a_while(node, clock):
    began = clock.now
    ending = node._find_coordinator("no answer")
    assert (ending.code, node.ended_job) == (1, False)
    assert GONE_S <= clock.now - began < GONE_S + 1


def test_a_moment_without_a_record_is_not_the_end_of_a_job(node, clock, tmp_path, monkeypatch):
    began = clock.now
    connection = object()
    monkeypatch.setattr(node, "_reach", lambda *addresses: connection)

    def take_over():
        if clock.now - began > GONE_S / 2 and not election.newest(tmp_path):
            election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")

    clock.meanwhile = take_over
    assert node._find_coordinator("no answer") is connection


def test_a_folder_that_cannot_be_read_is_not_the_end_of_a_job(node, clock, tmp_path, monkeypatch):
    """Nor is it a reason to take over when it can be read again: the counter could not be seen to grow."""
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    began, newest, connection = clock.now, election.newest, object()

    def sometimes(run):
        if 1 < clock.now - began < 60:
            raise OSError(5, "Input/output error")
        return newest(run)

    def meanwhile():
        if clock.now - began > 62:
            term.beat()
            node._reach = lambda *addresses: connection

    monkeypatch.setattr(election, "newest", sometimes)
    clock.meanwhile = meanwhile
    assert node._find_coordinator("no answer") is connection
    assert "Input/output error" in node._last_problem


def test_no_job_begins_in_a_folder_that_cannot_be_read(node, clock, tmp_path, monkeypatch):
    began, newest = clock.now, election.newest
    listener = SimpleNamespace(close=lambda: None, getsockname=lambda: ("127.0.0.1", 29400), family=2)

    def unreadable(run):
        if clock.now - began < 5:
            raise OSError(5, "Input/output error")
        return newest(run)

    monkeypatch.setattr(election, "newest", unreadable)
    monkeypatch.setattr(node, "_claim_first", lambda: listener)
    role = node._join_or_coordinate()
    with role.resources:
        assert role.term.info.term == 1
        assert clock.now - began >= 5


def lives(clock, term):
    clock.meanwhile = term.beat


def test_a_node_returns_a_few_times_in_an_hour(node, clock, tmp_path, monkeypatch, capfd):
    lives(clock, election.begin_term(tmp_path, None, "host-a", ADDRESS))
    connection, reached = object(), []
    monkeypatch.setattr(node, "_reach", lambda *addresses: reached.append(addresses) or connection)
    for _ in range(MAX_RECONNECTS):
        assert node._find_coordinator("no answer") is connection
    assert node._find_coordinator("no answer").code == 1
    assert len(reached) == MAX_RECONNECTS  # the last return was not even tried
    assert f"has returned to it {MAX_RECONNECTS} times within an hour" in capfd.readouterr().err
    clock.now += HOUR_S
    assert node._find_coordinator("no answer") is connection


def test_the_node_that_coordinates_ends_the_job(node, tmp_path, monkeypatch):
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    monkeypatch.setattr(node_launcher, "Coordinator", lambda *arguments: SimpleNamespace(run=lambda: JobEnd(1)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert node._coordinate(CoordinatorRole(ExitStack(), listener, term)) == JobEnd(1)
    assert node.ended_job


def test_a_signal_that_a_superseded_coordinator_received_reaches_its_successor(node, tmp_path, monkeypatch):
    """Its own coordinator had taken the signal, and could no longer do anything about it."""
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    superseded = SimpleNamespace(run=lambda: None, received_signals=["SIGTERM"], state=CoordinatorState([0, 1]))
    monkeypatch.setattr(node_launcher, "Coordinator", lambda *arguments: superseded)
    election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")
    connection, reached = object(), []
    monkeypatch.setattr(node, "_reach", lambda *addresses: reached.append(addresses) or connection)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert node._coordinate(CoordinatorRole(ExitStack(), listener, term)) is connection
    assert reached == [("127.0.0.1:29401",)]
    assert node._signals == ["SIGTERM"]  # which is sent on the new connection


def test_a_signal_ends_a_node_that_finds_no_coordinator(node, clock, tmp_path, capfd):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    node._signals.append("SIGTERM")
    assert node._find_coordinator("no answer").code == 75
    assert "stopped while no node coordinates" in capfd.readouterr().err


def test_a_signal_waits_for_a_successor_that_does_not_answer_at_once(node, clock, tmp_path, monkeypatch):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    lives(clock, election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401"))
    connection, tries = object(), []

    def reach(*addresses):
        tries.append(addresses)
        return connection if len(tries) == 3 else None

    monkeypatch.setattr(node, "_reach", reach)
    node._signals.append("SIGTERM")
    assert node._find_coordinator("no answer") is connection
    assert node._signals == ["SIGTERM"]


@pytest.mark.parametrize("successor_lives", [True, False])
def test_a_signal_does_not_wait_for_ever(node, clock, tmp_path, successor_lives):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    term = election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")
    if successor_lives:
        lives(clock, term)
    node._signals.append("SIGTERM")
    began = clock.now
    assert node._find_coordinator("no answer").code == 75
    assert clock.now - began < node_launcher.DELIVER_S + 1
