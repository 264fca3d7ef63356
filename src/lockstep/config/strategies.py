"""Strategies: how the ranks share a model. There is one record per name, and no other place compares names.

All other code reads the attributes of a record. To add a strategy, add a record here, its name to `StrategyName`, and a
driver that `parallel/apply.py` builds for its attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["ddp", "zero1", "fsdp-grads", "fsdp", "hsdp", "tp", "pp"]

# What a rank keeps in memory from step to step; the names are fields of a memory Footprint.
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Strategy:
    """What a strategy shards over the ranks, and which settings go with it."""

    name: StrategyName
    replicates: tuple[str, ...]  # parts of STATE that exist more than once in the job
    local_forward: bool = False  # a forward waits for no other rank: torch's DDP, or its equivalent, runs the model
    shards_parameters: bool = False  # by blocks, with fully_shard: blocks and offload have a meaning
    keeps_gathered: bool = False  # parameters stay gathered from the forward to the end of the backward
    replica_groups: bool = False  # full copies, each sharded over a group of ranks
    axis: str | None = None  # the mesh axis that gets all ranks that no other axis takes
    composes_with_mesh: bool = True  # can be combined with mesh.tp and mesh.pp
    nearest: str = ""  # the strategy to type instead, for use with mesh.tp or mesh.pp
    exact: bool = False  # sums can be made independent of the number of ranks
    comparable: bool = True  # `verify` can compare it: every parameter can be gathered under its own name

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank of a replica holds the optimizer state of only some of its parameters."""
        return self.shards_parameters or "optimizer" not in self.replicates

    @property
    def only_reduces_gradients(self) -> bool:
        """Whether ranks exchange nothing in a step but one all-reduce of the gradients."""
        return self.local_forward and not self.shards_optimizer

    @property
    def pipeline(self) -> bool:
        return self.axis == "pp"


# tp and pp shard the model's layers and stages; how much of it several ranks hold depends on the model.
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", STATE, local_forward=True, exact=True),
        Strategy(
            "zero1",
            ("parameters", "gradients"),
            local_forward=True,
            exact=True,
            composes_with_mesh=False,
            nearest="ddp",
        ),
        Strategy("fsdp-grads", (), shards_parameters=True, keeps_gathered=True, exact=True),
        Strategy("fsdp", (), shards_parameters=True, exact=True),
        Strategy("hsdp", STATE, shards_parameters=True, replica_groups=True, composes_with_mesh=False, nearest="fsdp"),
        Strategy("tp", STATE, axis="tp", comparable=False),
        Strategy("pp", STATE, axis="pp", comparable=False),
    )
}

LEAST_MEMORY = "fsdp"  # the strategy to advise when memory runs out


def with_trait(trait: str) -> tuple[str, ...]:
    """Return the names of the strategies that have `trait`, an attribute of Strategy."""
    return tuple(name for name, strategy in STRATEGIES.items() if getattr(strategy, trait))
