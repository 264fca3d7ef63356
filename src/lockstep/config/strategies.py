"""Strategies: how the ranks share a model. There is one record per name, and no other place compares names.

All other code reads the attributes of a record. To add a strategy, add a record here, its name to `StrategyName`, and
the driver that the record names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["ddp", "zero1", "fsdp-grads", "fsdp", "hsdp", "tp", "pp"]

# What a rank keeps in memory from step to step; the names are fields of a memory Footprint.
STATE = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Strategy:
    """What a strategy shards over the ranks, and which settings go with it."""

    name: StrategyName
    driver: str  # the driver factory, as MODULE:NAME; called with the model and a `DriverSetup`
    replicates: tuple[str, ...]  # parts of STATE that exist more than once in the job
    uses_ddp: bool = False  # torch's DDP, or its equivalent, runs the full model: a forward waits for no other rank
    shards_parameters: bool = False  # by blocks, with fully_shard: blocks and offload have a meaning
    reshard_after_forward: bool = True  # sharded parameters; False: they stay gathered to the end of the backward
    replica_groups: bool = False  # full copies, each sharded over a group of ranks
    axis: str | None = None  # the mesh axis that gets all ranks that no other axis takes
    extra_axes: tuple[str, ...] = ()  # axes of the mesh, besides dp, along which its driver runs the model
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
        """Whether the all-reduce of the gradients is the only communication of a step."""
        return self.uses_ddp and not self.shards_optimizer

    @property
    def pipeline(self) -> bool:
        return self.axis == "pp"

    def driver_in(self, sizes: Mapping[str, int]) -> str:
        """Return the driver factory, as MODULE:NAME, in a mesh with these sizes of its axes."""
        # Where the driver cannot run the model along an axis, the strategy with the name of that axis decides.
        for axis in ("pp", "tp"):
            if sizes[axis] > 1 and axis not in self.extra_axes:
                return STRATEGIES[axis].driver

        return self.driver


# The driver factories. As text, because the launcher checks settings and must not import torch; and the modules of a
# pipeline are slow to import.
DDP = "lockstep.parallel.ddp.driver:make_driver"
FSDP = "lockstep.parallel.fsdp.driver:FSDPDriver"
TP = "lockstep.parallel.tensor.driver:TensorDriver"
PP = "lockstep.parallel.pipeline.driver:PipelineDriver"


# tp and pp shard the model's layers and stages; how much of it several ranks hold depends on the model.
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", DDP, STATE, uses_ddp=True, exact=True),
        Strategy(
            "zero1",
            DDP,
            ("parameters", "gradients"),
            uses_ddp=True,
            exact=True,
            composes_with_mesh=False,
            nearest="ddp",
        ),
        Strategy(
            "fsdp-grads", FSDP, (), shards_parameters=True, reshard_after_forward=False, exact=True, extra_axes=("tp",)
        ),
        Strategy("fsdp", FSDP, (), shards_parameters=True, exact=True, extra_axes=("tp",)),
        Strategy(
            "hsdp",
            FSDP,
            STATE,
            shards_parameters=True,
            replica_groups=True,
            composes_with_mesh=False,
            nearest="fsdp",
        ),
        Strategy("tp", TP, STATE, axis="tp", extra_axes=("tp",), comparable=False),
        Strategy("pp", PP, STATE, axis="pp", extra_axes=("pp", "tp"), comparable=False),
    )
}

LEAST_MEMORY = "fsdp"  # the strategy to advise when memory runs out


def with_trait(trait: str) -> tuple[str, ...]:
    """Return the names of the strategies that have `trait`, an attribute of Strategy."""
    return tuple(name for name, strategy in STRATEGIES.items() if getattr(strategy, trait))
