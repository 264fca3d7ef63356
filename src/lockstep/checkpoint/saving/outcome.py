"""How a save ends on one rank: its outcome, and how it is ended early."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from lockstep.checkpoint.storage.folder import Checkpoint


@dataclass(frozen=True)
class Written:
    """This rank's file is durable, and rank 0 does the rest: the outcome on all ranks but rank 0."""


@dataclass(frozen=True)
class Committed:
    """The checkpoint is complete and has its final name: the outcome on rank 0."""

    checkpoint: Checkpoint
    total_bytes: int  # of all files
    warnings: tuple[str, ...] = ()  # what went wrong despite the commit, each in a sentence


@dataclass
class SaveFailed(Exception):
    """The save was not committed, and its files were deleted.

    It is raised inside a save that must end for a reason other than an OSError, and is then its outcome.
    """

    reason: str
    caused_elsewhere: bool = False  # by another rank or another attempt
    taken_over: bool = False  # another attempt owns the checkpoints: no later save of this one can succeed

    def __str__(self) -> str:
        return self.reason


class AbortRequest:
    """A request from the training thread to end a save. The writing thread looks for it now and then."""

    def __init__(self) -> None:
        self.reason = ""
        self._requested = threading.Event()

    def request(self, why: str) -> None:
        """Ask the writing thread to end the save. `why` becomes the reason of its failure."""
        self.reason = why
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def check(self) -> None:
        """Raise SaveFailed if the save is to end."""
        if self.requested:
            raise SaveFailed(self.reason)

    def sleep(self, seconds: float) -> None:
        """Sleep, but wake up and raise SaveFailed as soon as the save is to end."""
        self._requested.wait(seconds)
        self.check()


def as_text(error: BaseException) -> str:
    """Return an error with its type: many messages mean nothing without it."""
    return f"{type(error).__name__}: {error}"
