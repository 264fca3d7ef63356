"""A trainer's state in a folder, in the core's format: committed by one rename, every byte checked when it is read.

A script may save or load on all ranks, or on one alone (`if rank == 0:`), and the ranks do not know which. So there is
no collective here: a rank leaves a report of its call in the store of the process group, where others may wait for it.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoint.choose import checkpoints_at
from lockstep.checkpoint.integrity import verify_checkpoint
from lockstep.checkpoint.loading.search import VerifyingRanks, newest_valid
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.saving.draft import SaveContext
from lockstep.checkpoint.saving.outcome import Committed, SaveFailed
from lockstep.checkpoint.saving.save import Saver
from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage
from lockstep.checkpoint.storage.transitions import (
    claim,
    delete_leftovers,
    owner_of,
    put_back_replaced,
    set_aside_later,
)
from lockstep.config.sections import CheckpointConfig
from lockstep.engine.step import Stepper
from lockstep.errors import UserError
from lockstep.run_folder.paths import CHECKPOINTS
from lockstep.runtime.rendezvous.store import wait_for
from lockstep.runtime.shards import shard_of
from lockstep.runtime.world import World

# The pause between two looks at what other ranks have left in the store, in seconds.
POLL_S = 0.02


class CheckpointCalls:
    """The saves and loads of one trainer, and the keys of their reports.

    A rank may save alone, so the ranks count their saves differently. They count steps alike, and a load may change the
    trainer's step, but not this count. Paths are in no key: the same folder may have another path on another machine.
    """

    def __init__(self, world: World, trainer: int):
        self.world = world
        self._trainer = trainer
        self._steps = 0

        # Since the last step: each load with the storage it read, and for each writer the number of its saves whose
        # report this rank has left in the store, or taken from it.
        self.loads: list[tuple[str, CheckpointStorage]] = []
        self.saves = Counter[int]()
        self._load_calls = 0

    def begin_step(self) -> None:
        self._steps += 1
        self._load_calls = 0
        self.loads.clear()
        self.saves.clear()

    def count_load(self) -> str:
        """Count one more load, and return its key."""
        self._load_calls += 1
        return f"lockstep/load/{self._trainer}/{self._steps}/{self._load_calls}"

    def save_key(self, writer: int) -> str:
        """Return the key of the next save of this writer that this rank has not counted yet."""
        return f"lockstep/save/{self._trainer}/{self._steps}/{writer}/{self.saves[writer]}"

    @property
    def store(self) -> dist.Store:
        return dist.distributed_c10d._get_default_store()

    def keys_of_all_ranks(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self.world.size)]

    def leave(self, key: str, **report: Any) -> None:
        if not self.world.alone:
            self.store.set(key, json.dumps(report))

    @contextmanager
    def reporting(self, key: str, interrupted: list[str], **report: Any) -> Iterator[dict[str, Any]]:
        """Leave a report when the block ends: what the block has added to it, and the UserError that ended the block.

        `interrupted` stands for any other exception.
        """
        report["error"] = interrupted
        try:
            yield report
            report["error"] = None
        except UserError as error:
            report["error"] = error.args
            raise
        finally:
            self.leave(key, **report)

    def read(self, key: str) -> dict[str, Any]:
        return json.loads(self.store.get(key))


def _checked(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report of another rank, or raise the error that it reports."""
    if report["error"] is not None:
        raise UserError(*report["error"])

    return report


# ---- save ----


def save_state(state: RunState, step: int, calls: CheckpointCalls, folder: Path, writer: int, limit: timedelta) -> Path:
    """Save the state after `step`. Ranks that call it too return when it is committed, or raise the same error.

    One rank writes. It holds the whole state, so that `if rank == 0: save_checkpoint(path)` works too. It waits for
    other ranks only while they may still load from this folder. The others wait for its report no longer than `limit`.
    """
    world = calls.world
    if not 0 <= writer < world.size:
        raise UserError(f"save_checkpoint(rank={writer}) names no rank", f"ranks 0 to {world.size - 1}", "pass rank=0")

    if world.rank == writer:
        report = _save_here(state, step, calls, folder, limit)
    else:
        report = _wait_for_save(calls, folder, writer, limit)

    return folder / CHECKPOINTS / report["checkpoint"]


def _save_here(state: RunState, step: int, calls: CheckpointCalls, folder: Path, limit: timedelta) -> dict[str, Any]:
    """Write a checkpoint, and leave the report for the other ranks: whatever goes wrong, they raise it too."""
    rank = calls.world.rank
    key = calls.save_key(rank)
    calls.saves[rank] += 1
    interrupted = _not_written(folder, "it was interrupted")

    # The other ranks wait for this report. If nothing else is reported, it says that the save was interrupted.
    with calls.reporting(key, interrupted, folder=str(folder.resolve())) as report:
        _wait_for_late_loads(calls, key, folder, limit)
        report["token"] = secrets.token_hex(4)

        try:
            report["checkpoint"] = _write(
                state, step, CheckpointStorage.of_run(folder), report["token"], calls.world.size
            )
        except OSError as error:
            raise UserError(*_not_written(folder, str(error))) from error

    return report


def _not_written(folder: Path, why: str) -> list[str]:
    problem = f"save_checkpoint({str(folder)!r}) could not write the checkpoint"
    return [problem, why, "make room, or choose another folder"]


def _write(state: RunState, step: int, storage: CheckpointStorage, token: str, world_size: int) -> str:
    """Write a checkpoint and return its name. Raise OSError if it cannot be written."""
    # Each save counts as a new attempt: what an earlier one left half-written is removed.
    claim(storage, token)
    delete_leftovers(storage, token)

    # Later checkpoints are of a training that this one has left, by a load or a new start. They must neither be loaded
    # in place of this one nor count among the newest three, which stay.
    def set_later_aside() -> None:
        set_aside_later(storage, step)

    context = SaveContext(
        storage=storage,
        rank=0,
        world_size=1,
        token=token,
        checkpoint_config=CheckpointConfig(keep=3, asynchronous=False),
        on_commit=set_later_aside,
    )

    # One rank writes everything, in this thread: the state is the same on all ranks.
    captured = state.capture()
    shards = {name: shard_of(captured_tensor.tensor) for name, captured_tensor in captured.tensors.items()}
    saver = Saver(context)
    values = {"state": captured.json_state, "world": world_size}
    save = saver.copy_and_write(step, RankContents(shards, Rank0Contents(captured.aliases, values)))
    saver.close()
    if isinstance(save.outcome, SaveFailed):
        raise OSError(save.outcome.reason)

    assert isinstance(save.outcome, Committed), "rank 0 commits, or fails"

    # If it failed right after the commit, try again, and raise the error.
    set_later_aside()
    return save.outcome.checkpoint.name


def _wait_for_late_loads(calls: CheckpointCalls, save: str, folder: Path, limit: timedelta) -> None:
    """Wait until all ranks have loaded what this one has loaded from this folder: the save may replace or delete it.

    `load_state` may have returned here before another rank has begun to load.
    """
    if calls.world.alone:
        return

    target = CheckpointStorage.of_run(folder)
    loads = [load for load, source in calls.loads if source == target]
    deadline = time.monotonic() + limit.total_seconds()

    for load, rank in itertools.product(loads, range(calls.world.size)):
        # A rank that waits for this save has left the load out.
        while not (calls.store.check([f"{load}/read/{rank}"]) or calls.store.check([f"{save}/waits/{rank}"])):
            if time.monotonic() > deadline:
                raise UserError(
                    f"save_checkpoint({str(folder)!r}) waited for rank {rank}, which has not loaded from there",
                    f"rank {calls.world.rank} loaded a checkpoint of this folder; nothing from rank {rank} "
                    f"within {limit}",
                    "call load_checkpoint on every rank, in the same order",
                )

            time.sleep(POLL_S)


def _wait_for_save(calls: CheckpointCalls, folder: Path, writer: int, limit: timedelta) -> dict[str, Any]:
    """Return the writer's report of its save to this folder."""
    deadline = time.monotonic() + limit.total_seconds()
    elsewhere: list[str] = []

    # The writer may save to other folders first: their reports are passed over.
    while True:
        key = calls.save_key(writer)
        # In `_wait_for_late_loads` the writer need not wait for this rank, which waits for the save.
        calls.leave(f"{key}/waits/{calls.world.rank}")
        rest = timedelta(seconds=max(0.01, deadline - time.monotonic()))

        if not wait_for(calls.store, [key], rest):
            others = f"; it has saved to {', '.join(elsewhere)}" if elsewhere else ""
            raise UserError(
                f"save_checkpoint({str(folder)!r}) waited for rank {writer}, which has not saved there",
                f"no save of rank {writer} to this folder within {limit}{others}",
                f"call save_checkpoint with the same folder on all ranks, or on rank {writer} alone",
            )

        report = calls.read(key)
        calls.saves[writer] += 1
        if _is_to(report, folder):
            return _checked(report)

        # The writer may have saved alone to another folder.
        elsewhere.append(report["folder"])


def _is_to(report: dict[str, Any], folder: Path) -> bool:
    """Return whether a save was to this folder, which may have another path on the writer's machine."""
    if report["folder"] == str(folder.resolve()):
        return True

    if report["error"] is None:
        return owner_of(CheckpointStorage.of_run(folder)) == report["token"]

    # Nothing was written to know the folder by.
    return Path(report["folder"]).name == folder.resolve().name


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
    key = calls.count_load()
    calls.leave(f"{key}/called/{world.rank}")

    with calls.reporting(f"{key}/read/{world.rank}", _interrupted(path, world.rank)):
        reader = _choose_for_all(calls, key, path) if world.rank == 0 else _chosen_by_rank_0(calls, key, path, limit)

        # From here on this rank's weights may differ from those of a rank that cannot load.
        stepper.set_flags(loaded=True)
        calls.loads.append((key, reader.checkpoint.storage))
        state.restore(reader)

    # Less than `limit`: ranks that left out this load may already wait for rank 0 elsewhere.
    if not world.alone and wait_for(calls.store, calls.keys_of_all_ranks(f"{key}/called"), min(arrival, limit / 2)):
        _wait_for_all(calls, key, path, limit)

    return stepper.steps_done


def _interrupted(path: Path, rank: int) -> list[str]:
    return [f"load_checkpoint({str(path)!r}) was interrupted on rank {rank}", "", "start again"]


def _wait_for_all(calls: CheckpointCalls, key: str, path: Path, limit: timedelta) -> None:
    """Return when all ranks have read the checkpoint. Raise the error of the first that could not."""
    reports = calls.keys_of_all_ranks(f"{key}/read")
    if not wait_for(calls.store, reports, limit):
        [late, *_] = [rank for rank, report in enumerate(reports) if not calls.store.check([report])]
        raise UserError(
            f"load_checkpoint({str(path)!r}) waited for rank {late}, which has not finished reading",
            f"nothing from rank {late} within {limit}",
            "look at what this rank printed; timeout_mins sets how long the others wait",
        )

    for report in reports:
        _checked(calls.read(report))


def _choose_for_all(calls: CheckpointCalls, key: str, path: Path) -> CheckpointReader:
    """Choose the checkpoint, and leave the choice for the other ranks."""
    with calls.reporting(f"{key}/choice", _interrupted(path, 0)) as choice:
        storage, only = checkpoints_at(path)

        # A save of the same step may have been killed when it was about to replace the checkpoint.
        put_back_replaced(storage)
        found = newest_valid(storage, VerifyingRanks.alone(), only)

        if found is None:
            raise UserError(
                f"load_checkpoint({str(path)!r}) found no checkpoint there",
                "",
                "give the folder that save_checkpoint was given",
            )

        reader = found.reader
        choice["checkpoint"] = reader.checkpoint.name
        choice["folder"] = str(storage.root)
        choice["digest"] = reader.manifest.digest
        choice["saves"] = calls.saves[0]

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

    # Saves that rank 0 made alone before this load are not those that this rank waits for after it.
    choice = _checked(calls.read(f"{key}/choice"))
    calls.saves[0] = choice["saves"]
    return _same_checkpoint(path, choice, calls.world)


def _same_checkpoint(path: Path, choice: dict[str, Any], world: World) -> CheckpointReader:
    """Return a reader of what rank 0 chose, and raise if this rank was given another checkpoint or sees other files."""
    storage, only = checkpoints_at(path)
    checkpoint = Checkpoint(storage, choice["checkpoint"])

    # Rank 0 has verified all bytes that it sees. Another machine may have its own disk, which its ranks verify.
    manifest, problems = verify_checkpoint(checkpoint, world.local_rank, world.local_size)
    found = [str(problem) for problem in problems]
    if manifest is None or manifest.digest != choice["digest"]:
        found.append(f"{checkpoint.path}: another checkpoint of the same name")

    if only not in (None, checkpoint.name):
        found.append(f"{path}: another checkpoint")

    if manifest is None or found:
        raise UserError(
            f"load_checkpoint({str(path)!r}) on rank {world.rank} does not see {choice['checkpoint']}, "
            f"which rank 0 loads from {choice['folder']}",
            found[0],
            "give all ranks the same folder, on a file system that all machines share",
        )

    return CheckpointReader(checkpoint, manifest)
