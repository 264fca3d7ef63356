"""Evaluation: every sample is counted exactly once, and the numbers are the same at any world size.

The evaluation set is split into the same batches whatever the number of ranks. Ranks run contiguous ranges of batches
without any communication; then the sums of every batch are gathered and added exactly (fsum), so that not even
rounding depends on the number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.config import RunConfig
from lockstep.data.loader import SampleReader, read_all, to_device
from lockstep.data.shard import deal
from lockstep.errors import UserError
from lockstep.observe.metrics import terms
from lockstep.observe.recorder import Recorder
from lockstep.parallel.driver import Driver
from lockstep.precision import Precision
from lockstep.runtime.context import Runtime
from lockstep.task import Loss

Row = dict[str, list[float]]  # of one batch: name -> [sum, weight]


@dataclass(frozen=True)
class Evaluation:
    """The weighted means over an evaluation set."""

    loss: float
    metrics: dict[str, float]
    samples: int
    weight: float
    step: int  # of the weights that were evaluated


@dataclass(frozen=True)
class Evaluator:
    """What is evaluated, and how: the same on every rank."""

    loss_fn: Callable[[nn.Module, Any], Loss]
    reader: SampleReader
    batch: int  # samples per forward
    workers: int
    precision: Precision
    may_preempt: bool  # stop the evaluation when some rank is preempted

    @classmethod
    def of(
        cls,
        config: RunConfig,
        precision: Precision,
        data: Any,
        loss_fn: Callable[[nn.Module, Any], Loss],
        collate: Callable[[list[Any]], Any],
        batch: int,
        may_preempt: bool = False,
    ) -> Evaluator:
        reader = SampleReader(data, collate, config.seed, config.data.seed_samples)
        return cls(loss_fn, reader, batch, config.data.workers, precision, may_preempt)


def check_data(data: Any) -> None:
    """Check that every sample of `data` can be counted once, before the first step rather than at an evaluation."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        kind = "a stream" if hasattr(data, "__iter__") else f"a {type(data).__name__}"
        raise UserError(
            f"a dataset to evaluate on must have __getitem__ and __len__; this one is {kind}",
            "every sample counts once, on any number of ranks",
            "return a list of its samples, list(stream), or None for no evaluation at all",
        )
    if len(data) == 0:
        raise UserError("the dataset to evaluate on has no samples", "", "return None for no evaluation at all")


def evaluate_and_log(
    evaluator: Evaluator, driver: Driver, runtime: Runtime, recorder: Recorder, step: int
) -> Evaluation | None:
    """Evaluate the weights of `step`, and log the result. None: some rank was preempted, so all have stopped."""
    began = time.perf_counter()
    # The launcher allows an evaluation more time than a step.
    runtime.heartbeat.beat("evaluate", step)
    found = _evaluate(evaluator, driver, runtime, step)
    if found is None:
        return None
    recorder.event(
        "eval",
        step=step,
        loss=found.loss,
        metrics=found.metrics,
        samples=found.samples,
        weight=found.weight,
        seconds=time.perf_counter() - began,
    )
    # The time of an evaluation is not the time of a step.
    recorder.exclude(time.perf_counter() - began)
    return found


def _evaluate(evaluator: Evaluator, driver: Driver, runtime: Runtime, step: int) -> Evaluation | None:
    check_data(evaluator.reader.dataset)
    # Running statistics differ between the ranks: all evaluate with those of rank 0, which are also the ones saved.
    driver.sync_buffers()

    # Every module gets its own mode back: a part may be in eval mode on purpose.
    modes = [(module, module.training) for module in driver.model.modules()]
    driver.model.eval()
    try:
        with torch.no_grad():
            rows, samples = _run_own_batches(evaluator, driver, runtime)
    finally:
        for module, training in modes:
            module.training = training

    # A rank that is not preempted learns here that another one is.
    preempted = evaluator.may_preempt and runtime.notice.signal is not None
    parts = runtime.collectives.gather_json({"rows": rows, "samples": samples, "preempted": preempted})
    if any(part["preempted"] for part in parts):
        return None
    all_rows = [row for part in parts for row in part["rows"]]
    return _combine(all_rows, sum(part["samples"] for part in parts), step)


def _run_own_batches(evaluator: Evaluator, driver: Driver, runtime: Runtime) -> tuple[list[Row], int]:
    """Run this rank's batches, and return their sums and the number of samples.

    Ranks run different numbers of batches, so the unwrapped model is called, whose forward is not collective. Where it
    is (a sharded model), ranks with fewer batches repeat one and drop the result.
    """
    # The batches follow from the length and the batch size alone; only the ranges depend on the rank.
    placement = driver.placement
    length = len(evaluator.reader.dataset)
    count = math.ceil(length / evaluator.batch)
    own = deal(count, placement.data_rank, placement.data_size)
    ranges = [range(i * evaluator.batch, min((i + 1) * evaluator.batch, length)) for i in own]
    repeated: list[range] = []
    if placement.collective_forwards:
        most = math.ceil(count / placement.data_size)
        repeated = [range(min(evaluator.batch, length))] * (most - len(ranges))

    # Evaluation always reads epoch 0, so that samples which draw random numbers are the same every time.
    results = []
    requests = ((0, ids) for ids in [*ranges, *repeated])
    for data in read_all(evaluator.reader, requests, evaluator.workers, prefetch=2):
        runtime.heartbeat.beat("evaluate")

        # Where a forward is collective, a rank that stopped alone would leave the others waiting.
        if evaluator.may_preempt and runtime.notice.signal is not None and not placement.collective_forwards:
            return [], 0
        loss = driver.evaluate(evaluator.loss_fn, to_device(data, runtime.device), evaluator.precision.autocast)
        if loss is not None:
            results.append(list(terms(loss)))

    # Another rank has gone through the same batches, and reports them.
    if not placement.reports_loss:
        return [], 0
    # Read back only now: one host synchronisation instead of one per batch.
    rows = [
        {name: [float(total), float(weight)] for name, total, weight in result} for result in results[: len(ranges)]
    ]
    return rows, sum(map(len, ranges))


def _combine(rows: list[Row], samples: int, step: int) -> Evaluation:
    """Add the sums of all batches, and divide once."""
    means: dict[str, float] = {}
    weights: dict[str, float] = {}
    for name in sorted({name for row in rows for name in row}):
        # fsum rounds once, so the order of the rows does not matter. A metric may be missing in some batches.
        total = math.fsum(row[name][0] for row in rows if name in row)
        weight = math.fsum(row[name][1] for row in rows if name in row)
        means[name] = total / weight if weight else math.nan
        weights[name] = weight
    loss = means.pop("loss", math.nan)
    return Evaluation(loss, means, samples, weights.get("loss", 0.0), step)
