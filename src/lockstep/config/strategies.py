"""The strategies by name, and what a configuration must know about each: the only place that compares their names.

How a strategy is applied to a model is said in `parallel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["ddp", "zero1", "fsdp-grads", "fsdp", "hsdp", "tp", "pp"]

STATE = ("parameters", "gradients", "optimizer")  # what a rank keeps in memory from step to step


@dataclass(frozen=True)
class StrategyRules:
    """Which settings go with a strategy."""

    replicates: tuple[str, ...]  # parts of STATE of which more than one rank holds a full copy
    local_forward: bool = False  # a forward waits for no other rank: torch's DDP, or its equivalent, runs the model
    shards_parameters: bool = False  # by blocks, with fully_shard: blocks and offload have a meaning
    replica_groups: bool = False  # full copies, each sharded over a group of ranks
    pipeline: bool = False  # the model is divided into stages
    exact: bool = False  # sums can be made independent of the number of ranks
    named: bool = True  # every parameter can be gathered under its own name, so that `verify` can compare it


STRATEGIES: dict[str, StrategyRules] = {
    "ddp": StrategyRules(STATE, local_forward=True, exact=True),
    "zero1": StrategyRules(("parameters", "gradients"), local_forward=True, exact=True),
    "fsdp-grads": StrategyRules((), shards_parameters=True, exact=True),
    "fsdp": StrategyRules((), shards_parameters=True, exact=True),
    "hsdp": StrategyRules(STATE, shards_parameters=True, replica_groups=True),
    "tp": StrategyRules(STATE, named=False),
    "pp": StrategyRules(STATE, pipeline=True, named=False),
}

LEAST_MEMORY = "fsdp"  # the strategy to advise when memory runs out


def with_trait(trait: str) -> tuple[str, ...]:
    """Return the names of the strategies that have `trait`, an attribute of StrategyRules."""
    return tuple(name for name, rules in STRATEGIES.items() if getattr(rules, trait))
