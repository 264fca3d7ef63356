"""How a save ends on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.checkpoint.storage import Checkpoint


@dataclass(frozen=True)
class Written:
    """This rank's file is durable, and the rest is up to rank 0: the outcome on all other ranks."""


@dataclass(frozen=True)
class Committed:
    """The checkpoint is complete and has its final name: the outcome on rank 0."""

    checkpoint: Checkpoint
    total_bytes: int  # of all files
    warning: str = ""  # what went wrong despite the commit; completes the sentence "the checkpoint is ..."


@dataclass(frozen=True)
class SaveFailed:
    """The save was not committed, and its files were deleted."""

    reason: str
    caused_elsewhere: bool = False  # by another rank or another attempt


SaveOutcome = Written | Committed | SaveFailed
