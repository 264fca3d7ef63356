"""Weigh what compiling would cost against what it would gain, and remember what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.blocks import class_name, find_blocks
from lockstep.parallel.compiled import history
from lockstep.parallel.compiled.decision import (
    BLOCKS,
    LOSS,
    MODEL,
    SPEEDUPS,
    Decision,
    Facts,
    Payoff,
    decide,
    preferred,
)
from lockstep.parallel.compiled.shapes import Dims
from lockstep.parallel.compiled.side_effects import Function
from lockstep.parallel.compiled.targets import compiles_itself
from lockstep.parallel.compiled.watch import BatchWatch
from lockstep.parallel.driver import Driver


class Judge:
    """Gathers the facts for the rule in decision.py: from the model, this run, and earlier runs on this machine."""

    def __init__(self, driver: Driver, config: RunConfig):
        self._model = driver.model
        self._runtime = driver.runtime
        self._ddp = config.ddp
        self._own_compile = compiles_itself(driver.model)  # asked before any code of ours is on the model
        self._key = ""  # of this model's records on this machine; none before a decision
        self.eager_s = 0.0  # seconds of a step without compiled code, on the slowest rank

    def preferred(self, function: Function | None, varying: Dims) -> Sequence[str]:
        """Return what to compile, whether it pays or not."""
        return preferred(self._facts(function, varying))

    def decide(self, steps_left: int, spent_s: float, function: Function | None, watch: BatchWatch) -> Decision:
        """Decide by `eager_s`, and by what earlier runs with batches of these sizes have measured. Collective.

        spent_s: seconds that compiling has taken in this run
        """
        # Only rank 0 reads the file: the caches of two machines differ, and all ranks must decide by the same facts.
        self._key = history.signature(self._model, self._runtime.device, [watch.sizes.describe(), bool(function)])
        cold, records = self._runtime.collectives.run_on_rank0(self._read_history)

        facts = replace(
            self._facts(function, watch.varying),
            steps_left=steps_left,
            cold=cold,
            records={target: Payoff(**values) for target, values in records.items()},
            spent_s=spent_s,
        )
        return decide(facts)

    def _read_history(self) -> tuple[bool, dict[str, dict[str, float]]]:
        """Return whether torch has compiled nothing on this machine, and the fields of the records by target."""
        records = {target: asdict(payoff) for target, payoff in history.read(self._key).items()}
        return history.is_cold(), records

    def remember(self, target: str, payoff: Payoff) -> None:
        """Write down for later runs what a target cost and gained, if this run has decided by measurements."""
        if self._key and self._runtime.is_main:
            history.write(self._key, target, payoff)

    def remember_unfinished(self, target: str, seconds: float) -> None:
        """Note how long compiling has taken so far: it may never end, and then the next run should know."""
        self.remember(target, Payoff(seconds, SPEEDUPS[target], measured=False))

    def _facts(self, function: Function | None, varying: Dims) -> Facts:
        """Return what the model and this run say."""
        blocks = find_blocks(self._model)
        one_of_each = {class_name(block): block for block in blocks}.values()

        # Without what only `decide` knows: the steps that are left, and what earlier runs measured.
        return Facts(
            steps_left=0,
            step_s=self.eager_s,
            sizes_vary=bool(varying),
            layers=_count_layers(self._model),
            blocks=len(blocks),
            block_layers=sum(map(_count_layers, one_of_each)),
            all_block_layers=sum(map(_count_layers, blocks)),
            possible=self._possible(function),
        )

    def _possible(self, function: Function | None) -> tuple[str, ...]:
        """Return the targets that can be compiled at all."""
        # The model says itself which of its parts to compile.
        if self._own_compile:
            return (MODEL,)

        # DDP would look for the parameters in a result of the compiled loss, and not find them.
        hidden = self._ddp.static_graph or self._ddp.find_unused_parameters
        if function and not hidden:
            return (LOSS, MODEL, BLOCKS)
        return (MODEL, BLOCKS)


def _count_layers(model: nn.Module) -> int:
    """Return how many modules have parameters of their own."""
    return sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
