"""The TCP connections that carry messages between the launchers of a job.

`Connection` and `Hub` never block, except that `Hub.close` waits up to DRAIN_S for the other nodes to hang up. `reach`
blocks for a few seconds at most. A coordinator binds one address only: an address of `--join` (`bind_join_address`), or
after a takeover the successor's own (`listen_at`). Messages have a size limit, and a message is believed only from a
node that has proven that it knows the job's secret (`acceptor.py`).
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from lockstep.errors import UserError
from lockstep.launch.job import COORDINATOR, parse_address
from lockstep.launch.times import LOST_AFTER_S
from lockstep.launch.wire.acceptor import Acceptor
from lockstep.launch.wire.messages import Message, decode, encode
from lockstep.launch.wire.secret import SECRET, SECRET_FILE
from lockstep.launch.wire.sockets import LineReader, ReadySockets, wait_readable
from lockstep.runtime.host.network import address_family, as_others_reach_it, join_host_port
from lockstep.runtime.rendezvous.handshake import HandshakeFailed, HandshakeUnanswered, LineSigner, Secret, authenticate

# How long the coordinator keeps connections open after the job ended.
DRAIN_S = 2.0

# How many nodes may connect before the coordinator accepts the first of them.
BACKLOG = 1024

# The limit for the bytes of one message, and for the bytes that wait to be sent.
LARGEST = 8 * 2**20


class ConnectionLost(Exception):
    """The other side is gone; the text says how this was noticed."""


class Garbled(ConnectionLost):
    """The other side, or a machine in between, sent what no node of this job sends."""


class NoAnswer(Exception):
    """No node that could be joined was reached; the text says why."""


class Connection:
    """One non-blocking TCP connection that carries messages, each with a signature."""

    def __init__(self, connection: socket.socket, now: float, signer: LineSigner):
        connection.setblocking(False)

        # Messages are short, and must not wait for more bytes.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._signer = signer

        # The messages that arrive, and the bytes that the socket has not taken yet.
        self._lines = LineReader(connection, LARGEST)
        self._unsent = b""
        self.last_received = now

        # Why nothing can be sent any more. `receive` raises it when all messages that have arrived were returned.
        self._send_error: ConnectionLost | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        """This machine's address, as the other side sees it."""
        return local_address(self._socket)

    def send(self, message: Message) -> None:
        """Send as much as the socket takes; the rest goes with the next `send` or `receive`, which reports errors."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Send a message that is encoded already."""
        if self._send_error is None:
            self._unsent += self._signer.sign(line)
            self._flush()

    @property
    def blocked(self) -> bool:
        """Whether the socket has not taken everything: not yet, or because the connection broke."""
        return bool(self._unsent)

    def _flush(self) -> None:
        """Send what the socket takes now. An error is reported by `receive`, after the messages that came before it."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            # A peer that never reads must not fill our memory.
            if len(self._unsent) > LARGEST:
                self._send_error = ConnectionLost("it has stopped reading")
        except OSError as error:
            self._send_error = _broken(error)

    def receive(self, now: float) -> list[Message]:
        """Return the complete messages that have arrived.

        Raises ConnectionLost when no more will come, and for anything that is not a message.
        """
        try:
            messages = [decode(self._signer.check(line + b"\n")) for line in self._lines.read()]
        except (ValueError, RecursionError) as error:
            raise Garbled(f"it sent something that is not one of our messages ({error})") from error

        # Messages that came before the end of the connection are handled first; a later call reports the loss.
        if messages:
            self.last_received = now
        elif self._send_error is not None:
            raise self._send_error
        elif self._lines.ended:
            error = self._lines.error
            raise _broken(error) if error else ConnectionLost("the connection was closed")
        elif now - self.last_received > LOST_AFTER_S:
            raise ConnectionLost(f"no heartbeat for {LOST_AFTER_S:.0f} s")

        self._flush()
        return messages

    def close(self) -> None:
        """Close the socket. What was not sent is lost."""
        self._socket.close()


def _broken(error: OSError) -> ConnectionLost:
    """Return the loss of a connection, with the system's words for it."""
    return ConnectionLost(f"the connection broke ({error.strerror})")


class Hub:
    """The coordinator's connections to all other nodes, by node number. A job on a single node has no acceptor."""

    def __init__(self, acceptor: Acceptor | None = None):
        self._acceptor = acceptor
        self._connections: dict[int, Connection] = {}

        # The numbers by file descriptor, the connections that have not taken all that was sent, and when all
        # connections are looked at next.
        self._ready = ReadySockets()
        self._numbers: dict[int, int] = {}
        self._blocked: set[int] = set()
        self._next_look = -math.inf

        # The number that the newest connection got. Connections are numbered from COORDINATOR + 1 on.
        self._last = COORDINATOR

    def sockets(self, now: float) -> list[Any]:
        """Return what to wait for: new connections and handshakes, and all connections as one."""
        accepting = self._acceptor.sockets(now) if self._acceptor else []
        return [*accepting, self._ready]

    def poll(self, now: float) -> list[tuple[int, Message | ConnectionLost]]:
        """Accept nodes that know the secret and return what has arrived from all of them."""
        admitted = self._acceptor.poll(now) if self._acceptor else []
        for connection, signer in admitted:
            self._last += 1
            self._connections[self._last] = Connection(connection, now, signer)
            self._numbers[connection.fileno()] = self._last
            self._ready.add(connection)

        return self._read_all(now)

    def _read_all(self, now: float) -> list[tuple[int, Message | ConnectionLost]]:
        """Return the messages of all nodes, and the losses. Connections that are lost are closed."""
        received: list[tuple[int, Message | ConnectionLost]] = []

        for number in self._to_read(now):
            connection = self._connections[number]
            try:
                received += [(number, message) for message in connection.receive(now)]

                # `receive` has tried to send the rest, too.
                if not connection.blocked:
                    self._blocked.discard(number)
            except ConnectionLost as lost:
                self.hang_up(number)
                received.append((number, lost))

        return received

    def _to_read(self, now: float) -> list[int]:
        """Return the nodes that have sent something, or have more to receive; twice a second all, to find lost ones."""
        if now >= self._next_look:
            self._next_look = now + 0.5
            return list(self._connections)

        ready = [self._numbers[descriptor] for descriptor in self._ready.descriptors()]
        return sorted({*ready, *self._blocked})

    def send(self, number: int, message: Message) -> None:
        self.send_to_all([number], message)

    def send_to_all(self, numbers: Iterable[int], message: Message) -> None:
        """Send a message. A node that cannot be reached is reported by a later poll."""
        line = encode(message)  # once, for all nodes

        # Bytes that the socket does not take now are sent when it can be written.
        for number in numbers:
            if number in self._connections:
                self._connections[number].send_line(line)
                if self._connections[number].blocked:
                    self._blocked.add(number)

    def hang_up(self, number: int) -> None:
        """Close the connection to a node, if there is one."""
        if number in self._connections:
            connection = self._connections.pop(number)
            self._ready.remove(connection)

            del self._numbers[connection.fileno()]
            self._blocked.discard(number)
            connection.close()

    def close(self) -> None:
        """Wait until the other nodes have hung up: closing first could discard messages that are on their way."""
        if self._acceptor:
            self._acceptor.close()

        # The messages that still arrive are read, and ignored.
        deadline = time.monotonic() + DRAIN_S

        while self._connections:
            left = deadline - time.monotonic()
            if left <= 0:
                break

            wait_readable([self._ready], left)
            self._read_all(time.monotonic())

        for number in list(self._connections):
            self.hang_up(number)

        self._ready.close()


def bind_join_address(address: str) -> socket.socket | None:
    """Bind an address of --join. Return None if it belongs to another machine, or is in use on this one."""
    host, port = parse_address(address)

    try:
        # IPv4 nodes can reach the IPv6 address ::.
        family, _, _, _, where = socket.getaddrinfo(as_others_reach_it(host), port, type=socket.SOCK_STREAM)[0]
        return _listener(where, family, dualstack_ipv6=family == socket.AF_INET6)
    except socket.gaierror as error:
        raise UserError(
            f"--join {address}: the host {host} is not known here",
            f"{error.strerror}",
            "use an address that all nodes know",
        ) from None
    except OSError as error:
        # The address belongs to another machine, or to a coordinator that is already here.
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None

        raise UserError(
            f"--join {address}: this address cannot be bound",
            os.strerror(error.errno or 0),
            "use an address of one node, and a port that is free there",
        ) from None


def is_taken(address: str) -> bool:
    """Return whether this machine has an address of --join, and something else listens at its port."""
    host, port = parse_address(address)

    # Port 0 shows whether the address is this machine's, the real port whether it is in use.
    for wanted, free in ((0, True), (port, False)):
        try:
            here = as_others_reach_it(host)
            family, _, _, _, where = socket.getaddrinfo(here, wanted, type=socket.SOCK_STREAM)[0]
            _listener(where, family).close()
        except OSError as error:
            return not free and error.errno == errno.EADDRINUSE

    return False


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at this address of the machine, at a free port if `port` is in use. Raises OSError."""
    family = address_family(host)
    try:
        return _listener((host, port), family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise

        return _listener((host, 0), family)


def unused_port(address: str) -> int:
    """Return a port that is free now. MASTER_PORT names it, for scripts that make a process group themselves."""
    with listen_at(address, 0) as unused:
        return unused.getsockname()[1]


def _listener(where: Any, family: int, dualstack_ipv6: bool = False) -> socket.socket:
    """Return a listening socket that never blocks. Raises OSError."""
    listener = socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=dualstack_ipv6)
    listener.setblocking(False)

    return listener


def local_address(connection: socket.socket) -> str:
    """Return this machine's address of a socket, in numeric form, with the zone that some IPv6 addresses need."""
    return socket.getnameinfo(connection.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def address_of(listener: socket.socket) -> str:
    """Return where a listening socket can be reached, as it is typed after --join."""
    return join_host_port(local_address(listener), listener.getsockname()[1])


def reach(address: str, source: str | None, secret: Secret) -> Connection:
    """Try once to connect to the coordinating node. Both sides prove that they know the secret. Blocks.

    Raises NoAnswer if a later try may succeed, and a UserError if none will.
    """
    host, port = parse_address(address)
    try:
        # `source` is this node's own address, where the system would choose another one.
        local = (source, 0) if source else None
        connection = socket.create_connection((as_others_reach_it(host), port), 2.0, local)
        return _authenticated(connection, secret)

    # A later try may succeed.
    except OSError as error:
        raise NoAnswer(error.strerror or str(error)) from None
    except HandshakeUnanswered:
        raise NoAnswer("what listens there did not answer: it is busy, or not a launcher of this job") from None
    except HandshakeFailed as error:
        raise UserError(
            f"--join {address}: the two nodes do not share a secret",
            f"what listens there {error}; the secret here is from {secret.source}",
            f"set a run_dir that all nodes share; or set {SECRET}, or {SECRET_FILE}, to the same on all nodes",
        ) from None


def _authenticated(connection: socket.socket, secret: Secret) -> Connection:
    """Return a connection whose two sides have proven that they know the secret; close the socket otherwise."""
    try:
        return Connection(connection, time.monotonic(), authenticate(connection, secret))
    except BaseException:  # Ctrl-C as well: the socket must not stay open
        connection.close()
        raise
