"""The door of a job on several machines: the secret that its nodes share, the proof of it, and what strangers get.

Both sides prove that they know the secret before either believes a word of the other:

    coordinator -> node     a challenge: random
    node -> coordinator     a challenge of its own, and an HMAC of both
    coordinator -> node     another HMAC of both

From then on every line carries an HMAC with a key of this one connection, so that no line can be forged, repeated,
left out or sent back. Nothing is encrypted. A stranger gets a random number, or a "no", and nothing else; no text of
theirs is shown, and there is one notice for each kind of them.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import resource
import secrets
import socket
import stat
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError

# The secret itself, or a file that holds it, for nodes without a shared disk.
SECRET = "LOCKSTEP_SECRET"
SECRET_FILE = "LOCKSTEP_SECRET_FILE"

# A shorter text could be guessed.
SHORTEST = 16

# How long a connection has to prove that it knows the secret.
PROOF_S = 5.0

# How many unproven connections may wait at once, and how many are accepted in one turn.
MOST_STRANGERS = 64
MOST_PER_TURN = 256

# File descriptors that strangers cannot have: the launcher needs some for each rank that it starts.
RESERVE = 64

# How long nobody is let in after this process, or the system, has run out of descriptors.
PAUSE_S = 0.2

# Digits of a challenge and of a proof. With these, all three lines of the exchange have a fixed length.
DIGITS = 64

# The coordinator's answer to a wrong proof: a line of the same length that proves nothing.
NO_PROOF = b"0" * DIGITS + b"\n"

# What the two sides of a connection are called in what they sign.
NODE_SIDE = b"node"
COORDINATOR_SIDE = b"coordinator"

# Kinds of strangers.
WRONG = "does not know the job's secret"
NOISE = "sent something that is no answer to the challenge"
SILENT = f"did not answer the challenge within {PROOF_S:.0f} s"
HUNG_UP = "hung up in the middle of its answer"
CROWD = f"made more than {MOST_STRANGERS} connections that prove nothing"
EXHAUSTED = "came when this process had few file descriptors left"


# ---- the secret ----


@dataclass(frozen=True)
class Secret:
    """The key of a job, and where it came from, for messages. Its representation does not show the key."""

    key: bytes
    source: str

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"


def find_secret(path: Path) -> Secret:
    """Return the job's secret: from the environment, or from the file `path`, which the first node makes."""
    if text := os.environ.get(SECRET):
        return _checked(text, f"the environment variable {SECRET}")

    if named := os.environ.get(SECRET_FILE):
        return _read_secret(Path(named))

    try:
        _make_secret(path)
    except OSError as error:
        raise UserError(
            f"the job's secret cannot be written to {path}",
            error.strerror or str(error),
            f"type a run_dir that you may write to, or set {SECRET} to the same text on every node",
        ) from None

    return _read_secret(path)


def _make_secret(path: Path) -> None:
    """Make the file if there is none. Nodes may try at the same time: a link appears once, and with its contents."""
    if os.path.lexists(path):
        return

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")

    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read_secret(path: Path) -> Secret:
    # O_NONBLOCK: opening a pipe must not wait for a writer.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        why = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise UserError(
            f"the job's secret cannot be read from {path}", f"{why}", f"name a file in {SECRET_FILE}, or remove it"
        ) from None

    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not stat.S_ISREG(status.st_mode) or not private:
            raise UserError(
                f"the job's secret in {path} is not private",
                f"owner {status.st_uid}, mode {stat.filemode(status.st_mode)}",
                f"chmod 600 {path} if it is yours; remove it if it is not; where neither helps, set {SECRET}",
            )

        return _checked(file.read(4096).decode(errors="replace"), str(path))


def _checked(text: str, source: str) -> Secret:
    text = text.strip()
    if len(text) < SHORTEST:
        raise UserError(
            f"the job's secret in {source} is too short",
            f"{len(text)} characters",
            f"use {SHORTEST} or more, for example: openssl rand -hex 32",
        )

    return Secret(text.encode(), source)


# ---- proofs ----


class Seal:
    """Signs the lines that this side of a connection sends and checks those that it receives."""

    def __init__(self, secret: Secret, challenges: bytes, ours: bytes, theirs: bytes):
        self._key = _sign(secret.key, b"lines", challenges)
        self._ours = ours
        self._theirs = theirs

        # Numbers of the next lines: a line that is repeated, or left out, has the wrong one.
        self._sent = 0
        self._received = 0

    def sign(self, line: bytes) -> bytes:
        signature = _sign(self._key, self._ours, b"%d" % self._sent, line)
        self._sent += 1
        return signature + line

    def check(self, line: bytes) -> bytes:
        """Return the line without its signature. Raises ValueError if the signature is wrong."""
        signature, rest = line[:DIGITS], line[DIGITS:]
        if not hmac.compare_digest(signature, _sign(self._key, self._theirs, b"%d" % self._received, rest)):
            raise ValueError("its signature is wrong")

        self._received += 1
        return rest


def _sign(key: bytes, *parts: bytes) -> bytes:
    # No part but the last can hold a space, so that two lists of parts never make the same text.
    return hmac.new(key, b" ".join(parts), hashlib.sha256).hexdigest().encode()


def _challenge() -> bytes:
    return secrets.token_hex(DIGITS // 2).encode()


class NotProven(Exception):
    """The other side did not prove that it knows the secret; the text is a kind of stranger."""


class TurnedAway(Exception):
    """The coordinator has said nothing about the proof: it may have too many strangers at its door."""


def prove(connection: socket.socket, secret: Secret) -> Seal:
    """Prove to the coordinator that this node knows the secret, and check that the coordinator does. Blocks."""
    deadline = time.monotonic() + PROOF_S
    theirs = _receive_line(connection, deadline)
    ours = _challenge()
    challenges = theirs + b"." + ours
    connection.sendall(ours + b" " + _sign(secret.key, NODE_SIDE, challenges) + b"\n")

    proof = _receive_line(connection, deadline)
    if not hmac.compare_digest(proof, _sign(secret.key, COORDINATOR_SIDE, challenges)):
        raise NotProven(WRONG)

    return Seal(secret, challenges, NODE_SIDE, COORDINATOR_SIDE)


def _receive_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    try:
        # No byte more than the line: what follows is the first message. Whoever sends byte by byte gains no time.
        connection.settimeout(_time_left(deadline))
        while len(line) <= DIGITS and (data := connection.recv(DIGITS + 1 - len(line))):
            line += data
            connection.settimeout(_time_left(deadline))
    except OSError:
        # It hung up, or has not come to this connection in time.
        raise TurnedAway from None

    if len(line) <= DIGITS:
        raise TurnedAway
    if not _is_line_of_digits(line):
        raise NotProven(NOISE)

    return line[:-1]


def _time_left(deadline: float) -> float:
    # A timeout of 0 would mean a socket that never waits.
    return max(deadline - time.monotonic(), 0.001)


def _is_line_of_digits(line: bytes) -> bool:
    return line.endswith(b"\n") and all(byte in b"0123456789abcdef" for byte in line[:-1])


# ---- strangers ----


@dataclass(frozen=True)
class Notice:
    """The first stranger of a kind."""

    kind: str
    address: str


class Stranger:
    """A connection that has not proven anything yet."""

    # A challenge, a space, a proof and a newline.
    ANSWER = 2 * DIGITS + 2

    def __init__(self, connection: socket.socket, address: str, now: float):
        self.connection = connection
        self.address = address
        self.since = now
        self.challenge = _challenge()
        self._answer = b""

        connection.setblocking(False)
        _send_now(connection, self.challenge + b"\n")

    def fileno(self) -> int:
        return self.connection.fileno()

    def poll(self, secret: Secret, now: float) -> Seal | None:
        """Return the seal of a node that has proven itself, None if its answer is not complete.

        Raises NotProven; its text is empty for one that hung up without a word, as a port scan does.
        """
        try:
            # No byte more than the answer: what follows is the first message.
            data = self.connection.recv(self.ANSWER - len(self._answer))
            ended = not data
        except BlockingIOError:
            data, ended = b"", False
        except OSError:
            data, ended = b"", True

        self._answer += data
        if len(self._answer) == self.ANSWER:
            return self._judge(secret)
        if ended:
            raise NotProven(HUNG_UP if self._answer else "")

        # Noise need not have the length of an answer, nor come in one piece.
        if not all(byte in b"0123456789abcdef " for byte in self._answer):
            raise NotProven(NOISE)
        if now - self.since > PROOF_S:
            raise NotProven(SILENT)

        return None

    def _judge(self, secret: Secret) -> Seal:
        ours, space, proof = self._answer[:DIGITS], self._answer[DIGITS : DIGITS + 1], self._answer[DIGITS + 1 :]
        if space != b" " or not _is_line_of_digits(ours + b"\n") or not _is_line_of_digits(proof):
            raise NotProven(NOISE)

        challenges = self.challenge + b"." + ours
        if not hmac.compare_digest(proof[:-1], _sign(secret.key, NODE_SIDE, challenges)):
            # In place of a proof, so that a node with another secret need not try again.
            _send_now(self.connection, NO_PROOF)
            raise NotProven(WRONG)

        _send_now(self.connection, _sign(secret.key, COORDINATOR_SIDE, challenges) + b"\n")
        return Seal(secret, challenges, COORDINATOR_SIDE, NODE_SIDE)


def _send_now(connection: socket.socket, line: bytes) -> None:
    # The buffer of a new socket has room for both lines that it gets. If not, the peer hangs up in vain.
    with suppress(OSError):
        connection.send(line)


class Door:
    """The listening socket of a job, and the strangers who wait there."""

    def __init__(self, listener: socket.socket, secret: Secret):
        self._listener = listener
        self._secret = secret
        self._strangers: list[Stranger] = []
        self._closed_until = 0.0

        # How many strangers of each kind were turned away, and the notices that nobody has taken yet.
        self.turned_away: Counter[str] = Counter()
        self._notices: list[Notice] = []

    def files(self, now: float) -> list[socket.socket | Stranger]:
        """Return what to wait for. While the door is closed, those outside must not wake us up."""
        return [*([] if now < self._closed_until else [self._listener]), *self._strangers]

    def take_notices(self) -> list[Notice]:
        notices, self._notices = self._notices, []
        return notices

    def poll(self, now: float) -> list[tuple[socket.socket, Seal]]:
        """Let strangers in to prove themselves, and return the connections of those who have."""
        if now >= self._closed_until:
            self._accept(now)

        admitted = []
        for stranger in list(self._strangers):
            try:
                seal = stranger.poll(self._secret, now)
            except NotProven as kind:
                self._turn_away(stranger, str(kind))
                continue

            if seal is not None:
                self._strangers.remove(stranger)
                admitted.append((stranger.connection, seal))

        return admitted

    def _accept(self, now: float) -> None:
        for _ in range(MOST_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                # Usually nobody else is waiting, or has hung up already.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._close_for_a_while(now)
                return

            self._strangers.append(Stranger(connection, address[0], now))
            if len(self._strangers) > MOST_STRANGERS:
                self._make_room()

            # The system gives out the lowest free number: a high one means that few are left.
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if connection.fileno() >= most - min(RESERVE, most // 2):
                self._close_for_a_while(now)
                return

    def _make_room(self) -> None:
        """Turn away the oldest of those whose address has the most connections: a node proves itself at once."""
        counts = Counter(stranger.address for stranger in self._strangers)
        most = max(counts.values())
        self._turn_away(next(one for one in self._strangers if counts[one.address] == most), CROWD)

    def _close_for_a_while(self, now: float) -> None:
        """Give the descriptors of all strangers back, and let nobody in for a moment."""
        self._closed_until = now + PAUSE_S
        self._note(EXHAUSTED, self._strangers[-1].address if self._strangers else "")
        for stranger in list(self._strangers):
            self._turn_away(stranger, EXHAUSTED)

    def _turn_away(self, stranger: Stranger, kind: str) -> None:
        self._strangers.remove(stranger)
        stranger.connection.close()
        if kind:
            self._note(kind, stranger.address)

    def _note(self, kind: str, address: str) -> None:
        if kind not in self.turned_away:
            self._notices.append(Notice(kind, address))
        self.turned_away[kind] += 1

    def close(self) -> None:
        self._listener.close()
        for stranger in self._strangers:
            stranger.connection.close()
        self._strangers.clear()
