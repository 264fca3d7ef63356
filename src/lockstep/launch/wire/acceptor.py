"""Accepts the connections of a job on several nodes, once their handshake shows that they belong to it.

Both sides of a handshake prove that they know the job's secret (`lockstep.runtime.rendezvous.handshake`). Before that,
the peer is unknown: it gets a random challenge, or an answer that proves nothing, and no text that it sends is shown.
Only the first unknown peer that is rejected for some reason is reported.
"""

from __future__ import annotations

import errno
import hmac
import resource
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lockstep.runtime.rendezvous.handshake import (
    COORDINATOR_SIDE,
    DIGITS,
    HANDSHAKE_S,
    NODE_SIDE,
    NOT_AN_ANSWER,
    WRONG_SECRET,
    HandshakeFailed,
    LineSigner,
    Secret,
    is_line_of_digits,
    new_challenge,
    sign,
)

# How many handshakes may be under way at once, and how many connections are accepted in one poll.
MOST_PENDING = 64
MOST_PER_TURN = 256

# With more nodes than this, no further room for handshakes is made.
MOST_NODES = 16384

# File descriptors that a launcher needs for other things than connections.
OTHER_FILES = 256

# File descriptors that unknown peers cannot have: the launcher needs some for each rank that it starts.
RESERVE = 64

# The coordinator's answer to a wrong proof: a line of the same length that proves nothing.
NO_PROOF = b"0" * DIGITS + b"\n"

# Why a peer is rejected. The subject of each is "an unknown peer".
SILENT = f"did not answer the challenge within {HANDSHAKE_S:.0f} s"
HUNG_UP = "hung up in the middle of its answer"
TOO_MANY = "made too many connections at once that prove nothing"
FEW_DESCRIPTORS = "came when this process had few file descriptors left"


@dataclass(frozen=True)
class Rejection:
    """The first unknown peer that was rejected for this reason."""

    reason: str
    address: str


class Handshake:
    """The handshake of a new connection, whose peer has yet to prove that it knows the secret."""

    # A challenge, a space, a proof and a newline.
    ANSWER = 2 * DIGITS + 2

    def __init__(self, connection: socket.socket, address: str, now: float):
        self.connection = connection
        self.address = address
        self.since = now

        self.challenge = new_challenge()
        # The part of the answer that has arrived.
        self._answer = b""

        connection.setblocking(False)
        _send_now(connection, self.challenge + b"\n")

    def fileno(self) -> int:
        return self.connection.fileno()

    def poll(self, secret: Secret, now: float) -> LineSigner | None:
        """Return a signer for the connection if the peer knows the secret, None if its answer is not complete.

        Raises HandshakeFailed, with an empty text if the peer hung up without sending a byte, as a port scan does.
        """
        try:
            # Not a byte more than the answer is read: what follows is the first message.
            data = self.connection.recv(self.ANSWER - len(self._answer))
            ended = not data
        except BlockingIOError:
            data, ended = b"", False  # nothing has arrived yet
        except OSError:
            data, ended = b"", True  # the peer has reset the connection

        self._answer += data
        if len(self._answer) == self.ANSWER:
            return self._judge(secret)

        if ended:
            raise HandshakeFailed(HUNG_UP if self._answer else "")

        # Other bytes are refused at once, before they have the length of an answer.
        if not all(byte in b"0123456789abcdef " for byte in self._answer):
            raise HandshakeFailed(NOT_AN_ANSWER)

        if now - self.since > HANDSHAKE_S:
            raise HandshakeFailed(SILENT)

        return None

    def _judge(self, secret: Secret) -> LineSigner:
        """Return a signer if the complete answer proves that the peer knows the secret. Raises HandshakeFailed."""
        ours = self._answer[:DIGITS]
        space = self._answer[DIGITS : DIGITS + 1]
        proof = self._answer[DIGITS + 1 :]

        # The form is checked first: only digits are compared with a proof.
        if space != b" " or not is_line_of_digits(ours + b"\n") or not is_line_of_digits(proof):
            raise HandshakeFailed(NOT_AN_ANSWER)

        # Both challenges are part of the proof, so that neither side can replay an old one.
        challenges = self.challenge + b"." + ours
        if not hmac.compare_digest(proof[:-1], sign(secret.key, NODE_SIDE, challenges)):
            # This line takes the place of a proof, so that a node with another secret does not try again.
            _send_now(self.connection, NO_PROOF)
            raise HandshakeFailed(WRONG_SECRET)

        # The coordinator proves itself only to a peer that has done so.
        _send_now(self.connection, sign(secret.key, COORDINATOR_SIDE, challenges) + b"\n")
        return LineSigner(secret, challenges, COORDINATOR_SIDE, NODE_SIDE)


def _send_now(connection: socket.socket, line: bytes) -> None:
    """Send a line of the handshake without waiting."""
    # The buffer of a new socket has room for both lines. An error here shows when the answer is read.
    with suppress(OSError):
        connection.send(line)


class Acceptor:
    """The listening socket of a job, and the handshakes of the connections that it has accepted."""

    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        on_first: Callable[[Rejection], None],
        most: int = MOST_PENDING,
    ):
        """`on_first` gets the first peer that is rejected for each reason.

        `most` is how many handshakes may be under way at once.
        """
        self._listener = listener
        self._secret = secret

        # The handshakes under way, and until when no connection is accepted, for lack of descriptors.
        self._pending: list[Handshake] = []
        self._most = most
        self._paused_until = 0.0

        # How many peers were rejected for each reason.
        self.rejected: Counter[str] = Counter()
        self._on_first = on_first

    @classmethod
    def for_nodes(
        cls, listener: socket.socket, secret: Secret, nodes: int, on_first: Callable[[Rejection], None]
    ) -> Acceptor:
        """Return the acceptor of a job of this many nodes, all of which may connect at once, and some again."""
        # `--nnodes` may allow far more nodes than there are.
        nodes = min(nodes, MOST_NODES)
        allow_files(OTHER_FILES + 3 * nodes)
        return cls(listener, secret, on_first, max(MOST_PENDING, 2 * nodes))

    def sockets(self, now: float) -> list[socket.socket | Handshake]:
        """Return the sockets to wait for. During a pause, new connections must not end the wait."""
        listening = [] if now < self._paused_until else [self._listener]
        return [*listening, *self._pending]

    def poll(self, now: float) -> list[tuple[socket.socket, LineSigner]]:
        """Accept connections, and return those whose handshake has succeeded."""
        if now >= self._paused_until:
            self._accept(now)

        # Each handshake succeeds, fails, or has time left.
        admitted = []

        for handshake in list(self._pending):
            try:
                signer = handshake.poll(self._secret, now)
            except HandshakeFailed as reason:
                self._reject(handshake, str(reason))
                continue

            if signer is not None:
                self._pending.remove(handshake)
                admitted.append((handshake.connection, signer))

        return admitted

    def _accept(self, now: float) -> None:
        """Accept the connections that wait, a limited number in one turn: messages of nodes must not wait for them."""
        for _ in range(MOST_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                # Usually no other connection is waiting, or it was closed already.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause(now)

                return

            self._pending.append(Handshake(connection, address[0], now))
            if len(self._pending) > self._most:
                self._make_room()

            # The system gives out the lowest free descriptor, so a high number means that few are left.
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if connection.fileno() >= most - min(RESERVE, most // 2):
                self._pause(now)
                return

    def _make_room(self) -> None:
        """Reject the oldest peer of the address with the most connections. A node would have answered at once."""
        counts = Counter(handshake.address for handshake in self._pending)
        most = max(counts.values())
        oldest = next(handshake for handshake in self._pending if counts[handshake.address] == most)
        self._reject(oldest, TOO_MANY)

    def _pause(self, now: float) -> None:
        """Reject all pending peers, and accept no connection for a moment."""
        self._paused_until = now + 0.2

        self.note_rejection(FEW_DESCRIPTORS, self._pending[-1].address if self._pending else "")
        for handshake in list(self._pending):
            self._reject(handshake, FEW_DESCRIPTORS)

    def _reject(self, handshake: Handshake, reason: str) -> None:
        """Close a connection, and note why; `reason` is empty if the peer has sent nothing."""
        self._pending.remove(handshake)
        handshake.connection.close()

        if reason:
            self.note_rejection(reason, handshake.address)

    def note_rejection(self, reason: str, address: str) -> None:
        """Count a rejection, and report the first for this reason."""
        self.rejected[reason] += 1
        if self.rejected[reason] == 1:
            self._on_first(Rejection(reason, address))

    def close(self) -> None:
        """Close the listening socket and all connections whose handshake is not over."""
        self._listener.close()
        for handshake in self._pending:
            handshake.connection.close()

        self._pending.clear()


def allow_files(needed: int) -> None:
    """Let this process open that many files, as far as the system allows it to raise its own limit."""
    # The system's own limit stays as it is.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
