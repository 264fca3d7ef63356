"""torch's schedules: the order of forwards and backwards, and the modules that they call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.utils._pytree import tree_leaves

from lockstep.errors import UserError
from lockstep.parallel.driver import LossFn
from lockstep.parallel.pipeline.p2p import sendable
from lockstep.parallel.pipeline.stages import ModelInput, Stage
from lockstep.parallel.progress import PassProgress
from lockstep.task import MicroBatch

if TYPE_CHECKING:
    from lockstep.parallel.pipeline.pipeline import Pipeline

Work = Sequence[tuple[MicroBatch, ModelInput]]  # the micro-batches of one pass, each with the model's arguments

# For each name: torch's class, and the default number of stages per rank.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 1),
}


class _ScheduledStage(nn.Module):
    """A stage as torch's schedules call it. The last stage returns the loss."""

    def __init__(self, number: int, stage: Stage, pipeline: Pipeline):
        super().__init__()
        self.number = number
        self._pipeline = pipeline
        self._unregistered = (stage,)  # in a tuple, so that torch does not make the stage a submodule

        # A new schedule clears the gradients of its modules' parameters. For a sharded stage that would discard the
        # gradients that FSDP has accumulated, so a sharded stage is not registered as a submodule.
        if pipeline.shard_group is None:
            self.stage = stage

    def start(self, work: Work, loss_fn: LossFn, progress: PassProgress) -> None:
        """Begin a pass. torch then calls `forward` once for each micro-batch."""
        self._work = iter(work)  # every schedule runs the forwards in this order
        self._loss_fn = loss_fn
        self._progress = progress

    def forward(self, *received: Tensor) -> Any:
        """Run the next micro-batch. Return what the next stage receives; on the last stage, what to backpropagate."""
        micro, arguments = next(self._work)
        self._progress.before_forward(micro, self.number)
        for part in self._pipeline.parts:
            part.before_forward(micro, self._progress)

        (stage,) = self._unregistered
        with self._pipeline.autocast():
            output = stage(arguments, received if self.number else None)

        # PreparedSchedule declares a float32 loss. The backward starts with a gradient of 1 in any dtype.
        is_last = self.number == self._pipeline.count - 1
        passed = (self._scaled_loss(output, micro).float(),) if is_last else tuple(sendable(output, self.number))
        if self._pipeline.check_graph:
            self._pipeline.check_graph(passed)

        return passed[0] if is_last else passed

    def _scaled_loss(self, output: Any, micro: MicroBatch) -> Tensor:
        """Return the task's loss for the model's `output`, times the gradient with which a backward would start.

        If the loss raises a UserError, or has read a tensor of another stage, this is a sum over `output` instead.
        """
        pipeline = self._pipeline
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaf in leaves:
            # If the loss changes a view in place, torch calls the hooks of its base only.
            base = leaf._base if leaf._base is not None and leaf._base.grad_fn is not None else leaf
            base.register_hook(pipeline.note_gradient)

        # Gradients that the loss computes itself are checked against the model's outputs.
        pipeline.outputs = leaves
        compute_loss = partial(pipeline.loss, self._loss_fn, micro.data)
        try:
            loss = compute_loss(output)
            grad_output = self._progress.record(loss)
            if not pipeline.remote.were_read(loss, output, compute_loss):
                return loss.total * grad_output
        except UserError as error:
            pipeline.refuse(error)
        finally:
            pipeline.outputs = []

        # All ranks will raise an error at the end of the pass. Until then the other stages wait for a backward, which
        # must reach every tensor of the output. Without any that has a gradient it reaches nothing.
        nothing = torch.zeros((), device=pipeline.pp.device, requires_grad=True)
        return torch.stack([nothing, *(leaf.float().sum() for leaf in leaves)]).sum()


class _SendingStage(PipelineStage):
    """Sends a gradient for everything that it received: zeros where the loss does not depend on it.

    Before 2.13 torch raises an error instead, on this rank alone, and the others lose the connection.
    """

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        if not self.is_first and any(gradient is None for gradient in gradients):
            pairs = zip(gradients, self.args_recv_info[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(received.buffer) if gradient is None else gradient  # pyrefly: ignore[bad-argument-type]
                for gradient, received in pairs
            )

        return super().get_bwd_send_ops(bwd_chunk_id)


class PreparedSchedule:
    """A schedule for a fixed number of micro-batches of one shape, with its receive buffers."""

    def __init__(self, pipeline: Pipeline, stage_inputs: dict[int, list[Tensor]], count: int):
        # The last stage returns the loss, a single number.
        loss = torch.empty((), device="meta", requires_grad=True)
        self.modules = [_ScheduledStage(n, stage, pipeline) for n, stage in pipeline.local_stages.items()]

        # With input_args and output_args, torch need not run the stages to infer the shapes.
        self.stages = [
            _SendingStage(
                module,
                module.number,
                pipeline.count,
                pipeline.pp.device,
                input_args=tuple(stage_inputs.get(module.number, ())),
                output_args=tuple(stage_inputs.get(module.number + 1, (loss,))),
                group=pipeline.pp.group,
            )
            for module in self.modules
        ]

        self.schedule = make_schedule(pipeline.schedule, self.stages, count)

    def run(self, work: Work, loss_fn: LossFn, progress: PassProgress) -> None:
        """Run forward and backward of these micro-batches, in the order of the schedule."""
        for module, stage in zip(self.modules, self.stages, strict=True):
            module.start(work, loss_fn, progress)
            # torch does this in schedule.step(), which we do not call: it would split a batch into micro-batches.
            stage.has_backward = True
            stage.clear_runtime_states()

        try:
            self.schedule._step_microbatches(target_mbs=[None] * len(work), return_outputs=False)
        except RuntimeError as error:
            # torch wraps an error from a stage in a RuntimeError.
            if error.__cause__ is None:
                raise

            raise error.__cause__ from None


def make_schedule(name: str, stages: Sequence[PipelineStage], count: int) -> Any:
    """Return the schedule `name` for `count` micro-batches.

    If it does not support that number (in a short last step), all forwards run first and then all backwards, with the
    same sums.
    """
    kind, _ = SCHEDULES[name]
    if not fits(name, stages[0].group_size, count):
        kind = ScheduleLoopedBFS if len(stages) > 1 else ScheduleGPipe

    return kind(
        # These two classes take one stage, the others a list of stages.
        stages[0] if kind in (ScheduleGPipe, Schedule1F1B) else list(stages),
        count,
        # A copy, because torch detaches the stage's output in place before it uses the loss.
        loss_fn=lambda output, _: output.clone(),
        scale_grads=False,
    )


def fits(name: str, ranks: int, count: int) -> bool:
    """Whether the schedule supports `count` micro-batches. These are torch's own conditions."""
    if name == "gpipe":
        return True
    return count >= ranks and (name == "1f1b" or count % (count // ranks) == 0)
