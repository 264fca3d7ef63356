"""What a rank leaves in its attempt's folder about its own end: a failure record, or a note that it has not failed.

    rank-3.json     the failure record of rank 3
    ended-3         rank 3 has ended as planned
    preempted-3     rank 3 has exited because it was asked to; the step, if its save failed
    error-3         the exception of rank 3 itself, for the process that called `lockstep.fit`

`post_mortem.py` reads the first three in the launcher.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from lockstep.errors import OutOfStep, UserError
from lockstep.launch import records
from lockstep.launch.failure import Failure, follows_lost_peer
from lockstep.launch.frames import Frame

# ---- the failure record ----


def stamp(error: BaseException) -> None:
    """Note the time of an error where it is first seen, before this rank leaves the process group.

    The other ranks notice that this rank is gone, and one of them may record its own error first. The stamps still
    show which error came first.
    """
    # Some exception classes take no attributes.
    with contextlib.suppress(AttributeError):
        error.__dict__.setdefault("lockstep_time", time.time())


def record_exception(folder: Path, rank: int, error: BaseException) -> None:
    """Write the failure record of this rank. For OutOfStep it names the rank at fault, not the rank that noticed."""
    at_fault = error.ranks if isinstance(error, OutOfStep) else []
    failure = Failure(
        rank=min(at_fault, default=rank),
        host=socket.gethostname(),
        time=getattr(error, "lockstep_time", time.time()),
        kind=type(error).__name__,
        # A hook of the user adds its name as a note.
        message="\n".join([str(error), *getattr(error, "__notes__", ())]),
        traceback="".join(traceback.format_exception(error)),
        for_user=isinstance(error, UserError),
        cause=error.cause if isinstance(error, UserError) else "",
        follows_lost_peer=follows_lost_peer(error),
    )
    write(folder, rank, failure)


def write(folder: Path, rank: int, failure: Failure) -> None:
    records.write(_record_path(folder, rank), json.dumps(asdict(failure)))


def read(folder: Path, rank: int) -> Failure:
    """Read the failure record of a rank. Raises ValueError if there is none, or if it is not valid."""
    return _parse(_record_path(folder, rank))


def first_failure(folder: Path) -> Failure | None:
    """Return the first failure that ranks of this folder have recorded. An error for the user comes before others."""
    failures = [_parse(path) for path in folder.glob(_record_path(folder, "*").name)]
    return min(failures, key=lambda failure: (not failure.for_user, failure.time), default=None)


def _parse(path: Path) -> Failure:
    """Read a failure record. Raises ValueError if it is not valid."""
    return records.parse(Failure, json.loads(records.read(path)))


def _record_path(folder: Path, rank: int | str) -> Path:
    """Return the path of a rank's failure record. The rank may be a pattern."""
    return folder / f"rank-{rank}.json"


# ---- an end as planned ----


def note_end(folder: Path, rank: int, exit_line: str = "") -> None:
    """Note that this rank's work has ended as planned, because `os._exit(0)` too early has the same exit code.

    `exit_line`: FILE:LINE where the program called sys.exit(), if it did.
    """
    with contextlib.suppress(OSError):  # the launcher may have ended, and removed the folder
        end_note(folder, rank).write_text(exit_line)


def end_note(folder: Path, rank: int) -> Path:
    """Return the path of a rank's note that it has ended as planned."""
    return folder / f"ended-{rank}"


def note_preemption(folder: Path, rank: int, unsaved_step: int | None = None) -> None:
    """Note that this rank exits because it was asked to, because a program may call `sys.exit` with the same code.

    `unsaved_step`: the step at which it should have saved, if that save failed.
    """
    with contextlib.suppress(OSError):
        preemption_note(folder, rank).write_text("" if unsaved_step is None else str(unsaved_step))


def preemption_note(folder: Path, rank: int) -> Path:
    """Return the path of a rank's note that it has exited because it was asked to."""
    return folder / f"preempted-{rank}"


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
