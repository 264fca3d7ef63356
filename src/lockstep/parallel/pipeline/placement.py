"""The stages of a model on the ranks: each rank keeps the tensors of its own, and placeholders for all others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.checkpoint.state.reshard import ParameterHolders
from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.driver import DriverSetup, RankRole
from lockstep.parallel.mesh import Axes, Mesh
from lockstep.parallel.pipeline.build import make_stages
from lockstep.parallel.pipeline.schedules import SCHEDULES
from lockstep.parallel.pipeline.stage_gradients import ranks_at
from lockstep.parallel.pipeline.stages import Stage, keep_only, shard_stages, stages_by_tensor
from lockstep.parallel.tensor.driver import apply_plan, explain_dtensor_errors
from lockstep.parallel.tensor.plans import choose_plan
from lockstep.runtime.context import Runtime


class PlacedStages(NamedTuple):
    """The stages of a model, and which ranks hold its tensors."""

    stages: Sequence[Stage]  # the stages of all ranks
    local_stages: Sequence[Stage]
    by_tensor: Mapping[str, Sequence[int]]  # the stages that use each tensor
    pp_ranks: Mapping[str, set[int]]  # the ranks along pp whose stages use it; empty if no stage does: then all hold it
    holding_ranks: Mapping[str, tuple[int, ...]]  # the ranks that hold a tensor, if not all of them do
    held: set[str]  # the tensors that this rank's stages use, and those that no stage uses
    materialized: set[str]  # `held`, and all buffers that its stages may write into: they have memory on this rank
    banner: Mapping[str, str]  # lines about the stages


def place_stages(model: nn.Module, setup: DriverSetup, axes: Axes, sharded: bool) -> PlacedStages:
    """Split the model into stages, and leave on this rank the tensors of its own. Collective."""
    config, runtime, sizes = setup.config, setup.runtime, axes.mesh.sizes

    # While this rank still has the full model, choose how layers are sharded, and find which stages use a tensor.
    plan = choose_plan(model, setup.task, sizes["tp"], runtime.world.size // sizes["tp"]) if sizes["tp"] > 1 else {}

    count = sizes["pp"] * (config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1])
    stages, used = make_stages(model, setup.task, config, setup.data, count, setup.precision)

    by_tensor = stages_by_tensor(model, used)
    _refuse_shared_batchnorm(model, by_tensor)
    _broadcast_one_by_one(model, runtime)

    # Stages are assigned to the ranks round-robin. A tensor that no stage uses is on all ranks.
    pp_rank = axes.mesh.coordinate("pp")
    local_stages = stages[pp_rank :: sizes["pp"]]
    pp_ranks = {name: {stage % sizes["pp"] for stage in users} for name, users in by_tensor.items()}
    held = {name for name, users in pp_ranks.items() if not users or pp_rank in users}
    partial = {name: users for name, users in pp_ranks.items() if 0 < len(users) < sizes["pp"]}
    holding_ranks = {name: ranks_at(axes.mesh, users) for name, users in partial.items()}

    # Of all other tensors this rank keeps placeholders, but a stage may write into any buffer.
    mutable = {id(buffer) for stage in local_stages for buffer in stage.mutable_buffers()}
    buffers = model.named_buffers(remove_duplicate=False)
    materialized = held | {name for name, buffer in buffers if id(buffer) in mutable}
    keep_only(model, materialized, runtime.device)

    # In the same order as in apply.py: tensor parallelism, compile, FSDP.
    if plan:
        local_plan = {layer: style for layer, style in plan.items() if _holds(model, layer, held)}
        apply_plan(model, local_plan, axes, runtime)
        for stage in local_stages:
            explain_dtensor_errors(stage)

    if setup.compiled:
        for stage in local_stages:
            stage.compile()

    banner = shard_stages(local_stages, model, held, config, axes) if sharded else {}
    return PlacedStages(stages, local_stages, by_tensor, pp_ranks, holding_ranks, held, materialized, banner)


def role_in(placed: PlacedStages, setup: DriverSetup, mesh: Mesh) -> RankRole:
    """Return the role of this rank in a pipeline."""
    pp_rank, pp_ranks = mesh.coordinate("pp"), placed.pp_ranks
    holders = ParameterHolders(
        held_elsewhere=pp_ranks.keys() - placed.held,
        all_on_every_rank=not placed.holding_ranks,
        duplicates={name for name, users in pp_ranks.items() if users and pp_rank > min(users)},
    )
    return replace(setup.role, pipeline_depth=mesh.sizes["pp"], replicated=False, holders=holders, banner=placed.banner)


def _refuse_shared_batchnorm(model: nn.Module, by_tensor: Mapping[str, Collection[int]]) -> None:
    """Refuse a BatchNorm that two stages use: each stage would update its own copy of the running statistics."""
    for name, module in model.named_modules():
        tensors = [f"{name}.{tensor}".lstrip(".") for tensor in ("running_mean", "weight")]
        stages = sorted({stage for tensor in tensors for stage in by_tensor.get(tensor, ())})
        if isinstance(module, _BatchNorm) and module.running_mean is not None and len(stages) > 1:
            raise UserError(
                f"{name!r} is a {type(module).__name__} that {len(stages)} stages of the pipeline (mesh.pp) share",
                f"each of the stages {', '.join(map(str, stages))} would update its own running statistics",
                "use a separate BatchNorm in each place; or set strategy=ddp, or strategy=fsdp",
            )


def _holds(model: nn.Module, layer: str, held: Collection[str]) -> bool:
    """Whether all parameters of the layer are among the names `held`."""
    return all(name in held for name, _ in model.get_submodule(layer).named_parameters(prefix=layer))


def _broadcast_one_by_one(model: nn.Module, runtime: Runtime) -> None:
    """Copy rank 0's weights to all ranks, one tensor at a time, so that no device ever holds the full model."""
    for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        moved = tensor.detach().to(runtime.device)
        runtime.collectives.broadcast_([moved])
        tensor.detach().copy_(moved)


def check_pipeline(config: RunConfig, sharded: bool, runtime: Runtime, compiled: bool) -> None:
    if runtime.on_gpu and runtime.backend == "gloo":
        raise UserError(
            "a pipeline (mesh.pp) on GPUs cannot run over gloo, which cannot send GPU tensors from rank to rank",
            "",
            "give every rank its own GPU (nccl), or set device=cpu",
        )

    if sharded and config.pp.schedule in ("interleaved", "zero-bubble"):
        raise UserError(
            f"pp.schedule={config.pp.schedule} cannot be combined with strategy={config.strategy}",
            "this schedule needs the parameters of a stage in full from forward to backward",
            "set pp.schedule=1f1b, or strategy=pp",
        )

    if compiled and config.pp.schedule == "zero-bubble":
        raise UserError(
            f"pp.schedule={config.pp.schedule} cannot be combined with compile={str(config.compile).lower()}",
            "this schedule splits the backward into two halves, which torch cannot do for a compiled module",
            "set compile=false, or pp.schedule=1f1b",
        )
