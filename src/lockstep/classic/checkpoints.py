"""A trainer's state in a folder, in the core's format: committed by one rename, every byte checked when it is read."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from lockstep.checkpoint.format import verify
from lockstep.checkpoint.load import CheckpointReader, find
from lockstep.checkpoint.manifest import Damaged, Manifest, encode
from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import Checkpoint, FileStore, Retention, Store, clean
from lockstep.checkpoint.writer import SaveContext
from lockstep.engine.step import Stepper
from lockstep.errors import UserError
from lockstep.launch.run_dir import MANIFEST, is_checkpoint
from lockstep.runtime.layout import shard_of
from lockstep.runtime.rendezvous.store import wait_for
from lockstep.runtime.world import World


class CheckpointCalls:
    """Tells one save or load of a trainer from another, by keys in the ranks' store.

    A rank may save alone, so the ranks count their saves differently. They count steps alike, and a load may change the
    trainer's step, but not this count. Paths are in no key: the same folder may have another path on another machine.
    """

    def __init__(self, world: World, trainer: int):
        self.world = world
        self._trainer = trainer
        self._steps = 0

        # Since the last step: each load with the folder it read, and for each writer the number of its saves whose
        # outcome this rank has left in the store, or taken from it.
        self.loads: list[tuple[str, Path]] = []
        self.saves = Counter[int]()
        self._load_calls = 0

    def begin_step(self) -> None:
        self._steps += 1
        self._load_calls = 0
        self.loads.clear()
        self.saves.clear()

    def next_load(self) -> str:
        self._load_calls += 1
        return f"lockstep/load/{self._trainer}/{self._steps}/{self._load_calls}"

    def next_save(self, writer: int) -> str:
        return f"lockstep/save/{self._trainer}/{self._steps}/{writer}/{self.saves[writer]}"

    @property
    def store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    def of_all_ranks(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.world.size)]


# ---- save ----


def save_state(state: RunState, calls: CheckpointCalls, folder: Path, writer: int, limit: timedelta) -> Path:
    """Save the state from one rank. Ranks that call it too return when it is committed, or raise the same error.

    The writer holds the whole state, so that `if rank == 0: save_checkpoint(path)` works too. It waits for other ranks
    only while they may still load from this folder. The others wait for its outcome no longer than `limit`.
    """
    world = calls.world
    if not 0 <= writer < world.size:
        raise UserError(f"save_checkpoint(rank={writer}) names no rank", f"ranks 0 to {world.size - 1}", "pass rank=0")

    if world.rank == writer:
        # Whatever goes wrong, the other ranks raise it too.
        outcome: dict[str, Any] = {"error": _not_written(folder, "it was interrupted")}
        try:
            outcome = _save_here(state, calls, folder, limit)
        finally:
            if not world.alone:
                calls.store.set(calls.next_save(writer), json.dumps(outcome | {"folder": str(folder.resolve())}))
                calls.saves[writer] += 1
    else:
        outcome = _outcome_of(calls, writer, folder, limit)

    if outcome["error"] is not None:
        raise UserError(*outcome["error"])

    return Checkpoint(FileStore(folder / "checkpoints"), outcome["checkpoint"]).path


def _not_written(folder: Path, why: str) -> list[str]:
    problem = f"save_checkpoint({str(folder)!r}) could not write the checkpoint"
    return [problem, why, "make room, or choose another folder"]


def _save_here(state: RunState, calls: CheckpointCalls, folder: Path, limit: timedelta) -> dict[str, Any]:
    """Write a checkpoint and return the outcome for all ranks. Only what is no failure of the disk is raised."""
    store = FileStore(folder / "checkpoints")
    token = secrets.token_hex(4)
    try:
        _wait_for_readers(calls, folder, limit)
        name, failure = _write(state, store, token, calls.world.size)
    except UserError as error:
        return {"error": error.args}
    except OSError as error:
        return {"error": _not_written(folder, str(error))}

    return {"checkpoint": name, "token": token, "error": None if name else _not_written(folder, str(failure))}


def _wait_for_readers(calls: CheckpointCalls, folder: Path, limit: timedelta) -> None:
    """Wait until no rank can still be reading a checkpoint in this folder: the save may replace it."""
    if calls.world.alone:
        return

    # A rank that waits for this save does not load, even if it has left out a load.
    saving = calls.of_all_ranks(f"{calls.next_save(calls.world.rank)}/waits")
    target = (folder / "checkpoints").resolve()
    deadline = time.monotonic() + limit.total_seconds()
    for load in [load for load, source in calls.loads if source == target]:
        signs = list(zip(calls.of_all_ranks(f"{load}/read"), saving, strict=True))
        while late := [rank for rank, keys in enumerate(signs) if not any(calls.store.check([key]) for key in keys)]:
            if time.monotonic() > deadline:
                raise UserError(
                    f"save_checkpoint({str(folder)!r}) waited for rank {late[0]}, which has not loaded from there",
                    f"rank {calls.world.rank} loaded a checkpoint of this folder; nothing from rank {late[0]} "
                    f"within {limit}",
                    "call load_checkpoint on every rank, in the same order",
                )
            time.sleep(0.02)


def _outcome_of(calls: CheckpointCalls, writer: int, folder: Path, limit: timedelta) -> dict[str, Any]:
    """Wait for the outcome of the writer's save to this folder."""
    deadline = time.monotonic() + limit.total_seconds()
    elsewhere: list[str] = []
    while True:
        key = calls.next_save(writer)
        calls.store.set(f"{key}/waits/{calls.world.rank}", "")
        rest = timedelta(seconds=max(0.01, deadline - time.monotonic()))
        if not wait_for(calls.store, [key], rest):
            others = f"; it has saved to {', '.join(elsewhere)}" if elsewhere else ""
            raise UserError(
                f"save_checkpoint({str(folder)!r}) waited for rank {writer}, which has not saved there",
                f"no save of rank {writer} to this folder within {limit}{others}",
                f"call save_checkpoint with the same folder on all ranks, or on rank {writer} alone",
            )

        outcome = json.loads(calls.store.get(key))
        calls.saves[writer] += 1
        if _is_to(outcome, folder):
            return outcome
        # The writer may have saved alone to another folder.
        elsewhere.append(outcome["folder"])


def _is_to(outcome: dict[str, Any], folder: Path) -> bool:
    """Return whether a save was to this folder, which may have another path on the writer's machine."""
    if outcome["folder"] == str(folder.resolve()):
        return True
    if outcome["error"] is None:
        return FileStore(folder / "checkpoints").owner() == outcome["token"]
    # Nothing was written to know the folder by.
    return Path(outcome["folder"]).name == folder.resolve().name


def _write(state: RunState, store: Store, token: str, world_size: int) -> tuple[str | None, str | None]:
    """Write a checkpoint. Return its name or None, and the error or None."""
    # Each save counts as a new attempt: what an earlier one left half-written is removed.
    store.claim(token)
    clean(store, token)

    # One rank writes everything, in this thread: the state is the same on all ranks.
    tensors, aliases, plain_state = state.capture()
    shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
    saver = Saver(SaveContext(store, 0, 1, token, Retention(3)), asynchronous=False)  # the newest three stay
    saver.save(state.stepper.counters.step, shards, aliases, {"state": plain_state, "world": world_size})

    # A failed save is an outcome and not an exception: the other ranks wait for it.
    [save] = saver.take_ended()
    saver.close()
    return save.checkpoint.name if save.checkpoint else None, save.error


# ---- load ----


def load_state(
    state: RunState, stepper: Stepper, calls: CheckpointCalls, path: Path, limit: timedelta, arrival: timedelta
) -> int:
    """Restore the newest valid checkpoint below `path`, or exactly this one. Return its step.

    Rank 0 chooses the checkpoint and verifies all of it; the others load the same, and return when all have read it,
    or raise the error of the rank that could not. Rank 0 may have been called under `if rank == 0:`. So a rank that
    does not come within `arrival` is not waited for: the next step raises if it has not loaded (`Flags.loaded`), and a
    save to this folder waits for it.
    """
    world = calls.world
    key = calls.next_load()
    error: Sequence[str] | None = [
        f"load_checkpoint({str(path)!r}) was interrupted on rank {world.rank}",
        "",
        "start again",
    ]
    try:
        if not world.alone:
            calls.store.set(f"{key}/called/{world.rank}", "")
        reader = _choose_for_all(calls, key, path) if world.rank == 0 else _chosen_by_rank_0(calls, key, path, limit)

        # From here on this rank's weights may differ from those of a rank that cannot load.
        stepper.set_flags(loaded=True)
        calls.loads.append((key, _folder_of(reader)))
        state.restore(reader, reader.manifest.values["state"])
        error = None
    except UserError as problem:
        error = problem.args
        raise
    finally:
        if not world.alone:
            calls.store.set(f"{key}/read/{world.rank}", json.dumps(error))

    # Less than `limit`: ranks that left out this load may already wait for rank 0 elsewhere.
    if not world.alone and wait_for(calls.store, calls.of_all_ranks(f"{key}/called"), min(arrival, limit / 2)):
        _wait_for_all(calls, key, path, limit)
    return stepper.counters.step


def _wait_for_all(calls: CheckpointCalls, key: str, path: Path, limit: timedelta) -> None:
    """Return when all ranks have read the checkpoint. Raise the error of the first that could not."""
    read = calls.of_all_ranks(f"{key}/read")
    if not wait_for(calls.store, read, limit):
        [late, *_] = [rank for rank, name in enumerate(read) if not calls.store.check([name])]
        raise UserError(
            f"load_checkpoint({str(path)!r}) waited for rank {late}, which has not finished reading",
            f"nothing from rank {late} within {limit}",
            "look at what this rank printed; timeout_mins sets how long the others wait",
        )

    for name in read:
        error = json.loads(calls.store.get(name))
        if error is not None:
            raise UserError(*error)


def _choose_for_all(calls: CheckpointCalls, key: str, path: Path) -> CheckpointReader:
    """Choose the checkpoint, and leave the choice or the error in the store for the other ranks."""
    choice: dict[str, Any] = {"error": ["load_checkpoint was interrupted on rank 0", "", "start again"]}
    try:
        reader = _choose(path)
        choice = {
            "checkpoint": reader.checkpoint.name,
            "folder": str(_folder_of(reader)),
            "digest": _digest(reader.manifest),
            "saves": calls.saves[0],
        }
    except UserError as error:
        choice = {"error": list(error.args)}
        raise
    finally:
        if not calls.world.alone:
            calls.store.set(f"{key}/choice", json.dumps(choice))

    return reader


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


def _chosen_by_rank_0(calls: CheckpointCalls, key: str, path: Path, limit: timedelta) -> CheckpointReader:
    """Wait for the choice of rank 0, and return a reader of the same checkpoint."""
    if not wait_for(calls.store, [f"{key}/called/0"], limit):
        raise UserError(
            f"load_checkpoint({str(path)!r}) waited for rank 0, which has not called it",
            f"nothing from rank 0 within {limit}",
            "call load_checkpoint on every rank, in the same order",
        )

    if not wait_for(calls.store, [f"{key}/choice"], limit):
        raise UserError(
            f"load_checkpoint({str(path)!r}) waited for rank 0, which has not finished verifying the checkpoint",
            f"rank 0 began more than {limit} ago",
            "look at what rank 0 printed; if the disk is only slow, raise timeout_mins",
        )

    choice = json.loads(calls.store.get(f"{key}/choice"))
    if "error" in choice:
        raise UserError(*choice["error"])

    # Saves that rank 0 made alone before this load are not those that this rank waits for after it.
    calls.saves[0] = choice["saves"]
    return _same_checkpoint(path, choice, calls.world)


def _same_checkpoint(path: Path, choice: dict[str, Any], world: World) -> CheckpointReader:
    """Return a reader of what rank 0 chose, and raise if this rank was given another checkpoint or sees other files."""
    checkpoint = Checkpoint(_store_of(path), choice["checkpoint"])
    try:
        # Rank 0 has verified all bytes that it sees. Another machine may read another disk, which its ranks verify
        # together.
        manifest, problems = verify(checkpoint, world.local_rank, world.local_size)
        if problems:
            raise problems[0]
        assert manifest is not None
        if _digest(manifest) != choice["digest"]:
            raise Damaged(checkpoint, MANIFEST, "another checkpoint of the same name")
        if is_checkpoint(path) and Checkpoint.at(path).name != checkpoint.name:
            raise Damaged(Checkpoint.at(path), MANIFEST, "another checkpoint")
    except Damaged as damaged:
        raise UserError(
            f"load_checkpoint({str(path)!r}) on rank {world.rank} does not see {choice['checkpoint']}, "
            f"which rank 0 loads from {choice['folder']}",
            str(damaged),
            "give all ranks the same folder, on a file system that all machines share",
        ) from None

    return CheckpointReader(checkpoint, manifest)


def _store_of(path: Path) -> Store:
    return Checkpoint.at(path).store if is_checkpoint(path) else FileStore(path / "checkpoints")


def _folder_of(reader: CheckpointReader) -> Path:
    return Path(reader.checkpoint.store.address).resolve()


def _digest(manifest: Manifest) -> str:
    return xxhash.xxh3_128(encode(manifest)).hexdigest()
