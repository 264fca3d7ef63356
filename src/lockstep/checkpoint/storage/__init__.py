"""Where checkpoints are kept: one module for each kind of storage, and the rules that hold for all of them.

A storage holds folders of files, whatever their contents (`protocol.CheckpointStorage`). The rest of the package gets
one from `open_storage`, and reads, writes, lists, renames and deletes checkpoints only through it. CONTRIBUTING says
what another kind of storage needs, and which code looks at the folder itself. Nothing here imports torch, so that
`lockstep ckpt ls` starts fast.
"""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.storage.file_system import FileSystemStorage
from lockstep.checkpoint.storage.object_storage import ObjectStorage
from lockstep.checkpoint.storage.protocol import CheckpointStorage, NotDurable
from lockstep.launch.folder.checkpoint_names import LATEST, OBJECTS, name_aside, name_to_delete, step_in, token_in

__all__ = [
    "Checkpoint",
    "CheckpointStorage",
    "FileSystemStorage",
    "ObjectStorage",
    "committed",
    "delete_checkpoint",
    "delete_leftovers",
    "open_storage",
    "set_aside",
    "set_aside_after",
    "update_latest",
]


@dataclass(frozen=True)
class Checkpoint:
    """One folder of a storage: a checkpoint that is committed, not yet committed, or set aside."""

    storage: CheckpointStorage
    name: str

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in the folder `path` of a file system."""
        # "." and ".." are not the name that the folder has in its parent.
        path = path.resolve() if path.name in ("", "..") else path
        return cls(open_storage(path.parent), path.name)

    @property
    def location(self) -> str:
        """The location, for messages. It is not always a path: a storage may be anywhere."""
        return f"{self.storage.address}/{self.name}"

    @property
    def step(self) -> int:
        """The step of a committed checkpoint; no other has one."""
        step = step_in(self.name)
        assert step is not None, self.name
        return step

    def open(self, file: str) -> io.BufferedIOBase:
        return self.storage.open(f"{self.name}/{file}")


def open_storage(folder: Path, url: str | None = None) -> CheckpointStorage:
    """Return the storage of the checkpoints in `folder`. This is the only place that chooses a kind of storage.

    `url`: the object store for large files of new checkpoints (`checkpoint.storage`).
    """
    if url is not None or (folder / OBJECTS).exists():
        return ObjectStorage(folder, url)

    return FileSystemStorage(folder)


# ---- the rules for every kind of storage ----


def committed(storage: CheckpointStorage) -> list[Checkpoint]:
    """Return the committed checkpoints, newest first. Their contents are not verified (`load.newest_valid` does it)."""
    checkpoints = [Checkpoint(storage, name) for name in storage.folders() if step_in(name) is not None]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def delete_leftovers(storage: CheckpointStorage, token: str) -> None:
    """Delete the folders that other attempts left half written or half deleted."""
    for name in storage.folders():
        if token_in(name) not in (None, token):
            # If another attempt still writes into the folder, the next start will delete it.
            with suppress(OSError):
                storage.delete(name)


def update_latest(storage: CheckpointStorage) -> None:
    """Let `latest` name the newest committed checkpoint. Only people and the launcher read it.

    `load.newest_valid` lists the checkpoints themselves.
    """
    newest = committed(storage)[:1]
    if newest:
        storage.replace(LATEST, newest[0].name.encode() + b"\n")
    else:
        storage.delete(LATEST)


def set_aside(storage: CheckpointStorage, name: str, suffix: Literal["damaged", "undone"]) -> str:
    """Rename a checkpoint to `step-N.damaged` or `step-N.undone`, so that it is ignored, but not lost.

    Return its new name.
    """
    target = name_aside(name, suffix, storage.folders())
    _rename(storage, name, target)
    update_latest(storage)
    return target


def _rename(storage: CheckpointStorage, name: str, to: str) -> None:
    """Rename a folder, for any purpose but a commit: if a power cut undoes it, nothing is lost."""
    with suppress(NotDurable):
        storage.rename(name, to)


def set_aside_after(storage: CheckpointStorage, step: int) -> dict[str, str]:
    """Set aside all checkpoints after `step`, to which the run goes back. Return their new names by the old ones."""
    # List the folder only once, however many checkpoints there are.
    taken = set(storage.folders())
    undone = [checkpoint.name for checkpoint in committed(storage) if checkpoint.step > step]
    new_names = {name: name_aside(name, "undone", taken) for name in undone}

    for name, new_name in new_names.items():
        _rename(storage, name, new_name)

    if undone:
        update_latest(storage)

    return new_names


def delete_checkpoint(storage: CheckpointStorage, name: str, token: str) -> None:
    """Delete a committed checkpoint. The folder is renamed first, so that no reader finds half of it."""
    temporary = name_to_delete(name, token)
    _rename(storage, name, temporary)
    storage.delete(temporary)
