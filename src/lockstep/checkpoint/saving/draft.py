"""Where a rank saves: the folder of a checkpoint that is not committed yet, and what ranks tell each other through it.

    step-N.tmp-TOKEN-NUMBER/rank-RANK.safetensors   the file of a rank
    step-N.tmp-TOKEN-NUMBER/rank-RANK.json          its confirmation, for rank 0
    step-N.tmp-TOKEN-NUMBER/manifest.json           written by rank 0 when all ranks have confirmed

Ranks communicate only through the storage, so that a rank that hangs blocks no writing thread of another rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.checkpoint.manifest import File, TensorEntry, tensors_from_json, tensors_to_json
from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import owner_of
from lockstep.config.sections import CheckpointConfig
from lockstep.run_folder.checkpoint_names import MANIFEST, confirmation_name, draft_name, file_name


@dataclass
class SaveContext:
    """What all saves of a run have in common: where a rank saves, and with which settings."""

    storage: CheckpointStorage
    rank: int
    world_size: int
    token: str  # identifies this attempt of the run
    checkpoint_config: CheckpointConfig

    # Called on rank 0 right after the rename. If it raises, the checkpoint is safe, and its outcome has a warning.
    on_commit: Callable[[], None] = lambda: None

    # The metrics of the committed checkpoints, which `apply_retention` compares.
    all_metrics: CheckpointMetrics = field(init=False)

    def __post_init__(self) -> None:
        assert self.token.isalnum(), self.token  # it becomes part of a folder's name
        self.all_metrics = CheckpointMetrics(self.storage)

    def check_owner(self) -> None:
        """Raise SaveFailed if this attempt does not own the checkpoints, with `taken_over` if another one does."""
        # If this process was suspended for a while, its run may already continue elsewhere.
        owner = owner_of(self.storage)
        if not owner:
            raise SaveFailed("no attempt owns the checkpoints: the file `owner` is gone")

        if owner != self.token:
            raise SaveFailed(f"another attempt has taken over this run (its token is {owner})", taken_over=True)

    def is_taken_over(self) -> bool:
        """Return whether another attempt owns the checkpoints; False if that cannot be read now."""
        try:
            self.check_owner()
        except SaveFailed as failed:
            return failed.taken_over
        except OSError:
            pass

        return False


@dataclass(frozen=True)
class Confirmation:
    """What a rank writes next to its file, for rank 0: what the manifest will say of the file, or why there is none."""

    file: File | None
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)  # with the pieces that are in this file
    error: str = ""

    def encode(self) -> bytes:
        file = vars(self.file) if self.file else None
        return json.dumps({"file": file, "tensors": tensors_to_json(self.tensors), "error": self.error}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Confirmation:
        """Undo `encode`. A rank of this attempt has written it, so its fields are not checked here."""
        fields = json.loads(data)
        file = File(**fields["file"]) if fields["file"] else None

        return cls(file, tensors_from_json(fields["tensors"]), fields["error"])


class Draft:
    """The folder of one save until its commit, as one rank sees it."""

    def __init__(self, context: SaveContext, step: int, number: int):
        """`step` is the step to save. `number` counts the saves of this rank."""
        self.context = context
        self.step = step
        self.name = draft_name(step, context.token, number)
        self._file_confirmed = False

    # ---- keys in the storage ----

    def file_key(self, rank: int) -> str:
        return f"{self.name}/{file_name(rank)}"

    def confirmation_key(self, rank: int) -> str:
        return f"{self.name}/{confirmation_name(rank)}"

    @property
    def manifest_key(self) -> str:
        return f"{self.name}/{MANIFEST}"

    # ---- confirmations ----

    def confirm(self, confirmation: Confirmation) -> None:
        self.context.storage.replace(self.confirmation_key(self.context.rank), confirmation.encode())
        self._file_confirmed = confirmation.file is not None

    def read_confirmation(self, rank: int) -> Confirmation | None:
        """Return what a rank has confirmed; None if it has not yet."""
        # A confirmation that exists is complete, since `replace` is atomic.
        with suppress(FileNotFoundError), self.context.storage.open(self.confirmation_key(rank)) as file:
            return Confirmation.decode(file.read())

        return None

    def delete_confirmations(self) -> None:
        for rank in range(self.context.world_size):
            self.context.storage.delete(self.confirmation_key(rank))

    # ---- the end of a save that is not committed ----

    def delete(self) -> None:
        """Delete what this rank has written; rank 0 deletes the folder. After the commit, this does nothing."""
        rank = self.context.rank
        if rank == 0:
            keys = [self.name]
        elif self._file_confirmed:
            # Rank 0 may have read the confirmation, and may be about to commit the file: then only rank 0 deletes it.
            keys = [self.confirmation_key(rank)]
        else:
            keys = [self.confirmation_key(rank), self.file_key(rank)]

        # The next start deletes files that cannot be deleted now.
        for key in keys:
            with suppress(OSError):
                self.context.storage.delete(key)

    def is_gone(self) -> bool:
        """Return whether another rank, or another attempt, has deleted the folder."""
        # If listing fails as well, the first error remains the reason.
        with suppress(OSError):
            return self.name not in self.context.storage.folders()

        return False
