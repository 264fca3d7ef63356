"""The records that a rank leaves about its own end.

    rank-3.json     how rank 3 ends, in its attempt's folder: a `RankExit`, with its failure if it has failed
    error-3         the exception of rank 3 itself, in the folder of the process that called `lockstep.fit`

`post_mortem.py` reads the first in the launcher.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from lockstep import files
from lockstep.errors import OutOfStep, Preempted, UserError
from lockstep.files import typed_json
from lockstep.launch import lost_peer
from lockstep.launch.failure import EXCEPTION_TRAITS, PROGRAM_ERROR, Failure, RankExit
from lockstep.launch.frames import Frame
from lockstep.runtime import attempt_folder

# ---- how a rank ends ----


def ended_by(error: BaseException, rank: int) -> RankExit:
    """Return how this exception ends the rank: as planned, as it was asked to, or with a failure."""
    if not isinstance(error, SystemExit):
        return RankExit(1, _failure_of(error, rank))

    # A program that cleans up after a preemption may then call sys.exit with its code.
    preempted = error if isinstance(error, Preempted) else error.__context__
    if isinstance(preempted, Preempted):
        without_failure = "saved" if preempted.checkpoint else "nothing"
        return RankExit.as_asked("failed" if preempted.save_failed else without_failure, preempted.step)

    if error.code in (None, 0):
        return RankExit(0, exit_line=raising_line(error))

    return RankExit(1, _failure_of(error, rank))


def _failure_of(error: BaseException, rank: int) -> Failure:
    """Return the failure of this rank. For OutOfStep it names the rank that is out of step."""
    # The time at which the error was first seen: before the rank has cleaned up, others may fail because of it. Some
    # exception classes take no attributes.
    when = time.time()
    with contextlib.suppress(AttributeError):
        when = error.__dict__.setdefault("lockstep_time", when)

    out_of_step = error.ranks if isinstance(error, OutOfStep) else []
    return Failure(
        rank=min(out_of_step, default=rank),
        host=socket.gethostname(),
        time=when,
        kind=type(error).__name__,
        # A hook of the user adds its name as a note.
        message="\n".join([lost_peer.text_of(error), *getattr(error, "__notes__", ())]),
        traceback="".join(traceback.format_exception(error)),
        for_user=isinstance(error, UserError),
        cause=error.cause if isinstance(error, UserError) else "",
        lost_peer="yes" if lost_peer.reported_by(error) else "no",
        # Only here is the class known: the record has its name, and a program may have a class of the same name.
        traits=EXCEPTION_TRAITS.get(type(error), PROGRAM_ERROR),
    )


# ---- the record ----


def write(folder: Path, rank: int, rank_exit: RankExit) -> None:
    """Record how a rank ends. Without a record, its exit code is all that is known."""
    path = attempt_folder.exit_record(folder, rank)
    # The launcher may have ended, and removed the folder. A full disk has room for an empty file: see `examine`.
    with contextlib.suppress(OSError):
        path.touch()
        files.write(path, json.dumps(asdict(rank_exit)))


def read(folder: Path, rank: int) -> RankExit | None:
    """Read the record of a rank. Return None if there is none, or if it is not valid."""
    return _parse(attempt_folder.exit_record(folder, rank))


def exists(folder: Path, rank: int) -> bool:
    """Return whether a rank has left a record, valid or not."""
    return attempt_folder.exit_record(folder, rank).exists()


def root_failure(folder: Path) -> Failure | None:
    """Return the failure of this folder's ranks that explains the others, for ranks without a coordinator.

    An error for the user comes first, because it says what to do.
    """
    exits = [_parse(path) for path in folder.glob(attempt_folder.exit_record(folder, "*").name)]
    failures = [rank_exit.failure for rank_exit in exits if rank_exit is not None and rank_exit.failure is not None]
    return min(failures, key=lambda failure: (not failure.for_user, *failure.root_order), default=None)


def _parse(path: Path) -> RankExit | None:
    try:
        return typed_json.parse(RankExit, json.loads(files.read(path)))
    except ValueError:
        return None


@contextlib.contextmanager
def recording_early(rank: int) -> Iterator[Callable[[BaseException], None]]:
    """Yield a function that records a failure before this rank cleans up. At the end the record is withdrawn.

    If the clean-up hangs, the launcher finds the record: the rank has failed, and does not hang (`Agent`). After the
    clean-up the program may catch the error and go on. Without our launcher nothing is recorded.
    """
    folder = attempt_folder.current()

    def record(error: BaseException) -> None:
        rank_exit = ended_by(error, rank)
        if folder is not None:
            write(folder, rank, rank_exit)

    try:
        yield record
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):
                attempt_folder.exit_record(folder, rank).unlink(missing_ok=True)


def raising_line(error: BaseException) -> str:
    """Return FILE:LINE of the line that raised an error, in the user's code if it went through any; "" if unknown."""
    frames = [Frame(f.filename, str(f.lineno), f.name) for f in traceback.extract_tb(error.__traceback__)]

    # wandb, for example, replaces sys.exit by a function of its own.
    users = [frame for frame in frames if frame.in_user_code]
    return next((f"{frame.file}:{frame.line}" for frame in reversed(users or frames)), "")


# ---- the exception itself ----


def leave_exception(folder: Path, rank: int, error: Exception) -> None:
    """Leave this rank's exception, as an object, for the process that called `lockstep.fit`: see `load_exception`."""
    import cloudpickle

    # An exception that cannot be pickled is reported by its type and its text alone.
    with contextlib.suppress(Exception):
        _exception_path(folder, rank).write_bytes(cloudpickle.dumps(error))


def load_exception(folder: Path, failure: Failure) -> Exception | None:
    """Return the exception behind a failure, if its rank has left it in `folder`.

    Unpickling runs code, so the folder must be private to this process and the ranks that it has started.
    """
    if failure.origin != "exception" or failure.rank is None:
        return None

    import cloudpickle

    # Unpickling may raise anything; then the text of the failure must do. Classes of a notebook's cells come back as
    # the same classes: cloudpickle remembers those that it has sent.
    with contextlib.suppress(Exception):
        error = cloudpickle.loads(_exception_path(folder, failure.rank).read_bytes())
        if isinstance(error, Exception) and failure.raised_as(type(error)):
            return error

    return None


def _exception_path(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}"
