"""Chooses the trials: several world sizes with one split of the batch, other splits on one process, a reference.

One of them is the reference: one process, with the micro-batches that all numbers of ranks have. A second run of it
shows what differs without any reason, and runs with weights that are changed in the last place show how far rounding
alone may spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.config.strategies import STRATEGIES, with_trait
from lockstep.errors import UserError, plural

# Three divides few batches, so that ranks get different numbers of micro-batches.
WORLDS = (1, 2, 3, 4)
STEPS = 4
NUDGES = 2  # runs whose weights are moved by one unit in the last place, to measure the effect of rounding


@dataclass(frozen=True)
class Trial:
    """A few steps of training in one layout; the fields after the first three are for comparisons and probes."""

    world: int = 1
    micro_batch: int | None = None  # None: as configured
    strategy: str | None = None  # None: as configured
    again: bool = False  # a repetition of the same trial
    nudge: int = 0  # seed of the changes in the last place; 0: none
    eval_mode: bool = False  # the model in eval mode: no dropout, no batch statistics
    part: tuple[int, int] | None = None  # (rank, world): only that rank's micro-batches, on one process
    twice: bool = False  # every sample twice in its micro-batch
    finds: bool = False  # with the check at the start of a run, whose result is recorded

    @property
    def text(self) -> str:
        ranks = plural(self.world, "process", f"processes {self.strategy or ''}".rstrip())
        flags = {"again": self.again, "nudged": self.nudge, "eval mode": self.eval_mode}
        return ", ".join([ranks, f"micro-batch {self.micro_batch}", *(word for word, on in flags.items() if on)])


@dataclass(frozen=True)
class TrialMatrix:
    """The trials that are always run."""

    reference: Trial
    again: Trial
    nudged: tuple[Trial, ...]
    worlds: tuple[Trial, ...]
    splits: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def one_each(self) -> bool:
        """Whether every rank has one micro-batch, so that its size follows the number of ranks."""
        return any(trial.micro_batch != self.reference.micro_batch for trial in self.worlds)


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command; None means the default."""

    worlds: tuple[int, ...] | None = None
    strategies: tuple[str, ...] | None = None
    splits: tuple[int, ...] | None = None
    steps: int = STEPS
    exact: bool = False

    @staticmethod
    def parse(worlds: str | None, strategies: str | None, splits: str | None, steps: int, exact: bool) -> VerifyOptions:
        """Return the options that were typed."""
        return VerifyOptions(
            worlds=None if worlds is None else _numbers("--worlds", worlds),
            strategies=None if strategies is None else tuple(strategies.split(",")),
            splits=None if splits is None else _numbers("--splits", splits),
            steps=steps,
            exact=exact,
        )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas. Raises a UserError."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"{option} {text} is not a list of whole numbers", "", f"use {option} 1,2")

    return tuple(map(int, parts))


def check(options: VerifyOptions) -> None:
    """Refuse options that can be known to be wrong before anything runs."""
    comparable = with_trait("comparable")
    exact = with_trait("exact")
    strategies = options.strategies or ()
    typed = f"--strategies {','.join(strategies)}"

    for name in strategies:
        if name not in STRATEGIES:
            raise UserError(f"{typed} has {name}, which is not a strategy", "", f"use some of {','.join(comparable)}")

        if name not in comparable:
            raise UserError(
                f"{typed} has {name}, which cannot be compared",
                "its ranks do not hold or gather every parameter under its own name",
                f"use some of {','.join(comparable)}",
            )

        if options.exact and name not in exact:
            raise UserError(
                f"--exact {typed} has {name}, which cannot be exact",
                "it adds gradients in a different order",
                f"use some of {','.join(exact)}",
            )

    for option, counts in [("--worlds", options.worlds), ("--splits", options.splits), ("--steps", (options.steps,))]:
        if counts is not None and (not counts or min(counts) < 1):
            raise UserError(f"{option} {_as_typed(counts)} has a count below 1", "", f"use {option} 1 or more")


def choose(options: VerifyOptions, facts: dict[str, Any]) -> TrialMatrix:
    """Return the trials to run. `facts` comes from a first run on one process."""
    worlds, notes = _worlds(options, facts)

    # With one micro-batch size all worlds compute the same sums, and dropout draws the same masks.
    sizes = dict.fromkeys([1, *worlds], _micro_batch(facts, max(worlds, default=1), options))
    one_each = _has_one_each(facts)
    if one_each:
        sizes = {world: -(-facts["global_batch"] // world) for world in sizes}
        notes.append(one_each)

    reference = Trial(1, sizes[1], facts["strategy"])

    # Replica groups of equal size need an even number of ranks.
    many = [
        Trial(world, sizes[world], name)
        for world in worlds
        for name in options.strategies or (facts["strategy"],)
        if world % 2 == 0 or not STRATEGIES[name].replica_groups
    ]

    return TrialMatrix(
        reference,
        again=replace(reference, again=True),
        nudged=tuple(replace(reference, nudge=seed) for seed in range(1, NUDGES + 1)),
        worlds=tuple(many),
        splits=tuple(replace(reference, micro_batch=size) for size in _splits(facts, sizes[1], options)),
        notes=tuple(notes),
    )


def _as_typed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _fits(world: int, facts: dict[str, Any]) -> bool:
    """Return whether every rank has samples in every step; in a stream each needs the same number."""
    return facts["global_batch"] % world == 0 if facts["stream"] else facts["global_batch"] >= world


def _worlds(options: VerifyOptions, facts: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Return the world sizes above 1 that the batch allows, and a note about the others."""
    # A batch must give every rank at least one sample.
    worlds = [world for world in options.worlds or WORLDS if world > 1]
    fitting = [world for world in worlds if _fits(world, facts)]
    left_out = sorted(set(worlds) - set(fitting))

    if not left_out:
        return fitting, []

    problem = (
        f"a global batch of {facts['global_batch']} samples cannot be divided among {_as_typed(left_out)} processes"
    )
    # World sizes that were asked for are not left out silently.
    if options.worlds is not None:
        raise UserError(
            f"--worlds {_as_typed(options.worlds)} cannot be used: {problem}",
            "",
            f"use --worlds {_as_typed([1, *fitting])}",
        )

    return fitting, [f"{problem}: left out"]


def _has_one_each(facts: dict[str, Any]) -> str:
    """Return why every rank must have one micro-batch, as a note for the report; "" if it may have several.

    A loss over the global batch cannot be computed otherwise. One over the micro-batch follows the number of ranks,
    unless the user has set micro_batch, and that must show.
    """
    if facts["gathers"]:
        return "the loss calls run.all_gather: every rank has one micro-batch, and other splits are not compared"

    if "batch-coupled" in facts["accepted"] and facts["micro_batch_asked"] is None:
        return "checks.loss=batch-coupled without micro_batch: every rank has one micro-batch, as in training"

    return ""


def _micro_batch(facts: dict[str, Any], most: int, options: VerifyOptions) -> int:
    """Return the size for the reference and all worlds: the user's own, if it gives every rank a micro-batch."""
    batch = facts["global_batch"]

    asked = facts["micro_batch_asked"] or batch
    even = batch // most
    if not facts["stream"]:
        return asked if -(-batch // asked) >= most else even

    # Ranks of a stream take full micro-batches, so the size must divide a rank's share in every world.
    shares = [batch // world for world in options.worlds or WORLDS if _fits(world, facts)]
    return next(size for size in range(min(asked, even), 0, -1) if all(share % size == 0 for share in shares))


def _splits(facts: dict[str, Any], micro_batch: int, options: VerifyOptions) -> list[int]:
    """Return other micro-batch sizes: those asked for, or two that are no larger than the user's micro_batch."""
    batch = facts["global_batch"]
    if facts["gathers"] and options.splits is None:
        return []

    if options.splits is not None:
        large = [size for size in options.splits if size > batch]
        if large:
            raise UserError(
                f"--splits {_as_typed(options.splits)} has {large[0]}, more than the global batch of {batch} samples",
                "",
                f"use --splits {batch} or less",
            )

        return [size for size in options.splits if size != micro_batch]

    # The preferred size comes first: all at once, with a smaller last micro-batch, halves, single samples.
    most = facts["micro_batch_asked"] or batch
    sizes = dict.fromkeys([most, most - most // 3, most // 2, 1])
    usable = [size for size in sizes if size >= 1 and size != micro_batch]

    # Every micro-batch of a stream has one size.
    if facts["stream"]:
        usable = [size for size in usable if batch % size == 0]

    return usable[:2]
