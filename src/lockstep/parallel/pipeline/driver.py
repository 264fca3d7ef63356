"""The Driver of a pipeline: every rank holds the tensors of its own stages, and placeholders for all others.

Stages are distributed along pp, replicated or sharded along dp, and their layers are sharded along tp. Both of two
stages that share a weight (a tied embedding) hold it; its two gradients are added, so that both get the same update.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.batchnorm.buffers import broadcast_buffers
from lockstep.parallel.batchnorm.statistics import add_running_statistics
from lockstep.parallel.driver import Driver, DriverSetup, LossFn, Reduced, trainable
from lockstep.parallel.fsdp.collective_check import END, CollectiveCheck
from lockstep.parallel.fsdp.forward_checks import ForwardChecks, check_shardable, parameters_before
from lockstep.parallel.fsdp.sharding import sharded_modules
from lockstep.parallel.gradients import clear_gradients, no_gradient, sum_with_word
from lockstep.parallel.inner_gradients import InnerGradient, InnerGradients
from lockstep.parallel.parameter_hooks.hooks import change_sums
from lockstep.parallel.pipeline.pipeline import Pipeline
from lockstep.parallel.pipeline.placement import check_pipeline, place_stages, role_in
from lockstep.parallel.pipeline.remote_tensors import RemoteTensors
from lockstep.parallel.pipeline.stage_gradients import StageGradients
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepParts
from lockstep.runtime.control_word import ControlWord, ControlWordCodec
from lockstep.runtime.shards import full_tensor
from lockstep.task import Loss, StepBatches


class PipelineDriver(Driver):
    """Runs all micro-batches of a pass at once, stage by stage."""

    def __init__(self, model: nn.Module, setup: DriverSetup):
        """Split `model`, which is a full model on the CPU. A trace of its forward reads two of the samples."""
        config, runtime, axes = setup.config, setup.runtime, setup.axes
        assert axes is not None
        sharded = config.strategy_record.shards_parameters and axes.mesh.sizes["dp"] > 1
        check_pipeline(config, sharded, runtime, setup.compiled)
        if sharded:
            check_shardable(model, config)

        originals = parameters_before(model)
        placed = place_stages(model, setup, axes, sharded)

        super().__init__(model, role_in(placed, setup, axes.mesh), trainable(model), StepParts(overlapping=True))
        self._runtime = runtime
        self._dp_group = setup.dp_group
        self._tp_group = axes.along("tp")
        self._names = list(self.parameters)
        self._holding_ranks = placed.holding_ranks
        self._hooks_on_sums = setup.hooks  # called with the gradient sums of a pass

        # What sums the gradients.
        holders = [placed.pp_ranks[name] for name in self._names]
        is_held = [name in placed.held for name in self._names]
        self._gradients = StageGradients(runtime, axes, [*self.parameters.values()], is_held, holders, sharded)

        # What takes part in the steps.
        materialized = placed.materialized
        self._statistics = add_running_statistics(self.parts, model, self._dp_group, materialized, setup.log_event)

        self._sharded_modules = sharded_modules(nn.ModuleList(placed.local_stages))
        self._collective_check: CollectiveCheck | None = None
        self._forward_checks: ForwardChecks | None = None
        if sharded:
            self._collective_check = CollectiveCheck(model, runtime, placed.local_stages, self._dp_group)
            self._forward_checks = ForwardChecks(model, self._sharded_modules, originals, config)

        self._codec = ControlWordCodec(runtime.device, torch.float64)
        self._inner_gradients = InnerGradients(self._before_inner_gradient)

        # What runs the micro-batches.
        stages_of_remote = {name: placed.by_tensor[name] for name in placed.holding_ranks}
        self._remote = RemoteTensors(model, stages_of_remote, materialized)
        self._pipeline = Pipeline(
            model,
            placed.stages,
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
            first = micro_batches[0]
            loss = None
            try:
                loss = self._pipeline.forward(intercepted, first.data, loss_gradients=True)
            except UserError as error:
                self._pipeline.refuse(error)

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
        for module in self._sharded_modules:
            module.reshard()

    # ---- after the last backward ----

    def _finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        """Reduce gradients over ranks. Return the summed control word, and the norms of the gradients of all stages."""
        if self._collective_check:
            self._collective_check.compare(END)

        # The other ranks learn of an error with the flags.
        if self._forward_checks:
            try:
                self._forward_checks.check_pass()
            except UserError as error:
                self._pipeline.refuse(error)

        # First sum the control word, together with flags that say which parameters a rank used. On a GPU the host waits
        # for them, because they decide what is summed.
        used = self._gradients.used()
        flags = torch.tensor([*self._pipeline.pass_flags(), *used, *self._remote.used()], dtype=torch.float64)
        packed, counts = sum_with_word(self._codec.pack(control_word), flags, self._runtime.collectives)
        refused, reached, *found = [count > 0 for count in counts.tolist()]
        if refused:
            self._raise_refusal()

        used_anywhere, remote_used_anywhere = found[: len(used)], found[len(used) :]
        self._remote.check(remote_used_anywhere)

        # If the loss does not depend on the model, the last stage sends zeros, and parameters have gradients anyway.
        if not (reached and any(used_anywhere)):
            raise no_gradient()

        # Then sum the gradients, and call the user's hooks with the sums.
        self._gradients.sum(used_anywhere)
        change_sums(self._hooks_on_sums, self.parameters)
        return packed, self._gradients.gradient_norms()

    def _raise_refusal(self) -> NoReturn:
        """Raise a UserError on all ranks: of the loss, which only the last stage calls, or of a stage's forward."""
        local = self._pipeline.refusal
        refusals = self._runtime.collectives.all_gather_json(list(local.args) if local else None)
        raise local or UserError(*next(filter(None, refusals)))
