"""Two records -> where and by how much they differ, held against what rounding alone does to this very model.

The yardstick is measured. The reference is trained again with every weight moved, before every step, by up to one unit
in the last place: rounding errors act like such changes. A tensor of another layout may be `FACTOR` times as far from
the reference as the nudged runs are, or `FACTOR` units in the last place of its largest element, if that is more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.verify.record import Record, Tensors

FACTOR = 32.0
EPS = float(np.finfo(np.float32).eps)  # sums over micro-batches and ranks are made in float32, whatever is computed in
# In the order in which one step makes them.
KINDS = (
    "initial weights",
    "loss weight",
    "loss",
    "metric",
    "gradient",
    "parameter",
    "buffer",
    "state",
    "number of steps",
)
ALWAYS = ("gradient", "parameter", "state")  # what is there in the reference must be there


@dataclass(frozen=True)
class Divergence:
    """Something that is further from the reference than rounding explains."""

    step: int
    kind: str
    name: str
    gap: float  # largest difference of an element
    allowed: float

    @property
    def text(self) -> str:
        thing = f"{self.kind} {self.name}".rstrip()
        when = "after" if self.kind in ("parameter", "buffer", "state") else "of"
        if self.kind == KINDS[-1]:
            return f"another number of steps: it ended after {self.step}"
        where = "before the first step" if self.kind == "initial weights" else f"{when} step {self.step}"
        return f"{thing} {where} is off by {self.gap:.1e}; rounding explains {self.allowed:.1e}"


@dataclass
class Comparison:
    """A record against the reference."""

    record: Record
    identical: dict[str, bool] = field(default_factory=dict)  # gradients, parameters, losses
    errors: dict[str, float] = field(default_factory=dict)  # relative to the largest element, by the same names
    found: list[Divergence] = field(default_factory=list)

    @property
    def bits(self) -> bool:
        return all(self.identical.values())

    @property
    def first(self) -> Divergence | None:
        """Of the buffers of a BatchNorm, its statistics say more than its counter."""
        return min(
            self.found,
            key=lambda d: (d.step, KINDS.index(d.kind), d.name.endswith("num_batches_tracked"), -d.gap / d.allowed),
            default=None,
        )


def compare(record: Record, reference: Record, nudged: Sequence[Record], kinds: Sequence[str] = KINDS) -> Comparison:
    """`kinds`: what is judged. Errors and bits are of gradients, parameters and losses in any case."""
    result = Comparison(record)
    steps = min([record.steps, reference.steps, *(other.steps for other in nudged)])
    for columns, kind in [("gradients", "gradient"), ("parameters", "parameter"), ("losses", "loss")]:
        pairs = [pair for step in range(steps) for pair in _pairs(kind, step, record, reference)]
        result.identical[columns] = all(same_bits(a, b) for _, a, b in pairs)
        size = max((_size(b) for _, _, b in pairs), default=0.0)
        result.errors[columns] = max((gap(a, b) for _, a, b in pairs), default=0.0) / (size or 1.0)
    for step in range(steps):
        for kind in kinds[:-1]:
            if kind == "initial weights" and step:
                continue
            result.found += _judge(kind, step, record, reference, nudged)
    if record.steps != reference.steps:
        result.found.append(Divergence(steps, KINDS[-1], "", abs(record.steps - reference.steps), 0.5))
    return result


def _judge(kind: str, step: int, record: Record, reference: Record, nudged: Sequence[Record]) -> Iterator[Divergence]:
    noise: dict[str, float] = {}
    for other in nudged:
        for name, a, b in _pairs(kind, step, other, reference):
            noise[name] = max(noise.get(name, 0.0), gap(a, b))
    for name, a, b in _pairs(kind, step, record, reference):
        allowed = FACTOR * max(noise.get(name, 0.0), EPS * _size(b))
        if not gap(a, b) <= allowed:
            yield Divergence(step, kind, name, gap(a, b), allowed or math.ulp(0.0))


def _pairs(kind: str, step: int, record: Record, reference: Record) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, here, in the reference) of everything of one kind in one step."""
    both = [_of(kind, step, each) for each in (record, reference)]
    missing = np.empty(0)
    return [(name, both[0].get(name, missing), b) for name, b in both[1].items() if kind in ALWAYS or name in both[0]]


def _of(kind: str, step: int, record: Record) -> Tensors:
    if kind == "gradient":
        return record.gradients(step)
    if kind == "initial weights":
        return record.parameters(0)
    if kind == "parameter":
        return record.parameters(step + 1)
    if kind == "buffer":
        return record.buffers(step + 1)
    if kind == "state":
        return {name: t for name, t in record.kept(step + 1).items() if name.startswith("state.")}
    if kind == "metric":
        return {name: np.array(value) for name, value in record.metrics(step).items()}
    return {"": np.array(record.loss(step) if kind == "loss" else record.weight(step))}


def gap(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of an element; infinite if they cannot be compared."""
    if a.shape != b.shape:
        return math.inf
    if not a.size or np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
        return 0.0
    with np.errstate(invalid="ignore"):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(np.nan_to_num(difference, nan=math.inf).max())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """0 and -0 are told apart; which nan it is says nothing."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    alike = (a == b) & (np.signbit(a) == np.signbit(b))
    return bool(np.all(alike | (np.isnan(a) & np.isnan(b))))


def turned_over(reference: Record, nudged: Sequence[Record]) -> int | None:
    """The first step in which rounding may change the largest gradient by as much as it is: from there on nothing can
    be told. None: there is no such step."""
    for step in range(min(record.steps for record in (reference, *nudged))):
        pairs = [pair for other in nudged for pair in _pairs("gradient", step, other, reference)]
        noise = max((gap(a, b) for _, a, b in pairs), default=0.0)
        if noise and FACTOR * noise >= max(_size(b) for _, _, b in pairs):
            return step
    return None


def _size(tensor: np.ndarray) -> float:
    return float(np.abs(tensor.astype(np.float64)).max()) if tensor.size else 0.0
