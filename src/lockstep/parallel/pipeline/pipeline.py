"""A model cut into stages, one or more for each rank; micro-batches flow through them: torch's own schedules.

Every rank of a pipeline reads the same micro-batches. What the task passes to `model(...)` is found by calling its loss
with a stand-in that looks at the arguments and goes no further; the first stage gets those. In the last stage the loss
runs again, up to its end, with a stand-in that returns what came through the pipeline. Gradients are of sums and never
divided, so micro-batches may weigh what they want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
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
from lockstep.parallel.pipeline.absent import Absent
from lockstep.parallel.pipeline.gates import Span
from lockstep.parallel.pipeline.stages import Chunk, Given
from lockstep.parallel.pipeline.wire import receive, send
from lockstep.runtime.collectives import Collectives
from lockstep.task import Loss, MicroBatch

MOST_KEPT = 8  # prepared schedules: one for each number and shape of micro-batches
LossOf = Callable[[Any, Any], Loss]
Stage = Chunk | Span


class _Reached(BaseException):
    """The task has called the model. Not an Exception: no `except` of the task's own may take it for one."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args_given, self.kwargs_given = args, kwargs


class StandIn:
    """What a task's loss gets for the model. Apart from calls it looks like the user's."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any]):
        self._model, self._answer, self._calls = model, answer, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise _not_one_call("two")
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def model_input(loss_of: LossOf, model: nn.Module, data: Any) -> Given:
    """What the task passes to the model for this batch."""

    def look(*args: Any, **kwargs: Any) -> Any:
        raise _Reached(args, kwargs)

    try:
        loss_of(StandIn(model, look), data)
    except _Reached as reached:
        return reached.args_given, reached.kwargs_given
    raise _not_one_call("none")


class Pipeline:
    """Runs the micro-batches of a step, or one batch of an evaluation, through this rank's stages."""

    def __init__(
        self,
        model: nn.Module,
        chunks: Sequence[Stage],
        schedule: str,
        along: Collectives,
        autocast: Callable[[], AbstractContextManager[Any]],
        absent: Absent,
        copies: Collectives | None = None,
    ):
        """`absent`: what only other stages hold. `copies`: the ranks that hold other parts of the same stages, whose
        forwards and backwards wait for each other; None: nobody does."""
        self.copies, self.absent = copies, absent
        assert along.group is not None
        self.model, self.schedule, self.autocast = model, schedule, autocast
        self.group, self.ranks, self.rank, self.device = along.group, along.world.size, along.world.rank, along.device
        self.count = len(chunks)
        self.mine = {number: chunk for number, chunk in enumerate(chunks) if number % self.ranks == self.rank}
        self._prepared: dict[Any, _Prepared] = {}
        self._passed: dict[Any, dict[int, list[Tensor]]] = {}  # by shape of input: what comes into each stage, empty
        inside = {id(module) for module in model.modules()}
        self._around = [m for chunk in self.mine.values() for m in chunk.modules() if id(m) not in inside]

    def run(
        self,
        micros: Sequence[MicroBatch],
        loss_of: LossOf,
        begin: Callable[[MicroBatch, int], None],
        finish: Callable[[MicroBatch, Loss], Tensor],
    ) -> None:
        """Forward and backward. `begin(micro, stage)` comes before every forward, `finish(micro, loss)` gives what to
        backpropagate. Micro-batches of another shape (the short one at the end of an epoch) are a pass of their own."""
        self._set_mode()
        inputs = [model_input(loss_of, self.model, micro.data) for micro in micros]
        shapes = [_shape_of(given) for given in inputs]
        for group, explore in self._passes(shapes):
            shape = shapes[group[0]]
            if explore:
                self._passed[shape] = self._explore(inputs[group[0]])
            work = _Work([micros[n] for n in group], [inputs[n] for n in group], loss_of, begin, finish)
            self._prepare(shape, len(group)).run(work)

    def _passes(self, shapes: Sequence[Any]) -> list[tuple[list[int], bool]]:
        """Which micro-batches go through the schedule together, and whether to explore before. Ranks that wait for each
        other do the same, whatever their micro-batches look like."""
        groups = [list(places) for _, places in groupby(range(len(shapes)), key=lambda place: shapes[place])]
        new = [shape not in self._passed and shape not in shapes[:place] for place, shape in enumerate(shapes)]
        if self.copies is not None:
            everybody = self.copies.gather_json([groups, new])
            if any(theirs != groups for theirs, _ in everybody):
                groups = [[place] for place in range(len(shapes))]
            new = [any(flags) for flags in zip(*(theirs for _, theirs in everybody), strict=True)]
        return [(group, any(new[place] for place in group)) for group in groups]

    def forward(self, loss_of: LossOf, data: Any) -> Loss | None:
        """Without gradients, and without a trace in the model's buffers; the loss in the last stage, None in the
        others."""
        self._set_mode()
        output = self._walk(model_input(loss_of, self.model, data), lambda number, values: None)
        if self.count - 1 not in self.mine:
            return None
        with torch.no_grad(), self.autocast():
            return loss_of(StandIn(self.model, lambda *a, **k: output), data)

    def _walk(self, given: Given, note: Callable[[int, list[Tensor]], None]) -> Any:
        """One batch through all stages, one after another. What the last one returns, where it is. `note` hears the
        number of a stage, and what comes into it. Running statistics are put back: a real forward is still to come."""
        output = None
        buffers = [b for chunk in self.mine.values() for b in chunk.changing()] if self.model.training else []
        before = [buffer.clone() for buffer in buffers]
        for number, chunk in self.mine.items():
            values = None
            if number > 0:
                values = receive((number - 1) % self.ranks, self.group, self.device)
                note(number, values)
            with torch.no_grad(), self.autocast():
                output = chunk(given, values)
            if number < self.count - 1:
                leaving = sent(output, number)
                note(number + 1, leaving)
                send(leaving, (number + 1) % self.ranks, self.group)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        return output

    def _explore(self, given: Given) -> dict[int, list[Tensor]]:
        """What torch's schedules must know beforehand: the sizes of all that is passed on."""
        found: dict[int, list[Tensor]] = {}
        self._walk(given, lambda number, values: found.update({number: [_meta(v) for v in values]}))
        return found

    def _prepare(self, shape: Any, count: int) -> _Prepared:
        key = shape, count
        if key not in self._prepared:
            if len(self._prepared) >= MOST_KEPT:
                self._prepared.pop(next(iter(self._prepared)))
            self._prepared[key] = _Prepared(self, self._passed[shape], count)
        return self._prepared[key]

    def _set_mode(self) -> None:
        """Modules that the task has put around parts of the model follow it: training, or evaluation."""
        for module in self._around:
            module.training = self.model.training


class _Work:
    """What one pass through the schedule is made of."""

    def __init__(
        self,
        micros: list[MicroBatch],
        inputs: list[Given],
        loss_of: LossOf,
        begin: Callable[[MicroBatch, int], None],
        finish: Callable[[MicroBatch, Loss], Tensor],
    ):
        self.micros, self.inputs, self.loss_of, self.begin, self.finish = micros, inputs, loss_of, begin, finish


class _Stage(nn.Module):
    """What torch's schedule calls, micro-batch after micro-batch."""

    def __init__(self, number: int, chunk: Stage, pipeline: Pipeline):
        super().__init__()
        self.number = number
        self._behind = pipeline, chunk  # in a tuple: not modules of this one
        if pipeline.copies is None:  # torch takes the gradients away from what FSDP has cut, when a schedule is new
            self.chunk = chunk

    def start(self, work: _Work) -> None:
        self._work = work
        self._turns: Iterator[int] = iter(range(len(work.micros)))  # every schedule goes forward in this order

    def forward(self, *received: Tensor) -> Any:
        (pipeline, chunk), work, turn = self._behind, self._work, next(self._turns)
        micro = work.micros[turn]
        work.begin(micro, self.number)
        with pipeline.autocast():
            output = chunk(work.inputs[turn], received if self.number else None)
        if self.number < pipeline.count - 1:
            return tuple(sent(output, self.number))
        loss = self._loss(micro, output)
        total = work.finish(micro, loss)
        if pipeline.absent.read(loss, output, again=partial(self._loss, micro)):
            total = _any_number_of(output)  # an error is to come: only the backward must still pass
        # One type for torch, which was told it beforehand; the gradient that starts here is 1 in any.
        return total.float()

    def _loss(self, micro: MicroBatch, output: Any) -> Loss:
        pipeline, _ = self._behind
        with pipeline.autocast():
            return self._work.loss_of(StandIn(pipeline.model, lambda *a, **k: output), micro.data)


def _any_number_of(output: Any) -> Tensor:
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


class _Prepared:
    """A schedule for some number of micro-batches of one shape, with the buffers they are received in."""

    def __init__(self, pipeline: Pipeline, passed: dict[int, list[Tensor]], count: int):
        number = torch.empty((), device="meta", requires_grad=True)
        self.modules = [_Stage(n, chunk, pipeline) for n, chunk in pipeline.mine.items()]
        self.stages = [
            PipelineStage(
                module,
                module.number,
                pipeline.count,
                pipeline.device,
                input_args=tuple(passed.get(module.number, ())),
                output_args=tuple(passed.get(module.number + 1, (number,))),
                group=pipeline.group,
            )
            for module in self.modules
        ]
        self.schedule = make_schedule(pipeline.schedule, self.stages, count)
        self.count = count

    def run(self, work: _Work) -> None:
        for module, stage in zip(self.modules, self.stages, strict=True):
            module.start(work)
            stage.has_backward = True
            stage.clear_runtime_states()
        try:
            self.schedule._step_microbatches(target_mbs=[None] * self.count, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch has put its own words around what was raised in a stage


SCHEDULES: dict[str, tuple[Any, int]] = {  # and how many stages a rank has, where nothing else is asked
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 1),
}


def make_schedule(name: str, stages: list[PipelineStage], count: int) -> Any:
    """As asked; for a number of micro-batches that it cannot take (a short last step), all forwards, then all
    backwards, which gives the same sums."""
    kind, _ = SCHEDULES[name]
    if not fits(name, len(stages), stages[0].group_size, count):
        kind = ScheduleLoopedBFS if len(stages) > 1 else ScheduleGPipe
    one = kind in (ScheduleGPipe, Schedule1F1B)
    # `clone`: torch detaches the stage's output in place, and still needs the loss.
    return kind(stages[0] if one else stages, count, loss_fn=lambda output, _: output.clone(), scale_grads=False)


def fits(name: str, stages_per_rank: int, ranks: int, count: int) -> bool:
    """Whether the schedule can run `count` micro-batches: what torch asks of it."""
    if name == "gpipe":
        return True
    if name == "1f1b":
        return count >= ranks
    return count >= ranks and count % (count // ranks) == 0


def sent(output: Any, number: int) -> list[Tensor]:
    values = output if isinstance(output, tuple) else (output,)
    if any(isinstance(value, DTensor) for value in values):
        raise UserError(
            "stages that pass whole tensors on",
            f"stage {number} returns one that is cut (mesh.tp)",
            'in tensor_plan(model) write "rowwise" or "gathered" for the last layer of a stage',
        )
    wrong = [v for v in values if not isinstance(v, Tensor) or not v.is_floating_point()]
    if wrong:
        kind = f"a tensor of {wrong[0].dtype}" if isinstance(wrong[0], Tensor) else f"a {type(wrong[0]).__name__}"
        raise UserError(
            "stages that pass floating-point tensors on, one or a tuple of them",
            f"stage {number} returns {kind}",
            "let stages(model) cut where only activations pass, and compute masks and positions in each stage",
        )
    return [value.contiguous() for value in values]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)


def _shape_of(given: Any) -> tuple[Any, ...]:
    leaves = tree_leaves(given)
    return tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves)


def _not_one_call(found: str) -> UserError:
    return UserError(
        "a loss that calls model(...) exactly once: the model runs as a pipeline",
        f"{found} in loss(model, batch)",
        "give the model's forward what it needs to compute everything in one call; or choose strategy=fsdp",
    )
