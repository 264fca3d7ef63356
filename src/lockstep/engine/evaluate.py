"""Evaluation: every sample counted exactly once, and the same number at any world size.

The evaluation set is cut into the same batches whoever runs them. Ranks run contiguous ranges of batches without
talking to each other; then every batch's sums are gathered and added exactly (fsum), so not even rounding depends
on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.data.loader import Reader, read_all, to_device
from lockstep.data.shard import deal
from lockstep.observe.metrics import terms
from lockstep.parallel.drivers import Driver
from lockstep.precision import Precision
from lockstep.runtime.context import Runtime
from lockstep.task import Task


@dataclass(frozen=True)
class Evaluation:
    loss: float
    metrics: dict[str, float]
    samples: int
    weight: float


def evaluate(
    task: Task,
    driver: Driver,
    reader: Reader,
    batch: int,
    workers: int,
    precision: Precision,
    runtime: Runtime,
) -> Evaluation:
    driver.sync_buffers()
    driver.model.eval()
    try:
        with torch.no_grad():
            rows, samples = _run_my_batches(task, driver, reader, batch, workers, precision, runtime)
    finally:
        driver.model.train()
    everything = runtime.collectives.gather_json({"rows": rows, "samples": samples})
    return _combine(
        [row for part in everything for row in part["rows"]], sum(part["samples"] for part in everything)
    )


def _run_my_batches(
    task: Task,
    driver: Driver,
    reader: Reader,
    batch: int,
    workers: int,
    precision: Precision,
    runtime: Runtime,
) -> tuple[list[dict[str, list[float]]], int]:
    length = len(reader.dataset)
    mine = deal(math.ceil(length / batch), runtime.world.rank, runtime.world.size)
    ranges = [range(index * batch, min((index + 1) * batch, length)) for index in mine]
    results: list[dict[str, tuple[Any, Any]]] = []
    requests = ((0, ids) for ids in ranges)
    for data in read_all(reader, requests, workers, prefetch=2):
        with precision.autocast():
            # The unwrapped model: ranks run different numbers of batches, so no forward may wait for another rank.
            loss = task.eval_loss(driver.model, to_device(data, runtime.device))
        results.append({name: (total, weight) for name, total, weight in terms(loss)})
    # Read back only now: one host synchronisation instead of one per batch.
    rows = [{name: [_number(t), _number(w)] for name, (t, w) in row.items()} for row in results]
    return rows, sum(map(len, ranges))


def _combine(rows: list[dict[str, list[float]]], samples: int) -> Evaluation:
    names = sorted({name for row in rows for name in row})
    means, weights = {}, {}
    for name in names:
        totals = math.fsum(row[name][0] for row in rows if name in row)
        weights[name] = math.fsum(row[name][1] for row in rows if name in row)
        means[name] = totals / weights[name] if weights[name] else math.nan
    loss = means.pop("loss", math.nan)
    return Evaluation(loss, means, samples, weights.get("loss", 0.0))


def _number(value: Tensor | float) -> float:
    return float(value)
