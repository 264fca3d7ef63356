"""Sums and weights of the loss and the metrics since the last log line. They stay on the device until they are read.

A step adds to the `Sums` of an `Interval`. The log ends the interval, sums over the ranks, and divides once
(`quotients`). With `exact` the sums are `ExactSums`, at the end of this page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.task import Loss, Number, Weight

# How many losses are collected before they are added up: the hot path only appends to a list.
FOLD_AT = 128

# The names of the loss in log lines and in settings. No metric may have them.
LOSS_NAMES = ("loss", "eval_loss")

Term = tuple[str, Number, Weight]  # (name, sum, weight)


# ---- sums ----


def check_metric_name(name: str) -> None:
    """Raise if the name is one of the loss, which the metric would overwrite in the log."""
    if name in LOSS_NAMES:
        raise UserError(
            f"a metric is named {name!r}, which is the name of the loss itself", "", "give the metric another name"
        )


def metric_terms(loss: Loss) -> Iterator[Term]:
    """Yield each metric, detached. A metric without a weight has the weight of the loss."""
    for name, value in loss.metrics.items():
        check_metric_name(name)

        # A pair is (sum, weight); a single number takes the weight of the loss.
        total, weight = value if isinstance(value, tuple) else (value, loss.weight)
        for number in (total, weight):
            if isinstance(number, Tensor) and number.numel() != 1:
                raise UserError(
                    f"the metric {name!r} must be one number, the SUM over the micro-batch; it has the shape "
                    f"{tuple(number.shape)}",
                    "",
                    f"return its sum: metrics={{{name!r}: values.sum()}}",
                )

        yield name, detached(total), detached(weight)


def detached(number: Number) -> Number:
    """Return a number without its graph, which would keep the activations of its step alive until the log line."""
    return number.detach() if isinstance(number, Tensor) else number


class Sums:
    """One rank's sums of the loss and of the task's own metrics, by name.

    Values stay on the device until a log line or a checkpoint needs them. Adding to the sums never makes the host wait,
    and sums of all ranks are added before the one division by the weight.
    """

    def __init__(self) -> None:
        self._losses: list[tuple[Number, Weight]] = []
        self._metrics: list[Term] = []
        self._folded: dict[str, tuple[Any, Any]] = {}  # name -> (sum, weight)

    def clear(self) -> None:
        """Drop everything that was added."""
        self._losses = []
        self._metrics = []
        self._folded = {}

    def add(self, losses: list[tuple[Number, Weight]], metrics: list[Term]) -> None:
        """Add the (sum, weight) of each micro-batch of a step, and its metrics, without waiting for the device."""
        # Nothing is added up yet: that would be one more kernel per micro-batch.
        self._losses += losses
        self._metrics += metrics
        if len(self._losses) >= FOLD_AT:
            self._fold()

    def take(self, names: list[str], device: torch.device) -> Tensor:
        """Return (sum, weight) of every name, shape (2 * names,), in float64 on the device, and reset them to 0.

        A name that this rank has never seen has sum 0 and weight 0.
        """
        self._fold()
        flat = [value for name in names for value in self._folded.pop(name, (0.0, 0.0))]

        # The task may give tensors or plain numbers. The numbers are copied to the device together.
        pinned = torch.tensor(
            [0.0 if isinstance(value, Tensor) else value for value in flat],
            dtype=torch.float64,
            pin_memory=device.type == "cuda",
        )
        packed = pinned.to(device, non_blocking=True)

        # Tensors are added on the device, so that the host does not wait for them.
        for index, value in enumerate(flat):
            if isinstance(value, Tensor):
                packed[index] += value

        return packed

    def take_global(self, names: list[str], collectives: Collectives) -> list[Any]:
        """Return what `take` returns, summed over all ranks, for a checkpoint. Collective; it waits for the device."""
        return collectives.all_reduce_(self.take(names, collectives.device)).tolist()

    def names(self) -> list[str]:
        """Return the names of the metrics that were added since they were last taken."""
        self._fold()
        return sorted(self._folded)

    def put(self, names: list[str], totals: Sequence[float | str]) -> None:
        """Add what `take_global` returned."""
        self._fold()
        numbers = [from_exact(exact_from_text(total)) for total in totals]

        for name, total, weight in zip(names, numbers[0::2], numbers[1::2], strict=True):
            before = self._folded.get(name, (0.0, 0.0))
            self._folded[name] = (before[0] + total, before[1] + weight)

    def _take_terms(self) -> list[Term]:
        """Return the terms that were collected since the last call, as (name, sum, weight)."""
        collected: list[Term] = [("loss", total, weight) for total, weight in self._losses]
        collected += self._metrics

        self._losses = []
        self._metrics = []
        return collected

    def _fold(self) -> None:
        """Add up the collected terms, with one stacked sum per name."""
        # The first summand is the sum so far.
        summands = {name: ([total], [weight]) for name, (total, weight) in self._folded.items()}

        for name, total, weight in self._take_terms():
            totals, weights = summands.setdefault(name, ([], []))
            totals.append(total)
            weights.append(weight)

        self._folded = {name: (_add_up(totals), _add_up(weights)) for name, (totals, weights) in summands.items()}


def quotients(names: list[str], sums: list[float]) -> dict[str, float]:
    """Return sum / weight of every name: log lines and evaluations divide only here. Names of weight 0 are left out."""
    pairs = zip(names, sums[0::2], sums[1::2], strict=True)
    return {name: total / weight for name, total, weight in pairs if weight}


def _add_up(values: list[Number]) -> Number:
    """Return the sum of tensors with one element and plain numbers: a tensor of shape () if any of them is one."""
    tensors = [value.double().reshape(()) for value in values if isinstance(value, Tensor)]
    # As floats: numbers of NumPy would be added in their own dtype, such as int8 or float16.
    plain = sum([float(value) for value in values if not isinstance(value, Tensor)], 0.0)
    return torch.stack(tensors).sum() + plain if tensors else plain


# ---- the interval of a log line ----


@dataclass
class MetricNames:
    """Names of metrics. The log shows a metric only when all ranks have its name."""

    seen: set[str] = field(default_factory=set)  # names that this rank has metrics of
    known: list[str] = field(default_factory=lambda: ["loss"])  # names that all ranks know, in the order of the log
    unshared: set[str] = field(default_factory=set)  # names in `seen` that are not in `known`
    new: bool = True  # some rank may have seen a name that is not in `known`

    def see(self, names: Iterable[str]) -> None:
        """Add names that this rank has metrics of. The next control word says so if they are new."""
        self.seen.update(names)
        self.unshared = self.seen.difference(self.known)

    def announce(self) -> None:
        """Note that some rank has seen new names: a control word says so, and all ranks have it."""
        self.new = True

    def agree(self, collectives: Collectives) -> None:
        """Make all ranks know the metrics of each of them. Collective. They sum them in this order from now on."""
        gathered = collectives.all_gather_json(sorted(self.seen.union(self.known)))
        self.known = ["loss", *sorted({name for names in gathered for name in names} - {"loss"})]
        self.unshared = set()
        self.new = False

    def restore(self, names: Iterable[str]) -> None:
        """Make these, from a checkpoint, the names that all ranks know. They still have to exchange newer ones."""
        self.known = list(names)
        self.unshared = self.seen.difference(self.known)


class Interval:
    """The time since the last line of metrics, with the sums and counts that the next line reports, on this rank.

    One object serves all lines of a run. The log counts the steps in it, and the Stepper adds their losses.

    On a GPU the outcome of the last step may be late (`engine/requests.py`): a line then lacks the losses of that
    step, which the next line has instead.
    """

    def __init__(self, sums: Sums, metric_names: MetricNames) -> None:
        self.sums = sums  # sums of the losses and metrics of applied steps
        self.metric_names = metric_names
        self._begin(time.perf_counter())

    def _begin(self, now: float, late_steps: float = 0) -> None:
        """Begin to count from 0. `late_steps` of the previous interval will add their losses to this one's sums."""
        self._began = now  # `exclude` makes it later
        self._late_steps_before = late_steps
        self._weight_before_resume = 0.0

        self.steps = 0
        self.samples = 0  # samples of all ranks
        self.has_skips = False
        self.micro_batches = 0  # micro-batches of this rank
        self.data_wait_s = 0.0

    # ---- what is counted ----

    def add_step(self, samples: int, waits_s: Sequence[float]) -> None:
        """Count a step, with the samples of all ranks, and how long this rank has waited for each micro-batch."""
        self.steps += 1
        self.samples += samples
        self.micro_batches += len(waits_s)
        self.data_wait_s += sum(waits_s)

    def add_losses(self, losses: list[tuple[Number, Weight]], metrics: list[Term]) -> None:
        """Add the losses and metrics of an applied step."""
        self.sums.add(losses, metrics)

    def add_metric(self, name: str, total: Number, weight: Weight) -> None:
        """Add to a metric that the user's code logs."""
        # A name is only noted here. Ranks may log different ones, and agree on them with the control word of a step.
        self.metric_names.see([name])
        self.sums.add([], [(name, total, weight)])

    def note_skip(self) -> None:
        """Note that a step was skipped."""
        self.has_skips = True

    # ---- the time ----

    def restart(self) -> None:
        """Drop all sums and counts: a rewind undoes the steps that they come from."""
        self.sums.clear()
        self._begin(time.perf_counter())

    def restart_clock(self) -> None:
        """Restart the clock: the earlier time was not training."""
        self._began = time.perf_counter()
        self.data_wait_s = 0.0
        self.micro_batches = 0

    def exclude(self, seconds: float) -> None:
        """Exclude time that was spent on something other than training."""
        self._began += seconds

    def end(self, late_steps: float) -> EndedInterval:
        """End the interval, whose sums were taken, and begin the next one. Return the counts for the line.

        The losses of its last `late_steps` steps come to the next interval: less than 1 if a step has several passes.
        """
        now = time.perf_counter()
        ended = EndedInterval(
            steps=self.steps,
            # The losses of late steps come one interval later.
            steps_in_sums=self._late_steps_before + self.steps - late_steps,
            samples=self.samples,
            has_skips=self.has_skips,
            seconds=now - self._began,
            data_wait_s=self.data_wait_s,
            weight_before_resume=self._weight_before_resume,
        )
        self._begin(now, late_steps=late_steps)
        return ended

    # ---- checkpoints ----

    def state_dict(self, names: list[str], collectives: Collectives) -> dict[str, Any]:
        """Return the global sums of these names for a checkpoint. Collective.

        From now on rank 0 holds them, and the other ranks start from 0, so that nothing is counted twice.
        """
        totals = self.sums.take_global(names, collectives)
        if collectives.world.rank == 0:
            self.sums.put(names, totals)

        return {"names": names, "totals": totals}

    def load_state_dict(self, state: dict[str, Any], collectives: Collectives) -> None:
        """Continue the interval of a checkpoint, on any number of ranks."""
        if collectives.world.rank == 0:
            self.sums.put(state["names"], state["totals"])

        # `totals` holds the sum and the weight of each name in turn.
        weight = state["totals"][2 * state["names"].index("loss") + 1]
        self._weight_before_resume = from_exact(exact_from_text(weight))


@dataclass(frozen=True)
class EndedInterval:
    """The counts and times of an interval that has ended."""

    steps: int
    steps_in_sums: float  # the steps whose losses the line has: one more or less than `steps` if an outcome was late
    samples: int
    has_skips: bool
    seconds: float
    data_wait_s: float
    # The loss's weight includes that of the steps before a resume, which took none of these seconds.
    weight_before_resume: float = 0.0

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


# ---- the sums of exact mode ----
#
# Every float is an integer multiple of 2^-1074, and a sum of integers does not depend on their order. The grid of
# `exact` for the control word (`on_grid` in parallel/exact/grid.py) would round metrics too much.

SMALLEST_POWER = 1074  # 2^-1074 is the smallest float above 0
Exact = int | float  # a multiple of 2^-1074, as an integer; a float only if it is nan or infinite


class ExactSums(Sums):
    """Sums that are rounded once, after all ranks are added, so that they do not depend on the number of ranks.

    They are kept as `Exact` numbers. Reading them makes the host wait for the device.
    """

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives

    def take(self, names: list[str], device: torch.device) -> Tensor:
        """Return the global sums on rank 0 and 0 on all others, so that one more all-reduce changes nothing."""
        totals = self.take_global(names, self._collectives)
        if self._collectives.world.rank:
            return torch.zeros(len(totals), dtype=torch.float64, device=device)

        return torch.tensor(
            [from_exact(exact_from_text(total)) for total in totals], dtype=torch.float64, device=device
        )

    def take_global(self, names: list[str], collectives: Collectives) -> list[Any]:
        """Return the sums over all ranks, as text without rounding. Collective.

        Every rank adds up the same integers, so all have the same result, whatever the number of ranks.
        """
        self._fold()
        local = [exact_to_text(value) for name in names for value in self._folded.pop(name, (0, 0))]

        totals: list[Exact] = [0] * len(local)
        # Exact, so that the order of the ranks does not matter.
        for texts in collectives.all_gather_json(local):
            totals = [add_exact(total, exact_from_text(text)) for total, text in zip(totals, texts, strict=True)]

        return [exact_to_text(total) for total in totals]

    def put(self, names: list[str], totals: Sequence[float | str]) -> None:
        """Add what `take_global` returned, without rounding."""
        for name, total, weight in zip(names, totals[0::2], totals[1::2], strict=True):
            self._add(name, exact_from_text(total), exact_from_text(weight))

    def _fold(self) -> None:
        """Add the collected terms as integers. The host waits for the device."""
        collected = self._take_terms()
        values = [value for _, *pair in collected for value in pair]

        # Tensors are fetched together, with one synchronisation.
        tensors = [value.double().reshape(()) for value in values if isinstance(value, Tensor)]
        fetched = iter(torch.stack(tensors).tolist() if tensors else [])
        numbers = [next(fetched) if isinstance(value, Tensor) else float(value) for value in values]

        for (name, *_), total, weight in zip(collected, numbers[0::2], numbers[1::2], strict=True):
            self._add(name, to_exact(total), to_exact(weight))

    def _add(self, name: str, total: Exact, weight: Exact) -> None:
        """Add to the sum and to the weight of a name."""
        before = self._folded.get(name, (0, 0))
        self._folded[name] = (add_exact(before[0], total), add_exact(before[1], weight))


def to_exact(value: float) -> Exact:
    """Return a float as a multiple of 2^-1074, which every finite float is."""
    if not math.isfinite(value):
        return value

    # The division leaves no remainder: the denominator is a power of two, at most 2^1074.
    numerator, denominator = value.as_integer_ratio()
    return (numerator << SMALLEST_POWER) // denominator


def from_exact(value: Exact) -> float:
    """Return the nearest float."""
    if isinstance(value, float):
        return value

    try:
        return value / (1 << SMALLEST_POWER)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def add_exact(a: Exact, b: Exact) -> Exact:
    """Return the sum, without rounding."""
    # A finite number does not change one that is nan or infinite.
    if isinstance(a, int) != isinstance(b, int):
        return b if isinstance(a, int) else a

    return a + b


def exact_to_text(value: Exact) -> str:
    """Return text for JSON, whose readers may not support integers of that size."""
    return repr(value) if isinstance(value, float) else f"{value:x}"


def exact_from_text(text: str | float) -> Exact:
    """Return the number that `exact_to_text` wrote; a plain float is accepted as well."""
    if not isinstance(text, str):
        return to_exact(float(text))

    return float(text) if text in ("nan", "inf", "-inf") else int(text, 16)
