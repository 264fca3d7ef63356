"""Waiting for sockets and pipes, and the lines that arrive there.

The lines are messages of nodes, requests of ranks to their store, what a zygote reports about its ranks, and requests
on a tether.
"""

from __future__ import annotations

import math
import os
import select
import socket
from collections.abc import Iterable
from typing import Any


def wait_readable(files: Iterable[Any], seconds: float | None) -> bool:
    """Wait until one of `files` can be read, or was closed by the other side. Return whether one can.

    None means without a limit. Unlike `select.select`, it takes file descriptors above 1023.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)

    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class ReadySockets:
    """Says which of many sockets can be read. What a turn costs depends on how many can, not on how many there are.

    It can be waited for like a socket: it is readable if one of its sockets is.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._count = 0

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, connection: Any) -> None:
        self._epoll.register(connection, select.EPOLLIN)
        self._count += 1

    def remove(self, connection: Any) -> None:
        """Forget a socket, before it is closed."""
        self._epoll.unregister(connection)
        self._count -= 1

    def descriptors(self) -> list[int]:
        """Return the file descriptors of the sockets that can be read, or were closed by the other side."""
        return [descriptor for descriptor, _ in self._epoll.poll(0, max(self._count, 1))]

    def close(self) -> None:
        """Stop watching all sockets. They stay open."""
        self._epoll.close()


class LineReader:
    """Collects the bytes that arrive on a socket or a pipe into whole lines, and never waits."""

    def __init__(self, file: socket.socket | int, longest: float = math.inf):
        """`file`: a socket, or a file descriptor. `longest`: how many bytes a line may have."""
        self._file = file
        self._longest = longest

        # The beginning of a line whose rest has not arrived.
        self._unread = b""

        # Whether nothing more will arrive, and the error if the connection broke. The last lines are returned first.
        self.ended = False
        self.error: OSError | None = None

    def read(self) -> list[bytes]:
        """Return the lines that have arrived, without newlines. Raises ValueError for a line that is too long."""
        # The socket may be a blocking one, for what is sent on it.
        descriptor = self._file if isinstance(self._file, int) else self._file.fileno()

        # Everything that has arrived is read, up to the limit: a peer that sends without end must not keep us here.
        while not self.ended and len(self._unread) <= self._longest and wait_readable([descriptor], 0.0):
            try:
                data = os.read(descriptor, 65536)
            except OSError as error:
                data, self.error = b"", error

            self._unread += data
            self.ended = not data

        # The last part has no newline yet.
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > self._longest:
            raise ValueError("it sent a line that is too long")

        return lines
