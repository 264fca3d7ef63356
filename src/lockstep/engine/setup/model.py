"""The checks, first weights, optimizers and moving average with which `RunBuilder.setup_model` surrounds the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from lockstep.checkpoint.init_from.weights import InitialWeights, load_initial_weights
from lockstep.checkpoint.state.tensor_names import frozen_names
from lockstep.checkpoint.storage.folder import CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.retry import READ_FIX, retry_on_rank0
from lockstep.config import RunConfig
from lockstep.engine.checks.guards import check_replicas
from lockstep.engine.checks.model import check_instance_norms, check_supported
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.capabilities import check_kind
from lockstep.optim.groups import apply_groups
from lockstep.optim.optimizers import Optimizers, as_list
from lockstep.optim.registry import build_optimizers
from lockstep.optim.weight_average import WeightAverage
from lockstep.optim.zero1 import ShardedOptimizers
from lockstep.parallel.driver import Driver
from lockstep.precision import Precision, check_batchnorm, check_storage
from lockstep.run_folder.opened import RunFolder
from lockstep.runtime.context import EventLogger, Runtime


def check_model(model: nn.Module, precision: Precision, runtime: Runtime) -> None:
    """Refuse a model that would train wrongly, before anything is done to it. Collective."""
    if precision.stores_bf16:
        check_batchnorm(model, precision)
    else:
        check_storage(model)

    check_supported(model)
    if not runtime.world.alone:
        check_instance_norms(model)

    # Frozen parameters are never broadcast, so they must already be equal on all ranks.
    check_replicas(model, runtime, only_frozen=True)


def initial_weights(
    driver: Driver, path: Path, config: RunConfig, runtime: Runtime, folder: RunFolder, log_event: EventLogger
) -> InitialWeights:
    """Read the weights at `path` (`init_from`). If the run resumes, only what its checkpoints leave out."""
    assert config.init_from is not None

    # None reads all weights. If the run resumes, its checkpoint replaces them, except frozen ones that it leaves out.
    only = None
    storage = CheckpointStorage.of_run(folder.path)
    problem = f"the checkpoints in {storage.root} cannot be listed"
    has_checkpoint = retry_on_rank0(
        runtime, config.checkpoint.timeout, lambda: bool(list_checkpoints(storage)), problem, READ_FIX
    )
    if folder.start_from.will_load(has_checkpoint):
        only = set() if config.checkpoint.frozen else frozen_names(driver.model)
        if not only:
            return InitialWeights(config.init_from)

    # In a pipeline a rank holds only the parameters of its stages.
    elsewhere = driver.role.holders.held_elsewhere
    return load_initial_weights(driver.model.state_dict(), path, config, runtime, log_event, elsewhere, only)


def wrap_optimizers(
    user_optimizers: Any, model: nn.Module, config: RunConfig, precision: Precision, runtime: Runtime
) -> Optimizers:
    """Return the task's optimizers, or their replacements by the setting `optimizer`, as one `Optimizers` object."""
    for optimizer in as_list(user_optimizers):
        check_kind(optimizer)

    optimizers = build_optimizers(config, user_optimizers, model)
    group_banner = apply_groups(config.optim.groups, as_list(optimizers), model)

    # FSDP shards the parameters, and the optimizer state with them. zero1 shards only the optimizer state.
    shards_only_state = config.strategy_record.shards_optimizer and not config.strategy_record.shards_parameters
    sharded = shards_only_state and not runtime.world.alone
    wrapped = ShardedOptimizers(optimizers, model, runtime) if sharded else Optimizers(optimizers, model)

    wrapped.group_banner = group_banner

    # Parameters stored in bfloat16 are updated through float32 copies.
    if precision.rounding:
        wrapped.use_masters(MasterWeights(wrapped.all, model, precision.rounding, config.seed))

    return wrapped


def make_average(model: nn.Module, config: RunConfig, driver: Driver) -> WeightAverage | None:
    """Return the moving average of the weights, or None without `ema.decay`."""
    decay = config.ema.decay
    return None if decay is None else WeightAverage(model, decay, driver.role.holders.held_elsewhere)
