"""Decides which mistake a loss makes, by arithmetic on its results for a batch and for the two halves of the batch.

A loss that is a sum gives, for a batch, the sum of what it gives for the halves. A mean does not, and neither does a
loss that depends on the number of ranks, or on samples of other micro-batches. Each mistake fails in its own way, which
is how it is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.causes import Cause, named
from lockstep.parallel.inner_gradients import InnerGradient
from lockstep.start_check.snapshot import Changes

WEIGHT_TOLERANCE = 1e-6  # relative; weights are counts
SAME_RATIO = 0.02  # relative; two ratios that are closer than this count as equal
EXPLAINED = 1e-3  # a mistake explains a difference if at most this fraction of it remains
FLOAT32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Measurement:
    """The result of one call of the loss, with a gradient per trainable parameter if they were computed."""

    total: float
    weight: float
    gradients: list[Tensor] | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # those without a weight of their own


@dataclass(frozen=True)
class Tolerance:
    """The relative difference that two sums of the same terms may have."""

    total: float
    gradient: float
    repeated: float  # for two calls with the same samples: only nondeterministic kernels differ

    @staticmethod
    def of(eps: float) -> Tolerance:
        # Kernels add in a different order for a different batch size. Mistakes are usually far larger than this.
        # float64 gets the same tolerance, because many float64 models compute their loss in float32.
        total = max(8 * eps, 1e-4)
        repeated = min(total, 32 * max(eps, FLOAT32))
        return Tolerance(total, 10 * total, repeated)

    def same(self, a: float, b: float, *terms: float) -> bool:
        """Return whether two sums are equal up to rounding. `terms`: the sizes of the numbers that were added."""
        return _within(self.total, a, b, *terms)

    def explains(self, remainder: float, difference: float, *terms: float) -> bool:
        """Return whether an assumed mistake explains `difference`: hardly any `remainder` is left of it."""
        return abs(remainder) <= max(EXPLAINED * abs(difference), self.repeated * max(map(abs, terms)))


def _within(tolerance: float, a: float, b: float, *terms: float) -> bool:
    """Return whether two numbers are equal up to `tolerance`, relative to the largest of them and of `terms`."""
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b), *map(abs, terms), 0.0)


# ---- state that a call of the loss changes ----


def judge_changes(changes: Changes, host_draws: set[str], inner: InnerGradient | None = None) -> Cause | None:
    """Return the cause if the loss changed state or drew from other generators than torch's, else None.

    `inner` is a gradient that the loss itself computed.
    """

    # In the order in which one mistake explains another.
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


def judge_repetition(first: Measurement, again: Measurement, changes: Changes, tolerance: Tolerance) -> Cause | None:
    """Return the cause if the same samples, seeds and weights gave a different loss the second time, else None."""
    if not (math.isfinite(first.total) and math.isfinite(again.total)):
        return None  # the first step will report it

    # If some attribute changes with every call, even a small difference is not a rounding error.
    allowed = tolerance.repeated if changes.others else tolerance.total
    same_total = _within(allowed, first.total, again.total, 1e-2 * first.weight)
    if same_total and first.weight == again.weight:
        return None

    evidence = f"the same samples twice: {_pair(first)}, then {_pair(again)}"
    if changes.others:
        return named("carried-state", f"{evidence}; {_some(changes.others)} changes")

    return named("nondeterminism", evidence)


# ---- the whole and its halves ----


def mismatched_gradients(
    whole: Measurement,
    halves: Sequence[Measurement],
    names: Sequence[str],
    tolerance: Tolerance,
    norms: Callable[[list[Tensor]], list[Tensor]],
) -> list[str] | None:
    """Return the names of parameters whose gradients do not add up, or None if no gradients were computed.

    `norms` returns the norms of full tensors. It is collective if the ranks hold shards.
    """
    if whole.gradients is None or any(half.gradients is None for half in halves):
        return None

    first, second = (half.gradients or [] for half in halves)

    # Overwrites the gradients of the whole batch. Memory often suffices for three copies (as many as Adam needs), not
    # for four.
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        whole.gradients[number] = whole.gradients[number] - a - b

    errors = [float(norm) for norm in norms(whole.gradients)]

    # Relative to the gradients of the halves: the gradients of the whole batch are overwritten.
    sizes = [float(a) + float(b) for a, b in zip(norms(first), norms(second), strict=True)]

    # A gradient that is zero up to rounding is compared with the size of all gradients together.
    floor = 1e-2 * math.hypot(*sizes)

    # `not <=` also catches nan.
    return [
        name
        for name, error, size in zip(names, errors, sizes, strict=True)
        if not error <= tolerance.gradient * max(size, floor)
    ]


def judge_halves(
    whole: Measurement,
    halves: Sequence[Measurement],
    measure_doubled: Callable[[bool], Measurement],
    mismatched: list[str] | None,
    tolerance: Tolerance,
) -> Cause | None:
    """Return the cause if the loss of the whole batch is not the sum of the losses of its halves, else None.

    `measure_doubled(with_rest)` measures a batch that holds the first half twice, and then the second half if
    `with_rest` is true. `mismatched` names the parameters whose gradients do not add up.
    """
    first, second = halves
    numbers = [number for measured in (whole, *halves) for number in (measured.total, measured.weight)]
    if not all(map(math.isfinite, numbers)) or not whole.weight:
        return None  # the first step will report it

    evidence = f"a few samples whole: {_pair(whole)}; in two halves: {_pair(first)}, and {_pair(second)}"
    weights = first.weight + second.weight
    totals = first.total + second.total

    # Terms of size 1 may cancel in the sum and leave only their rounding errors.
    same_total = tolerance.same(whole.total, totals, first.total, second.total, 1e-2 * whole.weight)

    is_mean = _is_mean(whole, halves, tolerance)
    if not math.isclose(whole.weight, weights, rel_tol=WEIGHT_TOLERANCE):
        if same_total:
            return named("loss-weight", evidence)

        # Neither adds up. If the weight varies with the batch, the loss selects terms from it, such as the hardest.
        same_weight = whole.weight == first.weight == second.weight
        return named("mean-of-means" if same_weight else "batch-coupled", evidence)

    if same_total and not mismatched:
        return None

    if same_total:
        assert mismatched is not None
        return named("batch-coupled", f"{evidence}; these add up, but the gradient of {_some(mismatched)} does not")

    if is_mean:
        return named("mean-for-sum", evidence)

    # If every call adds a constant, such as a penalty on the weights, the two halves contain it twice and the whole
    # batch once. Then two calls on the first half also exceed one call on the doubled half by this constant.
    twice = measure_doubled(False)
    constant = totals - whole.total
    if tolerance.explains(2 * first.total - twice.total - constant, constant, *numbers):
        return named("penalty", f"{evidence}; every call adds {constant:.4g}, whatever its samples")

    uneven = measure_doubled(True)
    if _is_reweighted(whole, halves, uneven, tolerance):
        return named("loss-weight", f"{evidence}; each total is a mean over something else, times the weight")

    # Such a mean without the factor, as Hugging Face's .loss beside the number of rows.
    whole, *halves, uneven = (replace(part, total=part.total * part.weight) for part in (whole, *halves, uneven))
    if _is_reweighted(whole, halves, uneven, tolerance):
        return named("loss-weight", f"{evidence}; each total is a mean over something that the weight does not count")

    return named("batch-coupled", evidence)


def _is_mean(whole: Measurement, halves: Sequence[Measurement], tolerance: Tolerance) -> bool:
    """Return whether the total of the whole batch is the weighted mean of the totals of its halves."""
    mean = sum(half.total * half.weight for half in halves) / whole.weight
    return tolerance.same(whole.total, mean, *(half.total for half in halves))


def _is_reweighted(
    whole: Measurement, halves: Sequence[Measurement], uneven: Measurement, tolerance: Tolerance
) -> bool:
    """Return whether the loss is its weight times a mean over something that the weight does not count.

    Such a loss averages over some unknown count (tokens, say). The means of the whole and of its halves give the ratio
    of the halves' counts, and this ratio predicts the mean of `uneven`, which holds the first half twice. If the
    prediction fails, the samples influence each other's loss instead.
    """
    if not (uneven.weight and all(half.weight for half in halves)):
        return False

    # Means of the halves and of the whole batch, by the weights that the loss returned.
    first, second = (half.total / half.weight for half in halves)
    mean = whole.total / whole.weight
    if tolerance.same(first, mean) or not min(first, second) <= mean <= max(first, second):
        return False

    # If the ratio is almost that of the weights, the loss may depend slightly on the whole batch instead, as a
    # load-balancing loss of experts does. The halves are sorted by size, so another count has another ratio.
    ratio = (mean - second) / (first - mean)
    if math.isclose(ratio, halves[0].weight / halves[1].weight, rel_tol=SAME_RATIO):
        return False

    # The counts are in this ratio, so this is the mean of the first half twice and the second once, by count and by
    # weight.
    expected = (2 * ratio * first + second) / (2 * ratio + 1)
    by_weight = (2 * first * halves[0].weight + second * halves[1].weight) / uneven.weight
    remainder = uneven.total / uneven.weight - expected
    return tolerance.explains(remainder, by_weight - expected, first, second)


def metrics_like_means(whole: Measurement, halves: Sequence[Measurement], tolerance: Tolerance) -> dict[str, str]:
    """Return the metrics that lie between those of the halves and are not their sum, by name, with the evidence.

    A mean does, and so does the largest value. A sum over samples never does.
    """
    found = {}
    for name in whole.metrics.keys() & halves[0].metrics.keys() & halves[1].metrics.keys():
        value, first, second = (measured.metrics[name] for measured in (whole, *halves))
        if not all(map(math.isfinite, (value, first, second))):
            continue

        # Values of size 1 may cancel and leave only their rounding errors, as in the total.
        if tolerance.same(value, first + second, first, second, 1e-2 * whole.weight):
            continue

        # A count may differ by one where rounding decides, as it may for an argmax.
        is_count = all(number.is_integer() for number in (value, first, second))
        if is_count and abs(value - first - second) <= 1:
            continue

        slack = tolerance.total * max(abs(first), abs(second))
        if min(first, second) - slack <= value <= max(first, second) + slack:
            found[name] = f"{value:.4g} on a few samples, {first:.4g} and {second:.4g} on their halves"

    return found


def same_metrics(a: Measurement, b: Measurement, tolerance: Tolerance) -> set[str]:
    """Return the names of the metrics that are the same in two calls with the same samples."""
    return {name for name in a.metrics.keys() & b.metrics.keys() if tolerance.same(a.metrics[name], b.metrics[name])}


def judge_ranks(
    first: Measurement, alone: Measurement, again: Measurement, ranks: int, tolerance: Tolerance
) -> Cause | None:
    """Return the cause of a loss that differs as if on a single rank (`alone`), unless it is not repeatable at all."""
    if not same_loss(first, again, tolerance):
        return None

    return named("rank-in-loss", f"the same samples: {_pair(first)} on {ranks} ranks; as on one rank: {_pair(alone)}")


def same_loss(a: Measurement, b: Measurement, tolerance: Tolerance) -> bool:
    """Return whether two calls with the same samples returned the same loss. Infinite losses cannot be compared."""
    if not all(map(math.isfinite, (a.total, b.total, a.weight, b.weight))):
        return True

    return a.weight == b.weight and tolerance.same(a.total, b.total, 1e-2 * a.weight)


# ---- text ----


def _pair(measured: Measurement) -> str:
    """`total 12.5, weight 8`"""
    return f"total {measured.total:.5g}, weight {measured.weight:.5g}"


def _some(names: Sequence[str]) -> str:
    """`first, second and 3 more`"""
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + rest
