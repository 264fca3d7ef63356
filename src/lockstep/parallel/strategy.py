"""What each value of `strategy` shards: one frozen record per name, so that no other module compares names."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import RunConfig


@dataclass(frozen=True)
class Strategy:
    """Facts about one strategy, whatever the number of ranks."""

    name: str
    shards_parameters: bool = False
    shards_gradients: bool = False
    shards_optimizer: bool = False
    keeps_gathered: bool = False  # parameters stay gathered from the forward to the backward
    replica_groups: bool = False  # shards within groups of ranks, replicates across them
    axis: str | None = None  # the mesh axis that takes all ranks which no other axis has


_STRATEGIES = (
    Strategy("ddp"),
    Strategy("zero1", shards_optimizer=True),
    Strategy("fsdp-grads", True, True, True, keeps_gathered=True),
    Strategy("fsdp", True, True, True),
    Strategy("hsdp", True, True, True, replica_groups=True),
    Strategy("tp", axis="tp"),
    Strategy("pp", axis="pp"),
)
_BY_NAME = {strategy.name: strategy for strategy in _STRATEGIES}


def strategy_of(config: RunConfig) -> Strategy:
    """Return the record of `config.strategy`."""
    return _BY_NAME[config.strategy]
