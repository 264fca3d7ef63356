"""The transitions of a checkpoint: who may commit, how a draft becomes a checkpoint, how one is set aside or deleted.

Each transition is a few renames and deletions in a `CheckpointStorage`. A kill between two of them loses no
checkpoint, and the next start does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from lockstep.checkpoint.storage.folder import CheckpointStorage, NotDurable, list_checkpoints
from lockstep.run_folder.checkpoint_names import (
    LATEST,
    OWNER,
    aside_name,
    deleting_name,
    is_half_deleted,
    name_before_replacement,
    replaced_name,
    step_in,
    token_in,
)


def claim(storage: CheckpointStorage, token: str) -> None:
    """Make the attempt with this (fencing) token the only one that may commit. Call it before any file is written.

    The owner is checked just before the rename that commits. A process suspended between the check and the rename can
    still commit.
    """
    storage.replace(OWNER, token.encode())

    # This has made the folder, if it is new. Without its name, a power cut would take all checkpoints in it.
    storage.sync_name()


def owner_of(storage: CheckpointStorage) -> str | None:
    """Return the token of the last claim; None before the first."""
    # Any other error must not look as if there were no owner.
    with suppress(FileNotFoundError), storage.open(OWNER) as file:
        return file.read(1000).decode(errors="replace").strip()

    return None


def delete_leftovers(storage: CheckpointStorage, token: str) -> None:
    """Delete the folders and temporary files that other attempts left half written or half deleted.

    A checkpoint that was about to be replaced gets its name back. Raise OSError if that fails.
    """
    put_back_replaced(storage)
    storage.delete_old_temporaries()

    # A store may be away, or another attempt may still write into its folder. What cannot be deleted now is deleted
    # after the next commit, or at the next start.
    finish_deletions(storage, token)
    delete_all(storage, [name for name in storage.folders() if token_in(name) not in (None, token)], token)


def update_latest(storage: CheckpointStorage) -> None:
    """Let `latest` name the newest committed checkpoint, for people and their scripts.

    Nothing here reads it: `search.newest_valid` and the launcher list the checkpoints themselves.
    """
    newest = list_checkpoints(storage)[:1]
    if newest:
        storage.replace(LATEST, newest[0].name.encode() + b"\n")
    else:
        storage.delete(LATEST)


def set_aside(storage: CheckpointStorage, name: str, suffix: Literal["damaged", "rewound"]) -> str:
    """Rename a checkpoint to `step-N.damaged` or `step-N.rewound`, so that it is ignored, but not lost.

    Return its new name. `latest` may still name it until the load that follows calls `set_aside_later`. It is not
    updated here: if that failed, a second call could not rename the checkpoint again.
    """
    target = aside_name(name, suffix, storage.folders())
    _rename(storage, name, target)
    return target


def set_aside_later(storage: CheckpointStorage, step: int) -> None:
    """Set aside all checkpoints after `step`: the run rewinds, or goes back, to it. After an OSError, call it again."""
    # List the folder only once, however many checkpoints there are.
    taken = set(storage.folders())
    rewound = [checkpoint.name for checkpoint in list_checkpoints(storage) if checkpoint.step > step]

    for name in rewound:
        _rename(storage, name, aside_name(name, "rewound", taken))

    # Even if nothing is renamed: an earlier call may have failed here.
    update_latest(storage)


def commit_draft(storage: CheckpointStorage, draft: str, name: str) -> None:
    """Rename a draft to the name of its step: this is the commit. Raise NotDurable as `rename` does.

    An earlier checkpoint of this step makes way as `step-N.replaced`. If the commit fails, the earlier checkpoint gets
    its name back; after a kill, the next start does this (`put_back_replaced`).
    """
    # A file system cannot replace a folder by another one.
    if name in storage.folders():
        storage.delete(replaced_name(name))
        _rename(storage, name, replaced_name(name))

    try:
        storage.rename(draft, name)
    except NotDurable:
        raise
    except OSError:
        # If this fails as well, the next start does it.
        with suppress(OSError):
            put_back_replaced(storage)

        raise


def delete_checkpoint(storage: CheckpointStorage, name: str, token: str) -> None:
    """Delete a checkpoint, or a draft. What a reader may look for is renamed first, so that no reader finds half of it.

    If the rest of it cannot be deleted now, `finish_deletions` or the next start does it.
    """
    if step_in(name) is not None or name_before_replacement(name) is not None:
        stem, _, _ = name.partition(".")
        temporary = deleting_name(stem, token)

        # A run and `lockstep ckpt prune` may delete the same one.
        with suppress(FileNotFoundError):
            _rename(storage, name, temporary)

        name = temporary

    storage.delete(name)


def delete_all(storage: CheckpointStorage, names: Iterable[str], token: str) -> OSError | None:
    """Delete several, and return the first error, if there is one: what cannot be deleted must not keep the others."""
    failed = None
    for name in names:
        try:
            delete_checkpoint(storage, name, token)
        except OSError as error:
            failed = failed or error

    return failed


def finish_deletions(storage: CheckpointStorage, token: str) -> OSError | None:
    """Finish what this attempt could delete only in part, and delete the checkpoints whose replacement is committed.

    Return the first error, if there is one.
    """
    folders = storage.folders()
    half_deleted = [name for name in folders if is_half_deleted(name) and token_in(name) == token]
    replaced = [name for name in folders if name_before_replacement(name) in folders]
    return delete_all(storage, [*half_deleted, *replaced], token)


def _rename(storage: CheckpointStorage, name: str, to: str) -> None:
    """Rename a folder, for any purpose but a commit: if a power cut undoes it, nothing is lost."""
    with suppress(NotDurable):
        storage.rename(name, to)


# ---- a step that is saved again, as classic trainers do; a run saves no step twice ----


def put_back_replaced(storage: CheckpointStorage) -> None:
    """Give a checkpoint its name back if its replacement was never committed. Raise OSError."""
    folders = storage.folders()
    for name in folders:
        before = name_before_replacement(name)
        if before is None or before in folders:
            continue

        try:
            _rename(storage, name, before)
        except OSError:
            # The writer may be alive, and may have committed the replacement at this moment.
            if before not in storage.folders():
                raise
