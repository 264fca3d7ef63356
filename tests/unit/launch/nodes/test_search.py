"""How a node finds its coordinator, with a clock and connections of the test's own."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lockstep.errors import ExitCode, PeersMissing, UserError
from lockstep.launch import election
from lockstep.launch.election import Term
from lockstep.launch.job import Bounds, Job
from lockstep.launch.nodes import search as module
from lockstep.launch.nodes.search import GONE_S, MAX_RECONNECTS, JoinedTerm, Search
from lockstep.launch.times import DELIVER_S, HOUR_S, LOST_AFTER_S
from lockstep.launch.wire.messages import CoordinatorState, JobEnd
from lockstep.runtime.rendezvous.handshake import Secret
from ports import free_port

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
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def last():
    """Node 2 of three, which followed the coordinator of term 1."""
    return JoinedTerm(Term(1, "host-a", ADDRESS), 2, CoordinatorState([[0, 2]], 0), "127.0.0.1")


@pytest.fixture
def search(tmp_path, monkeypatch):
    """The search of a node that can reach no other node."""
    job = Job({}, tmp_path, Bounds(1, 1), Bounds(2, 3), join=ADDRESS, resume_command="again")
    made = Search(job, "host-c", [], Secret(b"0" * 32, "a test"))
    monkeypatch.setattr(made, "_reach", lambda *addresses: None)
    return made


def test_a_job_is_over_when_its_record_is_gone_for_a_while(search, last, clock, capfd):
    began = clock.now
    ending = search.after_loss(last, "no answer")
    assert ending.code == ExitCode.RESTART
    assert "the job has ended, and this node did not learn how" in capfd.readouterr().err
    assert "events.jsonl" in ending.failure.message
    assert GONE_S <= clock.now - began < GONE_S + 1


def test_a_moment_without_a_record_is_not_the_end_of_a_job(search, last, clock, tmp_path, monkeypatch):
    began = clock.now
    connection = object()
    monkeypatch.setattr(search, "_reach", lambda *addresses: connection)

    def take_over():
        if clock.now - began > GONE_S / 2 and not election.newest_term(tmp_path):
            election.begin_term(tmp_path, None, "host-a", ADDRESS)
            election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")

    clock.meanwhile = take_over
    assert search.after_loss(last, "no answer") is connection


def test_a_folder_that_cannot_be_read_is_not_the_end_of_a_job(search, last, clock, tmp_path, monkeypatch):
    """Nor is it a reason to take over when it can be read again: the counter could not be seen to grow."""
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    began, newest_term, connection = clock.now, election.newest_term, object()

    def sometimes(run):
        if 1 < clock.now - began < 60:
            raise OSError(5, "Input/output error")
        return newest_term(run)

    def meanwhile():
        if clock.now - began > 62:
            term.renew()
            search._reach = lambda *addresses: connection

    monkeypatch.setattr(election, "newest_term", sometimes)
    clock.meanwhile = meanwhile
    assert search.after_loss(last, "no answer") is connection
    assert "Input/output error" in search._last_problem


def test_no_job_begins_in_a_folder_that_cannot_be_read(search, last, clock, tmp_path, monkeypatch):
    began, newest_term = clock.now, election.newest_term
    listener = SimpleNamespace(close=lambda: None, getsockname=lambda: ("127.0.0.1", 29400), family=2)

    def unreadable(run):
        if clock.now - began < 5:
            raise OSError(5, "Input/output error")
        return newest_term(run)

    monkeypatch.setattr(election, "newest_term", unreadable)
    monkeypatch.setattr(search, "_claim_first", lambda: listener)
    role = search.find_coordinator()
    with role.resources:
        assert role.lease.term.number == 1
        assert clock.now - began >= 5


def lives(clock, term):
    clock.meanwhile = term.renew


def test_a_node_returns_a_few_times_in_an_hour(search, last, clock, tmp_path, monkeypatch, capfd):
    lives(clock, election.begin_term(tmp_path, None, "host-a", ADDRESS))
    connection, reached = object(), []
    monkeypatch.setattr(search, "_reach", lambda *addresses: reached.append(addresses) or connection)
    for _ in range(MAX_RECONNECTS):
        assert search.after_loss(last, "no answer") is connection
    assert search.after_loss(last, "no answer").code == 1
    assert len(reached) == MAX_RECONNECTS  # the last return was not even tried
    said = capfd.readouterr().err
    assert f"has returned to it {MAX_RECONNECTS} times within an hour" in said
    assert f"cannot stay connected to the coordinating node ({ADDRESS}): no answer" in said
    assert "is gone" not in said
    clock.now += HOUR_S + 1
    assert search.after_loss(last, "no answer") is connection


@pytest.mark.parametrize("new_term", [False, True])
def test_returns_count_for_one_coordinator(search, last, clock, tmp_path, monkeypatch, new_term):
    lives(clock, election.begin_term(tmp_path, None, "host-a", ADDRESS))
    connection = object()
    monkeypatch.setattr(search, "_reach", lambda *addresses: connection)
    for _ in range(MAX_RECONNECTS):
        search.after_loss(last, "no answer")
        search.adopt(search._job, new_term)
    assert (search.after_loss(last, "no answer") is connection) == new_term


def test_a_coordinator_that_dies_after_a_sign_of_life_is_not_called_alive(search, last, clock, tmp_path, monkeypatch):
    """Its counter grew after the connection was lost, and then stopped."""
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    began, cut_off = clock.now, []

    def dies_soon():
        if clock.now - began < 1:
            term.renew()

    clock.meanwhile = dies_soon
    monkeypatch.setattr(election, "write_cut_off_file", lambda *arguments: cut_off.append(clock.now))
    role = search.after_loss(last, "no answer")
    with role.resources:
        assert role.lease.term.number == 2
    assert 0 < max(cut_off) - began < 1 + LOST_AFTER_S


def test_a_slow_attempt_to_connect_is_no_silence_of_the_coordinator(search, last, clock, tmp_path, monkeypatch, capfd):
    """The counter grows all the time, but this node does not look while it tries to connect."""
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    lives(clock, term)
    monkeypatch.setattr(search, "_reach", lambda *addresses: clock.sleep(LOST_AFTER_S + 4))
    ending = search.after_loss(last, "no answer")
    assert isinstance(ending, JobEnd)
    assert election.newest_term(tmp_path).number == 1
    said = capfd.readouterr().err
    assert "no coordinating node could be reached within 5 minutes" in said
    assert "is gone" not in said


def test_a_signal_ends_a_node_that_finds_no_coordinator(search, last, clock, tmp_path, capfd):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    search._signals.append("SIGTERM")
    assert search.after_loss(last, "no answer").code == 75
    assert "ended while no node coordinates" in capfd.readouterr().err


def test_a_signal_waits_for_a_successor_that_does_not_answer_at_once(search, last, clock, tmp_path, monkeypatch):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    lives(clock, election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401"))
    connection, tries = object(), []

    def reach(*addresses):
        tries.append(addresses)
        return connection if len(tries) == 3 else None

    monkeypatch.setattr(search, "_reach", reach)
    search._signals.append("SIGTERM")
    assert search.after_loss(last, "no answer") is connection
    assert search._signals == ["SIGTERM"]


def test_a_signal_waits_a_while_for_a_successor_that_lives(search, last, clock, tmp_path):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    lives(clock, election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401"))
    search._signals.append("SIGTERM")
    began = clock.now
    assert search.after_loss(last, "no answer").code == 75
    assert DELIVER_S <= clock.now - began < DELIVER_S + 1


def test_a_signal_does_not_wait_for_a_successor_that_is_lost_as_well(search, last, clock, tmp_path):
    """Its counter stands still: nothing will answer there."""
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")
    search._signals.append("SIGTERM")
    began = clock.now
    assert search.after_loss(last, "no answer").code == 75
    assert LOST_AFTER_S <= clock.now - began < LOST_AFTER_S + 1


@pytest.mark.parametrize(("node", "binds"), [(None, True), (0, True), (1, False)])
def test_where_a_platform_numbers_its_machines_number_0_coordinates(search, node, binds):
    search._job = replace(search._job, node=node)
    search._addresses = [f"127.0.0.1:{free_port()}"]
    listener = search._claim_first()
    assert (listener is not None) == binds
    if listener:
        listener.close()


def test_a_name_that_a_platform_has_yet_to_publish_is_waited_for(search, clock, monkeypatch):
    def unknown(address):
        raise UserError(f"--join {address}: the host nobody is not known here", "not found", "")

    monkeypatch.setattr(module, "bind_join_address", unknown)
    with pytest.raises(UserError, match="the host nobody is not known here"):
        search.find_coordinator()

    search._job = replace(search._job, node=0)
    with pytest.raises(PeersMissing, match="no answer within 5 minutes") as missing:
        search.find_coordinator()
    assert "the host nobody is not known here" in missing.value.found
    assert missing.value.exit_code == ExitCode.RESTART
