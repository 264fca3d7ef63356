"""Run micro-batches through a model that is split into stages, one or more per rank, with torch's own schedules.

Every rank of a pipeline reads the same micro-batches. To get the arguments that the task passes to `model(...)`, we
call its loss with a proxy of the model, which records the arguments and aborts the call. They are the input of the
first stage. The last stage calls the loss again, with a proxy that returns the output of the pipeline. Gradients are
sums over micro-batches and never divided, so micro-batches may have any weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.errors import UserError
from lockstep.parallel.driver import LossFn
from lockstep.parallel.gradients import no_gradient
from lockstep.parallel.pipeline.p2p import receive, send, sendable
from lockstep.parallel.pipeline.remote_tensors import RemoteTensors
from lockstep.parallel.pipeline.schedules import PreparedSchedule
from lockstep.parallel.pipeline.stages import ModelInput, Stage
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.precision import Precision
from lockstep.runtime.collectives import Collectives
from lockstep.task import Loss, MicroBatch

MAX_PREPARED = 8  # how many schedules are cached, one for each number and shape of micro-batches

# ---- the arguments that the task passes to the model ----


class _ModelCalled(BaseException):
    """Ends a loss when it calls the model, with (args, kwargs). A BaseException, so that no `except` catches it."""


class ModelProxy:
    """A proxy of the model in a task's loss. It has the model's attributes, but a call runs `function` instead."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]):
        self._model = model
        self._function = function
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > 1:
            raise _not_one_call("more than once")
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def model_input(loss_fn: LossFn, model: nn.Module, data: Any) -> ModelInput:
    """Return the arguments that the task passes to the model for this batch."""
    trains = torch.is_grad_enabled()

    def record(*args: Any, **kwargs: Any) -> Any:
        # The stages run outside the loss, so a `no_grad` around the call would have no effect on them. Refuse it.
        if trains and not torch.is_grad_enabled():
            raise no_gradient()

        raise _ModelCalled(args, kwargs)

    try:
        # This runs the loss up to the call of the model (masks, shifted targets), and not further.
        loss_fn(ModelProxy(model, record), data)
    except _ModelCalled as call:
        args, kwargs = call.args
        return args, kwargs

    raise _not_one_call("not at all")


# ---- the pipeline ----


class Pipeline:
    """Runs the micro-batches of a pass, or one batch of an evaluation, through this rank's stages.

    The order of forwards and backwards is torch's schedule. The ranks of a pipeline exchange activations and their
    gradients, whose shapes are found with a first forward and may change from step to step.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        schedule: str,
        pp: Collectives,
        precision: Precision,
        remote: RemoteTensors,
        parts: Sequence[StepPart],
        shard_group: Collectives | None = None,
        check_graph: Callable[[Sequence[Tensor]], None] | None = None,
    ):
        """Set up this rank's stages.

        stages: the stages of all ranks
        pp: the ranks of the pipeline
        remote: the tensors that only other stages hold
        parts: what takes part in each stage's forward of a micro-batch
        shard_group: the ranks that share the shards of the same stages, so that their forwards and backwards are
            collective; None: the stages are not sharded
        check_graph: called with the tensors from which a backward will start, after each forward with gradients
        """
        self.model = model
        self.schedule = schedule
        self.autocast = precision.autocast
        self.remote = remote
        self.shard_group = shard_group
        self.check_graph = check_graph
        self.pp = pp
        self.parts = parts

        self.count = len(stages)

        # Round robin: with several stages per rank, consecutive stages are on different ranks.
        self.local_stages = {n: stage for n, stage in enumerate(stages) if n % pp.world.size == pp.world.rank}

        self.refusal: UserError | None = None  # see `refuse`

        # On the rank that computes the loss: whether a backward from the loss reached the model's output in this pass.
        self.reached = False
        self.outputs: list[Tensor] = []  # the model's, while a loss is computed with gradients
        self._prepared: dict[Any, PreparedSchedule] = {}

        # The result of `_forward_once`, by the shapes of the model's arguments.
        self._stage_inputs: dict[Any, dict[int, list[Tensor]]] = {}

        # model.train() does not reach the modules that stages(model) created around parts of the model.
        inside = {id(module) for module in model.modules()}
        self._wrappers = [m for stage in self.local_stages.values() for m in stage.modules() if id(m) not in inside]

    def run(self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, progress: PassProgress) -> None:
        """Run forward and backward of all micro-batches.

        Micro-batches of different shapes (a short one at the end of an epoch) go through the schedule separately.
        """
        self._set_mode()
        self.reached = False

        # Every rank has the samples, so it gets the model's arguments itself.
        inputs = [model_input(loss_fn, self.model, micro.data) for micro in micro_batches]
        shapes = [_shape_of(arguments) for arguments in inputs]

        for group, is_new in self._same_shape_groups(shapes):
            shape = shapes[group[0]]
            if is_new:
                _, self._stage_inputs[shape] = self._forward_once(inputs[group[0]])

            self._prepare(shape, len(group)).run([(micro_batches[n], inputs[n]) for n in group], loss_fn, progress)

    def refuse(self, error: UserError) -> None:
        """Keep the first UserError of this rank. All ranks raise it together, at the end of the pass."""
        self.refusal = self.refusal or error

    def pass_flags(self) -> list[bool]:
        """Return whether this rank has a refusal, and whether a backward from the loss reached the model's output."""
        return [self.refusal is not None, self.reached]

    def note_gradient(self, gradient: Tensor) -> None:
        """A hook on the model's output."""
        self.reached = True

    def _same_shape_groups(self, shapes: Sequence[Any]) -> list[tuple[list[int], bool]]:
        """Return which micro-batches go through the schedule together, and whether their shapes must be inferred first.

        The result is the same on all ranks of a shard group, even if their micro-batches have different shapes.
        """
        indices = range(len(shapes))

        # Only consecutive micro-batches of the same shape go together, which keeps their order.
        groups = [list(group) for _, group in groupby(indices, key=lambda index: shapes[index])]
        new = [shape not in self._stage_inputs and shape not in shapes[:index] for index, shape in enumerate(shapes)]

        # FSDP inside the stages makes every forward and backward collective within the group.
        if self.shard_group is not None:
            peers = self.shard_group.all_gather_json([groups, new])
            # If the ranks group their micro-batches differently, each micro-batch goes alone.
            if any(peer_groups != groups for peer_groups, _ in peers):
                groups = [[index] for index in indices]

            # A shape that is new on one rank is inferred on all of them.
            new = [any(flags) for flags in zip(*(peer_new for _, peer_new in peers), strict=True)]

        return [(group, any(new[index] for index in group)) for group in groups]

    def forward(self, loss_fn: LossFn, data: Any, loss_gradients: bool = False) -> Loss | None:
        """Run one batch without gradients, and without changing the model's buffers.

        Returns the loss on the rank of the last stage, None on the others. With `loss_gradients`, the loss is called as
        in training: it may compute gradients itself, which the driver may refuse.
        """
        self._set_mode()
        output, _ = self._forward_once(model_input(loss_fn, self.model, data))
        if self.count - 1 not in self.local_stages:
            return None

        if not loss_gradients:
            with torch.no_grad():
                return self.loss(loss_fn, data, output)

        output = tree_map_only(Tensor, _with_gradient, output)
        self.outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        try:
            return self.loss(loss_fn, data, output)
        finally:
            self.outputs = []

    def loss(self, loss_fn: LossFn, data: Any, output: Any) -> Loss:
        """Return the task's loss for the model's `output`. Only the rank of the last stage has it."""
        with self.autocast():
            return loss_fn(ModelProxy(self.model, lambda *a, **k: output), data)

    def _forward_once(self, arguments: ModelInput) -> tuple[Any, dict[int, list[Tensor]]]:
        """Run one batch through all stages, one after another, without changing running statistics.

        Returns the output of this rank's last stage, and the inputs of this rank's stages and of the stages that follow
        each, as meta tensors: torch's schedules need shapes in advance.
        """
        output = None
        stage_inputs: dict[int, list[Tensor]] = {}

        # In train mode a forward changes buffers. They are restored below.
        changing = self.local_stages.values() if self.model.training else ()
        buffers = [(buffer, buffer.clone()) for stage in changing for buffer in stage.mutable_buffers()]

        for number, stage in self.local_stages.items():
            received = None
            # A pipeline has at least two ranks, so the previous stage is always on another rank.
            if number > 0:
                received = receive((number - 1) % self.pp.world.size, self.pp.group, self.pp.device)
                stage_inputs[number] = [_meta(tensor) for tensor in received]

            with torch.no_grad(), self.autocast():
                output = stage(arguments, received)

            if number < self.count - 1:
                passed = sendable(output, number)
                stage_inputs[number + 1] = [_meta(tensor) for tensor in passed]
                send(passed, (number + 1) % self.pp.world.size, self.pp.group)

        for buffer, before in buffers:
            buffer.copy_(before)

        return output, stage_inputs

    def _prepare(self, shape: Any, count: int) -> PreparedSchedule:
        key = (shape, count)
        if key not in self._prepared:
            # Drop the oldest schedule: usually only a few shapes recur.
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.pop(next(iter(self._prepared)))

            self._prepared[key] = PreparedSchedule(self, self._stage_inputs[shape], count)

        return self._prepared[key]

    def _set_mode(self) -> None:
        for module in self._wrappers:
            module.training = self.model.training


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)


def _with_gradient(tensor: Tensor) -> Tensor:
    """Return a copy that requires a gradient, if its dtype can. A loss may change it in place, which no leaf allows."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _shape_of(arguments: ModelInput) -> tuple[Any, ...]:
    """Return a key for the shapes and dtypes of all tensors, and the values of everything else."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in tree_leaves(arguments)
    )


def _not_one_call(how_often: str) -> UserError:
    return UserError(
        f"loss(model, batch) calls model(...) {how_often}; in a pipeline it must call it exactly once",
        "",
        "let the model's forward compute everything in one call; or set strategy=fsdp",
    )
