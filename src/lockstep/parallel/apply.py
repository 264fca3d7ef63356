"""Apply parallelism to a model, in this order:

tensor parallelism -> BatchNorm -> float8 -> recomputation -> pipeline, or FSDP, or DDP -> compile -> CUDA graphs.
A pipeline (pipeline/driver.py) applies tensor parallelism, compile and FSDP itself, to the stages that it has split.
All of it happens in place: the model keeps its class and the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.caches import disable_kv_cache
from lockstep.parallel.compiled.compiler import Compiler
from lockstep.parallel.compiled.targets import compiled_call
from lockstep.parallel.cudagraph.install import capture_calls
from lockstep.parallel.ddp.driver import DDPDriver, FlatReduceDriver
from lockstep.parallel.driver import Driver, SingleDriver
from lockstep.parallel.exact.block_inputs import group_input_gradients
from lockstep.parallel.exact.driver import (
    OrderedDDPDriver,
    OrderedFlatReduceDriver,
    OrderedFSDPDriver,
    OrderedSingleDriver,
)
from lockstep.parallel.fsdp.driver import FSDPDriver, check_offload, check_scalars
from lockstep.parallel.hooks.parameter_hooks import check_hooks, take_hooks
from lockstep.parallel.layers import adapt_sync_batchnorm, compute_in_float8, synchronise_batchnorm
from lockstep.parallel.mesh import Axes, plan_mesh
from lockstep.parallel.meta.init import check_init, fill_model
from lockstep.parallel.remat import recompute_blocks
from lockstep.parallel.tensor.driver import TensorDriver, shard_layers
from lockstep.precision import cast_parameters_, choose_precision
from lockstep.runtime.context import EventLogger, Runtime, log_nothing


def apply(
    model: nn.Module,
    config: RunConfig,
    runtime: Runtime,
    task: Any = None,
    log_event: EventLogger = log_nothing,
    data: Callable[[], Any] | None = None,
) -> Driver:
    """Apply the configured parallelism to `model`, in place, and return the driver that executes it.

    `task` may define how the model is sharded or staged. `log_event` receives decisions that are made later, while the
    model runs. `data` returns samples, for a pipeline that must run the model to find its stages.
    """
    mesh = plan_mesh(config, runtime.world)
    axes = None if mesh.is_data_parallel_only else Axes(mesh, runtime)
    pipelined = mesh.sizes["pp"] > 1

    _check_settings(model, config, runtime)

    # Sharding replaces parameters, which would drop their hooks. The driver gets the hooks below.
    hooks = take_hooks(model)
    _place(model, config, runtime, pipelined)

    # Replace single layers before the model's calls are wrapped.
    if axes and not pipelined and mesh.sizes["tp"] > 1:
        shard_layers(model, task, axes, runtime)

    _adapt_layers(model, config, runtime, pipelined)

    # What the user has compiled stays as it is.
    compiled = wants_compile(config, runtime) and not any(map(compiled_call, model.modules()))

    # If forwards are collective, the ranks compile together, in the first one. Otherwise a Compiler watches the driver.
    together = compiled and not pipelined and collective_forwards(model, config, runtime)
    if together:
        model.compile()  # in place: no `_orig_mod.` in names, no second object

    driver = _make_driver(model, task, config, runtime, axes, compiled, data)

    # A Compiler captures when it has decided: a CUDA graph records the compiled kernels. Without one, capture now.
    if compiled and not pipelined and not together:
        driver.compiler = make_compiler(driver, config, runtime, log_event)
    else:
        capture_calls(model, config, runtime, log_event)

    check_hooks(hooks, model, runtime)
    driver.use_hooks(hooks)
    if driver.statistics:
        driver.statistics.log_event = log_event

    driver.role = replace(
        driver.role,
        data_rank=mesh.coordinate("dp"),
        data_size=mesh.data_size,
        reports_loss=mesh.reports_loss,
    )
    return driver


def _check_settings(model: nn.Module, config: RunConfig, runtime: Runtime) -> None:
    """Refuse unsupported settings before any tensor is moved."""
    check_init(model, config)
    check_offload(config.fsdp, runtime)
    if config.strategy_record.shards_parameters and not runtime.world.alone:
        check_scalars(model, config)


def _place(model: nn.Module, config: RunConfig, runtime: Runtime, pipelined: bool) -> None:
    """Put the parameters on the device, in the dtype in which they are stored.

    A model on the meta device is filled block by block while it is sharded, so only a single rank fills it here. A
    pipeline moves its own stages to the device.
    """
    if config.init == "meta" and runtime.world.alone:
        fill_model(model, (), lambda _: None, runtime)

    if not any(p.is_meta for p in model.parameters()):
        cast_parameters_(model, config.precision)
        if not pipelined:
            model.to(runtime.device)


def _adapt_layers(model: nn.Module, config: RunConfig, runtime: Runtime, pipelined: bool) -> None:
    """Change how layers compute: BatchNorm, float8, and what is recomputed in the backward."""
    if config.ddp.sync_batchnorm:
        synchronise_batchnorm(model, runtime)
    else:
        adapt_sync_batchnorm(model, runtime, pipelined)

    if choose_precision(config, runtime.device).float8:
        compute_in_float8(model, config.blocks)

    # A pipeline disables the cache of its stages itself.
    if not pipelined:
        disable_kv_cache(model, always=False)

    recompute_blocks(model, config)
    if config.exact:
        group_input_gradients(model, config)


def wants_compile(config: RunConfig, runtime: Runtime) -> bool:
    """Whether to compile, or to find out whether it pays. On a CPU it is slow, and rarely pays."""
    if config.compile == "auto":
        return runtime.device.type == "cuda" and not config.exact
    return config.compile


def make_compiler(driver: Driver, config: RunConfig, runtime: Runtime, log_event: EventLogger) -> Compiler:
    precision = choose_precision(config, runtime.device)

    # Whether compiling pays is a question of time, and a repeatable run must not depend on it. float8 always needs it.
    judged = config.compile == "auto" and not config.deterministic and not precision.float8
    loose = runtime.device.type == "cuda" or precision.name != "fp32"
    return Compiler(driver, config, log_event, judged, loose)


def collective_forwards(model: nn.Module, config: RunConfig, runtime: Runtime) -> bool:
    """Whether a forward of the model waits for other ranks."""
    if runtime.world.alone:
        return False

    synchronised = any(map(is_synchronised, model.modules()))
    return not config.strategy_record.local_forward or config.uses_axis("tp") or synchronised


def _make_driver(
    model: nn.Module,
    task: Any,
    config: RunConfig,
    runtime: Runtime,
    axes: Axes | None,
    compiled: bool,
    data: Callable[[], Any] | None,
) -> Driver:
    """Return the driver for the strategy's attributes."""
    # config/conflicts.py has already refused exact mode with tp or pp.
    if runtime.world.alone:
        single = OrderedSingleDriver if config.exact else SingleDriver
        return single(model, runtime)

    if axes and axes.mesh.sizes["pp"] > 1:
        from lockstep.parallel.pipeline.driver import PipelineDriver  # torch.distributed.pipelining is slow to import

        return PipelineDriver(model, task, config, axes, runtime, compiled, data)

    if config.strategy_record.shards_parameters:
        fsdp = OrderedFSDPDriver if config.exact else FSDPDriver
        return fsdp(model, config, runtime, axes)

    if axes:
        return TensorDriver(model, axes, runtime)
    if config.ddp.find_unused_parameters and config.exact:
        return OrderedFlatReduceDriver(model, runtime)
    if config.ddp.find_unused_parameters:
        return FlatReduceDriver(model, runtime, config.ddp.broadcast_buffers)

    ddp = OrderedDDPDriver if config.exact else DDPDriver
    return ddp(model, config.ddp, runtime, config.seed)
