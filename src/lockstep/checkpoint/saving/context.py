"""What all saves of a run have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.saving.outcome import SaveError, TakenOver
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import owner_of
from lockstep.config.sections import CheckpointConfig


@dataclass
class SaveContext:
    """Where a rank saves, and with which settings."""

    storage: CheckpointStorage
    rank: int
    world_size: int
    token: str  # identifies this attempt of the run
    checkpoint_config: CheckpointConfig

    # Called on rank 0 right after the rename. If it raises, the checkpoint is safe, and its outcome has a warning.
    on_commit: Callable[[], None] = lambda: None

    # The metrics of the committed checkpoints, which `apply_retention` compares.
    metrics_cache: CheckpointMetrics = field(init=False)

    def __post_init__(self) -> None:
        assert self.token.isalnum(), self.token  # it becomes part of a folder's name
        self.metrics_cache = CheckpointMetrics(self.storage)

    def check_owner(self) -> None:
        """Raise TakenOver if another attempt owns the checkpoints, or SaveError if none does."""
        # If this process was suspended for a while, its run may already continue elsewhere.
        owner = owner_of(self.storage)
        if not owner:
            raise SaveError("no attempt owns the checkpoints: the file `owner` is gone")

        if owner != self.token:
            raise TakenOver(f"another attempt has taken over this run (its token is {owner})")

    def is_taken_over(self) -> bool:
        """Return whether another attempt owns the checkpoints; False if that cannot be read now."""
        try:
            self.check_owner()
        except TakenOver:
            return True
        except (OSError, SaveError):
            pass

        return False
