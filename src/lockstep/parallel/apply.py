"""The one place that knows the order in which techniques are applied to a model: compile, then replicate."""

from __future__ import annotations

from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.ddp import DDPDriver
from lockstep.parallel.drivers import Driver, SingleDriver
from lockstep.parallel.flat import FlatDriver
from lockstep.parallel.fsdp import FSDPDriver
from lockstep.runtime.context import Runtime


def apply(model: nn.Module, config: RunConfig, runtime: Runtime) -> Driver:
    """`model` on its device, in a Driver. Parameter names stay the user's own."""
    model.to(runtime.device)
    if wants_compile(config, runtime):
        model.compile()  # in place: no `_orig_mod.` in names, no second object
    if runtime.world.alone:
        return SingleDriver(model, runtime.device)
    if config.strategy in ("fsdp", "fsdp-grads", "hsdp"):
        return FSDPDriver(model, config.strategy, config.fsdp, runtime)
    if config.ddp.find_unused_parameters:
        return FlatDriver(model, runtime)
    return DDPDriver(model, config.ddp, runtime)


def wants_compile(config: RunConfig, runtime: Runtime) -> bool:
    return runtime.device.type == "cuda" if config.compile == "auto" else config.compile
