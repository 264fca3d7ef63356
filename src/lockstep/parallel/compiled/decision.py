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

# Steps that are not timed, and steps that are. With dynamic sizes kernels are tuned for each size, and steps differ.
STEPS = 2, 3
STEPS_VARYING = 12, 12
SLOWER = 1.02  # compiled steps that take longer than this many times an eager one are given up

# A target that was never measured here may take at most this part of the time that is left: if it cannot be compiled,
# takes far longer than estimated or gains nothing, the run has lost no more. With SLOWER that is a tenth.
MOST_LOST = 0.08
# Set aside from it, in eager steps: what comparing takes, and what each timed step may lose if it is slower.
COMPARED, LOST_IN_STEP = 5, 0.5

# What was measured may cost this many times as much now, and the saving must be this many times the cost.
RECORD_MARGIN = 1.25
# A compilation that did not end takes at least this many times as long as it was given.
UNFINISHED = 2.0


@dataclass(frozen=True)
class Payoff:
    """What compiling costs and gains. `measured`: in a run on this machine; otherwise it is an estimate."""

    cost_s: float
    speedup: float
    measured: bool = True


@dataclass(frozen=True)
class Facts:
    """What is known about a run when it decides."""

    # The run.
    steps_left: int
    step_s: float  # seconds of a step without compiled code, on the slowest rank
    sizes_vary: bool  # whether batches have different sizes

    # The model.
    layers: int  # modules with parameters of their own, in the whole model
    blocks: int = 0  # repeated blocks
    block_layers: int = 0  # those modules, in one block of each class
    all_block_layers: int = 0  # and in all blocks together

    # The machine, and what was tried on it.
    cold: bool = False  # nothing has been compiled on this machine before
    possible: tuple[str, ...] = (LOSS, MODEL, BLOCKS)
    records: Mapping[str, Payoff] = field(default_factory=dict)  # of earlier runs
    spent_s: float = 0.0  # seconds that compiling has taken in this run

    @property
    def eager_s(self) -> float:
        """Seconds of the steps that are left, without compiled code."""
        return self.steps_left * self.step_s

    @property
    def most_s(self) -> float:
        """How long something that was never measured may take to compile."""
        # What comparing and measuring may cost is set aside, and so is what was spent on an earlier try.
        timed = sum(STEPS_VARYING if self.sizes_vary else STEPS)
        aside_s = (COMPARED + LOST_IN_STEP * timed) * self.step_s
        return max(0.0, MOST_LOST * self.eager_s - aside_s - self.spent_s)


@dataclass(frozen=True)
class Decision:
    targets: tuple[str, ...]  # to try in this order; none: the run stays eager
    reason: str
    limit_s: float = 0.0  # compiling is given up after so long


def decide(facts: Facts) -> Decision:
    """Return what to compile: the targets that pay, the best one first."""
    eager_s = facts.eager_s  # the yardstick: the rest of the run without compiling
    left = f"{facts.steps_left} steps of {facts.step_s * 1e3:.3g} ms are left"

    # What each target costs and gains, and how long the run takes with those that pay.
    payoffs = {target: expected(facts, target) for target in preferred(facts)}
    paying = {target: payoff for target, payoff in payoffs.items() if pays(facts, payoff)}
    seconds = {target: payoff.cost_s + eager_s / payoff.speedup for target, payoff in paying.items()}
    targets = tuple(sorted(seconds, key=lambda target: seconds[target]))

    if targets:
        best = targets[0]
        with_best = f"about {seconds[best]:.0f} s with {best} compiled"
        reason = f"{left}: {eager_s:.0f} s without compiling, {with_best}"

        # A target that was compiled here before may take as long as it did then, and a little more.
        known = [RECORD_MARGIN * payoff.cost_s for payoff in paying.values() if payoff.measured]
        return Decision(targets, reason, limit_s=max([facts.most_s, *known]))

    # Nothing pays. Explain it by the target that would be preferred.
    first = next(iter(payoffs.values()))
    gain_s = max(0.0, eager_s * (1 - 1 / first.speedup))
    reason = f"it would not pay: {left}, of which it would save about {gain_s:.0f} s for {first.cost_s:.0f} s"
    if gain_s > first.cost_s:
        # It would pay if the estimate were right, but too much is at stake if it is not.
        reason += f"; a first try may take {facts.most_s:.0f} s of them"

    return Decision((), reason)


def pays(facts: Facts, payoff: Payoff) -> bool:
    """Return whether a target is worth its cost. An estimate may be wrong, so it must also be small."""
    saving_s = facts.eager_s * (1 - 1 / payoff.speedup)
    if payoff.measured:
        return saving_s > RECORD_MARGIN * payoff.cost_s

    return payoff.cost_s < min(saving_s, facts.most_s)


def preferred(facts: Facts) -> list[str]:
    """Return the possible targets, the preferred one first."""
    order = [target for target in (LOSS, MODEL, BLOCKS) if target in facts.possible]

    # A single block is hardly less than the model.
    if facts.blocks < 2 and BLOCKS in order:
        order.remove(BLOCKS)

    # With dynamic sizes a whole model takes minutes to compile, and its blocks share the code of one.
    if facts.sizes_vary and BLOCKS in order:
        return [BLOCKS]
    return order


def expected(facts: Facts, target: str) -> Payoff:
    """Return what was measured on this machine, or else an estimate."""
    record = facts.records.get(target)
    if record and record.measured and not facts.cold:
        return record

    # Blocks of one class share their kernels, so further ones cost little.
    repeated = facts.all_block_layers - facts.block_layers
    if target == BLOCKS:
        own_s = LAYER_S * facts.block_layers + BLOCK_S * facts.blocks
    else:
        own_s = LAYER_S * (facts.layers - repeated) + REPEATED_S * repeated

    cost_s = START_S + COLD_S * facts.cold + own_s * (DYNAMIC if facts.sizes_vary else 1.0)
    if not record:
        return Payoff(cost_s, SPEEDUPS[target], measured=False)

    # torch's files are gone, or the last try was given up: the estimate was too low.
    at_least_s = record.cost_s if record.measured else UNFINISHED * record.cost_s
    return Payoff(max(cost_s, at_least_s), record.speedup, measured=False)
