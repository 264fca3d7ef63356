"""Checks before the first step that the disk has room for checkpoints."""

from __future__ import annotations

from rich.filesize import decimal as size_text

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import EventLogger


def check_space(
    storage: CheckpointStorage, sizes: tuple[int, int], collectives: Collectives, log_event: EventLogger
) -> None:
    """Raise an error if there is no room for the weights, and warn if two checkpoints do not fit. Collective.

    `sizes`: the bytes of the weights, and those that the optimizers' state will have, which is an estimate.
    """
    # All ranks use rank 0's numbers, so that either all of them raise or none does.
    free, known, estimate = collectives.run_on_rank0(lambda: [storage.free_bytes(), *sizes])
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
