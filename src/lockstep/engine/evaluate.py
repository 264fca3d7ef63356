"""Evaluation: every sample counted exactly once, and the same number at any world size.

The evaluation set is cut into the same batches whoever runs them. Ranks run contiguous ranges of batches without
talking to each other; then every batch's sums are gathered and added exactly (fsum), so not even rounding depends
on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.data.loader import SampleReader, read_all, to_device
from lockstep.data.shard import deal
from lockstep.errors import UserError
from lockstep.observe.metrics import terms
from lockstep.parallel.driver import Driver
from lockstep.precision import Precision
from lockstep.runtime.context import Runtime
from lockstep.task import Loss


@dataclass(frozen=True)
class Evaluation:
    loss: float
    metrics: dict[str, float]
    samples: int
    weight: float


@dataclass(frozen=True)
class Evaluator:
    """What is evaluated, and how: the same on every rank."""

    loss_of: Callable[[nn.Module, Any], Loss]
    reader: SampleReader
    batch: int  # samples per forward
    workers: int
    precision: Precision
    may_leave: bool = False  # it may be broken off when somebody is asked to leave


def check_data(data: Any) -> None:
    """Before the first step, not when the first evaluation is due."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            "a dataset to evaluate on, with __getitem__ and __len__: every sample counts once, on any number of ranks",
            f"a {type(data).__name__}, " + ("a stream" if hasattr(data, "__iter__") else "without them"),
            "return a list of its samples, list(stream), or None for no evaluation at all",
        )
    if len(data) == 0:
        raise UserError("a dataset to evaluate on", "one with no samples", "return None for no evaluation at all")


def evaluate(evaluator: Evaluator, driver: Driver, runtime: Runtime) -> Evaluation | None:
    """None: some rank was asked to leave while it ran, so it was broken off on all of them."""
    check_data(evaluator.reader.dataset)
    driver.sync_buffers()
    modes = [(module, module.training) for module in driver.model.modules()]
    driver.model.eval()
    try:
        with torch.no_grad():
            rows, samples = _run_my_batches(evaluator, driver, runtime)
    finally:
        for module, training in modes:  # each as it was: a part may be kept in eval mode on purpose
            module.training = training
    broken_off = evaluator.may_leave and runtime.notice.signal is not None
    everything = runtime.collectives.gather_json({"rows": rows, "samples": samples, "broken_off": broken_off})
    if any(part["broken_off"] for part in everything):
        return None
    return _combine([row for part in everything for row in part["rows"]], sum(part["samples"] for part in everything))


def _run_my_batches(evaluator: Evaluator, driver: Driver, runtime: Runtime) -> tuple[list[dict[str, list[float]]], int]:
    """With the unwrapped model: ranks run different numbers of batches, so no forward may wait for another rank. Where
    one must (a model that is cut), those with fewer batches repeat one, and forget what came out."""
    length, batch = len(evaluator.reader.dataset), evaluator.batch
    mine = deal(math.ceil(length / batch), driver.placement.data_rank, driver.placement.data_size)
    ranges = [range(index * batch, min((index + 1) * batch, length)) for index in mine]
    most = -(-math.ceil(length / batch) // driver.placement.data_size) if driver.placement.collective_forwards else 0
    repeated = [range(min(batch, length))] * (most - len(ranges))
    requests = ((0, ids) for ids in [*ranges, *repeated])
    results: list[dict[str, tuple[Any, Any]]] = []
    for data in read_all(evaluator.reader, requests, evaluator.workers, prefetch=2):
        runtime.heartbeat.beat("evaluate")
        if evaluator.may_leave and runtime.notice.signal is not None and not driver.placement.collective_forwards:
            return [], 0
        loss = _loss(evaluator, driver, to_device(data, runtime.device))
        if loss is not None:
            results.append({name: (total, weight) for name, total, weight in terms(loss)})
    if not driver.placement.reports_loss:  # another rank has gone through the same batches, and tells
        return [], 0
    # Read back only now: one host synchronisation instead of one per batch.
    rows = [{name: [float(t), float(w)] for name, (t, w) in row.items()} for row in results[: len(ranges)]]
    return rows, sum(map(len, ranges))


def _loss(evaluator: Evaluator, driver: Driver, data: Any) -> Loss | None:
    with evaluator.precision.autocast():
        return driver.evaluate(evaluator.loss_of, data)


def _combine(rows: list[dict[str, list[float]]], samples: int) -> Evaluation:
    names = sorted({name for row in rows for name in row})
    means, weights = {}, {}
    for name in names:
        totals = math.fsum(row[name][0] for row in rows if name in row)
        weights[name] = math.fsum(row[name][1] for row in rows if name in row)
        means[name] = totals / weights[name] if weights[name] else math.nan
    loss = means.pop("loss", math.nan)
    return Evaluation(loss, means, samples, weights.get("loss", 0.0))
