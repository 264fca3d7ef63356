"""Decide whether compiling pays. It is a pure function of facts that all ranks share, so they decide alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lockstep.parallel.compiled.targets import BLOCKS, LOSS, MODEL

# Estimates for a model that this machine has not compiled yet. Speed-ups are those of a step on a GPU, if its kernels
# were not measured. If they were, this part of the time that they could save is saved (see `kernel_times.py`).
SPEEDUPS = {LOSS: 1.5, MODEL: 1.35, BLOCKS: 1.3}
SAVED = {LOSS: 1.0, MODEL: 0.85, BLOCKS: 0.5}

# A cost that was measured on this machine replaces these. They come from one machine, the 16 cores beside an H200, with
# torch 2.11: LAYER_S from eight public models (docs/LOG.md, "2026-11-18: what compiling saves, known before"), the
# others are rough.
START_S = 3.0  # seconds to load the compiler and start its workers
COLD_S = 3.0  # seconds more if nothing has been compiled on this machine before
LAYER_S = 0.3  # seconds for one layer, forward and backward; the blocks of a model as a whole share nothing
BLOCK_S = 0.5  # seconds to trace one more block by itself
# The least seconds for one operation: a layer that is called in a loop is compiled once for each call. A loop of 50
# calls took 0.034 s for each operation, on a CPU. For the models above LAYER_S gives more.
OPERATION_S = 0.02
DYNAMIC = 2.0  # compiling with dynamic sizes takes this many times as long

# Steps that are not timed, and steps that are. With dynamic sizes kernels are tuned for each size, and steps differ.
STEPS = 2, 3
STEPS_VARYING = 12, 12
SLOWER = 1.02  # compiled steps that take longer than this many times an eager one are given up

# A target that was never measured here may take at most this part of the time that is left: if it cannot be compiled,
# takes far longer than estimated or gains nothing, the run has lost no more. With SLOWER that is a tenth.
MOST_LOST = 0.08
# Set aside from it, in eager steps: what comparing takes, and what each timed step may lose if it is slower.
COMPARED, LOST_IN_STEP = 5, 0.5

# If the kernels of a step show what compiling saves, more may be risked: this part of the saving, and of the time that
# is left. A model that cannot be compiled mostly fails while torch traces it, in the first seconds.
WORTH, MOST_RISKED = 0.75, 0.4

# Compiling may cost this many times what was measured or expected, and must save as much.
MARGIN = 1.25
# A compilation that did not end takes at least this many times as long as it was given.
UNFINISHED = 2.0


@dataclass(frozen=True)
class Payoff:
    """The costs and gains of compiling. `measured`: in a run on this machine; otherwise it is an estimate."""

    cost_s: float
    speedup: float
    measured: bool = True
    cold_cost_s: float | None = None  # measured in a run that found nothing in torch's cache


@dataclass(frozen=True)
class Facts:
    """What a run knows when it decides."""

    # The run.
    steps_left: int
    step_s: float  # seconds of a step without compiled code, on the slowest rank
    sizes_vary: bool  # whether batches have different sizes

    # The model.
    layers: int  # modules with parameters of their own, in the whole model
    blocks: int = 0  # repeated blocks
    block_layers: int = 0  # those modules, in one block of each class
    operations: int = 0  # differentiable operations of one call

    # The kernels of a step: the seconds that compiled code would save of them. None: they were not measured.
    saving_s: float | None = None

    # The machine, and what was tried on it.
    cold: bool = False  # nothing has been compiled on this machine before
    possible: tuple[str, ...] = (LOSS, MODEL, BLOCKS)
    records: Mapping[str, Payoff] = field(default_factory=dict)  # records of earlier runs
    spent_s: float = 0.0  # seconds that compiling has taken in this run

    @property
    def eager_s(self) -> float:
        """Seconds of the steps that are left, without compiled code."""
        return self.steps_left * self.step_s

    @property
    def aside_s(self) -> float:
        """Seconds that are set aside: for what comparing and timing may cost, and for an earlier try."""
        timed = sum(STEPS_VARYING if self.sizes_vary else STEPS)
        return (COMPARED + LOST_IN_STEP * timed) * self.step_s + self.spent_s

    @property
    def most_s(self) -> float:
        """The most seconds that compiling may take if it was never measured."""
        return max(0.0, MOST_LOST * self.eager_s - self.aside_s)

    def saved_s(self, payoff: Payoff) -> float:
        """Return the seconds that compiled code saves in the steps that are left, without its cost."""
        return max(0.0, self.eager_s * (1 - 1 / payoff.speedup))

    def worth_s(self, payoff: Payoff) -> float:
        """Return how long compiling may take if the kernels of a step have shown what it saves."""
        return max(0.0, min(WORTH * self.saved_s(payoff), MOST_RISKED * self.eager_s) - self.aside_s)


@dataclass(frozen=True)
class Decision:
    targets: tuple[str, ...]  # targets to try in this order; none: the run stays eager
    reason: str
    limit_s: float = 0.0  # seconds after which compiling is given up


@dataclass
class Candidates:
    """The targets of one decision, which are tried in turn, and what was wrong with those that were tried."""

    left: list[str] | None = None  # None: not decided, see `CompileFacts.preferred`
    limit_s: float = inf  # seconds for all tries
    problems: dict[str, str] = field(default_factory=dict)
    cost_s: float = 0.0  # seconds of all tries

    @property
    def why(self) -> str:
        """Why nothing better is compiled, for the log; empty if the first target worked."""
        return "; ".join(f"not {name}: {problem}" for name, problem in self.problems.items())


def decide(facts: Facts) -> Decision:
    """Return what to compile: the targets that pay, the best one first."""
    eager_s = facts.eager_s  # the yardstick: the rest of the run without compiling
    left = f"{facts.steps_left} steps of {facts.step_s * 1e3:.3g} ms are left"

    # What each target costs and gains, and how long the run takes with those that pay.
    possible = preferred(facts.possible, facts.blocks, facts.sizes_vary)
    payoffs = {target: expected(facts, target) for target in possible}
    paying = {target: payoff for target, payoff in payoffs.items() if pays(facts, payoff)}
    seconds = {target: payoff.cost_s + eager_s / payoff.speedup for target, payoff in paying.items()}
    targets = tuple(sorted(seconds, key=lambda target: seconds[target]))

    if not targets:
        return Decision((), _why_not(facts, next(iter(payoffs.values())), left))

    best = targets[0]
    with_best = f"about {seconds[best]:.0f} s with {best} compiled"
    reason = f"{left}: {eager_s:.0f} s without compiling, {with_best}"

    # A target that was compiled here before may take as long as it did then, and a little more. So may one whose saving
    # the kernels have shown: to give it up shortly before its end would lose all.
    limits = [facts.most_s]
    for payoff in paying.values():
        if payoff.measured or facts.saving_s is not None:
            limits.append(MARGIN * payoff.cost_s)
        if not payoff.measured and facts.saving_s is not None:
            limits.append(facts.worth_s(payoff))

    return Decision(targets, reason, limit_s=max(limits))


def _why_not(facts: Facts, first: Payoff, left: str) -> str:
    """Explain why nothing pays: why the preferred target does not."""
    gain_s = facts.saved_s(first)
    reason = f"it would not pay: {left}, of which it would save about {gain_s:.0f} s for {first.cost_s:.0f} s"

    # It would pay if the estimate were right, but too much is at stake if it is not.
    if gain_s > first.cost_s:
        most_s = facts.most_s if facts.saving_s is None else max(facts.most_s, facts.worth_s(first))
        reason += f"; a first try may take {most_s:.0f} s of them"

    return reason


def kernels_could_decide(facts: Facts) -> bool:
    """Return whether to measure the kernels of a step: nothing pays by the facts so far, and they might change that."""
    if facts.saving_s is not None or decide(facts).targets:
        return False

    # At best, kernels save so much that MOST_RISKED is the limit.
    payoffs = [expected(facts, target) for target in preferred(facts.possible, facts.blocks, facts.sizes_vary)]
    most_s = MOST_RISKED * facts.eager_s - facts.aside_s
    return any(not payoff.measured and payoff.cost_s < most_s for payoff in payoffs)


def preferred(possible: Sequence[str], blocks: int, sizes_vary: bool) -> list[str]:
    """Return the possible targets for a model with this many repeated blocks, the preferred one first."""
    # A single block is hardly less than the model.
    if blocks < 2:
        return [target for target in possible if target != BLOCKS]

    # With dynamic sizes a whole model takes minutes to compile, and its blocks share the code of one.
    if sizes_vary and BLOCKS in possible:
        return [BLOCKS]

    return list(possible)


def expected(facts: Facts, target: str) -> Payoff:
    """Return what was measured on this machine, or else an estimate."""
    record = facts.records.get(target)
    if record and record.measured:
        measured_s = record.cold_cost_s if facts.cold else record.cost_s
        if measured_s is not None:
            return replace(record, cost_s=measured_s)

    # Blocks that are compiled by themselves share the code of the first one of their class.
    if target == BLOCKS:
        of_one = facts.operations / max(1, facts.blocks)
        own_s = max(LAYER_S * facts.block_layers, OPERATION_S * of_one) + BLOCK_S * facts.blocks
    else:
        own_s = max(LAYER_S * facts.layers, OPERATION_S * facts.operations)

    # Without a record of an earlier run, the estimate is all that there is.
    cost_s = START_S + COLD_S * facts.cold + own_s * (DYNAMIC if facts.sizes_vary else 1.0)
    if not record:
        return Payoff(cost_s, _estimated_speedup(facts, target), measured=False)

    # There is a record that does not hold: it was measured with files of torch's that are gone, or the try was given
    # up. It still shows how long it takes at least.
    at_least_s = record.cost_s if record.measured else UNFINISHED * record.cost_s
    return Payoff(max(cost_s, at_least_s), record.speedup, measured=False)


def _estimated_speedup(facts: Facts, target: str) -> float:
    """Return the speed-up of a target that was never measured here."""
    if facts.saving_s is None:
        return SPEEDUPS[target]

    return facts.step_s / (facts.step_s - SAVED[target] * facts.saving_s)


def pays(facts: Facts, payoff: Payoff) -> bool:
    """Return whether a target is worth its cost. An estimated cost may be wrong, so it must also be small."""
    saving_s = facts.saved_s(payoff)
    if saving_s <= MARGIN * payoff.cost_s:
        return False
    if payoff.measured:
        return True

    # Either the risk is small, or the gain is known.
    return payoff.cost_s < facts.most_s or (facts.saving_s is not None and payoff.cost_s < facts.worth_s(payoff))
