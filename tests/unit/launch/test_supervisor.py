"""What a node does that has lost its coordinator, with a clock and connections of the test's own."""

import time
from types import SimpleNamespace

import pytest

from lockstep.launch import meeting, supervisor
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.job import Count, Job
from lockstep.launch.meeting import Record
from lockstep.launch.supervisor import GONE_S, HOUR_S, MOST_RETURNS, Member
from lockstep.launch.wire.protocol import Handover, JobEnd, Welcome

ADDRESS = "127.0.0.1:29400"


class Clock:
    """A clock that goes only while somebody sleeps, and what happens meanwhile."""

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
    monkeypatch.setattr(supervisor, "time", made)
    return made


@pytest.fixture
def member(tmp_path, monkeypatch):
    """Node 2 of three, which followed the coordinator of term 1 and can reach nobody."""
    monkeypatch.setattr(supervisor, "Agent", lambda job, name, secret: SimpleNamespace(close=lambda: None))
    job = Job({"resume_command": "again"}, tmp_path, Count(1, 1), Count(2, 3), join=ADDRESS)
    made = Member(job, "host-c", [])
    made._followed, made._number = Record(1, "host-a", ADDRESS), 2
    made._heard = Handover([0, 1, 2], 0)
    monkeypatch.setattr(made, "_reach", lambda *addresses: None)
    return made


def test_a_node_that_returns_withdraws_what_it_said_under_its_old_number(member, tmp_path):
    meeting.begin_term(tmp_path, None, "host-a", ADDRESS)
    meeting.report_lost(tmp_path, 1, 2)
    member._adopt(Welcome(str(tmp_path), [], "again", number=3, term=1))
    assert meeting.who_lost(tmp_path, 1) == set()


def test_a_job_is_over_when_its_record_is_gone_for_a_while(member, clock):
    began = clock.now
    ending = member._look_for_another("no answer")
    assert (ending.code, ending.coordinated) == (1, False)
    assert GONE_S <= clock.now - began < GONE_S + 1


def test_a_moment_without_a_record_is_not_the_end_of_a_job(member, clock, tmp_path, monkeypatch):
    began = clock.now
    connection = object()
    monkeypatch.setattr(member, "_reach", lambda *addresses: connection)

    def take_over():
        if clock.now - began > GONE_S / 2 and not meeting.newest(tmp_path):
            meeting.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")

    clock.meanwhile = take_over
    assert member._look_for_another("no answer") is connection


def test_a_folder_that_cannot_be_read_is_not_the_end_of_a_job(member, clock, tmp_path, monkeypatch):
    """Nor is it a reason to take over when it can be read again: nobody could see the count grow."""
    term = meeting.begin_term(tmp_path, None, "host-a", ADDRESS)
    began, newest, connection = clock.now, meeting.newest, object()

    def sometimes(run):
        if 1 < clock.now - began < 60:
            raise OSError(5, "Input/output error")
        return newest(run)

    def meanwhile():
        if clock.now - began > 62:
            term.superseded()
            member._reach = lambda *addresses: connection

    monkeypatch.setattr(meeting, "newest", sometimes)
    clock.meanwhile = meanwhile
    assert member._look_for_another("no answer") is connection
    assert "Input/output error" in member._why


def test_no_job_begins_in_a_folder_that_cannot_be_read(member, clock, tmp_path, monkeypatch):
    began, newest = clock.now, meeting.newest
    listener = SimpleNamespace(close=lambda: None, getsockname=lambda: ("127.0.0.1", 29400), family=2)

    def unreadable(run):
        if clock.now - began < 5:
            raise OSError(5, "Input/output error")
        return newest(run)

    monkeypatch.setattr(meeting, "newest", unreadable)
    monkeypatch.setattr(member, "_claim_first", lambda: listener)
    office = member._arrive()
    with office.folder:
        assert office.term.record.term == 1
        assert clock.now - began >= 5


def lives(clock, term):
    clock.meanwhile = term.superseded


def test_a_node_returns_a_few_times_in_an_hour(member, clock, tmp_path, monkeypatch, capfd):
    lives(clock, meeting.begin_term(tmp_path, None, "host-a", ADDRESS))
    connection, reached = object(), []
    monkeypatch.setattr(member, "_reach", lambda *addresses: reached.append(addresses) or connection)
    for _ in range(MOST_RETURNS):
        assert member._look_for_another("no answer") is connection
    assert member._look_for_another("no answer").code == 1
    assert len(reached) == MOST_RETURNS  # the last return was not even tried
    assert f"has returned to it {MOST_RETURNS} times within an hour" in capfd.readouterr().err
    clock.now += HOUR_S
    assert member._look_for_another("no answer") is connection


def test_only_the_coordinating_node_has_an_ending_that_it_coordinated(tmp_path, monkeypatch):
    agent = SimpleNamespace(name="host-a", count=Count(1, 1), stop=lambda: None)
    coordinator = Coordinator(Job({}, tmp_path, Count(1, 1)), agent, [])
    sent = []
    monkeypatch.setattr(coordinator, "_send_to_nodes", sent.append)
    coordinator._carry_out(JobEnd(1))
    assert sent == [JobEnd(1)]
    assert coordinator.run() == JobEnd(1, coordinated=True)
