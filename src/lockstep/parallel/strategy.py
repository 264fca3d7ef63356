"""Strategies: how the ranks share a model. One record per name, and the only place that knows the names.

Everything else asks a record's attributes. To add a strategy: a record here, its name in `config/schema.py`, and a
driver that `parallel/apply.py` builds for its attributes. Importing this needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import RunConfig


@dataclass(frozen=True)
class Strategy:
    """What a strategy shards over the ranks, and what it can be combined with."""

    name: str
    shards_optimizer: bool = False  # each rank holds optimizer state for a part of the parameters
    shards_gradients: bool = False
    shards_parameters: bool = False
    keeps_gathered: bool = False  # parameters stay gathered from the forward to the end of the backward
    replica_groups: bool = False  # shards inside groups of ranks, and replicates between the groups
    axis: str | None = None  # the mesh axis that takes all ranks which no other axis has
    inner_axes: bool = True  # can be combined with mesh.tp and mesh.pp
    nearest: str = ""  # the strategy to type instead, where inner_axes are wanted

    @property
    def replicates_model(self) -> bool:
        """Whether every rank holds all parameters in full, as long as mesh.tp and mesh.pp are 1."""
        return not self.shards_parameters and self.axis is None


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp"),
        Strategy("zero1", shards_optimizer=True, inner_axes=False, nearest="ddp"),
        Strategy(
            "fsdp-grads", shards_optimizer=True, shards_gradients=True, shards_parameters=True, keeps_gathered=True
        ),
        Strategy("fsdp", shards_optimizer=True, shards_gradients=True, shards_parameters=True),
        Strategy(
            "hsdp",
            shards_optimizer=True,
            shards_gradients=True,
            shards_parameters=True,
            replica_groups=True,
            inner_axes=False,
            nearest="fsdp",
        ),
        Strategy("tp", axis="tp"),
        Strategy("pp", axis="pp"),
    )
}


def strategy_of(config: RunConfig) -> Strategy:
    """Return the record of the strategy that the configuration names."""
    return STRATEGIES[config.strategy]
