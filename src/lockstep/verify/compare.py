"""Compares two records: where they differ, and whether by more than rounding alone changes the same model.

The yardstick is measured. The reference is trained again with every weight moved, before every step, by up to one unit
in the last place, because rounding errors act like such changes. A tensor of another trial may be `FACTOR` times as far
from the reference as these nudged runs are, or `FACTOR` units in the last place of its largest element, if that is
more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.verify.record import Tensors, TrialRecord

# Leaves room for what two nudged runs do not show: other orders of addition, and rare large rounding errors. A wrong
# factor of 1.0001 on one gradient is still found.
FACTOR = 32.0
EPS = float(np.finfo(np.float32).eps)  # sums over micro-batches and ranks are float32, whatever the compute format

# What is compared, in the order in which a step computes it -> when it is compared.
KINDS = {
    "initial weights": "before the first step",
    "loss weight": "of step {step}",
    "loss": "of step {step}",
    "metric": "of step {step}",
    "gradient": "of step {step}",
    "parameter": "after step {step}",
    "buffer": "after step {step}",
    "state": "after step {step}",
    "number of steps": "",
}
ALWAYS = ("gradient", "parameter", "state")  # kinds in which a name of the reference must not be missing


@dataclass(frozen=True)
class Divergence:
    """A value that is further from the reference than rounding explains."""

    step: int  # its index; the number of steps if that differs
    kind: str
    name: str
    gap: float  # largest difference of an element
    allowed: float

    @property
    def steps_done(self) -> int:
        """The number of steps that are done when it shows: reports name a step by it, as the log does."""
        return self.step + (self.kind not in ("initial weights", "number of steps"))

    @property
    def text(self) -> str:
        if self.kind == "number of steps":
            return f"another number of steps: it ended after {self.steps_done}"

        thing = f"{self.kind} {self.name}".rstrip()
        when = KINDS[self.kind].format(step=self.steps_done)
        return f"{thing} {when} is off by {self.gap:.1e}; rounding explains {self.allowed:.1e}"


@dataclass
class Comparison:
    record: TrialRecord
    reference: TrialRecord
    identical: dict[str, bool] = field(default_factory=dict)  # gradients, parameters, losses
    errors: dict[str, float] = field(default_factory=dict)  # relative to the largest element, by the same names
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def bits(self) -> bool:
        return all(self.identical.values())

    @property
    def first(self) -> Divergence | None:
        """The first divergence; the largest one, if several come first."""
        kinds = list(KINDS)
        return min(
            self.divergences,
            # A BatchNorm's statistics say more than its counter, which diverges with them.
            key=lambda d: (d.step, kinds.index(d.kind), d.name.endswith("num_batches_tracked"), -d.gap / d.allowed),
            default=None,
        )


def compare(
    record: TrialRecord, reference: TrialRecord, nudged: Sequence[TrialRecord], kinds: Iterable[str] = KINDS
) -> Comparison:
    """Compare a record with the reference in all `kinds`; `nudged` are the runs that measure rounding."""
    result = Comparison(record, reference)
    steps = min([record.steps, reference.steps, *(other.steps for other in nudged)])

    # The columns of the table: the largest error, relative to the largest element.
    for columns, kind in [("gradients", "gradient"), ("parameters", "parameter"), ("losses", "loss")]:
        pairs = [pair for step in range(steps) for pair in _pairs(kind, step, record, reference)]
        result.identical[columns] = all(same_bits(a, b) for _, a, b in pairs)

        size = max((_size(b) for _, _, b in pairs), default=0.0)
        result.errors[columns] = max((gap(a, b) for _, a, b in pairs), default=0.0) / (size or 1.0)

    # The verdict: each tensor of each step is judged by itself.
    for step in range(steps):
        for kind in kinds:
            if kind != "number of steps" and (step == 0 or kind != "initial weights"):
                result.divergences += _judge(kind, step, record, reference, nudged)

    if record.steps != reference.steps:
        result.divergences.append(Divergence(steps, "number of steps", "", abs(record.steps - reference.steps), 0.5))

    return result


def _judge(
    kind: str, step: int, record: TrialRecord, reference: TrialRecord, nudged: Sequence[TrialRecord]
) -> Iterator[Divergence]:
    # How far rounding alone moves each value.
    noise: dict[str, float] = {}
    for nudged_record in nudged:
        for name, a, b in _pairs(kind, step, nudged_record, reference):
            noise[name] = max(noise.get(name, 0.0), gap(a, b))

    for name, a, b in _pairs(kind, step, record, reference):
        allowed = FACTOR * max(noise.get(name, 0.0), EPS * _size(b))
        if not gap(a, b) <= allowed:  # true for nan as well
            yield Divergence(step, kind, name, gap(a, b), allowed or math.ulp(0.0))


def _pairs(
    kind: str, step: int, record: TrialRecord, reference: TrialRecord
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return (name, value, value in the reference) of everything of one kind in one step."""
    values = _of(kind, step, record)
    missing = np.empty(0)  # no value has its shape, so it diverges
    expected = _of(kind, step, reference).items()
    return [(name, values.get(name, missing), b) for name, b in expected if kind in ALWAYS or name in values]


def _of(kind: str, step: int, record: TrialRecord) -> Tensors:
    """Return the values of one kind in one step. Snapshot `step + 1` was taken after step `step`."""
    match kind:
        case "initial weights":
            return record.tensors("parameters", 0)

        case "gradient":
            return record.tensors("gradients", step)

        case "parameter" | "buffer":
            return record.tensors(f"{kind}s", step + 1)

        case "state":
            return {name: t for name, t in record.tensors("extra", step + 1).items() if name.startswith("state.")}

        case "metric":
            return {name: np.array(value) for name, value in record.metrics(step).items()}

        case _:
            return {"": np.array(record.loss(step) if kind == "loss" else record.weight(step))}


def gap(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of an element, or infinity if the shapes differ."""
    if a.shape != b.shape:
        return math.inf

    # A nan equals a nan: the engine decides what to do about nan, not this comparison.
    if not a.size or np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
        return 0.0

    with np.errstate(invalid="ignore"):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))

    return float(np.nan_to_num(difference, nan=math.inf).max())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have the same bits; 0 and -0 differ, all nan are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False

    if a.dtype.kind != "f":
        return np.array_equal(a, b)

    # Bytes would tell one nan from another, so values and signs are compared.
    same = (a == b) & (np.signbit(a) == np.signbit(b))
    return bool(np.all(same | (np.isnan(a) & np.isnan(b))))


def first_chaotic_step(reference: TrialRecord, nudged: Sequence[TrialRecord]) -> int | None:
    """Return the first step in which rounding may change the largest gradient by its own size, or None.

    From that step on, a comparison shows nothing.
    """
    # Chaos: the difference that rounding makes has grown to the size of the gradient.
    for step in range(min(record.steps for record in (reference, *nudged))):
        pairs = [pair for record in nudged for pair in _pairs("gradient", step, record, reference)]
        noise = max((gap(a, b) for _, a, b in pairs), default=0.0)

        if noise and FACTOR * noise >= max(_size(b) for _, _, b in pairs):
            return step

    return None


def _size(tensor: np.ndarray) -> float:
    return float(np.abs(tensor.astype(np.float64)).max(initial=0.0))
