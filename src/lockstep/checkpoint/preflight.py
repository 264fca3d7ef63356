"""Checks before the first step that a save can succeed: the first one may come hours later.

All ranks call them together, and all of them raise the same error.
"""

from __future__ import annotations

from collections.abc import Collection

from rich.filesize import decimal as size_text

from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.retry import retry_on_rank0
from lockstep.errors import UserError, listed_ranks, message_of
from lockstep.runtime.context import EventLogger, Runtime


def check_same_names(registered: Collection[str], runtime: Runtime) -> None:
    """Raise a UserError unless all ranks have registered objects of the same names. Collective."""
    names = [set(rank_names) for rank_names in runtime.collectives.all_gather_json(sorted(registered))]
    everywhere = set.intersection(*names)
    for rank, rank_names in enumerate(names):
        for name in sorted(rank_names - everywhere):
            lacking = listed_ranks([other for other in range(len(names)) if name not in names[other]])
            raise UserError(
                f"{name!r} is saved with the run by rank {rank}, but not by {lacking}",
                "a checkpoint has one state for all ranks",
                "register it on every rank, with run.register or as a callback",
            )


def check_store(storage: CheckpointStorage, runtime: Runtime, timeout_s: float) -> None:
    """Raise a UserError if the store for tensors cannot keep anything. Collective."""
    if not storage.store_url:
        return

    def try_store() -> str | None:
        """Return an error that retrying cannot fix, as text, or None. Raise other OSErrors."""
        try:
            storage.try_store()
        except (FileNotFoundError, NotADirectoryError) as error:
            return message_of(error)

        return None

    problem = f"the checkpoints of this run cannot be kept in {storage.store_url}"
    missing = retry_on_rank0(runtime, timeout_s, try_store, problem)
    if missing is not None:
        fix = "set checkpoint.store to a store that exists, or leave it out: checkpoints are then in run_dir"
        raise UserError(problem, missing, fix)


def check_room(
    storage: CheckpointStorage, state: RunState, runtime: Runtime, timeout_s: float, log_event: EventLogger
) -> None:
    """Raise a UserError if there is no room for the weights, and warn if two checkpoints do not fit. Collective."""
    # The optimizers allocate their state later, so its size is an estimate.
    known = state.bytes_without_optimizers(runtime)
    estimate = state.estimated_optimizer_bytes(runtime)

    # All ranks use the free space that rank 0 sees, so that either all of them raise or none does.
    problem = f"the free space in {storage.location} cannot be determined"
    free = retry_on_rank0(runtime, timeout_s, storage.free_bytes, problem)
    if free is None:
        return

    if free < known:
        raise UserError(
            f"there is no room for a checkpoint in {storage.location}: {size_text(free)} free",
            f"{size_text(known)} needed for the weights alone",
            f"free {size_text(known + estimate - free)}, or set run_dir=FOLDER on another disk",
        )

    # The old checkpoint is deleted only when the new one is committed.
    needed = 2 * (known + estimate)
    if free < needed:
        log_event(
            "warning",
            reason=f"the disk has {size_text(free)} free, but replacing a checkpoint by the next one needs room "
            f"for two, about {size_text(needed)}",
        )
