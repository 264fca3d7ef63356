"""Apply parallelism to a model, in this order:

tensor parallelism -> BatchNorm -> float8 -> recomputation -> pipeline, or FSDP, or DDP -> compile -> CUDA graphs.
A pipeline (pipeline/driver.py) applies tensor parallelism, compile and FSDP itself, to the stages that it has split.
All of it happens in place: the model keeps its class and the names of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from torch import nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.activation_checkpointing import checkpoint_activations
from lockstep.parallel.batchnorm.sync import adapt_sync_batchnorm, is_synchronised, synchronise_batchnorm
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.caches import disable_kv_cache
from lockstep.parallel.compiled.compiler import Compiler
from lockstep.parallel.compiled.cudnn_pause import CudnnPause
from lockstep.parallel.compiled.targets import compiled_call, notice_hooks
from lockstep.parallel.cudagraph.graphs import capture_calls
from lockstep.parallel.driver import Driver, DriverSetup, RankRole, register_nothing
from lockstep.parallel.exact.block_inputs import group_input_gradients
from lockstep.parallel.fsdp.sharding import check_offload, check_scalars
from lockstep.parallel.mesh import Axes, Mesh, plan_mesh
from lockstep.parallel.meta.init import check_init, fill_model
from lockstep.parallel.micro_batches import MicroBatchDriver, SingleDriver, runs_whole_model
from lockstep.parallel.parameter_hooks.hooks import check_hooks, take_hooks
from lockstep.parallel.tensor.driver import shard_layers
from lockstep.precision import Precision, cast_parameters_
from lockstep.runtime.context import EventLogger, Runtime, log_nothing
from lockstep.runtime.world import World

FLOAT8_MULTIPLE = 16  # float8 matrix products need dimensions that are multiples of this


def parallelize(
    model: nn.Module,
    config: RunConfig,
    runtime: Runtime,
    precision: Precision,
    task: Any = None,
    log_event: EventLogger = log_nothing,
    data: Callable[[], Any] | None = None,
    register: Callable[[str, Any], None] = register_nothing,
) -> Driver:
    """Apply the configured parallelism to `model`, in place, and return the driver that executes it.

    `task` may define how the model is sharded or staged. `log_event` receives decisions that are made later, while the
    model runs. `data` returns samples, for a pipeline that must run the model to find its stages. `register` saves what
    the driver must keep, such as the errors of PowerSGD, with every checkpoint.
    """
    mesh = plan_mesh(config, runtime.world)
    axes = None if mesh.is_data_parallel_only else Axes(mesh, runtime)
    pipelined = mesh.sizes["pp"] > 1

    _check_settings(model, config, runtime)

    # Sharding replaces parameters, which would drop their hooks. The driver gets the hooks.
    hooks = take_hooks(model)
    _move_to_device(model, config, runtime, precision, pipelined)

    # Replace single layers before the model's calls are wrapped.
    if axes and not pipelined and mesh.sizes["tp"] > 1:
        shard_layers(model, task, axes, runtime)

    _adapt_layers(model, config, runtime, precision, pipelined)

    role = RankRole(
        collective_forwards=_collective_forwards(model, config, runtime),
        data_world=World(mesh.coordinate("dp"), mesh.data_size),
        reports_loss=mesh.reports_loss,
    )
    if role.collective_forwards:
        _refuse_graph(config)

    # What the user has compiled stays as it is.
    compiled = wants_compile(config, runtime) and not any(map(compiled_call, model.modules()))
    if compiled and role.collective_forwards:
        notice_hooks()  # for the rest of the process: torch may compile in any forward

    setup = DriverSetup(
        config=config,
        runtime=runtime,
        precision=precision,
        role=role,
        axes=axes,
        log_event=log_event,
        task=task,
        compiled=compiled,
        data=data,
        hooks=hooks,
        register=register,
    )
    driver = _make_driver(model, mesh, setup)
    check_hooks(hooks, model, runtime)

    # A pipeline has compiled its stages.
    if runs_whole_model(driver):
        _compile_or_capture(driver, setup)

    return driver


def _compile_or_capture(driver: MicroBatchDriver, setup: DriverSetup) -> None:
    """Let a driver compile the model, or capture its calls as CUDA graphs, and pause cuDNN attention if that helps."""
    config, runtime = setup.config, setup.runtime

    # Both with and without compiled code: batches of many sizes slow cuDNN down.
    cudnn_pause = _cudnn_pause(setup)
    if cudnn_pause:
        driver.parts.add(cudnn_pause)

    if setup.role.collective_forwards:
        # The ranks compile together, in the first forward.
        if setup.compiled:
            driver.model.compile()  # in place: no `_orig_mod.` in names, no second object
    elif setup.compiled:
        # It captures when it has decided: a CUDA graph records the compiled kernels.
        pays = only_if_it_pays(config, setup.precision)
        low_precision = runtime.on_gpu or setup.precision.loses_bits
        driver.compiler = Compiler(driver, config, setup.log_event, pays, low_precision, cudnn_pause)
        driver.parts.add(driver.compiler)
    else:
        capture_calls(driver.model, config, runtime, setup.log_event)


def _cudnn_pause(setup: DriverSetup) -> CudnnPause | None:
    """Return the part that pauses cuDNN attention while sizes vary; None where kernels must stay as they are."""
    # Without a compiler the part counts the sizes itself.
    if not setup.compiled:
        return CudnnPause(needed=None) if may_change_kernels(setup.config, setup.runtime) else None

    # Compiled code has chosen its kernels. Until it is decided, steps run eagerly, and the compiler notes their sizes.
    decides = not setup.role.collective_forwards and only_if_it_pays(setup.config, setup.precision)
    return CudnnPause(needed=True) if decides else None


def _check_settings(model: nn.Module, config: RunConfig, runtime: Runtime) -> None:
    """Refuse unsupported settings before any tensor is moved."""
    check_init(model, config)
    check_offload(config.fsdp, runtime)
    if config.strategy_record.shards_parameters and not runtime.world.alone:
        check_scalars(model, config)


def _move_to_device(
    model: nn.Module, config: RunConfig, runtime: Runtime, precision: Precision, pipelined: bool
) -> None:
    """Put the parameters on the device, in the dtype in which they are stored.

    A model on the meta device is filled block by block while it is sharded, so only a single rank fills it here. A
    pipeline moves its own stages to the device.
    """
    if config.init == "meta" and runtime.world.alone:
        fill_model(model, (), lambda _: None, runtime)

    if not any(p.is_meta for p in model.parameters()):
        cast_parameters_(model, precision)
        if not pipelined:
            model.to(runtime.device)


def _adapt_layers(model: nn.Module, config: RunConfig, runtime: Runtime, precision: Precision, pipelined: bool) -> None:
    """Change how layers compute: BatchNorm, float8, and what is recomputed in the backward."""
    if config.ddp.sync_batchnorm:
        synchronise_batchnorm(model, runtime)
    else:
        adapt_sync_batchnorm(model, runtime, pipelined)

    if precision.float8:
        compute_in_float8(model, config.blocks)

    # A pipeline disables the cache of its stages itself.
    if not pipelined:
        disable_kv_cache(model, always=False)

    checkpoint_activations(model, config)
    if config.exact:
        group_input_gradients(model, config)


def compute_in_float8(model: nn.Module, named: list[str] | None) -> None:
    """Compute the matrix products inside blocks in float8 (torchao), with one scale per tensor.

    The layers outside the blocks (usually the first and the last) stay in bfloat16: they lose most from fewer bits and
    are a small part of the work. The parameters stay the same objects, with their names and dtypes.
    """
    from torchao.float8 import convert_to_float8_training  # pyrefly: ignore[missing-import]

    # By id, since a module may have several names.
    modules = [module for block in find_blocks(model, named) for module in block.modules()]
    chosen = {id(module) for module in modules if _fits_float8(module)}
    if not chosen:
        raise UserError(
            f"precision=fp8 finds no layer to convert in {type(model).__name__}",
            f"no block has an nn.Linear whose features are multiples of {FLOAT8_MULTIPLE}",
            "set precision=bf16, or name the classes of the blocks: blocks=[Block]",
        )

    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in chosen)


def _fits_float8(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and module.in_features % FLOAT8_MULTIPLE == 0
        and module.out_features % FLOAT8_MULTIPLE == 0
    )


def wants_compile(config: RunConfig, runtime: Runtime) -> bool:
    """Whether to compile, or to find out whether it pays. On a CPU it is slow, and rarely pays."""
    if config.compile == "auto":
        return runtime.on_gpu and not config.exact
    return config.compile


def may_change_kernels(config: RunConfig, runtime: Runtime) -> bool:
    """Whether kernels may be chosen by the sizes that batches turn out to have. A repeatable run must not do so."""
    return runtime.on_gpu and not (config.deterministic or config.exact)


def only_if_it_pays(config: RunConfig, precision: Precision) -> bool:
    """Whether steps are timed to find out if compiling pays. A repeatable run must not depend on time."""
    return config.compile == "auto" and not config.deterministic and not precision.float8  # float8 needs compiling


def _collective_forwards(model: nn.Module, config: RunConfig, runtime: Runtime) -> bool:
    """Whether forwards of the model in training wait for other ranks. All other code reads this from `RankRole`."""
    if runtime.world.alone:
        return False

    return not config.uses_ddp or any(map(is_synchronised, model.modules()))


def _refuse_graph(config: RunConfig) -> None:
    """Refuse graph=true if forwards are collective. config/conflicts.py does not see SyncBatchNorm in the model."""
    if config.graph is True:
        raise UserError(
            "graph=true cannot be used with SyncBatchNorm: its forward waits for other ranks, and is not captured",
            "",
            "set graph=auto; or use GroupNorm",
        )


def _make_driver(model: nn.Module, mesh: Mesh, setup: DriverSetup) -> Driver:
    """Return the driver of a single process, or on several ranks the one that the strategy's record names."""
    if setup.runtime.world.alone:
        return SingleDriver(model, setup)

    make = resolve_name(setup.config.strategy_record.driver_in(mesh.sizes))
    return make(model, setup)
