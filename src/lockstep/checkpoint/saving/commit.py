"""What rank 0 does once its own file is written: it turns the files of all ranks into one checkpoint.

    waits for all confirmations
    step-N.tmp-TOKEN-NUMBER/metrics.json        if the step was evaluated before the save
    step-N.tmp-TOKEN-NUMBER/manifest.json       durable
    deletes the confirmations
    checks that all files are there
    checks that it still owns the storage
    step-N -> step-N.replaced                   if step N was saved before; back again if the next rename fails
    step-N.tmp-TOKEN-NUMBER -> step-N           the commit, with which `commit` ends; `tidy_up` does the rest
    calls `SaveContext.on_commit`
    updates `latest`
    checks again that it owns the storage
    deletes what an earlier commit could delete only in part, step-N.replaced, and the checkpoints that no setting keeps

A power cut or a kill at any moment leaves the old state or the new one: contents are durable before names, the manifest
before the rename, and the rename before `latest` changes and before an old checkpoint is deleted. A run saves no step
twice; the classic trainers may. If such a process dies between the two renames, the next start gives step-N.replaced
its name back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import lockstep
from lockstep import faults
from lockstep.checkpoint.integrity import check_size
from lockstep.checkpoint.manifest import Manifest, Piece, TensorEntry, encode_manifest
from lockstep.checkpoint.manifest_reader import check_written
from lockstep.checkpoint.metrics import write_metrics
from lockstep.checkpoint.retention import apply_retention
from lockstep.checkpoint.saving.draft import Confirmation, Draft, SaveContext
from lockstep.checkpoint.saving.outcome import AbortRequest, Committed, SaveFailed, as_text
from lockstep.checkpoint.state.reshard import Rank0Contents
from lockstep.checkpoint.storage.folder import Checkpoint, NotDurable
from lockstep.checkpoint.storage.retry import backoff
from lockstep.checkpoint.storage.transitions import commit_draft, finish_deletions, update_latest
from lockstep.errors import listed_ranks
from lockstep.run_folder.checkpoint_names import file_name, folder_name


def commit(draft: Draft, abort: AbortRequest, of_rank0: Rank0Contents, metrics: Mapping[str, float]) -> Committed:
    """Commit the checkpoint, on rank 0, or raise SaveFailed, InvalidCheckpoint or OSError."""
    context = draft.context
    storage = context.storage
    confirmations = _wait_for_confirmations(draft, abort)

    manifest = _manifest_of(draft.step, confirmations, of_rank0, has_metrics=bool(metrics))
    encoded = encode_manifest(manifest)

    draft_folder = Checkpoint(storage, draft.name)
    check_written(manifest, len(encoded), draft_folder)

    if metrics:
        write_metrics(draft_folder, metrics)

    storage.write(draft.manifest_key, [memoryview(encoded)])

    # Delete the confirmations only now: until there is a manifest, they tell the launcher
    # (`commit_is_near` in run_folder/checkpoint_facts.py) that a commit is near.
    draft.delete_confirmations()
    faults.fire("rename", draft.step)

    # On a shared file system, a file that another machine wrote may not be visible yet, or may be lost.
    for file in manifest.files:
        check_size(draft_folder, file)

    # As late as possible: nothing that another attempt has written may be renamed.
    context.check_owner()
    warnings: tuple[str, ...] = ()
    try:
        commit_draft(storage, draft.name, folder_name(draft.step))
    except NotDurable as error:
        warnings = (f"{_name(draft)} is complete, but may not survive a power cut, so older ones are kept: {error}",)

    context.all_metrics.add(draft.step, metrics)
    return Committed(Checkpoint.of(storage, draft.step), len(encoded) + manifest.bytes, warnings)


def _name(draft: Draft) -> str:
    """Return how a warning names a checkpoint."""
    return f"the checkpoint of step {draft.step}"


# ---- before the commit ----


def _wait_for_confirmations(draft: Draft, abort: AbortRequest) -> list[Confirmation]:
    """Wait for the confirmations of all ranks, and return them by rank.

    Raise SaveFailed if a rank reports an error, or after a timeout: a rank may have died.
    """
    ranks = set(range(draft.context.world_size))
    confirmations: dict[int, Confirmation] = {}
    timeout_s = draft.context.checkpoint_config.timeout
    deadline = time.monotonic() + timeout_s

    # Begin with a short pause (in seconds): ranks save at the same time, so the others are probably almost done.
    pauses = backoff(0.01, 0.25)

    while True:
        # What has been confirmed is not read again.
        for rank in ranks - confirmations.keys():
            confirmation = draft.read_confirmation(rank)
            if confirmation is None:
                continue

            if confirmation.file is None:
                raise SaveFailed(f"rank {rank}: {confirmation.error}", caused_elsewhere=True)

            confirmations[rank] = confirmation

        missing = sorted(ranks - confirmations.keys())
        if not missing:
            return [confirmations[rank] for rank in sorted(ranks)]

        if time.monotonic() > deadline:
            files = "its file" if len(missing) == 1 else "their files"
            raise SaveFailed(f"{listed_ranks(missing)} did not write {files} within {timeout_s:.0f} s")

        abort.sleep(next(pauses))


def _manifest_of(step: int, confirmations: list[Confirmation], of_rank0: Rank0Contents, has_metrics: bool) -> Manifest:
    """Return the manifest of all ranks' files, as the ranks have confirmed them."""
    # The dtype and shape of each tensor, as the first rank has them, and the pieces of all ranks.
    tensors: dict[str, TensorEntry] = {}
    pieces: dict[str, list[Piece]] = {}

    for confirmation in confirmations:
        for name, entry in confirmation.tensors.items():
            first = tensors.setdefault(name, entry)
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                raise SaveFailed(f"the ranks do not agree on the dtype and shape of {name!r}")

            pieces.setdefault(name, []).extend(entry.pieces)

    # If the file of the metrics is lost, the manifest shows that there was one.
    values = dict(of_rank0.values)
    if has_metrics:
        values["has_metrics"] = True

    return Manifest(
        step=step,
        time=time.time(),
        lockstep=lockstep.__version__,
        files=tuple(confirmation.file for confirmation in confirmations if confirmation.file),
        tensors={name: replace(entry, pieces=tuple(pieces[name])) for name, entry in tensors.items()},
        aliases=dict(of_rank0.aliases),
        values=values,
    )


# ---- after the commit ----


def tidy_up(draft: Draft, outcome: Committed) -> Committed:
    """Do what follows a commit, and return the outcome with warnings of what has failed: the checkpoint is safe."""
    context = draft.context
    warnings = [*outcome.warnings]
    is_safe = f"{_name(draft)} is safe, but"
    try:
        context.on_commit()
        faults.fire("latest", draft.step)

        # Nothing but people reads `latest`. If the disk is full, the deletions that follow make room for it.
        try:
            update_latest(context.storage)
        except OSError as error:
            warnings.append(f"{is_safe} the file latest does not name it: {error}")

        # If this commit may not survive a power cut, the older ones are kept. What cannot be deleted now is deleted
        # after the next commit.
        if not outcome.warnings:
            try:
                _delete_old(context)
            except (OSError, SaveFailed) as error:
                warnings.append(f"{is_safe} older ones are not deleted: {error}")

        file = f"{folder_name(draft.step)}/{file_name(0)}"
        faults.damage_committed(context.storage, file, draft.step)
    except Exception as error:  # an exception would be lost with the thread
        warnings.append(f"{is_safe} tidying up after it failed: {as_text(error)}")

    return replace(outcome, warnings=tuple(warnings))


def _delete_old(context: SaveContext) -> None:
    """Delete the checkpoints that are not kept any more. Raise OSError, or SaveFailed."""
    # Another attempt may have taken over, and may have gone back to an old checkpoint.
    context.check_owner()

    # If one cannot be deleted, delete the others all the same: they would fill the disk. Retention does not count
    # replaced checkpoints, so a step that is saved again and again would fill it, too.
    deletion_error = finish_deletions(context.storage, context.token)
    retention_error = apply_retention(context.all_metrics, context.checkpoint_config, context.token)
    if error := deletion_error or retention_error:
        raise error
