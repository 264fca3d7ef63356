"""Checkpoints for tests, made by one or several ranks in one process, and the ways to look at them.

Where a place is needed, a path means a `CheckpointStorage` there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.loading.search import Found, Gather, VerifyingRanks, newest_valid
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.saving.draft import SaveContext
from lockstep.checkpoint.saving.outcome import Committed
from lockstep.checkpoint.saving.save import Save, Saver
from lockstep.checkpoint.state.encoding import pack, unpack
from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.config.sections import CheckpointConfig
from lockstep.runtime.shards import LocalShard, shard_of

TOKEN = "a1b2c3"


def as_storage(place: Path | CheckpointStorage) -> CheckpointStorage:
    return CheckpointStorage(place) if isinstance(place, Path) else place


def at(path: Path) -> Checkpoint:
    """Return the checkpoint in this folder."""
    return Checkpoint(CheckpointStorage(path.parent), path.name)


def state(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a run at this step: their values differ from step to step."""
    return {
        "model.weight": torch.arange(42, dtype=torch.float32).reshape(7, 6) + step,
        "model.bias": torch.full((6,), float(step), dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(step),
        "optimizer.moment": torch.linspace(0, step + 1, 24, dtype=torch.float64).reshape(2, 3, 4),
    }


def shard(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, LocalShard]:
    """Return the rank's rows of each tensor; a tensor without rows belongs to rank 0."""
    mine = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            if rank == 0:
                mine[name] = shard_of(tensor)
            continue
        bounds = [tensor.shape[0] * r // size for r in range(size + 1)]
        offset = (bounds[rank], *(0,) * (tensor.dim() - 1))
        mine[name] = LocalShard(tensor[bounds[rank] : bounds[rank + 1]], tuple(tensor.shape), offset)
    return mine


class WatchedSaver(Saver):
    """A saver that remembers its saves, so that a test can look at them when they have ended."""

    def __init__(self, context: SaveContext):
        super().__init__(context)
        self._running: list[Save] = []

    def copy_and_write(self, step: int, contents: RankContents, metrics: Mapping[str, float] = {}) -> Save:
        save = super().copy_and_write(step, contents, metrics)
        self._running.append(save)
        return save

    def take_ended(self, timeout: float | None = None) -> list[Save]:
        """Wait for the last save, and return those that have ended since the last call."""
        ended = [save for save in self._running if save.wait(timeout)]
        self._running = [save for save in self._running if save not in ended]
        return ended


def savers(
    place: Path | CheckpointStorage,
    size: int = 1,
    token: str = TOKEN,
    settings: CheckpointConfig = CheckpointConfig(keep=10),
    asynchronous: bool = True,
) -> list[WatchedSaver]:
    storage = as_storage(place)
    claim(storage, token)
    chosen = settings.model_copy(update={"asynchronous": asynchronous})
    return [WatchedSaver(SaveContext(storage, rank, size, token, chosen)) for rank in range(size)]


def commit(
    place: Path | CheckpointStorage,
    step: int,
    size: int = 1,
    tensors: Mapping[str, torch.Tensor] | None = None,
    aliases: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] = {},
) -> Checkpoint:
    """Commit a checkpoint that `size` ranks have written."""
    storage = as_storage(place)
    team = savers(storage, size)
    for rank, saver in enumerate(team):
        encoded = pack(dict(values or {"step": step}), "values", {})
        saver.copy_and_write(
            step,
            RankContents(shard(tensors or state(step), rank, size), Rank0Contents(aliases or {}, encoded)),
            metrics,
        )
    [report] = team[0].take_ended()
    for saver in team:
        saver.close()
    assert isinstance(report.outcome, Committed), report.outcome
    return report.outcome.checkpoint


def is_committed(save: Save) -> bool:
    return isinstance(save.outcome, Committed)


def load(place: Path | CheckpointStorage) -> tuple[Found, dict[str, torch.Tensor]]:
    found = newest_valid(as_storage(place), VerifyingRanks.alone())
    assert found is not None
    return found, {name: found.reader.read(name) for name in found.reader.names()}


def values_of(reader: CheckpointReader) -> dict[str, Any]:
    """Return the values of a checkpoint whose values have no tensors."""
    return unpack(reader.manifest.values, reader.read, torch.device("cpu"))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def together(size: int, work: Callable[[int, Gather], Any]) -> list[Any]:
    """Run `work(rank, gather)` in a thread for each rank. Return what each returned or raised."""
    barrier = threading.Barrier(size, timeout=120)
    sent: list[Any] = [None] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            sent[rank] = value
            barrier.wait()
            received = list(sent)
            barrier.wait()
            return received

        try:
            results[rank] = work(rank, gather)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def end(team: list[WatchedSaver]) -> list[Save]:
    """Wait for all ranks, and return the one save of each."""
    return [report for saver in team for report in saver.take_ended(60)]
