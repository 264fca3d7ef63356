"""Connections between launchers, and what a node does with the first messages on one."""

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import UserError
from lockstep.launch.election import Term
from lockstep.launch.job import Bounds, Job
from lockstep.launch.nodes.node_launcher import NodeLauncher
from lockstep.launch.wire import connections
from lockstep.launch.wire.acceptor import Acceptor
from lockstep.launch.wire.connections import (
    Connection,
    ConnectionLost,
    Hub,
    NoAnswer,
    address_of,
    bind_join_address,
    listen_at,
    reach,
)
from lockstep.launch.wire.messages import (
    Announce,
    CoordinatorState,
    JobEnd,
    Message,
    NodeHeartbeat,
    Refused,
    Rendezvous,
    Start,
    Welcome,
    encode,
)
from lockstep.runtime.rendezvous.handshake import COORDINATOR_SIDE, NODE_SIDE, LineSigner, Secret
from ports import free_port

SECRET = Secret(b"a secret of a test", "a test")


class Peer:
    """The other side of a connection, which signs what it says."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._signer = LineSigner(SECRET, b"1.2", COORDINATOR_SIDE, NODE_SIDE)

    def say(self, *messages: Message) -> None:
        self.socket.sendall(self.signed(*messages))

    def signed(self, *messages: Message) -> bytes:
        return b"".join(self._signer.sign(encode(message)) for message in messages)


@pytest.fixture
def line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    made = Connection(here, time.monotonic(), LineSigner(SECRET, b"1.2", NODE_SIDE, COORDINATOR_SIDE))
    yield made, Peer(there)
    made.close()
    there.close()


def received(line: Connection, now: float = 0.0) -> list:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if messages := line.receive(now):
            return messages
    raise AssertionError("nothing came")


def test_messages_come_whole(line):
    made, there = line
    data = there.signed(Announce("a"), Announce("b"))
    there.socket.sendall(data[:-5])
    assert received(made) == [Announce("a")]
    there.socket.sendall(data[-5:])
    assert received(made) == [Announce("b")]


def test_last_words_are_heard_before_the_end(line):
    made, there = line
    there.say(Announce("bye"))
    there.socket.close()
    assert received(made) == [Announce("bye")]
    with pytest.raises(ConnectionLost, match="closed"):
        received(made)


def test_last_words_are_heard_although_nothing_can_be_sent_any_more(line):
    made, there = line
    there.say(JobEnd(0))
    there.socket.close()
    for _ in range(3):  # the first one is answered with a reset, and the next ones fail
        made.send(NodeHeartbeat())
        time.sleep(0.05)
    assert received(made) == [JobEnd(0)]
    with pytest.raises(ConnectionLost, match="broke"):
        received(made)


@pytest.mark.parametrize("how", ["forged", "repeated", "left out", "sent back"])
def test_only_what_the_peer_said_is_heard(line, how):
    made, there = line
    first, second = there.signed(Announce("a")), there.signed(Announce("b"))
    forged = {
        "forged": first.replace(b'"a"', b'"x"'),
        "repeated": first + first,
        "left out": second,
        "sent back": LineSigner(SECRET, b"1.2", NODE_SIDE, COORDINATOR_SIDE).sign(encode(Announce("a"))),
    }
    there.socket.sendall(forged[how])
    with pytest.raises(ConnectionLost, match="its signature is wrong"):
        received(made)


def test_silence_is_noticed(line):
    made, _ = line
    assert made.receive(made.last_received + 4.9) == []
    with pytest.raises(ConnectionLost, match="no heartbeat for 5 s"):
        made.receive(made.last_received + 5.1)


def test_noise_ends_a_connection(line):
    made, there = line
    there.socket.sendall(b"GET / HTTP/1.0\r\n")
    with pytest.raises(ConnectionLost, match="not one of our messages"):
        received(made)


def test_a_message_without_end_is_cut_off(line, monkeypatch):
    made, there = line
    monkeypatch.setattr(made._lines, "_longest", 1000)
    there.socket.sendall(b"x" * 5000)
    with pytest.raises(ConnectionLost, match="too long"):
        received(made)


def test_a_peer_that_does_not_read_is_given_up(line, monkeypatch):
    monkeypatch.setattr(connections, "LARGEST", 1000)
    made, _ = line
    made.send(Announce("x" * 50_000_000))
    waiting = len(made._unsent)
    made.send(Announce("x" * 1000))
    assert len(made._unsent) == waiting  # nothing more is kept for it
    with pytest.raises(ConnectionLost, match="stopped reading"):
        received(made)


def connected(hub: Hub, address: str, *sources: str | None) -> list[Connection]:
    """Connect from each source, while the hub accepts connections."""
    lines: list[Connection] = []
    for source in sources:
        knocking = threading.Thread(target=lambda source=source: lines.append(reach(address, source, SECRET)))
        knocking.start()
        while knocking.is_alive():
            hub.poll(0.0)
    return lines


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def test_one_claims_the_address_and_the_others_connect(address):
    listener = bind_join_address(address)
    assert bind_join_address(address) is None
    hub = Hub(Acceptor(listener, SECRET, pytest.fail))
    lines = connected(hub, address, None, "127.0.0.2")
    for line in lines:
        line.send(Announce("here"))
    heard = []
    while len(heard) < 2:
        heard += hub.poll(0.0)
    assert [message for _, message in heard] == [Announce("here")] * 2
    hub.send(heard[1][0], NodeHeartbeat())
    assert received(lines[1]) == [NodeHeartbeat()]
    lines[0].close()
    number = heard[0][0]
    while not (gone := hub.poll(0.0)):
        pass
    assert (gone[0][0], type(gone[0][1])) == (number, ConnectionLost)
    hub.send(number, NodeHeartbeat())  # the peer is gone: no harm
    lines[1].close()
    hub.close()


def test_last_words_arrive_although_others_still_talk(address, monkeypatch):
    monkeypatch.setattr(connections, "DRAIN_S", 120.0)
    monkeypatch.setattr(connections, "LOST_AFTER_S", 120.0)
    hub = Hub(Acceptor(bind_join_address(address), SECRET, pytest.fail))
    (line,) = connected(hub, address, None)
    line.send(Announce("here"))
    while not (heard := hub.poll(0.0)):
        pass
    line.send(Announce("not heard in time"))
    time.sleep(0.05)
    hub.send(heard[0][0], Announce("the end"))
    closing = threading.Thread(target=hub.close)
    closing.start()
    time.sleep(0.1)
    line.send(NodeHeartbeat())  # would be answered with a reset if the other side had hung up
    time.sleep(0.1)
    assert received(line) == [Announce("the end")]
    line.close()
    closing.join(timeout=60)
    assert not closing.is_alive()  # it does not wait longer than it must


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node that has not been welcome anywhere."""
    agent = lambda job, name, secret: SimpleNamespace(count=job.nproc)
    monkeypatch.setattr("lockstep.launch.nodes.node_launcher.Agent", agent)
    spec = {"layers": [("command line", {"steps": 3})], "path": []}
    job = Job(spec, tmp_path / "a", Bounds(1, 1), join="127.0.0.1:29400", run_dir_was_chosen=True)
    return NodeLauncher(job, "host", [], SECRET)


WELCOME = Welcome("runs/b", "type it again", 2, Term(1, "host-a", "127.0.0.1:29400"))


def test_orders_may_come_together_with_the_welcome(line, node):
    made, there = line
    order = Start(0, 1, 1, 2, 1, Rendezvous("127.0.0.1", 5000, 5001, "a1"))
    there.say(Announce("early"), WELCOME, order, CoordinatorState([[0, 0], [2, 2]]))
    assert node._join(made) == [Announce("early"), order]
    assert not (node._job.run_dir / "logs").exists()  # a node that follows makes no folder of its own


def test_a_node_adopts_the_run_folder_of_the_coordinator(node):
    state = CoordinatorState([[0, 0], [2, 2]])
    node._adopt(WELCOME, state, "127.0.0.1")
    assert node._job.run_dir == Path("runs/b")
    assert node._job.spec_for_ranks["run_dir"] == "runs/b"
    assert node._job.resume_command == "type it again"

    # A node that comes back keeps what it has.
    adopted, agent = node._job, node._agent
    node._adopt(WELCOME, state, "127.0.0.1")
    assert (node._job, node._agent) == (adopted, agent)


def test_a_refusal_is_an_error_for_the_user(line, node):
    made, there = line
    there.say(Refused("--join x", "target: 'b' here, 'a' there", "run the same command"))
    with pytest.raises(UserError, match="run the same command"):
        node._join(made)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_that_every_machine_could_bind_is_refused(host):
    with pytest.raises(UserError, match="names no machine"):
        bind_join_address(f"{host}:29400")


def test_an_address_of_another_machine_is_not_ours():
    assert bind_join_address("192.0.2.1:29400") is None


def test_an_unknown_address():
    with pytest.raises(UserError, match="--join"):
        bind_join_address("no.such.host.invalid:29400")


def test_a_coordinator_that_does_not_answer(address):
    with pytest.raises(NoAnswer, match="refused"):
        reach(address, None, SECRET)


def test_an_address_whose_port_is_taken(address):
    with bind_join_address(address) as taken, listen_at(*taken.getsockname()) as other:
        assert address_of(taken) == address
        assert address_of(other) != address
        assert address_of(other).startswith("127.0.0.1:")
