"""A checkpoint in a storage, as the handle that the rest of the package passes around, and the list of all."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.run_folder.checkpoint_names import committed_names, folder_name, step_in


@dataclass(frozen=True)
class Checkpoint:
    """One folder of a storage: a checkpoint that is committed, not yet committed, or set aside."""

    storage: CheckpointStorage
    name: str

    @classmethod
    def of(cls, storage: CheckpointStorage, step: int) -> Checkpoint:
        """Return the committed checkpoint of a step."""
        return cls(storage, folder_name(step))

    @property
    def path(self) -> Path:
        """The folder of this checkpoint. Its tensors may be elsewhere: `open` finds them."""
        return self.storage.root / self.name

    @property
    def step(self) -> int:
        """The step of a committed checkpoint; no other has one."""
        step = step_in(self.name)
        assert step is not None, self.name
        return step

    def exists(self) -> bool:
        """Return whether this folder is there. A run deletes its checkpoints while others read them."""
        return self.name in self.storage.folders()

    def has(self, file: str) -> bool:
        """Return whether a file is there, as this machine sees it."""
        try:
            self.open(file).close()
        except FileNotFoundError:
            return False

        return True

    def open(self, file: str) -> io.BufferedIOBase:
        return self.storage.open(f"{self.name}/{file}")


def list_checkpoints(storage: CheckpointStorage) -> list[Checkpoint]:
    """Return the committed checkpoints, newest first. `search.newest_valid` verifies their contents."""
    return [Checkpoint(storage, name) for name in committed_names(storage.folders())]
