"""What rank 0 does when its own file is written: it turns the files of all ranks into one checkpoint.

    waits for all confirmations, and checks them
    step-N.tmp-TOKEN-NUMBER/manifest.json       durable
    deletes the confirmations
    checks that it still owns the storage
    step-N -> step-N.undone                     if step N was saved before
    step-N.tmp-TOKEN-NUMBER -> step-N           the commit
    calls `SaveContext.on_commit`
    updates `latest` and deletes the checkpoints that `Retention` does not keep

A power cut or a kill at any moment leaves the old state or the new one: contents are durable before names, the manifest
before the rename, and the rename before `latest` changes and before an old checkpoint is deleted. One exception: if
step N is saved again and the process dies between the two renames, no step-N exists; the old checkpoint is
step-N.undone, and `latest` already names an older one. This module does not import torch.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import lockstep
from lockstep import faults
from lockstep.checkpoint.manifest import Manifest, Piece, TensorEntry, encode
from lockstep.checkpoint.manifest_reader import decode
from lockstep.checkpoint.retention import apply_retention
from lockstep.checkpoint.saving.abort import AbortRequest, SaveError
from lockstep.checkpoint.saving.draft import Confirmation, Draft
from lockstep.checkpoint.saving.outcome import Committed
from lockstep.checkpoint.storage import Checkpoint, set_aside, update_latest
from lockstep.checkpoint.storage.protocol import NotDurable
from lockstep.errors import listed_ranks
from lockstep.launch.folder.checkpoint_names import file_name, folder_name


class Commit:
    """The commit of one save, on rank 0."""

    def __init__(self, draft: Draft, step: int, abort: AbortRequest):
        self.draft = draft
        self.step = step
        self.abort = abort
        self.context = draft.context
        self.storage = draft.storage

    def run(self, aliases: dict[str, str], values: dict[str, Any]) -> Committed:
        """Commit the checkpoint, or raise SaveError, InvalidCheckpoint or OSError."""
        confirmations = self._wait_for_confirmations()
        manifest = self._manifest(confirmations, aliases, values)
        encoded = encode(manifest)

        # Check that the manifest can be loaded.
        decode(encoded, Checkpoint(self.storage, self.draft.name))

        self.storage.write(self.draft.manifest, [memoryview(encoded)])

        # Only now may the confirmations go: until there is a manifest, they tell the launcher
        # (`commit_is_near` in launch/folder/run_dir.py) that a commit is near.
        self.draft.delete_confirmations()
        faults.fire("rename", self.step)

        # As late as possible: nothing that another attempt has written may be renamed.
        self._check_owner()
        warning = self._rename()
        checkpoint = Checkpoint(self.storage, folder_name(self.step))
        return Committed(checkpoint, len(encoded) + manifest.bytes, warning)

    def _check_owner(self) -> None:
        """Raise SaveError unless this attempt still owns the checkpoints."""
        # If this process was suspended for a while, its run may already continue elsewhere.
        owner = self.storage.owner()
        if owner != self.context.token:
            taken_over = f"another attempt has taken over this run (its token is {owner})"
            raise SaveError(taken_over if owner else "no attempt owns the checkpoints: the file `owner` is gone")

    def _rename(self) -> str:
        """Give the folder its final name, which is the commit. Return a warning, or an empty text."""
        # The same step may have been saved before: an evaluation that a preemption interrupted was repeated
        # (`Run.save_if_agreed`), for example.
        name = folder_name(self.step)
        if name in self.storage.folders():
            set_aside(self.storage, name, "undone")

        try:
            self.storage.rename(self.draft.name, name)
        except NotDurable as error:
            return f"complete, but may not survive a power cut, so older ones are kept: {error}"

        return ""

    # ---- before the commit ----

    def _wait_for_confirmations(self) -> list[Confirmation]:
        """Wait for the confirmations of all ranks, and return them by rank.

        Raise SaveError if a rank reports an error, or after a timeout: a rank may have died.
        """
        ranks = set(range(self.context.world_size))
        confirmations: dict[int, Confirmation] = {}
        deadline = time.monotonic() + self.context.timeout_s

        # Begin with a short pause (in seconds): ranks save at the same time, so the others are probably almost done.
        pause = 0.01

        while True:
            # What has been confirmed is not read again.
            for rank in ranks - confirmations.keys():
                confirmation = self.draft.read_confirmation(rank)
                if confirmation is not None:
                    self._check_confirmation(rank, confirmation)
                    confirmations[rank] = confirmation

            missing = sorted(ranks - confirmations.keys())
            if not missing:
                return [confirmations[rank] for rank in sorted(ranks)]

            if time.monotonic() > deadline:
                files = "its file" if len(missing) == 1 else "their files"
                limit = f"{self.context.timeout_s:.0f} s"
                raise SaveError(f"{listed_ranks(missing)} did not write {files} within {limit}")

            self.abort.sleep(pause)
            pause = min(pause * 1.5, 0.25)

    def _check_confirmation(self, rank: int, confirmation: Confirmation) -> None:
        """Raise SaveError if a rank has failed, or if its file has another size than it wrote."""
        if confirmation.file is None:
            raise SaveError(f"rank {rank}: {confirmation.error}", caused_elsewhere=True)

        # On a shared file system, a file that another machine wrote may not be visible yet, or may be lost: then the
        # save fails.
        written = confirmation.file.size
        with self.storage.open(self.draft.file(rank)) as file:
            size = file.seek(0, 2)

        if size != written:
            raise SaveError(f"rank {rank} wrote {written:,} bytes, but its file has {size:,}")

    def _manifest(self, confirmations: list[Confirmation], aliases: dict[str, str], values: dict[str, Any]) -> Manifest:
        """Put together what the ranks say about their files."""
        # The dtype and shape of each tensor, as the first rank has them, and the pieces of all ranks.
        tensors: dict[str, TensorEntry] = {}
        pieces: dict[str, list[Piece]] = {}

        for confirmation in confirmations:
            for name, entry in confirmation.tensors.items():
                first = tensors.setdefault(name, entry)
                if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                    raise SaveError(f"the ranks do not agree on the dtype and shape of {name!r}")

                pieces.setdefault(name, []).extend(entry.pieces)

        return Manifest(
            step=self.step,
            time=time.time(),
            lockstep=lockstep.__version__,
            files=tuple(confirmation.file for confirmation in confirmations if confirmation.file),
            tensors={name: replace(entry, pieces=tuple(pieces[name])) for name, entry in tensors.items()},
            aliases=aliases,
            values=values,
        )

    # ---- after the commit ----

    def announce(self) -> None:
        """Tell the run, people and the launcher that the checkpoint is committed."""
        self.context.on_commit()
        faults.fire("latest", self.step)
        update_latest(self.storage)

    def delete_old(self) -> None:
        """Delete the checkpoints that are not kept any more."""
        apply_retention(self.storage, self.context.retention, self.context.token)
        faults.damage_committed(self.storage, f"{folder_name(self.step)}/{file_name(0)}", self.step)
