"""Which node coordinates a job on several machines, as the run folder tells: terms, and the records of them.

    .coordinator-3      the record of term 3: a count that grows by one each second, who coordinates, and where
    .lost-3-2           node 2 cannot reach the coordinator of term 3, although its count grows

A term begins when a node makes the record of the next number, which only one can; it removes the records of earlier
terms. A coordinator whose record is gone has been superseded: it, and its rank 0, look once a second and end. All
machines of a job share its run folder, so there is no other judge of who may train there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch import records
from lockstep.launch.run_dir import folder_identity

# The environment variable that names the record of its coordinator's term to rank 0.
RECORD = "LOCKSTEP_RECORD"

_RECORD_NAME = re.compile(r"\.coordinator-(\d{1,15})", re.ASCII)
_LOST_NAME = re.compile(r"\.lost-(\d{1,15})-(\d{1,9})", re.ASCII)

# Digits of the count, which is written in place.
_DIGITS = 20

# A record that is listed and then not there: the next term has begun, so the folder is listed again, this often.
_LISTINGS = 5


@dataclass(frozen=True)
class Record:
    """Who coordinates the job in a term."""

    term: int
    host: str
    address: str  # as it is typed after --join


def newest(run: Path) -> Record | None:
    """Return the record of the newest term; None if no node coordinates here. Raises OSError if nobody can tell."""
    for _ in range(_LISTINGS - 1):
        with suppress(FileNotFoundError):
            return _newest_listed(run)

    return _newest_listed(run)


def _newest_listed(run: Path) -> Record | None:
    for term in sorted(_terms(run), reverse=True):
        try:
            values = json.loads(records.read_bytes(_record_path(run, term), most=4096)[_DIGITS:])
            return records.parse(Record, {"term": term, **values})
        except (ValueError, TypeError):
            continue  # not one of ours
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EFBIG):  # a pipe, or a large file: not one of ours
                raise

    return None


def count_of(run: Path, term: int) -> str:
    """Return what the record's count is now, which changes each second while the coordinator lives; "" if unknown."""
    # It is opened each time: only then does a network file system ask its server.
    return records.read(_record_path(run, term), most=4096)[:_DIGITS]


def _terms(run: Path) -> list[int]:
    """Return the terms that have a record. Raises OSError if the folder is there and cannot be read."""
    with suppress(FileNotFoundError):
        return [int(match[1]) for name in os.listdir(run) if (match := _RECORD_NAME.fullmatch(name))]

    return []


def _record_path(run: Path, term: int) -> Path:
    return run / f".coordinator-{term}"


# ---- the coordinator's side ----


class Watch:
    """Tells a process whether the coordinator that it belongs to has been superseded."""

    def __init__(self, record: Path):
        # The user's code may change the working folder.
        self.path = Path(os.path.abspath(record))
        self._folder = folder_identity(self.path.parent)

    def superseded(self) -> bool:
        """Count on, if this is the coordinator, and return whether the record is gone from its folder."""
        try:
            self._touch()
        except FileNotFoundError:
            # A run folder that was removed as a whole is another matter.
            return folder_identity(self.path.parent) == self._folder
        except OSError:
            pass  # a disk that fails says nothing about other nodes

        return False

    def _touch(self) -> None:
        os.close(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


class Term(Watch):
    """The term of this node, which coordinates the job until it ends or finds itself superseded."""

    def __init__(self, run: Path, record: Record):
        super().__init__(_record_path(run, record.term))
        self.record = record
        self._count = 0

    def _touch(self) -> None:
        self._count += 1
        fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _digits(self._count), 0)
        finally:
            os.close(fd)

    def end(self) -> None:
        """The job is over: there is nothing to take over."""
        self.path.unlink(missing_ok=True)

        # The next job begins with the same number again.
        with suppress(OSError):
            _remove_reports(self.path.parent, self.record.term)


def begin_term(run: Path, after: int | None, host: str, address: str) -> Term | None:
    """Begin the term that follows the term `after`, or all there were. Returns None if another node was faster."""
    terms = _terms(run)
    number = max(terms, default=0) + 1 if after is None else after + 1
    if any(term >= number for term in terms):
        return None

    # A link appears once, and with its contents, on network file systems too.
    draft = run / f".coordinator.{secrets.token_hex(4)}.tmp"
    path = _record_path(run, number)
    draft.write_bytes(_digits(0) + json.dumps({"host": host, "address": address}).encode())
    try:
        os.link(draft, path)
    except FileExistsError:
        return None
    finally:
        draft.unlink(missing_ok=True)

    # The term that this one follows may have been over for a while: then later ones may have come and gone.
    if any(term > number for term in _terms(run)):
        path.unlink(missing_ok=True)
        return None

    for term in _terms(run):
        if term < number:
            _record_path(run, term).unlink(missing_ok=True)

    # An earlier job in this folder may have had a term of this number.
    _remove_reports(run, number)

    return Term(run, Record(number, host, address))


def _remove_reports(run: Path, last: int) -> None:
    """Remove what nodes said of the coordinators up to the term `last`."""
    for name in os.listdir(run):
        if (match := _LOST_NAME.fullmatch(name)) and int(match[1]) <= last:
            (run / name).unlink(missing_ok=True)


def _digits(count: int) -> bytes:
    return b"%0*d" % (_DIGITS, count)


# ---- the other nodes' side ----


def report_lost(run: Path, term: int, node: int) -> None:
    """Tell the other nodes that this one cannot reach the coordinator."""
    with suppress(OSError):
        (run / f".lost-{term}-{node}").touch()


def withdraw(run: Path, term: int, node: int) -> None:
    with suppress(OSError):
        (run / f".lost-{term}-{node}").unlink(missing_ok=True)


def who_lost(run: Path, term: int) -> set[int]:
    """Return the nodes that cannot reach the coordinator of this term."""
    with suppress(OSError):
        matches = [_LOST_NAME.fullmatch(name) for name in os.listdir(run)]
        return {int(match[2]) for match in matches if match and int(match[1]) == term}

    return set()


@dataclass
class Vigil:
    """What a node that has lost its coordinator sees of it in the run folder, and when the node may take over.

    `number` is the node's own, `members` are all of the job. The lowest number goes first; the others give it `turn`
    seconds each, so that they do not compete.
    """

    number: int
    members: list[int]
    patience: float  # for how long the count may stand still
    turn: float

    _seen: tuple[int, str] | None = None  # the term, and its count
    _since: float = 0.0  # when that changed last
    _majority_since: float | None = None
    alive: bool = False  # whether the count has changed since the vigil began

    def look(self, term: int, count: str, now: float) -> None:
        if not count:
            self.forget()
            return

        if self._seen is None or self._seen[0] != term:
            self._since, self._majority_since, self.alive = now, None, False
        elif self._seen[1] != count:
            self._since, self.alive = now, True

        self._seen = (term, count)

    def forget(self) -> None:
        """Begin anew with the next look: a folder that cannot be read is no sign of life, and none of death."""
        self._seen = None

    def reason(self, lost: set[int], now: float) -> str | None:
        """Return why this node takes over now, or None if it does not. `lost` are the nodes in the same situation."""
        if self._seen is None:
            return None

        before = sum(0 < number < self.number for number in self.members)
        if now - self._since >= self.patience + before * self.turn:
            return f"no sign of life in the run folder for {self.patience:.0f} s"

        # It lives, but most cannot reach it: it is the one that is cut off.
        members = {0, *self.members}
        lost = lost & members
        if 2 * len(lost) <= len(members):
            self._majority_since = None
            return None

        if self._majority_since is None:
            self._majority_since = now

        before = sum(number < self.number for number in lost)
        return "most nodes cannot reach it" if now - self._majority_since >= before * self.turn else None
