"""Decide what to compile, from measured facts. A pure function: every rank has the same facts and so decides alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What may be compiled: the loss together with the model, the model alone, or each of its repeated blocks.
LOSS, MODEL, BLOCKS = "the loss with the model", "the model", "the blocks"

# Estimates for a model that this machine has not compiled yet. Speed-ups are those of a step on a GPU.
SPEEDUPS = {LOSS: 1.5, MODEL: 1.35, BLOCKS: 1.3}
START_S = 6.0  # seconds to load the compiler and start its workers
COLD_S = 6.0  # seconds more if nothing has been compiled on this machine before
LAYER_S = 0.25  # seconds for one layer, forward and backward
REPEATED_S = 0.05  # seconds for a layer of a further block, whose kernels are found in torch's cache
BLOCK_S = 0.5  # seconds to trace one more block by itself
DYNAMIC = 2.0  # with dynamic sizes it takes this many times as long

# The expected saving must be this many times the cost. If a model gains only 1.1, or compiling takes half as long again
# as estimated, the run then takes at most a tenth longer than without. A measured record is trusted more.
ESTIMATE_MARGIN = 1.7
RECORD_MARGIN = 1.1


@dataclass(frozen=True)
class Record:
    """What compiling gained and cost in an earlier run on this machine."""

    cost_s: float
    speedup: float


@dataclass(frozen=True)
class Facts:
    """What is known about a run when it decides."""

    steps_left: int
    step_s: float  # seconds of a step without compiled code, on the slowest rank
    sizes_vary: bool  # whether batches have different sizes
    layers: int  # modules with parameters of their own, in the whole model
    blocks: int = 0  # repeated blocks
    block_layers: int = 0  # those modules, in one block of each class
    all_block_layers: int = 0  # and in all blocks together
    cold: bool = False  # nothing has been compiled on this machine before
    possible: tuple[str, ...] = (LOSS, MODEL, BLOCKS)
    records: Mapping[str, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    targets: tuple[str, ...]  # to try in this order; none: the run stays eager
    reason: str


def decide(facts: Facts) -> Decision:
    """Return what to compile: the targets that pay, the best one first."""
    eager_s = facts.steps_left * facts.step_s
    left = f"{facts.steps_left} steps of {facts.step_s * 1e3:.3g} ms are left"

    # (seconds with compiled code, target) of everything that pays.
    paying = sorted(
        (cost_s + eager_s / speedup, target)
        for target in preferred(facts)
        for cost_s, speedup, margin in [expected(facts, target)]
        if eager_s * (1 - 1 / speedup) > margin * cost_s
    )
    if paying:
        seconds, target = paying[0]
        return Decision(
            tuple(target for _, target in paying),
            f"{left}: {eager_s:.0f} s without compiling, about {seconds:.0f} s with {target} compiled",
        )

    cost_s, speedup, _ = expected(facts, preferred(facts)[0])
    gain_s = max(0.0, eager_s * (1 - 1 / speedup))
    return Decision((), f"it would not pay: {left}, of which it would save about {gain_s:.0f} s for {cost_s:.0f} s")


def preferred(facts: Facts) -> list[str]:
    """Return the possible targets, the preferred one first."""
    order = [target for target in (LOSS, MODEL, BLOCKS) if target in facts.possible]
    if facts.blocks < 2 and BLOCKS in order:
        order.remove(BLOCKS)

    # With dynamic sizes a whole model takes minutes to compile, and its blocks share the code of one.
    return [BLOCKS] if facts.sizes_vary and BLOCKS in order else order


def expected(facts: Facts, target: str) -> tuple[float, float, float]:
    """Return the expected cost in seconds, the expected speed-up, and how much of a margin they need."""
    record = facts.records.get(target)
    if record:
        return record.cost_s, record.speedup, RECORD_MARGIN

    # Blocks of one class share their kernels, so further ones cost little.
    repeated = facts.all_block_layers - facts.block_layers
    if target == BLOCKS:
        own_s = LAYER_S * facts.block_layers + BLOCK_S * facts.blocks
    else:
        own_s = LAYER_S * (facts.layers - repeated) + REPEATED_S * repeated

    cost_s = START_S + COLD_S * facts.cold + own_s * (DYNAMIC if facts.sizes_vary else 1.0)
    return cost_s, SPEEDUPS[target], ESTIMATE_MARGIN
