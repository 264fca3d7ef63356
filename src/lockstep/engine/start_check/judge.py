"""Tells the causes apart, by arithmetic on what the loss returned for a batch and for its two halves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.causes import Cause, named
from lockstep.engine.start_check.kept_state import Changes
from lockstep.parallel.inner_gradients import InnerGradient

WEIGHT_TOLERANCE = 1e-6  # relative; weights are counts
NO_OTHER_COUNT = 0.02  # relative; counts that are closer to the weights than this are the weights
EXPLAINED = 1e-3  # a mistake explains a difference if it leaves no more than this part of it
FLOAT32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Measured:
    """What a loss returned, and its gradient for every trainable parameter, if it was computed."""

    total: float
    weight: float
    gradients: list[Tensor] | None = None


@dataclass(frozen=True)
class Tolerance:
    """How far two sums of the same terms may differ in a number format, relative to their size."""

    total: float
    gradient: float
    repeated: float  # for two calls with the same samples, where only kernels that add in any order differ

    @staticmethod
    def of(eps: float) -> Tolerance:
        # Kernels add in another order in another batch. Mistakes are far larger than this, as a rule.
        # Models in float64 get no less room: many compute their loss in float32.
        total = max(8 * eps, 1e-4)
        return Tolerance(total, 10 * total, min(total, 32 * max(eps, FLOAT32)))

    def same(self, a: float, b: float, *terms: float) -> bool:
        """Return whether two sums are equal; `terms` are the sizes of what was added up, where that is known."""
        return _within(self.total, a, b, *terms)

    def explains(self, left: float, missing: float, *terms: float) -> bool:
        """Return whether hardly anything is `left` of what was `missing`, once a mistake is assumed."""
        return abs(left) <= max(EXPLAINED * abs(missing), self.repeated * max(map(abs, terms)))


def _within(tolerance: float, a: float, b: float, *terms: float) -> bool:
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b), *map(abs, terms), 0.0)


# ---- what a call of the loss changes ----


def of_changes(changes: Changes, host_draws: set[str], inner: InnerGradient | None = None) -> Cause | None:
    """Name what a loss must not do besides returning a number. `inner`: a gradient that it computed itself."""
    if changes.gradients:
        where = f" ({inner.call_site})" if inner and inner.accumulates else ""
        return named("left-gradient", f"after the forward there is a gradient of {_some(changes.gradients)}{where}")
    if changes.settings:
        return named("schedule", f"the loss changes {_some(changes.settings)} of the optimizer")
    if changes.generators:
        return named("randomness", f"the loss draws from a generator of its own: {_some(changes.generators)}")
    if host_draws:
        return named("randomness", f"the loss draws from the global generator of {' and '.join(sorted(host_draws))}")
    if changes.model:
        return named("changed-in-forward", f"one forward changes {_some(changes.model)}")
    if changes.averages:
        return named("average", f"the loss changes {_some(changes.averages)}, which has the shape of a weight")
    return None


def of_repetition(first: Measured, again: Measured, changes: Changes, tolerance: Tolerance) -> Cause | None:
    """Name why the same samples, seeds and weights give another loss the second time."""
    if not (math.isfinite(first.total) and math.isfinite(again.total)):
        return None  # the first step will say it

    # What changes by a thousandth in every call is no rounding error, if there is something that changes.
    allowed = tolerance.repeated if changes.others else tolerance.total
    same_total = _within(allowed, first.total, again.total, 1e-2 * first.weight)
    if same_total and first.weight == again.weight:
        return None

    seen = f"the same samples twice: {_pair(first)}, then {_pair(again)}"
    if changes.others:
        return named("carried-state", f"{seen}; {_some(changes.others)} changes")
    return named("nondeterminism", seen)


# ---- the whole and its halves ----


def add_up(
    whole: Measured,
    halves: Sequence[Measured],
    names: Sequence[str],
    tolerance: Tolerance,
    norms: Callable[[list[Tensor]], list[Tensor]],
) -> list[str] | None:
    """Return the parameters whose gradients do not add up; None if there are no gradients to compare.

    `norms` returns the lengths of full tensors: where ranks hold shards, each has its part of a gradient. Collective
    there.
    """
    if whole.gradients is None or any(half.gradients is None for half in halves):
        return None

    first, second = (half.gradients or [] for half in halves)
    # In the place of the whole's: a model may have room for three times its gradients, as for Adam, and not for more.
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        whole.gradients[number] = whole.gradients[number] - a - b
    errors, *parts = ([float(norm) for norm in norms(some)] for some in (whole.gradients, first, second))
    sizes = [a + b for a, b in zip(*parts, strict=True)]

    # A gradient that is zero but for rounding is judged by the size of the others.
    floor = 1e-2 * math.hypot(*sizes)
    return [
        name
        for name, error, size in zip(names, errors, sizes, strict=True)
        if not error <= tolerance.gradient * max(size, floor)
    ]


def of_halves(
    whole: Measured,
    halves: Sequence[Measured],
    doubled: Callable[[bool], Measured],
    wrong: list[str] | None,
    tolerance: Tolerance,
) -> Cause | None:
    """Name why the whole is not the sum of its halves.

    `doubled` measures the first half with every sample twice, alone or together with the second half.
    """
    first, second = halves
    numbers = [number for measured in (whole, *halves) for number in (measured.total, measured.weight)]
    if not all(map(math.isfinite, numbers)) or not whole.weight:
        return None  # nothing can be said; the first step will

    seen = f"a few samples whole: {_pair(whole)}; in two halves: {_pair(first)}, and {_pair(second)}"
    weights = first.weight + second.weight
    totals = first.total + second.total

    # Terms of size 1 may cancel in the sum, and leave their rounding errors.
    same_total = tolerance.same(whole.total, totals, first.total, second.total, 1e-2 * whole.weight)
    is_mean = _is_mean(whole, halves, tolerance)
    if not math.isclose(whole.weight, weights, rel_tol=WEIGHT_TOLERANCE):
        if same_total:
            return named("loss-weight", seen)
        # Where neither adds up, and the weight follows the batch, terms are chosen from it: the hardest, say.
        constant = whole.weight == first.weight == second.weight
        return named("mean-of-means" if constant else "batch-coupled", seen)
    if same_total and not wrong:
        return None
    if same_total:
        assert wrong is not None
        return named("batch-coupled", f"{seen}; these add up, and the gradient of {_some(wrong)} does not")
    if is_mean:
        return named("mean-for-sum", seen)

    twice = doubled(False)
    missing = totals - whole.total
    if tolerance.explains(2 * first.total - twice.total - missing, missing, *numbers):
        return named("penalty", f"{seen}; every call adds {missing:.4g}, whatever its samples")
    if _is_reweighted(whole, halves, doubled(True), tolerance):
        return named("loss-weight", f"{seen}; each total is a mean over something else, times the weight")
    return named("batch-coupled", seen)


def _is_mean(whole: Measured, halves: Sequence[Measured], tolerance: Tolerance) -> bool:
    """Return whether the total of the whole is the mean of its halves', weighted by their weights."""
    mean = sum(half.total * half.weight for half in halves) / whole.weight
    return tolerance.same(whole.total, mean, *(half.total for half in halves))


def _is_reweighted(whole: Measured, halves: Sequence[Measured], uneven: Measured, tolerance: Tolerance) -> bool:
    """Return whether the loss is a mean over something that its weight does not count, times the weight.

    Such a mean is that of its halves, weighted by what is counted, whatever it is. The whole tells the ratio of the
    halves, and the ratio tells the mean of `uneven`, which has the first half twice: if it has another one, samples
    change each other's loss.
    """
    if not (uneven.weight and all(half.weight for half in halves)):
        return False
    first, second = (half.total / half.weight for half in halves)
    mean = whole.total / whole.weight
    if tolerance.same(first, mean) or not min(first, second) <= mean <= max(first, second):
        return False

    # A loss that depends a little on the whole batch, as a balance of experts does, looks the same if the ratio is
    # almost that of the weights. Samples are sorted by size, so what is counted instead differs more than that.
    ratio = (mean - second) / (first - mean)
    if math.isclose(ratio, halves[0].weight / halves[1].weight, rel_tol=NO_OTHER_COUNT):
        return False
    expected = (2 * ratio * first + second) / (2 * ratio + 1)
    by_weight = (2 * first * halves[0].weight + second * halves[1].weight) / uneven.weight
    left = uneven.total / uneven.weight - expected
    return tolerance.explains(left, by_weight - expected, first, second)


def of_ranks(first: Measured, alone: Measured, again: Measured, ranks: int, tolerance: Tolerance) -> Cause | None:
    """Name a loss that is another one when it is told that there is a single rank, and then the same `again`."""
    if not same(first, again, tolerance):
        return None
    return named(
        "rank-in-loss", f"the same samples: {_pair(first)} on {ranks} ranks; told that it is alone: {_pair(alone)}"
    )


def same(a: Measured, b: Measured, tolerance: Tolerance) -> bool:
    """Return whether two calls with the same samples returned the same loss, as far as can be said."""
    if not all(map(math.isfinite, (a.total, b.total, a.weight, b.weight))):
        return True
    return a.weight == b.weight and tolerance.same(a.total, b.total, 1e-2 * a.weight)


# ---- words ----


def _pair(measured: Measured) -> str:
    return f"total {measured.total:.5g}, weight {measured.weight:.5g}"


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + rest
