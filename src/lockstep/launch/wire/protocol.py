"""Everything that the launchers of one job say to each other, and the commands that the state machine gives.

This file has three parts: messages (frozen dataclasses, each sent as one line of JSON, checked field by field and never
evaluated), commands (what the state machine wants done on the coordinating node), and the TCP connections that carry
messages. Only the address given with `--join` is bound, messages have a size limit, and nothing here blocks. A message
is believed only from a node that has proven that it knows the job's secret (`door.py`).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.errors import UserError
from lockstep.launch import records
from lockstep.launch.failure import Failure, RankExit
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import Count, parse_address
from lockstep.launch.wire.door import SECRET, SECRET_FILE, Door, Notice
from lockstep.runtime.meeting.proof import NotProven, Seal, Secret, TurnedAway, prove

# A node that sends nothing for this long is lost.
LOST_AFTER_S = 5.0

# Seconds between two heartbeats of a node.
BEAT_S = 1.0

# How long the coordinator keeps connections open after the job ended.
DRAIN_S = 2.0

# The limit for the bytes of one message, and of everything that waits to be sent.
LARGEST = 8 * 2**20


# ---- messages from a node to the coordinator ----


class Message:
    """Base of all messages: a frozen dataclass whose fields `records.parse` can check."""


@dataclass(frozen=True)
class AttemptMessage(Message):
    """Base of messages about one attempt. They may arrive after the next one began."""

    attempt: int


@dataclass(frozen=True)
class Hello(Message):
    """A node asks to join; `identity` is the part of its command that must be equal on all nodes.

    A node that lost its connection and comes back says which number it had, and in which term.
    """

    host: str
    count: Count
    identity: dict
    term: int = 0
    number: int = 0


@dataclass(frozen=True)
class Exited(AttemptMessage):
    rank: int
    exit: RankExit


@dataclass(frozen=True)
class RanksGone(AttemptMessage):
    """No rank of this attempt is alive on the node any more."""


@dataclass(frozen=True)
class ZygoteLost(AttemptMessage):
    """The process that forks the node's ranks died; `hopeless` if a new one would end the same way."""

    why: str
    hopeless: bool


@dataclass(frozen=True)
class Stacks(AttemptMessage):
    """The answer to `CollectStacks`: where each rank is, and its last entries of the flight recorder."""

    stacks: dict[int, str]
    collectives: dict[int, list]


@dataclass(frozen=True)
class SignalReceived(Message):
    """The node's launcher received a signal that asks the whole job to save and exit."""

    signal: str


@dataclass(frozen=True)
class NodeBeat(Message):
    """A node's heartbeat, with those of its ranks and the task's settings."""

    views: list[RankView] = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    attempt: int = -1  # the last one that the node was told to start, and did


# ---- messages from the coordinator to a node ----


@dataclass(frozen=True)
class Welcome(Message):
    """The node belongs to the job and adopts what the coordinator decided. A `Handover` follows at once."""

    run_dir: str
    decided: list
    resume_command: str  # what to type to resume the job
    number: int  # of the node that is welcome
    term: int  # of the coordinator


@dataclass(frozen=True)
class Handover(Message):
    """The coordinator's heartbeat: what a node needs to know to take over if it was the last one.

    Times are ages in seconds, since clocks of two machines differ.
    """

    members: list[int]  # the numbers of all nodes
    attempt: int = -1  # the newest one
    restarts: int = 0
    recent: list[float] = field(default_factory=list)
    culprits: list = field(default_factory=list)
    hang_places: list = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    stop_signal: str | None = None  # one that asked the job to save and exit


@dataclass(frozen=True)
class Refused(Message):
    """The node may not join; the fields are those of a `UserError`."""

    problem: str
    found: str
    fix: str


@dataclass(frozen=True)
class Prepare(Message):
    """The node will soon start this many ranks and can import torch for them now."""

    count: int


@dataclass(frozen=True)
class Start(AttemptMessage):
    first_rank: int  # of this node
    count: int
    world_size: int
    group_rank: int  # the node's number in this attempt
    address: str
    port: int  # free when the attempt began
    store_port: int  # 0 for ranks on one machine
    store: str  # with the job's secret it makes the key of the ranks' store; empty for ranks on one machine


@dataclass(frozen=True)
class Preempt(AttemptMessage):
    """Ask the ranks to save a checkpoint and exit."""


@dataclass(frozen=True)
class Kill(AttemptMessage):
    """Kill the ranks."""


@dataclass(frozen=True)
class CollectStacks(AttemptMessage):
    """Ask every rank for its stack and its last collectives."""


# ---- commands of the state machine ----


@dataclass(frozen=True)
class StartAttempt:
    """Start a new attempt: this many ranks on each of these nodes, numbered in this order."""

    attempt: int
    ranks: dict[int, int]


@dataclass(frozen=True)
class Send:
    """Send a message to a node, which may be the coordinating one itself."""

    node: int
    message: Message


@dataclass(frozen=True)
class Drop:
    """Close the connection to a node that does not belong to the job any more."""

    node: int


@dataclass(frozen=True)
class LogEvent:
    """Append an event to the run's events.jsonl."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Announce(Message):
    """Print a text on the terminals of all nodes: a command, and the message that carries it to the other nodes."""

    text: str


@dataclass(frozen=True)
class JobEnd(Message):
    """The job is over: a command, and the message that carries it to the other nodes.

    Codes: 0 finished, 1 failed, 2 an error that the user can fix, 75 preempted after a save, 130 the same by Ctrl-C.
    """

    code: int
    failure: Failure | None = None
    restarts: int = 0
    coordinated: bool = field(default=False, compare=False)  # by the launcher that has this ending


Command = StartAttempt | Send | Drop | LogEvent | Announce | JobEnd


# ---- encoding ----

_KINDS = {kind.__name__: kind for kind in Message.__subclasses__() + AttemptMessage.__subclasses__()}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"  # pyrefly: ignore


def decode(line: bytes) -> Message:
    """Return the message in `line`. Raises ValueError for anything that is not a valid message."""
    values: Any = json.loads(line)
    kind = _KINDS.get(str(values.pop("kind", None))) if isinstance(values, dict) else None
    if kind is None:
        raise ValueError("not a JSON object of a known kind")

    return records.parse(kind, values)


def difference(theirs: Hello, ours: dict[str, Any]) -> str | None:
    """Return which parts of two nodes' commands differ, or None if they agree."""
    keys = sorted(theirs.identity.keys() | ours.keys())
    pairs = [(key, theirs.identity.get(key), ours.get(key)) for key in keys]
    parts = [f"{key}: {they!r} here, {we!r} on the coordinating node" for key, they, we in pairs if they != we]
    return "; ".join(parts) or None


# ---- connections ----


class ConnectionLost(Exception):
    """The other side is gone; the text says how we know."""


class Garbled(ConnectionLost):
    """The other side, or somebody in between, sent what no node of this job sends."""


class NoAnswer(Exception):
    """No node that could be joined was reached; the text says why."""


class Connection:
    """One non-blocking TCP connection that carries messages, each with a signature."""

    def __init__(self, connection: socket.socket, now: float, seal: Seal):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._seal = seal

        # The beginning of a message whose rest has not arrived, and what the socket has not taken yet.
        self._unread = b""
        self._unsent = b""
        self.last_received = now

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """This machine's address, as the other side sees it."""
        return own_host(self._socket)

    def send(self, message: Message) -> None:
        """Send as much as the socket takes; the rest goes with the next `send` or `receive`."""
        self._unsent += self._seal.sign(encode(message))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            # A peer that never reads must not fill our memory.
            if len(self._unsent) > LARGEST:
                raise ConnectionLost("it has stopped reading") from None
        except OSError as error:
            raise ConnectionLost(f"the connection broke ({error.strerror})") from error

    def receive(self, now: float) -> list[Message]:
        """Return the complete messages that have arrived.

        Raises ConnectionLost when no more will come, and for anything that is not a message.
        """
        self._flush()

        # Read what is there. No data means that the other side closed the connection.
        ended = False
        try:
            while len(self._unread) <= LARGEST and not ended:
                data = self._socket.recv(65536)
                self._unread += data
                ended = not data
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(f"the connection broke ({error.strerror})") from error

        # A message ends with a newline; what follows the last one is incomplete.
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LARGEST:
            raise Garbled("it sent a message that is too long")

        try:
            messages = [decode(self._seal.check(line + b"\n")) for line in lines]
        except (ValueError, RecursionError) as error:
            raise Garbled(f"it sent something that is not one of our messages ({error})") from error

        # Messages that came with the end of the connection are handled first; its loss is reported by the next call.
        if messages:
            self.last_received = now
        elif ended:
            raise ConnectionLost("the connection was closed")
        elif now - self.last_received > LOST_AFTER_S:
            raise ConnectionLost(f"no heartbeat for {LOST_AFTER_S:.0f} s")

        return messages

    def close(self) -> None:
        self._socket.close()


class Hub:
    """The coordinator's connections to all other nodes, by node number. A job on a single node has no door."""

    def __init__(self, door: Door | None = None):
        self._door = door
        self._connections: dict[int, Connection] = {}

        # The number given to the node that connected last.
        self._last = 0

    def sockets(self, now: float) -> list[Any]:
        return [*(self._door.files(now) if self._door else []), *self._connections.values()]

    def poll(self, now: float) -> list[tuple[int, Message | ConnectionLost]]:
        """Accept nodes that know the secret and return what has arrived from all of them."""
        for connection, seal in self._door.poll(now) if self._door else []:
            self._last += 1
            self._connections[self._last] = Connection(connection, now, seal)

        return self._read_all(now)

    def take_notices(self) -> list[Notice]:
        """Return what there is to say about strangers: once for each kind."""
        return self._door.take_notices() if self._door else []

    def turned_away(self) -> dict[str, int]:
        """Return how many strangers of each kind there were."""
        return dict(self._door.turned_away) if self._door else {}

    def _read_all(self, now: float) -> list[tuple[int, Message | ConnectionLost]]:
        received: list[tuple[int, Message | ConnectionLost]] = []
        for number, connection in list(self._connections.items()):
            try:
                received += [(number, message) for message in connection.receive(now)]
            except ConnectionLost as lost:
                self.drop(number)
                received.append((number, lost))

        return received

    def send(self, number: int, message: Message) -> None:
        """Send a message. A node that cannot be reached is reported by the next poll, which tries to send again."""
        if number in self._connections:
            with suppress(ConnectionLost):
                self._connections[number].send(message)

    def drop(self, number: int) -> None:
        if number in self._connections:
            self._connections.pop(number).close()

    def close(self) -> None:
        """Wait until the other nodes have hung up: closing first could discard messages that are on their way."""
        if self._door:
            self._door.close()

        deadline = time.monotonic() + DRAIN_S
        while self._connections and (left := deadline - time.monotonic()) > 0:
            records.wait_readable(self._connections.values(), left)
            self._read_all(time.monotonic())

        for number in list(self._connections):
            self.drop(number)


def claim(address: str) -> socket.socket | None:
    """Bind an address of --join. Returns None if it belongs to another node, or to another process of this one."""
    host, port = parse_address(address)

    try:
        # Only this address is bound, not all of the machine's. IPv4 nodes can reach the IPv6 address ::.
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where, family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6)
    except socket.gaierror as error:
        raise UserError(
            f"--join {address}: the host {host} is not known here",
            f"{error.strerror}",
            "type an address that all nodes know",
        ) from None
    except OSError as error:
        # Another node's address, or one that is taken here: this node follows.
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None

        raise UserError(
            f"--join {address}: this address cannot be bound",
            os.strerror(error.errno or 0),
            "type an address and a port that one node may use",
        ) from None

    listener.setblocking(False)

    return listener


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at this address of the machine, at another port if that one is taken. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        listener = socket.create_server((host, 0), family=family, backlog=128)

    listener.setblocking(False)

    return listener


def own_host(connection: socket.socket) -> str:
    """Return this machine's side of a socket, as a number, with the zone that some IPv6 addresses need."""
    return socket.getnameinfo(connection.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def address_of(listener: socket.socket) -> str:
    """Return where a listening socket can be reached, as it is typed after --join."""
    host, port = own_host(listener), listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reach(address: str, source: str | None, secret: Secret) -> Connection:
    """Try once to connect to the coordinating node. Both sides prove that they know the secret.

    Raises NoAnswer if it may succeed later, and a UserError if it never will.
    """
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), 2.0, (source, 0) if source else None)
        return _proven(connection, secret)
    except OSError as error:
        raise NoAnswer(error.strerror or str(error)) from None
    except TurnedAway:
        raise NoAnswer("it is busy: too many others want to join") from None
    except NotProven as error:
        raise UserError(
            f"--join {address}: the two nodes do not share a secret",
            f"what listens there {error}; the secret here is from {secret.source}",
            f"type a run_dir that all nodes share; or set {SECRET}, or {SECRET_FILE}, to the same on all nodes",
        ) from None


def _proven(connection: socket.socket, secret: Secret) -> Connection:
    try:
        return Connection(connection, time.monotonic(), prove(connection, secret))
    except BaseException:
        connection.close()
        raise
