"""A trainer's state in a folder, in the core's format: committed by one rename, every byte checked when it is read."""

from __future__ import annotations

import secrets
from pathlib import Path

from lockstep.checkpoint.load import find
from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.snapshot import Slice
from lockstep.checkpoint.storage import Checkpoint, FileStore, Retention, Store, clean
from lockstep.errors import UserError
from lockstep.launch.run_dir import is_checkpoint
from lockstep.runtime.context import Runtime


def save_state(state: RunState, runtime: Runtime, folder: Path, writer: int) -> Path:
    """Save the state from one rank. Collective: the others wait and raise the same error if it fails."""
    outcome: list[str | None] = [None, None]
    if runtime.world.rank == writer:
        outcome = _write(state, FileStore(folder / "checkpoints"), runtime.world.size)

    # Every rank learns how it went, so that all raise or none.
    path, error = runtime.collectives.gather_json(outcome)[writer]
    if path is None:
        raise UserError(
            f"save_checkpoint({str(folder)!r}) could not write the checkpoint",
            str(error),
            "make room, or choose another folder",
        )

    return Path(path)


def _write(state: RunState, store: Store, world_size: int) -> list[str | None]:
    """Write a checkpoint. Return its path or None, and the error or None."""
    # Each save counts as a new attempt: what an earlier one left half-written is removed.
    token = secrets.token_hex(4)
    store.claim(token)
    clean(store, token)

    # One rank writes everything, in this thread: the state is the same on all ranks.
    tensors, aliases, plain_state = state.capture()
    slices = [Slice.full(name, tensor) for name, tensor in tensors.items()]
    saver = Saver(store, 0, 1, token, Retention(3), asynchronous=False)  # the newest three stay
    saver.save(state.stepper.counters.step, slices, aliases, {"state": plain_state, "world": world_size})

    # A failed save is an outcome and not an exception: the other ranks wait to hear of it.
    [save] = saver.wait()
    saver.close()
    return [str(save.checkpoint.path) if save.checkpoint else None, save.error]


def load_state(state: RunState, runtime: Runtime, path: Path) -> int:
    """Restore the newest valid checkpoint below `path`, or exactly this one. Collective. Return its step."""
    rank, world_size = runtime.world.rank, runtime.world.size
    gather = runtime.collectives.gather_json
    if is_checkpoint(path):
        named = Checkpoint.at(path)
        reader = find(named.store, rank, world_size, gather, named.name)
    else:
        reader = find(FileStore(path / "checkpoints"), rank, world_size, gather)

    if reader is None:
        raise UserError(
            f"load_checkpoint({str(path)!r}) found no checkpoint there",
            "",
            "give the folder that save_checkpoint was given",
        )

    # No rank may save there before all have read.
    state.restore(reader, reader.manifest.values["state"])
    gather(None)
    return state.stepper.counters.step
