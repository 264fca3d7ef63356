"""A trainer's state in a folder, in the core's format: committed by one rename, every byte checked when it is read."""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lockstep.checkpoint.load import find
from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.snapshot import Slice
from lockstep.checkpoint.storage import Checkpoint, FileStore, Retention, Store, clean
from lockstep.errors import UserError
from lockstep.launch.run_dir import is_checkpoint
from lockstep.runtime.context import Runtime
from lockstep.runtime.rendezvous.store import wait_for


def save_state(state: RunState, runtime: Runtime, folder: Path, writer: int, name: str, limit: timedelta) -> Path:
    """Save the state from one rank. Ranks that call it too return when it is committed, or raise the same error.

    The writer waits for nobody: every rank holds everything, so `if rank == 0: save_checkpoint(path)` saves as well.
    It leaves the outcome in the store under `name`, which is the same on all ranks and different for every save;
    the others wait for it no longer than `limit`.
    """
    if not 0 <= writer < runtime.world.size:
        raise UserError(
            f"save_checkpoint(rank={writer}) names no rank", f"ranks 0 to {runtime.world.size - 1}", "type rank=0"
        )

    if runtime.world.rank == writer:
        # Whatever goes wrong, the others hear of it and raise it too.
        outcome: list[str | None] = [None, "it was interrupted"]
        try:
            outcome = _write(state, FileStore(folder / "checkpoints"), runtime.world.size)
        except OSError as failure:
            outcome = [None, str(failure)]
        finally:
            if not runtime.world.alone:
                dist.distributed_c10d._get_default_store().set(name, json.dumps(outcome))
    else:
        outcome = _outcome_of(writer, name, folder, limit)

    path, error = outcome
    if path is None:
        raise UserError(
            f"save_checkpoint({str(folder)!r}) could not write the checkpoint",
            str(error),
            "make room, or choose another folder",
        )

    return Path(path)


def _outcome_of(writer: int, name: str, folder: Path, limit: timedelta) -> list[str | None]:
    """Wait for what the writer leaves in the store."""
    store = dist.distributed_c10d._get_default_store()
    if not wait_for(store, [name], limit):
        raise UserError(
            f"save_checkpoint({str(folder)!r}) waited for rank {writer}, which has not saved",
            f"nothing from rank {writer} within {limit}",
            f"call save_checkpoint on all ranks, or on rank {writer} alone",
        )
    return json.loads(store.get(name))


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

    # The rank that saved may have done so alone: the others look only when it is here too.
    gather(None)
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
