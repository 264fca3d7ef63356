"""The Driver of a pipeline: every rank holds the tensors of its own stages, and placeholders for all others.

Stages are distributed along pp, replicated or sharded along dp, and their layers are sharded along tp. Both of two
stages that share a weight (a tied embedding) hold it; its two gradients are added, so that both get the same update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.checkpoint.state.reshard import ParameterHolders
from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.batchnorm.buffers import broadcast_buffers
from lockstep.parallel.batchnorm.statistics import add_running_statistics
from lockstep.parallel.driver import Driver, DriverSetup, LossFn, RankRole, Reduced, trainable
from lockstep.parallel.fsdp.collective_check import END, CollectiveCheck
from lockstep.parallel.fsdp.forward_checks import ForwardChecks, check_shardable, parameters_before
from lockstep.parallel.fsdp.sharding import sharded_modules
from lockstep.parallel.gradients import clear_gradients, no_gradient, sum_with_word
from lockstep.parallel.inner_gradients import InnerGradient, InnerGradients
from lockstep.parallel.mesh import Axes, Mesh
from lockstep.parallel.parameter_hooks.hooks import change_sums
from lockstep.parallel.pipeline.build import make_stages
from lockstep.parallel.pipeline.pipeline import Pipeline
from lockstep.parallel.pipeline.remote_tensors import RemoteTensors
from lockstep.parallel.pipeline.schedules import SCHEDULES
from lockstep.parallel.pipeline.stage_gradients import StageGradients, ranks_at
from lockstep.parallel.pipeline.stages import Stage, keep_only, shard_stages, stages_by_tensor
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepParts
from lockstep.parallel.tensor.driver import apply_plan, explain_dtensor_errors
from lockstep.parallel.tensor.plans import choose_plan
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import ControlWord, ControlWordCodec
from lockstep.runtime.shards import full_tensor
from lockstep.task import Loss, StepBatches


class PipelineDriver(Driver):
    """Runs all micro-batches of a step at once, stage by stage."""

    def __init__(self, model: nn.Module, setup: DriverSetup):
        """Split `model`, which is a full model on the CPU. A trace of its forward reads two of the samples."""
        config, runtime, axes = setup.config, setup.runtime, setup.axes
        assert axes is not None
        sharded = config.strategy_record.shards_parameters and axes.mesh.sizes["dp"] > 1
        _check(config, sharded, runtime, setup.compiled)
        if sharded:
            check_shardable(model, config)

        originals = parameters_before(model)
        split = _split_model(model, setup, axes, sharded)

        super().__init__(model, _role_in(split, setup, axes.mesh), trainable(model), StepParts(overlapping=True))
        self._runtime = runtime
        self._dp_group = setup.dp_group
        self._tp_group = axes.along("tp")
        self._names = list(self.parameters)
        self._holding_ranks = split.holding_ranks
        self._hooks_on_sums = setup.hooks  # called with the gradient sums of a step

        # What sums the gradients.
        holders = [split.pp_ranks[name] for name in self._names]
        is_held = [name in split.held for name in self._names]
        self._gradients = StageGradients(runtime, axes, [*self.parameters.values()], is_held, holders, sharded)

        # What takes part in the steps.
        materialized = split.materialized
        self._statistics = add_running_statistics(self.parts, model, self._dp_group, materialized, setup.log_event)

        self._collective_check: CollectiveCheck | None = None
        self._forward_checks: ForwardChecks | None = None
        if sharded:
            modules = sharded_modules(nn.ModuleList(split.local_stages))
            self._collective_check = CollectiveCheck(model, runtime, split.local_stages, self._dp_group)
            self._forward_checks = ForwardChecks(model, modules, originals, config)

        self._codec = ControlWordCodec(runtime.device, torch.float64)
        self._inner_gradients = InnerGradients(self._before_inner_gradient)

        # What runs the micro-batches.
        stages_of_remote = {name: split.by_tensor[name] for name in split.holding_ranks}
        self._remote = RemoteTensors(model, stages_of_remote, materialized)
        self._pipeline = Pipeline(
            model,
            split.stages,
            config.pp.schedule,
            axes.along("pp"),
            setup.precision,
            self._remote,
            self.parts,
            shard_group=self._dp_group if sharded else None,
            check_graph=self._forward_checks.check_graph if self._forward_checks else None,
        )

    def _begin_pass(self) -> None:
        """Begin a pass over the micro-batches of a step."""
        clear_gradients(self.parameters)
        for part in self.parts:
            part.begin_pass()

        self._remote.begin_pass()
        if self._collective_check:
            self._collective_check.begin_pass()

        if self._forward_checks:
            self._forward_checks.begin_pass()

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, progress: PassProgress) -> Reduced:
        self._begin_pass()
        micro_batches = list(batches)

        def intercepted(model: Any, data: Any) -> Loss:
            with self._inner_gradients:
                return loss_fn(model, data)

        # The loss scale of fp16 depends on the weight of the first micro-batch, and the schedule needs it beforehand.
        if progress.needs_reference_weight:
            first, loss = micro_batches[0], None
            try:
                loss = self._pipeline.forward(intercepted, first.data, loss_gradients=True)
            except UserError as error:
                self._pipeline.refusal = error  # all ranks raise it, at the end of the step

            progress.find_reference_weight(first, 0.0 if loss is None else loss.weight)

        self._pipeline.run(micro_batches, intercepted, progress)
        progress.end_all_backwards()
        for part in self.parts:
            part.before_all_reduce()

        packed, norms = self._finish_reduction(progress.control_word())
        for part in self.parts:
            part.end_pass(progress)

        # The norms are those of the parameters of all stages.
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        return Reduced(parameters, self._names, norms, packed, self._codec, to_sum=1.0)

    def _before_inner_gradient(self, inner: InnerGradient) -> None:
        """Refuse a gradient of the model that the user's loss computes itself."""
        # Gradients that do not depend on the model are allowed.
        if not inner.reaches({id(p) for p in self.parameters.values()}, tensors=self._pipeline.outputs):
            return

        raise UserError(
            "the loss computes gradients of the model itself, which a pipeline (mesh.pp) does not support: the rank "
            "that computes the loss holds only the last stage",
            inner.call_site,
            "set strategy=ddp, strategy=zero1 or strategy=fsdp, without mesh.pp",
        )

    def evaluate(self, loss_fn: LossFn, data: Any) -> Loss | None:
        # The pipeline itself enters autocast, for the stages and for the loss.
        return self._pipeline.forward(loss_fn, data)

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._gradients.norms(tensors)

    def full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        holders = self._holding_ranks.get(name)
        if holders is None:
            return full_tensor(tensor)

        # The ranks of other stages have only a placeholder and receive the tensor from the first rank that holds it.
        if self._runtime.world.rank in holders:
            full = full_tensor(tensor).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        self._runtime.collectives.broadcast_([full], source=holders[0])
        return full

    def sync_buffers(self) -> None:
        self._statistics.combine()

        # Placeholders of other stages have no memory to receive into.
        named = self.model.named_buffers()
        buffers = {name: buffer for name, buffer in named if name not in self.role.holders.held_elsewhere}
        broadcast_buffers(buffers, self._dp_group)
        broadcast_buffers(buffers, self._tp_group)
        self._statistics.forget()

    def reshard(self) -> None:
        for module in sharded_modules(nn.ModuleList(self._pipeline.local_stages.values())):
            module.reshard()

    # ---- after the last backward ----

    def _finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        """Reduce gradients over ranks. Return the summed control word, and the norms of the gradients of all stages."""
        if self._collective_check:
            self._collective_check.compare(END)

        # The other ranks learn of an error with the flags.
        if self._forward_checks:
            try:
                self._forward_checks.check_step()
            except UserError as error:
                self._pipeline.refusal = self._pipeline.refusal or error

        # First sum the control word, together with flags that say which parameters a rank used. On a GPU the host waits
        # for them, because they decide what is summed.
        used = self._gradients.used()
        flags = torch.tensor([*self._pipeline.step_flags(), *used, *self._remote.used()], dtype=torch.float64)
        packed, counts = sum_with_word(self._codec.pack(control_word), flags, self._runtime.collectives)
        refused, reached, *used_anywhere = [count > 0 for count in counts.tolist()]
        if refused:
            self._raise_refusal()

        self._remote.check(used_anywhere[len(used) :])

        # If the loss does not depend on the model, the last stage sends zeros, and parameters have gradients anyway.
        if not (reached and any(used_anywhere[: len(used)])):
            raise no_gradient()

        # Then sum the gradients, and call the user's hooks with the sums.
        self._gradients.sum(used_anywhere[: len(used)])
        change_sums(self._hooks_on_sums, self.parameters)
        return packed, self._gradients.step_norms()

    def _raise_refusal(self) -> NoReturn:
        """Raise a UserError on all ranks: of the loss, which only the last stage calls, or of a stage's forward."""
        local = self._pipeline.refusal
        refusals = self._runtime.collectives.all_gather_json(list(local.args) if local else None)
        raise local or UserError(*next(filter(None, refusals)))


class _Split(NamedTuple):
    """A model that is split into stages: where its tensors are."""

    stages: Sequence[Stage]  # the stages of all ranks
    local_stages: Sequence[Stage]
    by_tensor: Mapping[str, Sequence[int]]  # the stages that use each tensor
    pp_ranks: Mapping[str, set[int]]  # the ranks along pp whose stages use it; empty if no stage does: then all hold it
    holding_ranks: Mapping[str, tuple[int, ...]]  # the ranks that hold a tensor, if not all of them do
    held: set[str]  # the tensors that this rank's stages use, and those that no stage uses
    materialized: set[str]  # `held`, and all buffers that its stages may write into: they have memory on this rank
    banner: Mapping[str, str]  # lines about the stages


def _split_model(model: nn.Module, setup: DriverSetup, axes: Axes, sharded: bool) -> _Split:
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
    return _Split(stages, local_stages, by_tensor, pp_ranks, holding_ranks, held, materialized, banner)


def _role_in(split: _Split, setup: DriverSetup, mesh: Mesh) -> RankRole:
    """Return the role of this rank in a pipeline."""
    pp_rank, pp_ranks = mesh.coordinate("pp"), split.pp_ranks
    holders = ParameterHolders(
        held_elsewhere=pp_ranks.keys() - split.held,
        all_on_every_rank=not split.holding_ranks,
        duplicates={name for name, users in pp_ranks.items() if users and pp_rank > min(users)},
    )
    return replace(setup.role, pipeline_depth=mesh.sizes["pp"], replicated=False, holders=holders, banner=split.banner)


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


def _check(config: RunConfig, sharded: bool, runtime: Runtime, compiled: bool) -> None:
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
