"""A BatchSource that makes its own batches, by calling the model, is told where it is."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.config import RunConfig
from lockstep.data.shard import deal
from lockstep.errors import UserError
from lockstep.parallel.drivers import Driver
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World
from lockstep.task import BatchSource, Surroundings


def attach(
    source: BatchSource, share: World, driver: Driver, plan: Plan, config: RunConfig, runtime: Runtime
) -> str | None:
    """A source that makes its own batches (a rollout) learns where it is. What it says about them."""
    told: Callable[[Surroundings], str] | None = getattr(source, "attach", None)
    if told is None:
        return None
    if driver.pipeline is not None:
        raise UserError(
            f"{type(source).__name__}, which calls the model itself, in a pipeline (mesh.pp)",
            "ranks that hold a part of the model each",
            "type strategy=ddp or strategy=fsdp",
        )
    around = Surroundings(
        model=driver.model,
        device=runtime.device,
        seed=config.seed,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        mine=deal(plan.micro_batches, share.rank, share.size),
        ranks=share.size,
        in_step=driver.in_step,
        add=lambda values: runtime.collectives.sum_(values if driver.speaks else values.zero_()),
    )
    return told(around)
