"""Evaluation: every sample counts exactly once, and the numbers are the same at any world size.

The evaluation set is split into the same batches at any number of ranks. Each rank runs a contiguous range of batches
without communication. Then the sums of all batches are gathered and added exactly (fsum), so that not even rounding
depends on the number of ranks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.config import RunConfig
from lockstep.data.from_loader import Collate, take_evaluation_loader
from lockstep.data.loader import BatchRequest, SampleReader, is_empty, read_all
from lockstep.data.samplers import Sampled
from lockstep.data.streams.mosaic import by_index
from lockstep.data.transfer import Transfer
from lockstep.data.windows import rank_range
from lockstep.engine.evaluation.torch_metrics import MetricStates
from lockstep.errors import UserError, unknown_name
from lockstep.observe.metrics import LOSS_NAMES, Term, metric_terms, quotients
from lockstep.observe.recorder import Recorder
from lockstep.parallel.calls.state import restore_modes
from lockstep.parallel.driver import Driver, LossFn
from lockstep.runtime.context import Runtime
from lockstep.task import EvalData, Task

# Samples per forward, if neither evaluate.batch nor micro_batch is set.
MAX_EVALUATION_BATCH = 32

Row = dict[str, list[float]]  # the sums of one batch: name -> [sum, weight]


@dataclass(frozen=True)
class Evaluation:
    """The weighted means over an evaluation set."""

    steps_done: int  # before the evaluation
    loss: float
    metrics: dict[str, float]
    samples: int
    weight: float
    name: str | None = None  # of the evaluation set, if the task has several

    def named(self) -> dict[str, float]:
        """Return the results by the names that tell this set from others: `val/loss`, `val/accuracy`."""
        prefix = f"{self.name}/" if self.name else ""
        return {f"{prefix}{name}": value for name, value in {"loss": self.loss, **self.metrics}.items()}


@dataclass(frozen=True)
class EvaluationSet:
    """A dataset to evaluate on, and how."""

    data: Any  # a dataset, or a `Sampled` one
    loss_fn: LossFn
    collate: Collate
    name: str | None = None  # None: the only one
    monitored: bool = True  # whether early stopping, the best checkpoint and schedulers follow it
    metrics: Mapping[str, Any] = field(default_factory=dict)  # torchmetrics, by name
    batch: int | None = None  # its own batch size

    @property
    def dataset(self) -> Any:
        """The dataset without its sampler, which is for training: here every sample counts once."""
        return self.data.dataset if isinstance(self.data, Sampled) else self.data


def evaluation_sets(task: Task, monitor: str | None) -> list[EvaluationSet]:
    """Return what a task's `eval_data()` returns, as sets: one without a name, or several by name, or none.

    `monitor` is the setting `evaluate.monitor`.
    """
    data = task.eval_data()
    if data is None or not isinstance(data, Mapping):
        if monitor is not None:
            raise UserError(
                f"evaluate.monitor={monitor} names an evaluation set, and the task's sets have no names",
                "",
                "leave evaluate.monitor out, or return {name: dataset} from eval_data()",
            )

        return [] if data is None else [_make_set(task, data, _metrics_of(task))]

    if monitor is not None and monitor not in data:
        raise unknown_name("evaluate.monitor", monitor, list(data))

    # Results are called NAME/loss, and in some tools a slash makes a folder.
    for name in data:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise UserError(
                f"an evaluation set is called {name!r}",
                "its name becomes a part of metrics, such as val/loss",
                "use letters, digits, points, _ and - only",
            )

    # Without the setting, the first set of the mapping is followed.
    monitored = next(iter(data), None) if monitor is None else monitor
    metrics = _metrics_of(task)

    sets = []
    for name in data:
        made = _make_set(task, data[name], metrics)
        sets.append(replace(made, name=name, monitored=name == monitored))

    return sets


def _make_set(task: Task, given: Any, metrics: Mapping[str, Any]) -> EvaluationSet:
    """Return a set of `given`, a dataset or an EvalData. The task and `metrics` supply what an EvalData lacks."""
    chosen = given if isinstance(given, EvalData) else EvalData(given)
    return make_set(
        chosen.dataset,
        chosen.loss or task.eval_loss,
        chosen.collate or task.collate,
        metrics=metrics if chosen.metrics is None else _by_name(chosen.metrics, "EvalData(metrics=...)"),
        batch=chosen.batch,
    )


def make_set(data: Any, loss_fn: LossFn, collate: Collate, batch: int | None = None, **options: Any) -> EvaluationSet:
    """Return a set of a dataset, or of the parts of a DataLoader. `options` are further fields of the set."""
    if isinstance(data, DataLoader):
        data, collate, loader_batch = take_evaluation_loader(data, collate)
        batch = batch or loader_batch

    return EvaluationSet(by_index(data), loss_fn, collate, batch=batch, **options)


def _metrics_of(task: Task) -> Mapping[str, Any]:
    """Return the torchmetrics of a task, by name; there may be none."""
    # A task need not subclass Task.
    made = task.eval_metrics() if hasattr(task, "eval_metrics") else None
    return _by_name(made or {}, "eval_metrics()")


def _by_name(metrics: Any, origin: str) -> Mapping[str, Any]:
    """Return `metrics`, or raise unless they are metrics by name. A MetricCollection is no Mapping, but has items."""
    if not hasattr(metrics, "items"):
        raise UserError(
            f"{origin} must give metrics by name; it gave a {type(metrics).__name__}",
            "",
            'give {"accuracy": torchmetrics.classification.MulticlassAccuracy(10)}',
        )

    return metrics


def evaluation_batch(config: RunConfig, global_batch: int) -> int:
    """Return the batch size of evaluations.

    Never the derived micro-batch size: it depends on the number of ranks, and the results must not.
    """
    micro = config.micro_batch if config.micro_batch != "auto" else None
    return config.evaluate.batch or micro or min(global_batch, MAX_EVALUATION_BATCH)


def check_data(data: Any, name: str | None = None) -> None:
    """Check that `data` is a map-style dataset with samples, so that every sample can be counted once.

    `name` is that of its set, if there are several.
    """
    called = f" {name!r}" if name else ""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        kind = "a stream" if hasattr(data, "__iter__") else f"a {type(data).__name__}"
        raise UserError(
            f"a dataset to evaluate on must have __getitem__ and __len__; this one{called} is {kind}",
            "every sample counts once, on any number of ranks",
            "return a list of its samples, list(stream), or None for no evaluation at all",
        )

    if len(data) == 0:
        raise UserError(
            f"the dataset{called} to evaluate on has no samples",
            "",
            "leave it out of eval_data()" if name else "return None for no evaluation at all",
        )


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the model of a run. Collective: every rank must call `evaluate`."""

    config: RunConfig
    driver: Driver
    runtime: Runtime
    recorder: Recorder

    @cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self.runtime.device)

    def evaluate(
        self, sets: Sequence[EvaluationSet], batch: int, steps_done: int, may_preempt: bool = False
    ) -> list[Evaluation] | None:
        """Evaluate the weights on one set after the other, and log the results.

        `batch` is the number of samples of a forward, unless a set has its own. With `may_preempt` all ranks stop when
        one is preempted, and None is returned.
        """
        evaluations = []
        for chosen in sets:
            began = time.perf_counter()
            evaluation = self.measure(chosen, batch, steps_done, may_preempt)

            # A preempted evaluation is repeated after the resume, and logged then.
            if evaluation is None:
                return None

            self._log(evaluation, chosen, time.perf_counter() - began)
            evaluations.append(evaluation)

        return evaluations

    def measure(
        self, chosen: EvaluationSet, batch: int, steps_done: int, may_preempt: bool = False
    ) -> Evaluation | None:
        """Evaluate the weights on one set, as `evaluate` does, and log nothing."""
        # A set may have a batch size of its own, such as one of long samples.
        batch = chosen.batch or batch

        # The launcher allows an evaluation more time than a step.
        self.runtime.heartbeat.beat("evaluate", steps_done)
        check_data(chosen.dataset, chosen.name)

        # Buffers differ between ranks. Evaluate with the buffers that a checkpoint would save.
        self.driver.sync_buffers()

        metrics = MetricStates(chosen.metrics, self.runtime.device)
        reader = SampleReader(chosen.dataset, chosen.collate, self.config.seed, self.config.data.seed_samples)

        with restore_modes(self.driver.model.modules()), torch.no_grad():
            self.driver.model.eval()
            rows, samples = self._run_local_batches(reader, chosen.loss_fn, metrics, batch, may_preempt)

        # A sharded model gives up the weights that it has gathered after a backward, and here none follows. Code that
        # changes or saves the weights next must find the shards.
        self.driver.reshard()

        # If any rank was preempted, all ranks stop here.
        preempted = may_preempt and self.runtime.notice.signal is not None
        gathered = self.runtime.collectives.all_gather_json([rows, samples, preempted])
        if any(preempted for _, _, preempted in gathered):
            return None

        # Sums of batches, not of ranks: the rows are then the same ones on any number of ranks.
        all_rows = [row for rows, _, _ in gathered for row in rows]
        total_samples = sum(samples for _, samples, _ in gathered)
        evaluation = _combine(all_rows, total_samples, steps_done, chosen.name)

        # Metrics that are not sums: reduced by their own states.
        _add_metrics(evaluation, metrics.compute(self.runtime.collectives))
        return evaluation

    def first_names(self, chosen: EvaluationSet, batch: int) -> list[str]:
        """Return the names of the metrics of the first batch, which every rank runs for itself."""
        batch = chosen.batch or batch

        reader = SampleReader(chosen.dataset, chosen.collate, self.config.seed, self.config.data.seed_samples)
        data = reader(BatchRequest(0, range(min(batch, len(chosen.dataset)))))

        with restore_modes(self.driver.model.modules()), torch.no_grad():
            self.driver.model.eval()
            loss = self.driver.evaluate(chosen.loss_fn, self._transfer(data))

        assert loss is not None
        metrics = MetricStates(chosen.metrics, self.runtime.device)
        metrics.update(loss.outputs)
        return [*(name for name, *_ in metric_terms(loss)), *metrics.results()]

    def _log(self, evaluation: Evaluation, chosen: EvaluationSet, seconds: float) -> None:
        # The usual case, one set that is monitored, has no fields for that.
        fields = {key: value for key, value in vars(evaluation).items() if key not in ("steps_done", "name")}
        named = {"set": chosen.name} if chosen.name else {}
        followed = {} if chosen.monitored else {"monitor": False}
        self.recorder.event("eval", step=evaluation.steps_done, **fields, **named, **followed, seconds=seconds)

    def _split(self, length: int, batch: int) -> tuple[list[range], list[range]]:
        """Return the samples of each of this rank's batches, and of the batches that it only repeats."""
        # Batches depend only on the length and the batch size. The rank determines only which of them it runs.
        role = self.driver.role

        count = math.ceil(length / batch)
        local_batches = rank_range(count, role.data_world.rank, role.data_world.size)
        ranges = [range(i * batch, min((i + 1) * batch, length)) for i in local_batches]

        # If no rank can evaluate by itself, ranks with fewer batches repeat the first one, to run as many forwards.
        forwards = len(ranges) if role.replicated else math.ceil(count / role.data_world.size)
        return ranges, [range(min(batch, length))] * (forwards - len(ranges))

    def _run_local_batches(
        self, reader: SampleReader, loss_fn: LossFn, metrics: MetricStates, batch: int, may_preempt: bool
    ) -> tuple[list[Row], int]:
        """Run this rank's batches and return their sums and the number of samples.

        Ranks may run different numbers of batches: a forward in eval mode is not collective, unless the model is
        sharded. Then ranks with fewer batches repeat one and drop the result.
        """
        role = self.driver.role
        ranges, repeated = self._split(len(reader.dataset), batch)

        # Evaluation always reads epoch 0, so that random samples (augmentation) are the same every time.
        results = []
        requests = (BatchRequest(0, ids) for ids in [*ranges, *repeated])
        for data in read_all(reader, requests, self.config.data.workers, prefetch=2):
            self.runtime.heartbeat.beat("evaluate")

            # If the model is sharded, the other ranks would wait for a rank that stopped here.
            if may_preempt and self.runtime.notice.signal is not None and role.replicated:
                return [], 0

            # If collate left no sample of a batch, it contributes nothing, but a sharded model must still run.
            no_samples = is_empty(data)
            if no_samples and role.replicated:
                results.append([])
                continue

            data = reader.nonempty_batch(batch) if no_samples else data

            # None on the ranks of a pipeline that do not compute the loss.
            loss = self.driver.evaluate(loss_fn, self._transfer(data))

            # A batch without samples has run only for the other ranks.
            if no_samples:
                results.append([])
            elif loss is not None:
                results.append([("loss", loss.total.detach(), loss.weight), *metric_terms(loss)])

                # A repeated batch does not count, and another rank of the same tp group counts this one.
                if role.reports_loss and len(results) <= len(ranges):
                    metrics.update(loss.outputs)

        # Another rank of the same tp or pp group reports these batches.
        if not role.reports_loss:
            return [], 0

        # Read back only now: one host synchronisation instead of one per batch.
        return [_on_host(result) for result in results[: len(ranges)]], sum(map(len, ranges))


def _add_metrics(evaluation: Evaluation, results: Mapping[str, float]) -> None:
    """Add the torchmetrics of an evaluation to the metrics that its losses returned."""
    twice = sorted(results.keys() & {*LOSS_NAMES, *evaluation.metrics})
    if twice:
        raise UserError(
            f"two metrics are called {twice[0]!r}: one of eval_metrics(), and one of the loss", "", "rename one"
        )

    evaluation.metrics.update(results)


def _on_host(result: list[Term]) -> Row:
    """Return the sums of a batch as numbers. The host waits for the device."""
    return {name: [float(total), float(weight)] for name, total, weight in result}


def _combine(rows: list[Row], samples: int, steps_done: int, set_name: str | None) -> Evaluation:
    """Return the means over all batches: each sum of a name, divided by the sum of its weights."""
    names = sorted({"loss", *(name for row in rows for name in row)})

    # fsum is exactly rounded, so the order of the rows does not matter. A metric may be missing in some batches.
    sums: list[float] = []  # the total and the weight of each name
    for name in names:
        terms = [row[name] for row in rows if name in row]
        sums.append(math.fsum(total for total, _ in terms))
        sums.append(math.fsum(weight for _, weight in terms))

    # The mean of a name whose weight is 0 stays nan.
    means = dict.fromkeys(names, math.nan) | quotients(names, sums)
    loss = means.pop("loss")
    loss_weight = sums[2 * names.index("loss") + 1]
    return Evaluation(steps_done, loss, means, samples, loss_weight, set_name)
