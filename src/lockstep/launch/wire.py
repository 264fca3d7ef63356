"""Nodes talk over TCP, one JSON message a line. Only the address given is bound, and messages have a size limit."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import UserError
from lockstep.launch.job import parse_join
from lockstep.launch.protocol import Hello, Message, decode, encode

SILENCE_S = 5.0  # a node that is silent for so long is gone
BEAT_S = 1.0
CONNECT_S = 300.0
LAST_WORDS_S = 2.0
LARGEST = 8 * 2**20  # bytes of one message, and of all that wait to be sent
_ELSEWHERE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


class Lost(Exception):
    """The other side is gone; the text says how we know."""


class Line:
    """One connection. Nothing here waits."""

    def __init__(self, connection: socket.socket, now: float):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._unread, self._unsent = b"", b""
        self.heard = now

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > LARGEST:
                raise Lost("it has stopped reading") from None
        except OSError as error:
            raise Lost(f"the connection broke ({error.strerror})") from error

    def receive(self, now: float) -> list[Message]:
        """Whole messages that have arrived. Raises Lost when there will be no more, or for what is no message."""
        ended = self._read()
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LARGEST:
            raise Lost("it sent a message that is too long")
        try:
            messages = [decode(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise Lost(f"it sent what is no message of ours ({error})") from error
        if messages:
            self.heard = now
        elif ended:
            raise Lost("the connection was closed")
        elif now - self.heard > SILENCE_S:
            raise Lost(f"no sign of life for {SILENCE_S:.0f} s")
        return messages

    def _read(self) -> bool:
        try:
            while len(self._unread) <= LARGEST:
                data = self._connection.recv(65536)
                if not data:
                    return True
                self._unread += data
        except BlockingIOError:
            return False
        except OSError as error:
            raise Lost(f"the connection broke ({error.strerror})") from error
        return False

    def close(self) -> None:
        self._connection.close()


class Hub:
    """The coordinator's connections, by node number."""

    def __init__(self, listener: socket.socket):
        listener.setblocking(False)
        self._listener = listener
        self._lines: dict[int, Line] = {}
        self._last = 0

    def sockets(self) -> list[Any]:
        return [self._listener, *self._lines.values()]

    def poll(self, now: float) -> list[tuple[int, Message | Lost]]:
        self._accept(now)
        return self._read_all(now)

    def _read_all(self, now: float) -> list[tuple[int, Message | Lost]]:
        happened: list[tuple[int, Message | Lost]] = []
        for number, line in list(self._lines.items()):
            try:
                line.flush()
                happened += [(number, message) for message in line.receive(now)]
            except Lost as lost:
                self.drop(number)
                happened.append((number, lost))
        return happened

    def _accept(self, now: float) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                self._last += 1
                self._lines[self._last] = Line(connection, now)
        except OSError:
            return

    def send(self, number: int, message: Message) -> None:
        """A node that cannot be reached is noticed by the next poll."""
        if number in self._lines:
            try:
                self._lines[number].send(message)
            except Lost:
                self._lines[number].heard = -SILENCE_S

    def drop(self, number: int) -> None:
        if number in self._lines:
            self._lines.pop(number).close()

    def close(self) -> None:
        """Others hang up when they have heard the last words; to do it first could throw away what is on its way."""
        self._listener.close()
        deadline = time.monotonic() + LAST_WORDS_S
        while self._lines and (left := deadline - time.monotonic()) > 0:
            select.select(list(self._lines.values()), [], [], left)
            self._read_all(time.monotonic())
        for number in list(self._lines):
            self.drop(number)


def claim(join: str) -> socket.socket | None:
    """The meeting point, if it is ours to have; None if it is another node's, or taken by another process here."""
    host, port = parse_join(join)
    family, _, _, _, address = _resolve(join, host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in _ELSEWHERE:
            return None
        raise UserError(
            f"--join {join}", f"{error.strerror}", "type an address and a port that one node may use"
        ) from None
    return listener


def connect(join: str, source: str | None, say: Callable[[str], None]) -> Line:
    """To the coordinating node, which may not be there yet."""
    host, port = parse_join(join)
    began, said, why = time.monotonic(), False, ""
    while time.monotonic() - began < CONNECT_S:
        try:
            connection = socket.create_connection((host, port), 2.0, (source, 0) if source else None)
            return Line(connection, time.monotonic())
        except OSError as error:
            why = error.strerror or str(error)
        if not said and time.monotonic() - began > 1.0:
            said = True
            say(f"lockstep: nobody answers at {join} yet ({why}); trying for {CONNECT_S / 60:.0f} minutes")
        time.sleep(0.2)
    raise UserError(
        f"--join {join}",
        f"nobody answered within {CONNECT_S / 60:.0f} minutes ({why})",
        "start the same command on the node that has this address",
    )


def _resolve(join: str, host: str, port: int) -> Any:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UserError(f"--join {join}", f"{host}: {error.strerror}", "type an address that all nodes know") from None


def difference(theirs: Hello, ours: dict[str, Any]) -> str | None:
    """Which parts of two nodes' commands differ; None if they agree."""
    keys = sorted(theirs.identity.keys() | ours.keys())
    parts = [
        f"{key}: {theirs.identity.get(key)!r} here, {ours.get(key)!r} on the coordinating node"
        for key in keys
        if theirs.identity.get(key) != ours.get(key)
    ]
    return "; ".join(parts) or None
