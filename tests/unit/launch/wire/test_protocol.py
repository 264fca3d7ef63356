"""Messages between nodes, and what happens to those that are none."""

import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.launch.failure import Failure, RankExit
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import Count, Job
from lockstep.launch.supervisor import Member, adopt
from lockstep.launch.wire import protocol
from lockstep.launch.wire.door import Door
from lockstep.launch.wire.protocol import (
    Announce,
    Connection,
    ConnectionLost,
    Exited,
    Handover,
    Hello,
    Hub,
    JobEnd,
    NoAnswer,
    NodeBeat,
    Refused,
    Stacks,
    Start,
    Welcome,
    address_of,
    claim,
    decode,
    difference,
    encode,
    listen_at,
    reach,
)
from lockstep.runtime.meeting import proof
from lockstep.runtime.meeting.proof import Seal, Secret
from ports import free_port

VIEW = {"beats": 1, "age": 0.5, "step": 3, "steps_done": 2, "phase": "data", "detail": "", "longest": {"data": 1}}
MESSAGES = [
    Hello("host", Count(1, 2, 1), {"target": "x"}, 2, 1),
    Welcome("runs/b", [], "type it again", 1, 2),
    Handover([0, 2], 3, 1, [12.5], [[["host", 0], 5]], [[41, "data", 1]], {"hang": {}}, "SIGTERM"),
    Exited(0, 1, RankExit(0)),
    Exited(0, 1, RankExit(1, Failure(1, "host", 12, "ValueError", "text"))),
    JobEnd(75, None, 3),
    Stacks(3, {0: "line\nline"}, {0: [{}]}),
    Start(0, 0, 2, 4, 0, "127.0.0.1", 5000, 5001, "a1"),
    NodeBeat([RankView(rank=0, host="host", pid=1, state="S", **VIEW)], {"hang": {}}, 3),
    Announce("text with \u00e9"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_round_trip(message):
    assert encode(message).count(b"\n") == 1
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[1]",
        b"GET / HTTP/1.1",
        b'{"kind": "Nothing"}',
        b'{"kind": "Announce"}',
        b'{"kind": "Announce", "text": 1}',
        b'{"kind": "Announce", "text": "x", "more": 1}',
        b'{"kind": "RanksGone", "attempt": true}',
        b'{"kind": "RanksGone", "attempt": 1.5}',
        b'{"kind": "Exited", "attempt": 0, "rank": 1, "exit": {"code": 1, "failure": {"rank": 1}}}',
        b'{"kind": "Stacks", "attempt": 0, "stacks": {"first": ""}, "collectives": {}}',
        b'{"kind": "Message"}',
        b'{"kind": ["Announce"], "text": "x"}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError):  # noqa: PT011  (JSON's own errors are among them)
        decode(line)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from(["Exited", "NodeBeat", "Hello", "Start", "JobEnd"]), st.dictionaries(st.text(max_size=8), values)
)
def test_nothing_but_a_value_error_comes_of_noise(kind, fields):
    try:
        decode(json.dumps({**fields, "kind": kind}).encode())
    except ValueError:
        pass


SECRET = Secret(b"a secret of a test", "a test")


class Peer:
    """The other side of a connection, which signs what it says."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self._seal = Seal(SECRET, b"1.2", proof.COORDINATOR_SIDE, proof.NODE_SIDE)

    def say(self, *messages: protocol.Message) -> None:
        self.socket.sendall(self.signed(*messages))

    def signed(self, *messages: protocol.Message) -> bytes:
        return b"".join(self._seal.sign(encode(message)) for message in messages)


@pytest.fixture
def line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    made = Connection(here, time.monotonic(), Seal(SECRET, b"1.2", proof.NODE_SIDE, proof.COORDINATOR_SIDE))
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


@pytest.mark.parametrize("how", ["forged", "repeated", "left out", "sent back"])
def test_only_what_the_peer_said_is_heard(line, how):
    made, there = line
    first, second = there.signed(Announce("a")), there.signed(Announce("b"))
    forged = {
        "forged": first.replace(b'"a"', b'"x"'),
        "repeated": first + first,
        "left out": second,
        "sent back": Seal(SECRET, b"1.2", proof.NODE_SIDE, proof.COORDINATOR_SIDE).sign(encode(Announce("a"))),
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
    monkeypatch.setattr(protocol, "LARGEST", 1000)
    made, there = line
    there.socket.sendall(b"x" * 5000)
    with pytest.raises(ConnectionLost, match="too long"):
        received(made)


def test_a_peer_that_does_not_read_is_given_up(line, monkeypatch):
    monkeypatch.setattr(protocol, "LARGEST", 1000)
    made, _ = line
    with pytest.raises(ConnectionLost, match="stopped reading"):
        made.send(Announce("x" * 50_000_000))


def connected(hub: Hub, address: str, *sources: str | None) -> list[Connection]:
    """Connect from each source, while the hub opens the door."""
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
    listener = claim(address)
    assert claim(address) is None
    hub = Hub(Door(listener, SECRET))
    lines = connected(hub, address, None, "127.0.0.2")
    for line in lines:
        line.send(Announce("here"))
    heard = []
    while len(heard) < 2:
        heard += hub.poll(0.0)
    assert [message for _, message in heard] == [Announce("here")] * 2
    hub.send(heard[1][0], NodeBeat())
    assert received(lines[1]) == [NodeBeat()]
    lines[0].close()
    number = heard[0][0]
    while not (gone := hub.poll(0.0)):
        pass
    assert (gone[0][0], type(gone[0][1])) == (number, ConnectionLost)
    hub.send(number, NodeBeat())  # the peer is gone: no harm
    lines[1].close()
    hub.close()


def test_last_words_arrive_although_others_still_talk(address, monkeypatch):
    monkeypatch.setattr(protocol, "DRAIN_S", 120.0)
    monkeypatch.setattr(protocol, "LOST_AFTER_S", 120.0)
    hub = Hub(Door(claim(address), SECRET))
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
    line.send(NodeBeat())  # would be answered with a reset if the other side had hung up
    time.sleep(0.1)
    assert received(line) == [Announce("the end")]
    line.close()
    closing.join(timeout=60)
    assert not closing.is_alive()  # it does not wait longer than it must


@pytest.fixture
def member(tmp_path, monkeypatch):
    """A node that has not been welcome anywhere."""
    monkeypatch.setattr("lockstep.launch.supervisor.Agent", lambda job, name, secret: SimpleNamespace(count=job.nproc))
    layers = [("command line", {"steps": 3}), ("launcher", {"run_dir": str(tmp_path / "a")})]
    job = Job({"layers": layers, "path": []}, tmp_path / "a", Count(1, 1), join="127.0.0.1:29400")
    return Member(job, "host", [])


WELCOME = Welcome("runs/b", [["launcher", {"run_dir": "runs/b"}]], "type it again", 2, 1)


def test_orders_may_come_together_with_the_welcome(line, member):
    made, there = line
    order = Start(0, 1, 1, 2, 1, "127.0.0.1", 5000, 5001, "a1")
    there.say(Announce("early"), WELCOME, order, Handover([0, 2]))
    assert member._introduce(made) == [Announce("early"), order]
    assert not (member._job.run_dir / "logs").exists()  # a node that follows makes no folder of its own


def test_a_node_adopts_what_the_coordinator_decided():
    layers = [("command line", {"steps": 3}), ("launcher", {"run_dir": "runs/a"})]
    job = Job({"layers": layers, "path": [], "resume_command": "with runs/a"}, Path("runs/a"), Count(1, 1))
    adopted = adopt(job, WELCOME)
    assert adopted.run_dir == Path("runs/b")
    assert adopted.spec["layers"] == [("command line", {"steps": 3}), ["launcher", {"run_dir": "runs/b"}]]
    assert adopted.resume_command == "type it again"
    assert adopt(adopted, WELCOME) == adopted  # so that a node that comes back keeps what it has


def test_a_refusal_is_an_error_for_the_user(line, member):
    made, there = line
    there.say(Refused("--join x", "target: 'b' here, 'a' there", "run the same command"))
    with pytest.raises(UserError, match="run the same command"):
        member._introduce(made)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_that_every_machine_could_bind_is_refused(host):
    with pytest.raises(UserError, match="names no machine"):
        claim(f"{host}:29400")


def test_an_address_of_another_machine_is_not_ours():
    assert claim("192.0.2.1:29400") is None


def test_an_unknown_address():
    with pytest.raises(UserError, match="--join"):
        claim("no.such.host.invalid:29400")


def test_a_coordinator_that_does_not_answer(address):
    with pytest.raises(NoAnswer, match="refused"):
        reach(address, None, SECRET)


def test_an_address_whose_port_is_taken(address):
    with claim(address) as taken, listen_at(*taken.getsockname()) as other:
        assert address_of(taken) == address
        assert address_of(other) != address
        assert address_of(other).startswith("127.0.0.1:")


def test_differences_are_named():
    ours = {"target": "a.py", "layers": [["command line", {"steps": 3}]], "nnodes": "2"}
    theirs = Hello("h", Count(1, 1), {**ours, "target": "b.py"})
    assert difference(theirs, ours) == "target: 'b.py' here, 'a.py' on the coordinating node"
    assert difference(Hello("h", Count(1, 1), ours), ours) is None
