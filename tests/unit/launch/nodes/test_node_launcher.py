"""What the launcher of a node does as coordinator, and when it joins a job."""

import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from lockstep.launch import election
from lockstep.launch.election import Term
from lockstep.launch.job import Bounds, Job
from lockstep.launch.nodes import node_launcher
from lockstep.launch.nodes.node_launcher import NodeLauncher, Outcome, wait_for_messages
from lockstep.launch.nodes.search import CoordinatorRole, JoinedTerm, Search
from lockstep.launch.wire.connections import ConnectionLost, Garbled
from lockstep.launch.wire.messages import (
    CoordinatorState,
    JobEnd,
    Kill,
    NodeHeartbeat,
    SignalReceived,
    Welcome,
)
from lockstep.runtime.rendezvous.handshake import Secret

ADDRESS = "127.0.0.1:29400"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Node 2 of three, which followed the coordinator of term 1."""
    monkeypatch.setattr(node_launcher, "Agent", lambda job, name, secret: SimpleNamespace(close=lambda: None))
    job = Job({}, tmp_path, Bounds(1, 1), Bounds(2, 3), join=ADDRESS)
    made = NodeLauncher(job, "host-c", [], Secret(b"s" * 32, "a test"))
    made._joined = JoinedTerm(Term(1, "host-a", ADDRESS), 2, CoordinatorState([[0, 2]], 0), "127.0.0.1")
    return made


def test_a_node_that_returns_withdraws_what_it_said_under_its_old_number(node, tmp_path):
    election.begin_term(tmp_path, None, "host-a", ADDRESS)
    election.write_cut_off_file(tmp_path, 1, 2)
    node._adopt(
        Welcome(str(tmp_path), "again", number=3, term=Term(1, "host-a", ADDRESS)),
        CoordinatorState([[0, 1], [3, 3]]),
        "127.0.0.1",
    )
    assert election.cut_off_nodes(tmp_path, 1) == set()


def test_the_node_that_coordinates_ends_the_job(node, tmp_path, monkeypatch):
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    monkeypatch.setattr(node_launcher, "Coordinator", lambda *arguments: SimpleNamespace(run=lambda: JobEnd(1)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        role = CoordinatorRole(ExitStack(), listener, term)
        monkeypatch.setattr(node._search, "find_coordinator", lambda: role)
        assert node.run() == Outcome(JobEnd(1), ended_here=True)


def test_the_node_that_follows_does_not_end_the_job(node, monkeypatch):
    monkeypatch.setattr(node._search, "find_coordinator", lambda: JobEnd(1))
    assert node.run() == Outcome(JobEnd(1), ended_here=False)


def test_a_signal_that_a_superseded_coordinator_received_reaches_its_successor(node, tmp_path, monkeypatch, capfd):
    """Its own coordinator had taken the signal, and could no longer do anything about it."""
    term = election.begin_term(tmp_path, None, "host-a", ADDRESS)
    superseded = SimpleNamespace(
        run=lambda: None, received_signals=["SIGTERM"], coordinator_state=CoordinatorState([[0, 1]])
    )
    monkeypatch.setattr(node_launcher, "Coordinator", lambda *arguments: superseded)
    election.begin_term(tmp_path, 1, "host-b", "127.0.0.1:29401")
    connection, reached = object(), []
    monkeypatch.setattr(Search, "_reach", lambda search, *addresses: reached.append(addresses) or connection)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert node._coordinate(CoordinatorRole(ExitStack(), listener, term)) is connection
    assert reached == [("127.0.0.1:29401",)]
    assert node._signals == ["SIGTERM"]  # which is sent on the new connection

    # It does not report its own loss.
    said = capfd.readouterr().err
    assert "another node took over this job" in said
    assert "is lost" not in said


class FakeConnection:
    """A connection to a coordinator that sends these messages, each in a turn of its own, and is then lost."""

    local_address = "127.0.0.1"

    def __init__(self, *messages):
        self._messages = list(messages)
        self._here, self._there = socket.socketpair()
        self._there.send(b"x")  # something has arrived
        self.sent = []

    def fileno(self):
        return self._here.fileno()

    def send(self, message):
        self.sent.append(message)

    def receive(self, now):
        if not self._messages:
            raise ConnectionLost("the connection was closed")

        return [self._messages.pop(0)]

    def close(self):
        self._here.close()
        self._there.close()


@pytest.mark.parametrize(
    ("last_state", "kept"),
    [
        (CoordinatorState([[0, 2]], 0), ["SIGTERM"]),
        (CoordinatorState([[0, 2]], 0, preempt_signal="SIGTERM"), []),  # the successor has this state
    ],
)
def test_a_signal_that_was_sent_to_a_coordinator_as_it_died_reaches_its_successor(
    node, tmp_path, monkeypatch, last_state, kept
):
    """The signal was lost with the coordinator, and the job trained on until the scheduler killed it."""
    agent = SimpleNamespace(
        nproc=Bounds(1, 1), poll=list, heartbeat=NodeHeartbeat, sockets=list, kill_and_wait=list, close=list
    )
    monkeypatch.setattr(node_launcher, "Agent", lambda job, name, secret: agent)
    found = []
    monkeypatch.setattr(node._search, "after_loss", lambda last, why: found.append(list(node._signals)))
    welcome = Welcome(str(tmp_path), "again", number=2, term=Term(1, "host-a", ADDRESS))
    state = CoordinatorState([[0, 2]], 0)

    connection = FakeConnection(welcome, state, state, last_state)
    node._signals.append("SIGTERM")
    node._follow(connection)
    assert SignalReceived("SIGTERM") in connection.sent
    assert found == [kept]


def test_a_job_that_saves_already_gets_no_signal_twice(node, tmp_path):
    """A second Ctrl-C would kill the ranks at once."""
    node._signals.append("SIGINT")
    state = CoordinatorState([[0, 2]], 0, preempt_signal="SIGINT")
    node._adopt(Welcome(str(tmp_path), "again", 3, Term(1, "host-a", ADDRESS)), state, "127.0.0.1")
    assert node._signals == []


def test_what_no_coordinator_sends_ends_the_connection():
    here, there = socket.socketpair()
    with here, there:
        there.send(b"x")
        messages = [Kill(0), NodeHeartbeat()]
        connection = SimpleNamespace(fileno=here.fileno, receive=lambda now: messages)
        with pytest.raises(Garbled, match="NodeHeartbeat is not for a node"):
            wait_for_messages(connection)
        messages.pop()
        assert wait_for_messages(connection) == [Kill(0)]
