"""Decides which node coordinates a job on several nodes, with files in the run folder.

    .coordinator-3      the term file of term 3: a counter, then the host and address of the coordinator
    .cut-off-3-2        node 2 cannot reach the coordinator of term 3, although its counter grows

To begin a term, a node creates the next term's file; of several nodes that try, only one succeeds. It then removes the
files of earlier terms. A coordinator whose term file is gone has been superseded: the coordinator and its rank 0 check
this once a second, and end. All nodes of a job share the run folder, so the term files alone decide which node may
train there.
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep import files
from lockstep.files import typed_json
from lockstep.launch.job import COORDINATOR

_TERM_NAME = re.compile(r"\.coordinator-(\d{1,15})", re.ASCII)
_CUT_OFF_NAME = re.compile(r"\.cut-off-(\d{1,15})-(\d{1,9})", re.ASCII)

# Digits of the counter, which is overwritten in place.
_DIGITS = 20

# A term file may be removed between listing the folder and reading the file, because the next term has begun. Try this
# many times before treating it as an error.
_TRIES = 5

# At most this many nodes wait one after another before they take over. With more, the last of them would still wait
# when it gives up the search for a coordinator.
MOST_STAGGERED = 10


@dataclass(frozen=True)
class Term:
    """A term, and the node that coordinates in it."""

    number: int
    host: str
    address: str  # as it is typed after --join


def newest_term(run_dir: Path) -> Term | None:
    """Return the newest term; None if there is none. Raises OSError if the folder or a term file cannot be read."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return _newest_listed(run_dir)

    return _newest_listed(run_dir)


def _newest_listed(run_dir: Path) -> Term | None:
    """Return the newest term. Raises FileNotFoundError if its file is removed while this looks."""
    for number in sorted(_term_numbers(run_dir), reverse=True):
        path = _term_path(run_dir, number)

        try:
            values = json.loads(files.read_bytes(path, most=4096)[_DIGITS:])
            return typed_json.parse(Term, {"number": number, **values})
        except (ValueError, TypeError):
            continue  # no launcher wrote this file
        except OSError as error:
            # A pipe or an oversized file is not ours either.
            if error.errno not in (errno.EINVAL, errno.EFBIG):
                raise

    return None


def read_counter(run_dir: Path, term: int) -> str:
    """Return the counter of a term file, which grows every second while its coordinator is alive; "" if unreadable."""
    # The file is opened each time: only then does a network file system ask its server.
    return files.read(_term_path(run_dir, term), most=4096)[:_DIGITS]


def _term_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of the terms that have a file. Raises OSError if the folder exists and cannot be read."""
    with suppress(FileNotFoundError):
        matches = [_TERM_NAME.fullmatch(name) for name in os.listdir(run_dir)]
        return [int(match[1]) for match in matches if match]

    return []


def _term_path(run_dir: Path, term: int) -> Path:
    return run_dir / f".coordinator-{term}"


def folder_identity(run_dir: Path) -> tuple[int, int] | None:
    """Return device and inode, which differ for another folder at the same path; None if there is no folder.

    Raises OSError if the disk does not say.
    """
    try:
        found = run_dir.stat()
    except FileNotFoundError:
        return None

    return found.st_dev, found.st_ino


# ---- on the coordinating node ----


class TermFile:
    """The term file of this node's coordinator, which shows whether the coordinator has been superseded."""

    def __init__(self, path: Path):
        # The user's code may change the working folder.
        self.path = Path(os.path.abspath(path))
        self._folder_identity: tuple[int, int] | None = None
        with suppress(OSError):
            self._folder_identity = folder_identity(self.path.parent)

    def superseded(self) -> bool:
        """Return whether the file was removed from its folder, which the node that begins the next term does."""
        try:
            # Opened, and not only looked up, so that a network file system asks its server.
            os.close(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except FileNotFoundError:
            # If the whole run folder was removed, no other node has taken over.
            with suppress(OSError):
                return folder_identity(self.path.parent) == self._folder_identity
        except OSError:
            pass  # a disk error says nothing about other nodes

        return False


class Lease(TermFile):
    """The right of this node to coordinate the job for a term, and the term file, which is renewed every second."""

    def __init__(self, run_dir: Path, term: Term):
        super().__init__(_term_path(run_dir, term.number))
        self.term = term
        self._counter = 0

    def renew(self) -> None:
        """Increment the counter, which tells the other nodes that this coordinator is alive."""
        self._counter += 1

        # In place, so that the rest of the file stays as it is. If one renewal cannot be written, the next one may.
        with suppress(OSError):
            # Neither a link nor a pipe, which someone else might have put there.
            fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.pwrite(fd, _digits(self._counter), 0)
            finally:
                os.close(fd)

    def end(self) -> None:
        """Remove the term file, because the job is over and no node must take over."""
        # A disk that fails now does not change how the job has ended, which the other nodes know from a message.
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

            # The next job here counts terms from 1 again, and would take these files for its own.
            _remove_cut_off_files(self.path.parent, self.term.number)


def begin_term(run_dir: Path, after: int | None, host: str, address: str) -> Lease | None:
    """Begin term `after` + 1; if `after` is None, the term after the newest one on disk.

    Return None if another node has begun that term, or a later one, and if term `after` has no file any more: then
    the job has ended.
    """
    numbers = _term_numbers(run_dir)
    number = max(numbers, default=0) + 1 if after is None else after + 1
    if any(other >= number for other in numbers) or (after is not None and after not in numbers):
        return None

    # This succeeds on one node only.
    path = _term_path(run_dir, number)
    if not files.create_once(path, _digits(0) + json.dumps({"host": host, "address": address}).encode()):
        return None

    # Since the first look, the job may have ended, or a newer term may have begun.
    numbers = _term_numbers(run_dir)
    if any(other > number for other in numbers) or (after is not None and after not in numbers):
        path.unlink(missing_ok=True)
        return None

    # Remove the files of earlier terms, which tells their coordinators that they are superseded.
    for other in numbers:
        if other < number:
            _term_path(run_dir, other).unlink(missing_ok=True)

    # An earlier job in this folder may have had a term of this number.
    _remove_cut_off_files(run_dir, number)

    return Lease(run_dir, Term(number, host, address))


def _remove_cut_off_files(run_dir: Path, last: int) -> None:
    """Remove what nodes said about the coordinators of all terms up to `last`."""
    for name in os.listdir(run_dir):
        match = _CUT_OFF_NAME.fullmatch(name)
        if match and int(match[1]) <= last:
            (run_dir / name).unlink(missing_ok=True)


def _digits(counter: int) -> bytes:
    """Return a counter as text of fixed length: it can be overwritten in place."""
    return b"%0*d" % (_DIGITS, counter)


# ---- on the other nodes ----


def write_cut_off_file(run_dir: Path, term: int, node: int) -> None:
    """Leave a file that says that this node cannot reach a live coordinator; a majority of such nodes may take over."""
    with suppress(OSError):
        (run_dir / f".cut-off-{term}-{node}").touch()


def remove_cut_off_file(run_dir: Path, term: int, node: int) -> None:
    """Take back what `write_cut_off_file` has said: this node has reached a coordinator."""
    with suppress(OSError):
        (run_dir / f".cut-off-{term}-{node}").unlink(missing_ok=True)


def cut_off_nodes(run_dir: Path, term: int) -> set[int]:
    """Return the nodes that cannot reach the coordinator of this term."""
    with suppress(OSError):
        matches = [_CUT_OFF_NAME.fullmatch(name) for name in os.listdir(run_dir)]
        return {int(match[2]) for match in matches if match and int(match[1]) == term}

    return set()


class CounterWatch:
    """Watches the counter of the newest term file, which stands still once the coordinator is gone."""

    def __init__(self) -> None:
        # The term and its counter, and when they changed last.
        self._seen: tuple[int, str] | None = None
        self._since = 0.0

        # Whether the counter has changed since the first look at this term.
        self.has_grown = False

    def note(self, term: int, counter: str, now: float) -> None:
        """Note the counter of a term. An empty counter means the file was unreadable, which proves nothing."""
        # A counter of another term, or one from before a failed read, says nothing about this one.
        if not counter or (self._seen and self._seen[0] != term):
            self.reset()

        if not counter:
            return

        # A counter counts as standing still from the first look on.
        if self._seen is None:
            self._since = now
        elif self._seen[1] != counter:
            self._since = now
            self.has_grown = True

        self._seen = (term, counter)

    def reset(self) -> None:
        """Forget what was seen; the next look starts over."""
        self._seen = None
        self.has_grown = False

    def still_for(self, now: float) -> float:
        """Return for how many seconds the counter is known to stand still."""
        return 0.0 if self._seen is None else now - self._since


class TakeoverWatch(CounterWatch):
    """Decides when a node that has lost its connection to the coordinator may take over.

    `number` is the node's own number, `nodes` are the numbers of all nodes. The counter may stand still for
    `patience` seconds. Each node waits `stagger` seconds longer than the node numbered below it, so that they do not
    compete. From the node after `MOST_STAGGERED` others on, all wait equally long; the term file admits one of them.
    """

    def __init__(self, number: int, nodes: list[int], patience: float, stagger: float):
        super().__init__()
        self._number = number
        self._nodes = nodes
        self._patience = patience
        self._stagger = stagger

        # Since when most nodes cannot reach a coordinator whose counter grows.
        self._majority_since: float | None = None

    def reset(self) -> None:
        """Forget what was seen of the counter and of the other nodes."""
        super().reset()
        self._majority_since = None

    def is_alive(self, now: float) -> bool:
        """Return whether the coordinator is known to be alive: its counter has grown, and not too long ago."""
        return self.has_grown and self.still_for(now) < self._patience

    def reason_to_take_over(self, cut_off: set[int], now: float) -> str | None:
        """Return why this node takes over now, or None. `cut_off` are the nodes that cannot reach the coordinator."""
        if self._seen is None:
            return None

        # The coordinator's node may be lost. Nodes with lower numbers go first.
        lower_nodes = sum(COORDINATOR < number < self._number for number in self._nodes)
        if self.still_for(now) >= self._patience + self._longer_than(lower_nodes):
            return f"no sign of life in the run folder for {self.still_for(now):.0f} s"

        # The coordinator is alive. If most nodes cannot reach it, it is the coordinator's node that is cut off.
        nodes = {COORDINATOR, *self._nodes}
        cut_off = cut_off & nodes

        if 2 * len(cut_off) <= len(nodes):
            self._majority_since = None
            return None

        # The same order among the nodes that are cut off.
        if self._majority_since is None:
            self._majority_since = now

        lower_cut_off = sum(number < self._number for number in cut_off)
        waited = now - self._majority_since
        return "most nodes cannot reach it" if waited >= self._longer_than(lower_cut_off) else None

    def _longer_than(self, lower_nodes: int) -> float:
        """Return how many seconds this node waits, so that this many nodes with lower numbers may go first."""
        return min(lower_nodes, MOST_STAGGERED) * self._stagger
