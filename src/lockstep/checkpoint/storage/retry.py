"""Try again while the checkpoints are unreachable: how long, with which pauses, and after which errors.

`retry_together` and `retry_on_rank0` are for ranks that act together: all of them try again, and give up at the same
time. A `CheckpointReader`, and a save that is tried again during training, wait on their own.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.errors import UserError, message_of, printable

if TYPE_CHECKING:
    from lockstep.runtime.context import Runtime

# The first and the longest pause between two tries to read or claim checkpoints. A heartbeat follows each pause, so
# that the launcher does not take it for a stall.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0

# The errors for which waiting does not help: they last until a person makes room or grants permission.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_RIGHT = (errno.EACCES, errno.EROFS)

# What to do about files that cannot be read or written.
READ_FIX = "let this user read the files"
WRITE_FIX = "let this user write to the folder"

# An all-gather of JSON values. All ranks call it in the same order.
Gather = Callable[[Any], list[Any]]

Answer = TypeVar("Answer")


def backoff(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the seconds of the pauses between tries: each is twice as long as the last, up to a limit."""
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)


class Wait:
    """A wait for storage that is away: when it ends, the pauses, and the message about it."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._is_announced = False
        self.restart()

    def restart(self) -> None:
        """Begin again, because something was read."""
        self._began = time.monotonic()
        self._pauses = backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    def seconds_left(self) -> float:
        """Return how many seconds are left, by this process's clock."""
        return self._began + self._timeout_s - time.monotonic()

    def announce(self, problem: str) -> None:
        """Print what is waited for, once."""
        # Not an event: the terminal shows events only after the set-up of the run.
        if not self._is_announced:
            text = f"{problem}; trying again for {self._timeout_s:g} s (checkpoint.timeout)"
            print(printable(f"lockstep: {text}"), file=sys.stderr, flush=True)
            self._is_announced = True

    def pause(self, left: float) -> None:
        """Sleep until the next try, for `left` seconds at most."""
        time.sleep(min(next(self._pauses), left))


class StorageUnavailable(UserError):
    """The checkpoints cannot be listed or claimed now, or a checkpoint that may be intact cannot be read.

    To resume from an older one instead would lose progress.
    """


def retry_on_rank0(
    runtime: Runtime, timeout_s: float, act: Callable[[], Any], problem: str, fix: str = WRITE_FIX
) -> Any:
    """Run `act` on rank 0 until no OSError stops it, and return its result, plain JSON, on every rank. Collective.

    After `timeout_s` seconds all ranks raise StorageUnavailable; if waiting does not help, a UserError at once. `act`
    may be called again after it has done a part of its work. For the message, `problem` is its first sentence, and
    `fix` is what to do about it.
    """
    gather = runtime.collectives.all_gather_json

    # The other ranks have nothing to do, and get rank 0's result.
    act_here = act if runtime.is_main else lambda: None
    return retry_together(lambda: run_on_all_ranks(gather, act_here, problem, fix), runtime, timeout_s)[0]


def retry_together(act: Callable[[], Answer], runtime: Runtime, timeout_s: float) -> Answer:
    """Call `act` until it does not raise StorageUnavailable: a file server or an object store may come back.

    After `timeout_s` seconds, let the error pass. Collective.
    """
    wait = Wait(timeout_s)
    while True:
        try:
            return act()
        except StorageUnavailable as error:
            # All ranks raise it together, and give up together: rank 0's clock decides.
            left = runtime.collectives.run_on_rank0(wait.seconds_left)
            if left <= 0:
                raise

            if runtime.is_main:
                wait.announce(f"{error.problem} ({error.found})")

        wait.pause(left)
        runtime.heartbeat.keep_alive()


def run_on_all_ranks(gather: Gather, act: Callable[[], Any], problem: str, fix: str = READ_FIX) -> list[Any]:
    """Call `act` on all ranks, and return the results by rank. Collective.

    All ranks raise StorageUnavailable if one of them has an OSError, or a UserError if waiting does not help. For the
    message, `problem` is its first sentence, and `fix` is what to do about it.
    """
    answer = None
    failed = None
    failed_errno = None
    try:
        answer = act()
    except OSError as error:
        failed = message_of(error)
        failed_errno = error.errno

    # A rank that fails takes part as well: the others would wait for it.
    answers = gather([answer, failed, failed_errno])
    failures = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(answers) if why is not None]
    if failures:
        errnos = {number for _, _, number in answers}
        raise _storage_error(problem, "; ".join(failures), fix, errnos)

    return [answer for answer, _, _ in answers]


def _storage_error(problem: str, found: str, fix: str, errnos: set[int | None]) -> UserError:
    """Return the error for OSErrors with these numbers: StorageUnavailable if waiting may help."""
    if errnos.intersection(NO_ROOM):
        return UserError(problem, found, "make room there, and try again")

    if errnos.intersection(NO_RIGHT):
        return UserError(problem, found, f"{fix}, and try again")

    return StorageUnavailable(problem, found, fix_or_wait(fix))


def fix_or_wait(fix: str) -> str:
    """Return the advice for files that cannot be read or written now: `fix`, unless waiting helps."""
    return f"{fix}, or wait until the file server or the object store is back, and try again"
