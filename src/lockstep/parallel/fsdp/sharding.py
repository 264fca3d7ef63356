"""How FSDP2 shards a model: in place, block by block, before its driver is made."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.config import FSDPConfig, RunConfig
from lockstep.errors import UserError
from lockstep.parallel.batchnorm.buffers import broadcast_buffers
from lockstep.parallel.blocks import blocks_without_shared_parameters, find_blocks
from lockstep.parallel.driver import DriverSetup, broadcast_model
from lockstep.parallel.fsdp import torch_private
from lockstep.parallel.meta.init import fill_model
from lockstep.precision import Precision, cast_parameters_
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World


def shard_blocks(model: nn.Module, setup: DriverSetup) -> dict[str, str]:
    """Shard a model block by block, in place. Return lines for the banner."""
    config, runtime, axes = setup.config, setup.runtime, setup.axes
    blocks = find_blocks(model, config.blocks)
    separate_blocks = blocks_without_shared_parameters(blocks, model)
    mesh = axes.device_mesh["dp"] if axes else make_mesh(config, runtime)
    shard = partial(_shard, config=config, precision=setup.precision, mesh=mesh)

    # A model on the meta device is filled and sharded block by block, so that no rank ever holds all of it.
    is_meta = any(p.is_meta for p in model.parameters())
    if is_meta:
        fill_model(model, separate_blocks, shard, runtime)
    else:
        if axes is None:
            broadcast_model(model, runtime.collectives)

        for block in separate_blocks:
            shard(block)

    # The parameters outside the blocks.
    shard(model)
    configure_sharding(model)

    # Each rank has filled its own buffers.
    if is_meta:
        broadcast_buffers(dict(model.named_buffers()), runtime.collectives)

    return describe_blocks(len(blocks), len(separate_blocks))


def _shard(module: nn.Module, config: RunConfig, precision: Precision, mesh: DeviceMesh) -> None:
    cast_parameters_(module, precision)
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=config.strategy_record.reshard_after_forward,
        # Gradients of parameters stored in bfloat16 are added in float32 and rounded once.
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32 if precision.stores_bf16 else None),
        offload_policy=CPUOffloadPolicy() if config.fsdp.offload else OffloadPolicy(),
        ignored_params=set(scalars(module)),
    )


def configure_sharding(model: nn.Module) -> None:
    """Make FSDP sum gradients of any dtypes instead of averaging, and keep recurrent layers from moving weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            torch_private.check_members(module)
            module.set_gradient_divide_factor(1.0)  # torch would divide by the number of ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            torch_private.reduce_each_dtype(module)

        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _do_not_flatten  # pyrefly: ignore[bad-assignment]
            # cuDNN then copies the weights in every call, and warns about it.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


def _do_not_flatten() -> None:
    """Do nothing. This replaces RNNBase.flatten_parameters.

    On a GPU, that would move a layer's weights into one chunk of memory, while FSDP goes on gathering into the old
    memory: the layer would always compute with the weights of the first step.
    """


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that are sharded as a unit, the outermost first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def describe_blocks(count: int, separate: int) -> dict[str, str]:
    """Return a banner line if not all of the `count` blocks are sharded separately, because some share parameters."""
    if separate == count:
        return {}

    reason = "share a parameter with others: they are gathered together with the rest"
    return {"fsdp": f"{count - separate} of {count} blocks {reason}"}


def scalars(model: nn.Module) -> list[nn.Parameter]:
    """Return the zero-dimensional parameters. They have no dimension to shard, so they stay full on every rank."""
    return [p for p in model.parameters() if p.dim() == 0]


def count_replicas(config: FSDPConfig, world: World) -> int:
    """Return the number of replicas under hsdp: groups of ranks that together hold a full model."""
    # By default one replica per machine, so that parameters are only gathered inside a machine.
    return config.replicas or max(2, world.size // world.local_size)


def make_mesh(config: RunConfig, runtime: Runtime) -> DeviceMesh:
    """Return the mesh to shard over. It has one axis; under hsdp a second one for the replicas."""
    kind, size = runtime.device.type, runtime.world.size
    if not config.strategy_record.replica_groups:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))

    replicas = count_replicas(config.fsdp, runtime.world)
    if size % replicas:
        # Suggest the smallest number of replicas that divides the number of ranks.
        divisors = [n for n in range(2, size + 1) if size % n == 0]
        raise UserError(
            f"strategy=hsdp cannot divide {size} ranks into {replicas} replicas",
            f"{size} is not a multiple of {replicas}",
            f"set fsdp.replicas={divisors[0]}, or strategy=fsdp" if divisors else "set strategy=ddp",
        )

    return init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


# ---- what is refused before a model is sharded ----


def check_scalars(model: nn.Module, config: RunConfig) -> None:
    """Refuse zero-dimensional parameters with settings under which their gradients cannot be reduced."""
    obstacles = {
        "fsdp.offload=true": config.fsdp.offload,
        "mesh.pp": (config.mesh.pp or 1) > 1,
    }
    obstacle = next((setting for setting, is_set in obstacles.items() if is_set), None)
    scalar = next((name for name, p in model.named_parameters() if p.dim() == 0), None)

    if obstacle and scalar:
        raise UserError(
            f"strategy={config.strategy} with {obstacle} cannot shard the parameter {scalar!r}: it has no dimension",
            "",
            "make it a vector with one element, such as torch.zeros(1); or set strategy=ddp",
        )


def check_offload(config: FSDPConfig, runtime: Runtime) -> None:
    if config.offload and runtime.device.type == "cpu":
        raise UserError(
            "fsdp.offload=true has no effect on a CPU: everything is in host memory already",
            "",
            "leave fsdp.offload out",
        )

    if config.offload and runtime.world.alone:
        raise UserError(
            "fsdp.offload=true has no effect on one rank: nothing is sharded", "", "start two ranks: --nproc 2"
        )
