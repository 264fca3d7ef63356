"""What all saves of a run have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import CheckpointStorage


@dataclass(frozen=True)
class SaveContext:
    """Where a rank saves, and by which rules."""

    storage: CheckpointStorage
    rank: int
    world_size: int
    token: str  # identifies this attempt of the run
    retention: Retention
    timeout_s: float = 600.0  # how long rank 0 waits for the other ranks' files
    on_commit: Callable[[], None] = lambda: None  # called on rank 0 right after the rename; it must not raise

    def __post_init__(self) -> None:
        assert self.token.isalnum(), self.token  # it becomes part of a folder's name
