"""A trainer's state in a folder, in the core's format: committed by one rename, every byte checked when it is read."""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from lockstep.checkpoint.load import CheckpointReader, find
from lockstep.checkpoint.manifest import Damaged, Manifest, encode, read_manifest
from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.snapshot import Slice
from lockstep.checkpoint.storage import Checkpoint, FileStore, Retention, Store, clean
from lockstep.checkpoint.writer import SaveContext
from lockstep.errors import UserError
from lockstep.launch.run_dir import MANIFEST, is_checkpoint
from lockstep.runtime.context import Runtime
from lockstep.runtime.rendezvous.store import wait_for


def save_state(state: RunState, runtime: Runtime, folder: Path, writer: int, name: str, limit: timedelta) -> Path:
    """Save the state from one rank. Ranks that call it too return when it is committed, or raise the same error.

    The writer waits for no other rank, since it holds the whole state: `if rank == 0: save_checkpoint(path)` works too.
    It leaves the outcome in the store under `name`, which is the same on all ranks and different for every save;
    the others wait for it no longer than `limit`.
    """
    if not 0 <= writer < runtime.world.size:
        raise UserError(
            f"save_checkpoint(rank={writer}) names no rank", f"ranks 0 to {runtime.world.size - 1}", "pass rank=0"
        )

    if runtime.world.rank == writer:
        # Whatever goes wrong, the other ranks raise it too.
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
    saver = Saver(SaveContext(store, 0, 1, token, Retention(3)), asynchronous=False)  # the newest three stay
    saver.save(state.stepper.counters.step, slices, aliases, {"state": plain_state, "world": world_size})

    # A failed save is an outcome and not an exception: the other ranks wait for it.
    [save] = saver.take_ended()
    saver.close()
    return [str(save.checkpoint.path) if save.checkpoint else None, save.error]


def load_state(state: RunState, runtime: Runtime, path: Path, name: str, limit: timedelta) -> int:
    """Restore the newest valid checkpoint below `path`, or exactly this one. Return its step.

    Rank 0 chooses the checkpoint, verifies every byte of it and waits for no other rank: it may have been called under
    `if rank == 0:`, and the next step then raises on all ranks (`Flags.loaded`). The other ranks load what rank 0 left
    in the store under `name`.
    """
    world = runtime.world
    if world.rank == 0:
        choice: dict[str, Any] = {"error": ["load_checkpoint was interrupted on rank 0", "", "start again"]}
        try:
            reader = _choose(path)
            choice = {"checkpoint": reader.checkpoint.name, "digest": _digest(reader.manifest)}
        except UserError as error:
            choice = {"error": list(error.args)}
            raise
        finally:
            if not world.alone:
                dist.distributed_c10d._get_default_store().set(name, json.dumps(choice))
    else:
        reader = _chosen_by_rank_0(path, name, limit)

    state.restore(reader, reader.manifest.values["state"])
    return state.stepper.counters.step


def _choose(path: Path) -> CheckpointReader:
    only = Checkpoint.at(path).name if is_checkpoint(path) else None
    reader = find(_store_of(path), 0, 1, lambda value: [value], only)
    if reader is None:
        raise UserError(
            f"load_checkpoint({str(path)!r}) found no checkpoint there",
            "",
            "give the folder that save_checkpoint was given",
        )
    return reader


def _chosen_by_rank_0(path: Path, name: str, limit: timedelta) -> CheckpointReader:
    """Wait for the choice of rank 0, and return a reader of the same checkpoint."""
    store = dist.distributed_c10d._get_default_store()
    if not wait_for(store, [name], limit):
        raise UserError(
            f"load_checkpoint({str(path)!r}) waited for rank 0, which has not called it",
            f"nothing from rank 0 within {limit}",
            "call load_checkpoint on every rank, in the same order",
        )
    choice = json.loads(store.get(name))
    if "error" in choice:
        raise UserError(*choice["error"])

    # Rank 0 has verified the bytes: it only remains to show that this rank sees the same checkpoint.
    checkpoint = Checkpoint(_store_of(path), choice["checkpoint"])
    try:
        manifest = read_manifest(checkpoint)
        if _digest(manifest) != choice["digest"]:
            raise Damaged(checkpoint, MANIFEST, "another checkpoint of the same name")
    except Damaged as damaged:
        raise UserError(
            f"load_checkpoint({str(path)!r}) loaded {choice['checkpoint']} on rank 0, which this rank does not see",
            str(damaged),
            "use a folder on a file system that all machines share",
        ) from None
    return CheckpointReader(checkpoint, manifest)


def _store_of(path: Path) -> Store:
    return Checkpoint.at(path).store if is_checkpoint(path) else FileStore(path / "checkpoints")


def _digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128(encode(manifest)).hexdigest()
