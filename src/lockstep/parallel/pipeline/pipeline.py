"""Run micro-batches through a model that is split into stages, one or more per rank, with torch's own schedules.

Every rank of a pipeline reads the same micro-batches. What the task passes to `model(...)` is found by calling its loss
with a stand-in for the model that records the arguments and ends the call there; they are the input of the first stage.
The last stage calls the loss again, in full, with a stand-in that returns the output of the pipeline. Gradients are
those of sums and never divided, so micro-batches may have any weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lockstep.errors import UserError
from lockstep.parallel.driver import LossFn
from lockstep.parallel.pipeline.foreign_tensors import ForeignTensors
from lockstep.parallel.pipeline.p2p import receive, send
from lockstep.parallel.pipeline.stages import ModelInput, Stage
from lockstep.runtime.collectives import Collectives
from lockstep.task import Loss, MicroBatch

MAX_PREPARED = 8  # schedules that are kept: one for each number and shape of micro-batches

SCHEDULES: dict[str, tuple[Any, int]] = {  # torch's class, and the number of stages per rank by default
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 1),
}


# ---- the task's view of the model ----


class _ModelCalled(BaseException):
    """The task has called the model. Not an Exception, so that no `except` in the task catches it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.model_args = args
        self.model_kwargs = kwargs


class StandIn:
    """What a task's loss gets in place of the model. Apart from calls it looks like the user's model."""

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

    def record(*args: Any, **kwargs: Any) -> Any:
        raise _ModelCalled(args, kwargs)

    try:
        # Everything before the call of the model (masks, shifted targets) runs; the rest of the loss does not.
        loss_fn(StandIn(model, record), data)
    except _ModelCalled as call:
        return call.model_args, call.model_kwargs

    raise _not_one_call("not at all")


# ---- the pipeline ----


@dataclass
class _Work:
    """The input of one pass through the schedule, and the functions to call around each forward.

    `begin(micro, stage)` comes before a forward; `finish(micro, loss)` returns what to backpropagate.
    """

    micros: list[MicroBatch]
    inputs: list[ModelInput]
    loss_fn: LossFn
    begin: Callable[[MicroBatch, int], None]
    finish: Callable[[MicroBatch, Loss], Tensor]


class Pipeline:
    """Runs the micro-batches of a step, or one batch of an evaluation, through this rank's stages."""

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        schedule: str,
        along: Collectives,
        autocast: Callable[[], AbstractContextManager[Any]],
        foreign: ForeignTensors,
        shard_group: Collectives | None = None,
    ):
        """`stages` are those of all ranks, `along` the ranks of the pipeline, `foreign` what only other stages hold.

        `shard_group` are the ranks that hold the other shards of the same stages, and whose forwards and backwards wait
        for each other; None: the stages are not sharded.
        """
        assert along.group is not None
        self.model = model
        self.schedule = schedule
        self.autocast = autocast
        self.foreign = foreign
        self.shard_group = shard_group
        self.group = along.group
        self.ranks = along.world.size
        self.device = along.device
        self.count = len(stages)
        # Round robin: with several stages per rank, consecutive stages are on different ranks.
        self.mine = {n: stage for n, stage in enumerate(stages) if n % self.ranks == along.world.rank}

        self._prepared: dict[Any, _PreparedSchedule] = {}
        # By shape of the model's input: what comes into each stage, as meta tensors.
        self._stage_inputs: dict[Any, dict[int, list[Tensor]]] = {}
        # Modules that stages(model) has made around parts of the model; model.train() does not reach them.
        inside = {id(module) for module in model.modules()}
        self._wrappers = [m for stage in self.mine.values() for m in stage.modules() if id(m) not in inside]

    def run(
        self,
        micros: Sequence[MicroBatch],
        loss_fn: LossFn,
        begin: Callable[[MicroBatch, int], None],
        finish: Callable[[MicroBatch, Loss], Tensor],
    ) -> None:
        """Run forward and backward of all micro-batches.

        `begin(micro, stage)` is called before every forward, `finish(micro, loss)` returns what to backpropagate.
        Micro-batches of another shape (the short one at the end of an epoch) are a pass of their own.
        """
        self._set_mode()
        # Every rank finds the arguments itself, since every rank has the samples.
        inputs = [model_input(loss_fn, self.model, micro.data) for micro in micros]
        shapes = [_shape_of(given) for given in inputs]

        for group, is_new in self._passes(shapes):
            shape = shapes[group[0]]
            if is_new:
                self._stage_inputs[shape] = self._infer_shapes(inputs[group[0]])

            work = _Work([micros[n] for n in group], [inputs[n] for n in group], loss_fn, begin, finish)
            self._prepare(shape, len(group)).run(work)

    def _passes(self, shapes: Sequence[Any]) -> list[tuple[list[int], bool]]:
        """Return which micro-batches go through the schedule together, and whether shapes must be inferred first.

        Ranks that wait for each other do the same, whatever their micro-batches look like.
        """
        indices = range(len(shapes))
        # Neighbours of one shape go together; the order of micro-batches stays.
        groups = [list(group) for _, group in groupby(indices, key=lambda index: shapes[index])]
        new = [shape not in self._stage_inputs and shape not in shapes[:index] for index, shape in enumerate(shapes)]

        # FSDP inside the stages makes every forward and backward collective within the group.
        if self.shard_group is not None:
            of_all = self.shard_group.gather_json([groups, new])
            # Ranks whose micro-batches have other shapes group them differently: then each goes alone.
            if any(theirs != groups for theirs, _ in of_all):
                groups = [[index] for index in indices]

            new = [any(flags) for flags in zip(*(theirs for _, theirs in of_all), strict=True)]

        return [(group, any(new[index] for index in group)) for group in groups]

    def forward(self, loss_fn: LossFn, data: Any) -> Loss | None:
        """Run one batch without gradients, leaving the model's buffers as they are.

        Returns the loss on the rank of the last stage, None on the others.
        """
        self._set_mode()
        output = self._walk(model_input(loss_fn, self.model, data), lambda number, values: None)
        if self.count - 1 not in self.mine:
            return None

        # The loss runs on the last stage only, where the output is.
        with torch.no_grad(), self.autocast():
            return loss_fn(StandIn(self.model, lambda *a, **k: output), data)

    def _walk(self, given: ModelInput, note: Callable[[int, list[Tensor]], None]) -> Any:
        """Run one batch through all stages, one after another, and return what the last one returns, on its rank.

        `note(number, values)` is called with what comes into each stage. Running statistics are put back: the forward
        that counts is still to come.
        """
        output = None
        # In evaluation mode no buffer changes.
        buffers: list[Tensor] = []
        if self.model.training:
            buffers = [buffer for stage in self.mine.values() for buffer in stage.mutable_buffers()]

        before = [buffer.clone() for buffer in buffers]

        for number, stage in self.mine.items():
            values = None
            # A pipeline has at least two ranks, so the stage before is always on another one.
            if number > 0:
                values = receive((number - 1) % self.ranks, self.group, self.device)
                note(number, values)

            with torch.no_grad(), self.autocast():
                output = stage(given, values)

            if number < self.count - 1:
                leaving = sendable(output, number)
                note(number + 1, leaving)
                send(leaving, (number + 1) % self.ranks, self.group)

        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)

        return output

    def _infer_shapes(self, given: ModelInput) -> dict[int, list[Tensor]]:
        """Return what comes into each stage, as meta tensors: torch's schedules must know shapes beforehand."""
        found: dict[int, list[Tensor]] = {}
        self._walk(given, lambda number, values: found.update({number: [_meta(v) for v in values]}))
        return found

    def _prepare(self, shape: Any, count: int) -> _PreparedSchedule:
        key = (shape, count)
        if key not in self._prepared:
            # The oldest goes: shapes that come again are usually few.
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.pop(next(iter(self._prepared)))
            self._prepared[key] = _PreparedSchedule(self, self._stage_inputs[shape], count)
        return self._prepared[key]

    def _set_mode(self) -> None:
        """Set training or evaluation mode on modules that the task has put around parts of the model."""
        for module in self._wrappers:
            module.training = self.model.training


# ---- what torch's schedules call ----


class _ScheduledStage(nn.Module):
    """What torch's schedule calls, micro-batch after micro-batch."""

    def __init__(self, number: int, stage: Stage, pipeline: Pipeline):
        super().__init__()
        self.number = number
        self._behind = (pipeline, stage)  # in a tuple: not submodules of this one
        # When a schedule is new, torch takes away the gradients of its modules' parameters. For a sharded stage that
        # would take away what FSDP has accumulated, so torch does not see it.
        if pipeline.shard_group is None:
            self.stage = stage

    def start(self, work: _Work) -> None:
        self._work = work
        self._turns: Iterator[int] = iter(range(len(work.micros)))  # every schedule goes forward in this order

    def forward(self, *received: Tensor) -> Any:
        pipeline, stage = self._behind
        work = self._work
        turn = next(self._turns)
        micro = work.micros[turn]
        work.begin(micro, self.number)

        with pipeline.autocast():
            output = stage(work.inputs[turn], received if self.number else None)

        if self.number < pipeline.count - 1:
            return tuple(sendable(output, self.number))

        # Only the last stage knows the loss.
        loss = self._loss(micro, output)
        total = work.finish(micro, loss)
        if pipeline.foreign.are_read(loss, output, again=partial(self._loss, micro)):
            # An error will be raised at the end of the step; until then only the backward must still work.
            total = _finite_total(output)

        # torch got one dtype beforehand; the gradient that starts here is 1 in any.
        return total.float()

    def _loss(self, micro: MicroBatch, output: Any) -> Loss:
        pipeline, _ = self._behind
        with pipeline.autocast():
            return self._work.loss_fn(StandIn(pipeline.model, lambda *a, **k: output), micro.data)


def _finite_total(output: Any) -> Tensor:
    """Return a scalar, shape (), that depends on every tensor of `output`, so that a backward reaches all of them."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


class _PreparedSchedule:
    """A schedule for some number of micro-batches of one shape, with the buffers they are received in."""

    def __init__(self, pipeline: Pipeline, stage_inputs: dict[int, list[Tensor]], count: int):
        # The last stage returns the loss, a single number.
        loss = torch.empty((), device="meta", requires_grad=True)
        self.count = count
        self.modules = [_ScheduledStage(n, stage, pipeline) for n, stage in pipeline.mine.items()]
        self.stages = [
            PipelineStage(
                module,
                module.number,
                pipeline.count,
                pipeline.device,
                input_args=tuple(stage_inputs.get(module.number, ())),
                output_args=tuple(stage_inputs.get(module.number + 1, (loss,))),
                group=pipeline.group,
            )
            for module in self.modules
        ]
        self.schedule = make_schedule(pipeline.schedule, self.stages, count)

    def run(self, work: _Work) -> None:
        for module, stage in zip(self.modules, self.stages, strict=True):
            module.start(work)
            # torch sets these for its own step(), which splits a batch; our micro-batches come split.
            stage.has_backward = True
            stage.clear_runtime_states()

        try:
            self.schedule._step_microbatches(target_mbs=[None] * self.count, return_outputs=False)
        except RuntimeError as error:
            # torch wraps what was raised in a stage into an error of its own.
            if error.__cause__ is None:
                raise

            raise error.__cause__ from None


def make_schedule(name: str, stages: list[PipelineStage], count: int) -> Any:
    """Return the schedule `name` for `count` micro-batches.

    If it cannot take that number (a short last step), all forwards run, then all backwards, with the same sums.
    """
    kind, _ = SCHEDULES[name]
    if not fits(name, stages[0].group_size, count):
        kind = ScheduleLoopedBFS if len(stages) > 1 else ScheduleGPipe

    # torch's single-stage schedules take a stage, the others a list.
    takes_one = kind in (ScheduleGPipe, Schedule1F1B)
    # `clone`: torch detaches the stage's output in place, and still needs the loss.
    return kind(stages[0] if takes_one else stages, count, loss_fn=lambda output, _: output.clone(), scale_grads=False)


def fits(name: str, ranks: int, count: int) -> bool:
    """Whether the schedule can run `count` micro-batches: torch's own conditions."""
    if name == "gpipe":
        return True
    if name == "1f1b":
        return count >= ranks
    return count >= ranks and count % (count // ranks) == 0


# ---- between stages ----


def sendable(output: Any, number: int) -> list[Tensor]:
    """Return the output of stage `number` as contiguous tensors, or refuse it."""
    values = output if isinstance(output, tuple) else (output,)
    if any(isinstance(value, DTensor) for value in values):
        raise UserError(
            f"stage {number} returns a sharded tensor (mesh.tp), which cannot be passed to the next stage",
            "",
            'in tensor_plan(model) write "rowwise" or "gathered" for the last layer of a stage',
        )

    wrong = [v for v in values if not isinstance(v, Tensor) or not v.is_floating_point()]
    if wrong:
        kind = f"a tensor of {wrong[0].dtype}" if isinstance(wrong[0], Tensor) else f"a {type(wrong[0]).__name__}"
        raise UserError(
            f"stage {number} returns {kind}, which cannot be passed to the next stage",
            "a stage must return a floating-point tensor, or a tuple of them",
            "let stages(model) split where only activations pass, and compute masks and positions in each stage",
        )

    return [value.contiguous() for value in values]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)


def _shape_of(given: Any) -> tuple[Any, ...]:
    """Return a key for the shapes and dtypes of all tensors, and the values of everything else."""
    leaves = tree_leaves(given)
    return tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)


def _not_one_call(how_often: str) -> UserError:
    return UserError(
        f"loss(model, batch) calls model(...) {how_often}; in a pipeline it must call it exactly once",
        "",
        "give the model's forward what it needs to compute everything in one call; or choose strategy=fsdp",
    )
