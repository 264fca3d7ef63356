"""Run micro-batches through a model that is split into stages, one or more per rank, with torch's own schedules.

Every rank of a pipeline reads the same micro-batches. To learn what the task passes to `model(...)`, we call its loss
with a stand-in for the model, which records the arguments and ends the call; they are the input of the first stage. The
last stage calls the loss again, in full, with a stand-in that returns the output of the pipeline. Gradients are those
of sums and never divided, so micro-batches may have any weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

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
from lockstep.parallel.driver import Autocast, Control, LossFn, no_gradient
from lockstep.parallel.pipeline.foreign_tensors import ForeignTensors
from lockstep.parallel.pipeline.p2p import receive, send, sendable
from lockstep.parallel.pipeline.stages import ModelInput, Stage
from lockstep.runtime.collectives import Collectives
from lockstep.task import Loss, MicroBatch

MAX_PREPARED = 8  # schedules that are kept, one for each number and shape of micro-batches

# torch's class, and the default number of stages per rank.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 1),
}


# ---- the task's view of the model ----


class _ModelCalled(BaseException):
    """The task called the model with (args, kwargs).

    It is not an Exception, so that no `except` in the task catches it.
    """


class StandIn:
    """Takes the place of the model in a task's loss. It has the attributes of the model, and `answer` as its call."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any]):
        self._model = model
        self._answer = answer
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise _not_one_call("more than once")
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def model_input(loss_fn: LossFn, model: nn.Module, data: Any) -> ModelInput:
    """Return what the task passes to the model for this batch."""

    trains = torch.is_grad_enabled()

    def record(*args: Any, **kwargs: Any) -> Any:
        # The stages run outside the loss, with gradients.
        if trains and not torch.is_grad_enabled():
            raise no_gradient()
        raise _ModelCalled(args, kwargs)

    try:
        # Everything before the call of the model (masks, shifted targets) runs; the rest of the loss does not.
        loss_fn(StandIn(model, record), data)
    except _ModelCalled as call:
        args, kwargs = call.args
        return args, kwargs

    raise _not_one_call("not at all")


# ---- the pipeline ----


class Pipeline:
    """Runs the micro-batches of a step, or one batch of an evaluation, through this rank's stages."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        schedule: str,
        along: Collectives,
        autocast: Autocast,
        foreign: ForeignTensors,
        shard_group: Collectives | None = None,
        before_forward: Callable[[MicroBatch], None] = lambda micro: None,
    ):
        """Set up this rank's end of the pipeline.

        stages: those of all ranks
        along: the ranks of the pipeline
        foreign: the tensors that only other stages hold
        shard_group: the ranks that hold the other shards of the same stages, whose forwards and backwards wait for each
            other; None: the stages are not sharded
        before_forward: called before each stage's forward of a micro-batch
        """
        self.model = model
        self.schedule = schedule
        self.autocast = autocast
        self.foreign = foreign
        self.shard_group = shard_group
        self.along = along
        self.before_forward = before_forward
        self.count = len(stages)
        # Round robin: with several stages per rank, consecutive stages are on different ranks.
        self.local_stages = {n: stage for n, stage in enumerate(stages) if n % along.world.size == along.world.rank}

        # Of this step, where this rank computes the loss: what that was refused for, and whether a backward from it
        # reached the output of the model.
        self.refused: UserError | None = None
        self.reached = False
        self.outputs: list[Tensor] = []  # of the model, while the loss of a micro-batch is computed with gradients
        self._prepared: dict[Any, _PreparedSchedule] = {}
        self._stage_inputs: dict[Any, dict[int, list[Tensor]]] = {}  # as `_walk` returns them, by shape of the input

        # model.train() does not reach modules that stages(model) wrapped around parts of the model.
        inside = {id(module) for module in model.modules()}
        self._wrappers = [m for stage in self.local_stages.values() for m in stage.modules() if id(m) not in inside]

    def run(self, micros: Sequence[MicroBatch], loss_fn: LossFn, control: Control) -> None:
        """Run forward and backward of all micro-batches.

        Micro-batches of another shape (the short one at the end of an epoch) get a separate pass.
        """
        self._set_mode()
        self.reached = False

        # Every rank finds the arguments itself, since every rank has the samples.
        inputs = [model_input(loss_fn, self.model, micro.data) for micro in micros]
        shapes = [_shape_of(arguments) for arguments in inputs]

        for group, is_new in self._passes(shapes):
            shape = shapes[group[0]]
            if is_new:
                _, self._stage_inputs[shape] = self._walk(inputs[group[0]])
            self._prepare(shape, len(group)).run([(micros[n], inputs[n]) for n in group], loss_fn, control)

    def marks(self) -> list[bool]:
        """Return whether this rank's loss was refused, and whether its backward reached the model, in this step."""
        return [self.refused is not None, self.reached]

    def note_gradient(self, gradient: Tensor) -> None:
        self.reached = True

    def _passes(self, shapes: Sequence[Any]) -> list[tuple[list[int], bool]]:
        """Return which micro-batches go through the schedule together, and whether their shapes must be inferred first.

        Ranks that wait for each other get the same answer, whatever shapes their own micro-batches have.
        """
        indices = range(len(shapes))
        # Neighbours of the same shape go together, which keeps the order of micro-batches.
        groups = [list(group) for _, group in groupby(indices, key=lambda index: shapes[index])]
        new = [shape not in self._stage_inputs and shape not in shapes[:index] for index, shape in enumerate(shapes)]

        # FSDP inside the stages makes every forward and backward collective within the group.
        if self.shard_group is not None:
            answers = self.shard_group.gather_json([groups, new])
            # Ranks may group their micro-batches differently, by other shapes: then each micro-batch goes alone.
            if any(peer_groups != groups for peer_groups, _ in answers):
                groups = [[index] for index in indices]
            new = [any(flags) for flags in zip(*(peer_new for _, peer_new in answers), strict=True)]

        return [(group, any(new[index] for index in group)) for group in groups]

    def forward(self, loss_fn: LossFn, data: Any) -> Loss | None:
        """Run one batch without gradients, leaving the model's buffers as they are.

        Returns the loss on the rank of the last stage, None on the others.
        """
        self._set_mode()
        output, _ = self._walk(model_input(loss_fn, self.model, data))
        if self.count - 1 not in self.local_stages:
            return None

        with torch.no_grad():
            return self.loss(loss_fn, data, output)

    def loss(self, loss_fn: LossFn, data: Any, output: Any) -> Loss:
        """Return the task's loss for the model's `output`, which only the rank of the last stage has."""
        with self.autocast():
            return loss_fn(StandIn(self.model, lambda *a, **k: output), data)

    def _walk(self, arguments: ModelInput) -> tuple[Any, dict[int, list[Tensor]]]:
        """Run one batch through all stages, one after another, without changing running statistics.

        Returns the output of this rank's last stage, and the inputs of this rank's stages and of those after them, as
        meta tensors: torch's schedules must know shapes beforehand.
        """
        output = None
        stage_inputs: dict[int, list[Tensor]] = {}
        # In evaluation mode no buffer changes. In training mode the forward that counts is still to come.
        changing = self.local_stages.values() if self.model.training else ()
        buffers = [(buffer, buffer.clone()) for stage in changing for buffer in stage.mutable_buffers()]

        for number, stage in self.local_stages.items():
            received = None
            # A pipeline has at least two ranks, so the previous stage is always on another one.
            if number > 0:
                received = receive((number - 1) % self.along.world.size, self.along.group, self.along.device)
                stage_inputs[number] = [_meta(tensor) for tensor in received]

            with torch.no_grad(), self.autocast():
                output = stage(arguments, received)

            if number < self.count - 1:
                passed = sendable(output, number)
                stage_inputs[number + 1] = [_meta(tensor) for tensor in passed]
                send(passed, (number + 1) % self.along.world.size, self.along.group)

        for buffer, before in buffers:
            buffer.copy_(before)

        return output, stage_inputs

    def _prepare(self, shape: Any, count: int) -> _PreparedSchedule:
        key = (shape, count)
        if key not in self._prepared:
            # The oldest one goes: usually only a few shapes recur.
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.pop(next(iter(self._prepared)))

            self._prepared[key] = _PreparedSchedule(self, self._stage_inputs[shape], count)

        return self._prepared[key]

    def _set_mode(self) -> None:
        for module in self._wrappers:
            module.training = self.model.training


# ---- what torch's schedules call ----

_Work = Sequence[tuple[MicroBatch, ModelInput]]  # the micro-batches of one pass, each with the model's arguments


class _ScheduledStage(nn.Module):
    def __init__(self, number: int, stage: Stage, pipeline: Pipeline):
        super().__init__()
        self.number = number
        self._behind = (pipeline, stage)  # in a tuple, so that they do not become submodules

        # A new schedule clears the gradients of its modules' parameters. For a sharded stage that would discard what
        # FSDP accumulated, so such a stage stays hidden from torch.
        if pipeline.shard_group is None:
            self.stage = stage

    def start(self, work: _Work, loss_fn: LossFn, control: Control) -> None:
        self._work = iter(work)  # every schedule runs the forwards in this order
        self._loss_fn = loss_fn
        self._control = control

    def forward(self, *received: Tensor) -> Any:
        pipeline, stage = self._behind
        micro, arguments = next(self._work)
        self._control.before_forward(micro, self.number)
        pipeline.before_forward(micro)

        with pipeline.autocast():
            output = stage(arguments, received if self.number else None)

        if self.number < pipeline.count - 1:
            return tuple(sendable(output, self.number))

        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaf in leaves:
            leaf.register_hook(pipeline.note_gradient)

        loss_of = partial(pipeline.loss, self._loss_fn, micro.data)
        total: Tensor | None = None
        pipeline.outputs = leaves
        try:
            loss = loss_of(output)
            start = self._control.record(loss)  # may replace loss.total, by an injected fault
            if not pipeline.foreign.are_read(loss, output, again=loss_of):
                total = loss.total * start
        except UserError as error:
            pipeline.refused = pipeline.refused or error
        finally:
            pipeline.outputs = []

        # An error will be raised at the end of the step, on all ranks; until then the backward must still work, and
        # reach every tensor of the output. Without any that has a gradient it reaches nothing.
        if total is None:
            nothing = torch.zeros((), device=pipeline.along.device, requires_grad=True)
            total = torch.stack([nothing, *(leaf.float().sum() for leaf in leaves)]).sum()

        # torch was told that the loss is float32; the gradient that starts here is 1 in any dtype.
        return total.float()


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


class _PreparedSchedule:
    """A schedule for a fixed number of micro-batches of one shape, with the buffers they are received in."""

    def __init__(self, pipeline: Pipeline, stage_inputs: dict[int, list[Tensor]], count: int):
        # The last stage returns the loss, a single number.
        loss = torch.empty((), device="meta", requires_grad=True)
        self.modules = [_ScheduledStage(n, stage, pipeline) for n, stage in pipeline.local_stages.items()]

        # Given the shapes, torch need not run the stages to learn them.
        self.stages = [
            _SendingStage(
                module,
                module.number,
                pipeline.count,
                pipeline.along.device,
                input_args=tuple(stage_inputs.get(module.number, ())),
                output_args=tuple(stage_inputs.get(module.number + 1, (loss,))),
                group=pipeline.along.group,
            )
            for module in self.modules
        ]

        self.schedule = make_schedule(pipeline.schedule, self.stages, count)

    def run(self, work: _Work, loss_fn: LossFn, control: Control) -> None:
        for module, stage in zip(self.modules, self.stages, strict=True):
            module.start(work, loss_fn, control)
            # torch sets these in its own step(), which splits a batch; our micro-batches are split already.
            stage.has_backward = True
            stage.clear_runtime_states()

        try:
            self.schedule._step_microbatches(target_mbs=[None] * len(work), return_outputs=False)
        except RuntimeError as error:
            # torch wraps an error that was raised in a stage in its own.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None


def make_schedule(name: str, stages: Sequence[PipelineStage], count: int) -> Any:
    """Return the schedule `name` for `count` micro-batches.

    If it cannot take that number (a short last step), all forwards run, then all backwards, with the same sums.
    """
    kind, _ = SCHEDULES[name]
    if not fits(name, stages[0].group_size, count):
        kind = ScheduleLoopedBFS if len(stages) > 1 else ScheduleGPipe

    return kind(
        # These two take one stage, the others a list.
        stages[0] if kind in (ScheduleGPipe, Schedule1F1B) else list(stages),
        count,
        # A copy: torch detaches the stage's output in place and still needs the loss.
        loss_fn=lambda output, _: output.clone(),
        scale_grads=False,
    )


def fits(name: str, ranks: int, count: int) -> bool:
    """Return whether the schedule can run `count` micro-batches: these are torch's own conditions."""
    if name == "gpipe":
        return True
    return count >= ranks and (name == "1f1b" or count % (count // ranks) == 0)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)


def _shape_of(arguments: ModelInput) -> tuple[Any, ...]:
    """Return a key for the shapes and dtypes of all tensors, and the values of everything else."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in tree_leaves(arguments)
    )


def _not_one_call(how_often: str) -> UserError:
    return UserError(
        f"loss(model, batch) calls model(...) {how_often}; in a pipeline it must call it exactly once",
        "",
        "give the model's forward what it needs to compute everything in one call; or choose strategy=fsdp",
    )
