"""The handshake of a connection: how two processes of a job prove to each other that they know its secret.

It is a challenge and a response in both directions, before either side accepts a message:

    coordinator -> node     a challenge: random
    node -> coordinator     a challenge of its own, and an HMAC of both
    coordinator -> node     another HMAC of both

From then on every line carries an HMAC with a key of this connection, so that no line can be forged, repeated, left out
or sent back. Nothing is encrypted. Launchers use this with the job's secret. Ranks use it to connect to the store of
their attempt, with a key that is derived from the job's secret.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from dataclasses import dataclass

# How long a handshake may take.
HANDSHAKE_S = 5.0

# Digits of a challenge and of a proof. With these, all three lines of the exchange have a fixed length.
DIGITS = 64

# The names of the two sides of a connection, which are part of each signature.
NODE_SIDE = b"node"
COORDINATOR_SIDE = b"coordinator"

# Why a handshake fails. The subject of each is the peer.
WRONG_SECRET = "does not know the job's secret"
NOT_AN_ANSWER = "sent something that is not an answer to the challenge"


@dataclass(frozen=True)
class Secret:
    """The key of a job, and its source, which messages name. The representation does not show the key."""

    key: bytes
    source: str

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"


class LineSigner:
    """Signs the lines that this side of a connection sends and checks the lines that it receives."""

    def __init__(self, secret: Secret, challenges: bytes, ours: bytes, theirs: bytes):
        self._key = sign(secret.key, b"lines", challenges)
        self._ours = ours
        self._theirs = theirs

        # Numbers of the next lines: a line that is repeated, or follows a missing line, has the wrong number.
        self._sent = 0
        self._received = 0

    def sign(self, line: bytes) -> bytes:
        signature = sign(self._key, self._ours, b"%d" % self._sent, line)
        self._sent += 1
        return signature + line

    def check(self, line: bytes) -> bytes:
        """Return the line without its signature. Raises ValueError if the signature is wrong."""
        signature, rest = line[:DIGITS], line[DIGITS:]
        if not hmac.compare_digest(signature, sign(self._key, self._theirs, b"%d" % self._received, rest)):
            raise ValueError("its signature is wrong")

        self._received += 1
        return rest


def sign(key: bytes, *parts: bytes) -> bytes:
    # No part but the last can hold a space, so that two lists of parts never make the same text.
    return hmac.digest(key, b" ".join(parts), "sha256").hex().encode()


def new_challenge() -> bytes:
    return secrets.token_hex(DIGITS // 2).encode()


class HandshakeFailed(Exception):
    """The peer did not prove that it knows the secret; the text says why, with the peer as its subject."""


class HandshakeUnanswered(Exception):
    """The coordinator did not answer: it may have too many handshakes under way."""


def authenticate(connection: socket.socket, secret: Secret) -> LineSigner:
    """Prove to the coordinator that this node knows the secret, and check that the coordinator does. Blocks."""
    deadline = time.monotonic() + HANDSHAKE_S
    theirs = _receive_line(connection, deadline)
    ours = new_challenge()
    challenges = theirs + b"." + ours
    connection.sendall(ours + b" " + sign(secret.key, NODE_SIDE, challenges) + b"\n")

    proof = _receive_line(connection, deadline)
    if not hmac.compare_digest(proof, sign(secret.key, COORDINATOR_SIDE, challenges)):
        raise HandshakeFailed(WRONG_SECRET)

    return LineSigner(secret, challenges, NODE_SIDE, COORDINATOR_SIDE)


def _receive_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    try:
        # Not a byte more than the line is read: what follows is the first message. The deadline is for the whole line,
        # so that a peer that sends byte by byte gains no time.
        connection.settimeout(_time_left(deadline))
        while len(line) <= DIGITS and (data := connection.recv(DIGITS + 1 - len(line))):
            line += data
            connection.settimeout(_time_left(deadline))
    except OSError:
        # The other side hung up, or did not answer in time.
        raise HandshakeUnanswered from None

    if len(line) <= DIGITS:
        raise HandshakeUnanswered
    if not is_line_of_digits(line):
        raise HandshakeFailed(NOT_AN_ANSWER)

    return line[:-1]


def _time_left(deadline: float) -> float:
    # A timeout of 0 would make the socket non-blocking.
    return max(deadline - time.monotonic(), 0.001)


def is_line_of_digits(line: bytes) -> bool:
    return line.endswith(b"\n") and all(byte in b"0123456789abcdef" for byte in line[:-1])
