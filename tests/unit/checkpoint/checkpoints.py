"""Checkpoints for tests: one made by three ranks, and the ways to look at it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.load import CheckpointReader, Found, find
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saver import Report, Saver, Slice
from lockstep.checkpoint.storage import Store

TOKEN = "a1b2c3"


def state(step: int) -> dict[str, torch.Tensor]:
    """What a run has at this step: values that tell one step from another."""
    return {
        "model.weight": torch.arange(42, dtype=torch.float32).reshape(7, 6) + step,
        "model.bias": torch.full((6,), float(step), dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(step),
        "optimizer.moment": torch.linspace(0, step + 1, 24, dtype=torch.float64).reshape(2, 3, 4),
    }


def cut(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> list[Slice]:
    """Rank's rows of each tensor; a tensor without rows belongs to rank 0."""
    mine = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            mine += [Slice.whole(name, tensor)] if rank == 0 else []
            continue
        bounds = [tensor.shape[0] * r // size for r in range(size + 1)]
        offset = (bounds[rank], *(0,) * (tensor.dim() - 1))
        mine.append(Slice(name, tensor[bounds[rank] : bounds[rank + 1]], tuple(tensor.shape), offset))
    return mine


def savers(root: Path, size: int = 1, token: str = TOKEN, keep: Retention | None = None, **options: Any) -> list[Saver]:
    store = Store(root)
    store.claim(token)
    return [Saver(store, rank, size, token, keep or Retention(last=10), **options) for rank in range(size)]


def commit(
    root: Path,
    step: int,
    size: int = 1,
    tensors: Mapping[str, torch.Tensor] | None = None,
    aliases: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Path:
    """A committed checkpoint, written by `size` ranks."""
    team = savers(root, size)
    for rank, saver in enumerate(team):
        saver.save(step, cut(tensors or state(step), rank, size), aliases or {}, values or {"step": step})
    [report] = team[0].wait()
    for saver in team:
        saver.close()
    assert report.committed, report
    assert report.path is not None
    return report.path


def alone(value: Any) -> list[Any]:
    return [value]


def load(root: Path) -> tuple[Found, dict[str, torch.Tensor]]:
    found = find(Store(root), 0, 1, alone)
    assert found is not None
    reader = CheckpointReader(found.path, found.manifest)
    return found, {name: reader.read(name) for name in reader.names()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def together(size: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """`work(rank, share)` in a thread for each rank; what each returned or raised."""
    barrier, said, results = threading.Barrier(size, timeout=120), [None] * size, [None] * size

    def run(rank: int) -> None:
        def share(value: Any) -> list[Any]:
            said[rank] = value
            barrier.wait()
            heard = list(said)
            barrier.wait()
            return heard

        try:
            results[rank] = work(rank, share)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def end(team: list[Saver]) -> list[Report]:
    """The one report of each rank."""
    return [report for saver in team for report in saver.wait(60)]
