"""The door of a job on several machines: the secret that its nodes share, and what strangers get.

How both sides prove that they know the secret is in `lockstep.runtime.rendezvous.proof`. A connection that has proven
nothing is called a stranger. A stranger gets a random number, or a "no", and nothing else; no text that it sends is
shown, and only the first stranger of each kind is reported.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import socket
import stat
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.runtime.rendezvous.proof import (
    COORDINATOR_SIDE,
    DIGITS,
    NODE_SIDE,
    NOISE,
    PROOF_S,
    WRONG,
    NotProven,
    Seal,
    Secret,
    challenge,
    is_line_of_digits,
    sign,
)

# The secret itself, or a file that holds it, for nodes without a shared disk.
SECRET = "LOCKSTEP_SECRET"
SECRET_FILE = "LOCKSTEP_SECRET_FILE"

# A shorter text could be guessed.
SHORTEST = 16

# How many unproven connections may wait at once, and how many are accepted in one poll.
MOST_STRANGERS = 64
MOST_PER_TURN = 256

# For how many nodes the door is made at most.
MOST_NODES = 16384

# File descriptors that a launcher needs for other things than connections.
OTHER_FILES = 256

# File descriptors that strangers cannot have: the launcher needs some for each rank that it starts.
RESERVE = 64

# How long no connection is accepted after this process, or the system, has run out of descriptors.
PAUSE_S = 0.2

# The coordinator's answer to a wrong proof: a line of the same length that proves nothing.
NO_PROOF = b"0" * DIGITS + b"\n"

# Kinds of strangers.
SILENT = f"did not answer the challenge within {PROOF_S:.0f} s"
HUNG_UP = "hung up in the middle of its answer"
CROWD = "made too many connections at once that prove nothing"
EXHAUSTED = "came when this process had few file descriptors left"


# ---- the secret ----


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
            f"set a run_dir that you may write to, or set {SECRET} to the same text on every node",
        ) from None

    return _read_secret(path)


def _make_secret(path: Path) -> None:
    """Make the file if there is none. Several nodes may try at once; the link succeeds for only one node."""
    if os.path.lexists(path):
        return

    # The file appears complete, and readable by this user alone.
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
            f"the job's secret cannot be read from {path}",
            f"{why}",
            f"set {SECRET_FILE} to a file that you may read, or remove {path}",
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


# ---- strangers ----


@dataclass(frozen=True)
class Sighting:
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
        self.challenge = challenge()
        self._answer = b""

        connection.setblocking(False)
        _send_now(connection, self.challenge + b"\n")

    def fileno(self) -> int:
        return self.connection.fileno()

    def poll(self, secret: Secret, now: float) -> Seal | None:
        """Return the seal of a node that has proven that it knows the secret, None if its answer is not complete.

        Raises NotProven, with an empty text for a stranger that hung up without sending a byte, as a port scan does.
        """
        try:
            # Not a byte more than the answer is read: what follows is the first message.
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

        # Other bytes are refused at once, before they have the length of an answer.
        if not all(byte in b"0123456789abcdef " for byte in self._answer):
            raise NotProven(NOISE)
        if now - self.since > PROOF_S:
            raise NotProven(SILENT)

        return None

    def _judge(self, secret: Secret) -> Seal:
        ours, space, proof = self._answer[:DIGITS], self._answer[DIGITS : DIGITS + 1], self._answer[DIGITS + 1 :]
        if space != b" " or not is_line_of_digits(ours + b"\n") or not is_line_of_digits(proof):
            raise NotProven(NOISE)

        challenges = self.challenge + b"." + ours
        if not hmac.compare_digest(proof[:-1], sign(secret.key, NODE_SIDE, challenges)):
            # This line takes the place of a proof, so that a node with another secret does not try again.
            _send_now(self.connection, NO_PROOF)
            raise NotProven(WRONG)

        _send_now(self.connection, sign(secret.key, COORDINATOR_SIDE, challenges) + b"\n")
        return Seal(secret, challenges, COORDINATOR_SIDE, NODE_SIDE)


def _send_now(connection: socket.socket, line: bytes) -> None:
    # The buffer of a new socket has room for both lines. An error here shows when the answer is read.
    with suppress(OSError):
        connection.send(line)


class Door:
    """The listening socket of a job, and the connections that have not proven anything yet."""

    def __init__(self, listener: socket.socket, secret: Secret, most: int = MOST_STRANGERS):
        """`most`: how many unproven connections may wait at once."""
        self._listener = listener
        self._secret = secret
        self._strangers: list[Stranger] = []
        self._most = most
        self._closed_until = 0.0

        # How many strangers of each kind were turned away, and the first of each that were not taken yet.
        self.turned_away: Counter[str] = Counter()
        self._sightings: list[Sighting] = []

    @classmethod
    def for_nodes(cls, listener: socket.socket, secret: Secret, nodes: int) -> Door:
        """Return the door of a job of this many nodes, all of which may come at once, and some again."""
        # Someone may allow for far more nodes than there are.
        nodes = min(nodes, MOST_NODES)
        allow_files(OTHER_FILES + 3 * nodes)
        return cls(listener, secret, max(MOST_STRANGERS, 2 * nodes))

    def sockets(self, now: float) -> list[socket.socket | Stranger]:
        """Return the sockets to wait for. While the door is closed, new connections must not end the wait."""
        return [*([] if now < self._closed_until else [self._listener]), *self._strangers]

    def take_sightings(self) -> list[Sighting]:
        sightings, self._sightings = self._sightings, []
        return sightings

    def poll(self, now: float) -> list[tuple[socket.socket, Seal]]:
        """Accept connections, and return those that have proven that they know the secret."""
        if now >= self._closed_until:
            self._accept(now)

        # Each stranger proves that it knows the secret, is turned away, or has time left.
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
                # Usually no other connection is waiting, or it was closed already.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._close_for_a_while(now)
                return

            self._strangers.append(Stranger(connection, address[0], now))
            if len(self._strangers) > self._most:
                self._make_room()

            # The system gives out the lowest free descriptor, so a high number means that few are left.
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if connection.fileno() >= most - min(RESERVE, most // 2):
                self._close_for_a_while(now)
                return

    def _make_room(self) -> None:
        """Turn away the oldest stranger from the address with the most connections. A node would answer at once."""
        counts = Counter(stranger.address for stranger in self._strangers)
        most = max(counts.values())
        self._turn_away(next(stranger for stranger in self._strangers if counts[stranger.address] == most), CROWD)

    def _close_for_a_while(self, now: float) -> None:
        """Close the connections of all strangers, and accept none for a moment."""
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
            self._sightings.append(Sighting(kind, address))
        self.turned_away[kind] += 1

    def close(self) -> None:
        self._listener.close()
        for stranger in self._strangers:
            stranger.connection.close()
        self._strangers.clear()


def allow_files(needed: int) -> None:
    """Let this process open that many files, as far as the system allows it to raise its own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
