"""Which layouts are tried: worlds at one cut of the batch, cuts on one process, and the reference they are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.conflicts import STRATEGIES as EXACT
from lockstep.errors import UserError

WORLDS = (1, 2, 3, 4)
STRATEGIES = ("ddp", "zero1", "fsdp-grads", "fsdp", "hsdp")
STEPS = 4
NUDGES = 2  # runs whose weights are moved by one unit in the last place: how far rounding goes


@dataclass(frozen=True)
class Layout:
    """One run. What stands below the first three is for comparisons and probes, and is off in a plain one."""

    world: int = 1
    micro_batch: int | None = None  # None: as configured
    strategy: str | None = None  # None: as configured
    again: bool = False  # the same once more
    nudge: int = 0  # seed of the changes in the last place; 0: none
    quiet: bool = False  # the model in eval mode: no dropout, no batch statistics
    part: tuple[int, int] | None = None  # only the micro-batches of this rank of so many, on one process
    twice: bool = False  # every sample of a micro-batch two times

    @property
    def text(self) -> str:
        ranks = "1 process" if self.world == 1 else f"{self.world} processes {self.strategy or ''}".rstrip()
        extras = [", again" * self.again, ", nudged" * bool(self.nudge), ", eval mode" * self.quiet]
        return f"{ranks}, micro-batch {self.micro_batch}{''.join(extras)}"


@dataclass(frozen=True)
class Matrix:
    """What is run in any case."""

    reference: Layout
    again: Layout
    nudged: tuple[Layout, ...]
    worlds: tuple[Layout, ...]
    splits: tuple[Layout, ...]
    notes: tuple[str, ...] = ()

    @property
    def all(self) -> list[Layout]:
        return [self.reference, self.again, *self.nudged, *self.worlds, *self.splits]


@dataclass(frozen=True)
class VerifyOptions:
    """As typed; None: by default."""

    worlds: tuple[int, ...] | None = None
    strategies: tuple[str, ...] | None = None
    splits: tuple[int, ...] | None = None
    steps: int = STEPS
    exact: bool = False

    @staticmethod
    def typed(worlds: str | None, strategies: str | None, splits: str | None, steps: int, exact: bool) -> VerifyOptions:
        """From the command line."""
        counts = None if worlds is None else _numbers("--worlds", worlds)
        names = None if strategies is None else tuple(strategies.split(","))
        sizes = None if splits is None else _numbers("--splits", splits)
        return VerifyOptions(counts, names, sizes, steps, exact)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"{option} {text}", "no list of whole numbers", f"type {option} 1,2")
    return tuple(map(int, parts))


def check(wishes: VerifyOptions) -> None:
    """What can be known before anything runs."""
    unknown = [name for name in wishes.strategies or () if name not in STRATEGIES]
    if unknown:
        found = "whose ranks do not hold or gather every parameter under its own name"
        raise UserError(
            f"--strategies {','.join(wishes.strategies or ())}",
            f"{unknown[0]}, {found if unknown[0] in ('tp', 'pp') else 'which is none'}",
            f"type some of {','.join(STRATEGIES)}",
        )
    inexact = [name for name in wishes.strategies or () if wishes.exact and name not in EXACT]
    if inexact:
        raise UserError(
            f"--exact --strategies {','.join(wishes.strategies or ())}",
            f"{inexact[0]}, which adds in an order of its own",
            f"type some of {','.join(EXACT)}",
        )
    for option, counts in [("--worlds", wishes.worlds), ("--splits", wishes.splits), ("--steps", (wishes.steps,))]:
        if counts is not None and (not counts or min(counts) < 1):
            raise UserError(f"{option} {','.join(map(str, counts))}", "a count below 1", f"type {option} 1 or more")


def choose(wishes: VerifyOptions, facts: dict[str, Any]) -> Matrix:
    """`facts` are those of a first run on one process."""
    batch, strategy = facts["global_batch"], facts["strategy"]
    worlds = [world for world in wishes.worlds or WORLDS if world > 1]
    notes: list[str] = []
    fitting = [world for world in worlds if _fits(world, facts)]
    if left_out := sorted(set(worlds) - set(fitting)):
        text = f"a global batch of {batch} samples does not go into {_listed(left_out)} processes"
        if wishes.worlds is not None:
            raise UserError(f"--worlds {_listed(wishes.worlds)}", text, f"type --worlds {_listed([1, *fitting])}")
        notes.append(f"{text}: left out")
    micro = _cut(facts, max(fitting, default=1), wishes)
    reference = Layout(1, micro, strategy)
    ways = wishes.strategies or (strategy,)
    many = [Layout(world, micro, way) for world in fitting for way in ways if way != "hsdp" or world % 2 == 0]
    return Matrix(
        reference,
        replace(reference, again=True),
        tuple(replace(reference, nudge=seed) for seed in range(1, NUDGES + 1)),
        tuple(many),
        tuple(replace(reference, micro_batch=size) for size in _splits(facts, micro, wishes)),
        tuple(notes),
    )


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _fits(world: int, facts: dict[str, Any]) -> bool:
    batch = facts["global_batch"]
    return batch % world == 0 if facts["stream"] else batch >= world


def _cut(facts: dict[str, Any], most: int, wishes: VerifyOptions) -> int:
    """The micro-batch of the reference and of all worlds: the user's own, if there are enough of them."""
    batch = facts["global_batch"]
    worlds = [world for world in wishes.worlds or WORLDS if _fits(world, facts)]

    asked, even = facts["micro_batch_asked"] or batch, batch // most
    if facts["stream"]:  # every rank takes whole micro-batches
        fitting = (size for size in range(min(asked, even), 0, -1) if all(batch // w % size == 0 for w in worlds))
        return next(fitting)
    return asked if -(-batch // asked) >= most else even


def _splits(facts: dict[str, Any], micro: int, wishes: VerifyOptions) -> list[int]:
    """Other cuts of the same batch, not larger than the user allows: the whole, and one that leaves a ragged rest."""
    batch = facts["global_batch"]
    if wishes.splits is not None:
        large = [size for size in wishes.splits if size > batch]
        if large:
            raise UserError(
                f"--splits {_listed(wishes.splits)}",
                f"micro-batches of {large[0]} samples in a global batch of {batch}",
                f"type --splits {batch} or less",
            )
        return [size for size in wishes.splits if size != micro]
    most = facts["micro_batch_asked"] or batch
    sizes = dict.fromkeys([most, most - most // 3, most // 2, 1])
    usable = [size for size in sizes if size >= 1 and size != micro]
    if facts["stream"]:
        usable = [size for size in usable if batch % size == 0]
    return usable[:2]
