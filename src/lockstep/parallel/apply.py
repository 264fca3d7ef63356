"""The one place that knows the order in which techniques are applied to a model: cut its layers, recompute, compile,
then cut or replicate the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.cudagraph.graphs import LogEvent, capture_calls
from lockstep.parallel.ddp.compile_warmup import warm_up_compile
from lockstep.parallel.ddp.driver import DDPDriver
from lockstep.parallel.ddp.sync_batchnorm import synchronise_batchnorm
from lockstep.parallel.ddp.unused import FlatDriver
from lockstep.parallel.driver import Driver, SingleDriver
from lockstep.parallel.exact.driver import drive_exactly
from lockstep.parallel.float8 import compute_in_float8
from lockstep.parallel.fsdp.driver import CUT, FSDPDriver, check_offload, check_scalars
from lockstep.parallel.mesh import Axes, plan_mesh
from lockstep.parallel.meta_init import check_made_as_asked, fill
from lockstep.parallel.remat import recompute_blocks
from lockstep.parallel.tensor.driver import TensorDriver, cut_layers
from lockstep.precision import store
from lockstep.runtime.context import Runtime


def apply(
    model: nn.Module,
    config: RunConfig,
    runtime: Runtime,
    task: Any = None,
    tell: LogEvent = lambda *_, **__: None,
    data: Callable[[], Any] | None = None,
) -> Driver:
    """`model` on its device, in a Driver. Parameter names stay the user's own. `task` may say how to cut the model;
    `tell` hears what is decided later, while it runs; `data` gives the samples, if the model must be seen running."""
    mesh = plan_mesh(config, runtime.world)
    axes = None if mesh.plain else Axes(mesh, runtime)
    staged = mesh.sizes["pp"] > 1
    check_made_as_asked(model, config)
    check_offload(config.fsdp, runtime)
    if config.strategy in CUT and not runtime.world.alone:
        check_scalars(model, config)
    if config.init == "meta" and runtime.world.alone:
        fill(model, (), lambda _: None, config.seed, runtime)
    empty = any(p.is_meta for p in model.parameters())
    if not empty:
        store(model, config.precision)
    if not staged and not empty:  # a stage moves only what it keeps, and what is empty is filled when it is cut
        model.to(runtime.device)
    if axes and not staged and mesh.sizes["tp"] > 1:
        cut_layers(model, task, axes, runtime)
    if config.ddp.sync_batchnorm:
        synchronise_batchnorm(model, runtime)
    if config.precision == "fp8":
        compute_in_float8(model, config.blocks)
    recompute_blocks(model, config)
    if wants_compile(config, runtime) and not staged:
        model.compile()  # in place: no `_orig_mod.` in names, no second object
        warm_up_compile(model, config, runtime)
    capture_calls(model, config, runtime, tell)
    if axes and staged:
        driver = _stage(model, task, config, runtime, axes, data)
    else:
        driver = _drive(model, config, runtime, axes)
    driver.placement = replace(
        driver.placement, data_rank=mesh.data_rank, data_size=mesh.data_size, reports_loss=mesh.reports_loss
    )
    return driver


def _drive(model: nn.Module, config: RunConfig, runtime: Runtime, axes: Axes | None) -> Driver:
    if config.exact:
        return drive_exactly(model, config, runtime)
    if runtime.world.alone:
        return SingleDriver(model, runtime.device)
    if config.strategy in CUT:
        return FSDPDriver(
            model, config.strategy, config.fsdp, config.blocks, runtime, axes, config.seed, config.precision
        )
    if axes:
        return TensorDriver(model, axes, runtime)
    if config.ddp.find_unused_parameters:
        return FlatDriver(model, runtime, config.ddp.broadcast_buffers)
    return DDPDriver(model, config.ddp, runtime, config.seed)


def _stage(model: nn.Module, task: Any, config: RunConfig, runtime: Runtime, axes: Axes, data: Any) -> Driver:
    from lockstep.parallel.pipeline.driver import PipelineDriver  # torch's pipelines take a moment to import

    return PipelineDriver(model, task, config, axes, runtime, wants_compile(config, runtime), data)


def wants_compile(config: RunConfig, runtime: Runtime) -> bool:
    return (runtime.device.type == "cuda" and not config.exact) if config.compile == "auto" else config.compile
