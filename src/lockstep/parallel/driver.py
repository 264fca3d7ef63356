"""The Driver: how a step executes a model, whatever the strategy.

It runs one micro-batch after another. Its subclasses sum over ranks: in one process (`SingleDriver`) there is nothing
to sum, `FlatReduceDriver` in ddp/driver.py is a small example for replicas, and `ShardedDriver` in sharded.py is the
base class for sharded parameters. A pipeline overrides `forward_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError, some_names
from lockstep.parallel.batchnorm.buffers import broadcast_buffers
from lockstep.parallel.batchnorm.statistics import running_statistics
from lockstep.parallel.hooks.parameter_hooks import ParameterHooks
from lockstep.parallel.inner_gradients import (
    TORCH_ENGINE,
    InnerGradient,
    InnerGradients,
    LossFn,
    refuse_backward,
)
from lockstep.parallel.mesh import Axes
from lockstep.parallel.progress import StepProgress
from lockstep.parallel.step_parts import Reducer, StepParts
from lockstep.precision import Precision
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import EventLogger, Runtime, log_nothing
from lockstep.runtime.control_word import LENGTH, ControlWord, ControlWordCodec
from lockstep.runtime.shards import full_tensor
from lockstep.task import Loss, MicroBatch, StepBatches

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class RankRole:
    """The layout of the model on the ranks, and the data on which this rank trains. It is fixed for a run."""

    replicated: bool = True  # every rank holds every parameter in full, and can evaluate by itself
    collective_forwards: bool = False  # forwards in training wait for other ranks, which must run as many; see apply.py
    in_turn: bool = False  # micro-batches are assigned to ranks in turn, not in contiguous ranges
    runs_whole_model: bool = True  # a rank can call the model by itself; False in a pipeline
    pipeline_depth: int = 1  # micro-batches in flight: the number of pipeline ranks
    data_rank: int = 0  # ranks with the same data_rank train on the same samples
    data_size: int = 1  # the number of different data_ranks
    reports_loss: bool = True  # whether this rank's loss and weight count: true on one rank per data_rank
    # The ranks that hold a tensor, by its name; tensors that every rank holds are left out.
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Tensors that the model of this rank has by name, but that only other ranks hold: in a pipeline.
    held_elsewhere: frozenset[str] = frozenset()
    # Tensors whose identical shard a lower rank also holds, so that this rank need not save them.
    duplicates: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reduced:
    """The gradients of one step, reduced over micro-batches and ranks. Multiplied by `to_sum`, they are sums."""

    parameters: list[nn.Parameter]  # this rank's parameters that have a gradient
    names: list[str]  # parameter names, one for each norm; in a pipeline, of all stages
    norms: Tensor  # [len(names)]: L2 norm of each full gradient as reduced, the same bits on every rank
    packed_word: Tensor  # [LENGTH]: the summed control word
    codec: ControlWordCodec
    to_sum: float  # the number of ranks if the driver leaves means over ranks, else 1

    def drop_others(self, ids: Collection[int]) -> Reduced:
        """Drop the gradients of all parameters except those with these ids. Not for a pipeline."""
        indices = [index for index, p in enumerate(self.parameters) if id(p) in ids]
        for p in self.parameters:
            if id(p) not in ids:
                p.grad = None

        return replace(
            self,
            parameters=[self.parameters[index] for index in indices],
            names=[self.names[index] for index in indices],
            norms=self.norms[indices],
        )

    def drop_missing(self) -> Reduced:
        """Drop the parameters whose gradient a custom loop has set to None after the last backward."""
        left = {id(p) for p in self.parameters if p.grad is not None}
        if not left:
            raise no_gradient()

        return self if len(left) == len(self.parameters) else self.drop_others(left)


@dataclass(frozen=True)
class DriverSetup:
    """The arguments of all drivers, besides the model. The record of a strategy names what makes its driver."""

    config: RunConfig
    runtime: Runtime
    precision: Precision
    role: RankRole = RankRole()  # what follows from the mesh and the model; a driver adds what its strategy does
    axes: Axes | None = None  # None: dp is the only axis
    log_event: EventLogger = log_nothing  # receives what is found later, while the model runs
    task: Any = None  # which may say how the model is split
    compiled: bool = False  # whether the model will be compiled; a driver that splits it compiles the parts
    data: Callable[[], Any] | None = None  # returns samples, to run the model with


class Driver:
    """Executes the steps of a model, where its strategy has put it. Subclasses sum over ranks.

    A custom loop calls `begin`, `before_forward` and `backward` itself.
    """

    to_sum = 1.0  # see `Reduced`

    def __init__(
        self,
        model: nn.Module,
        setup: DriverSetup,
        role: RankRole | None = None,
        reducer: Callable[[Any], Reducer] | None = None,
        dp_ranks: Collectives | None = None,
        held: Collection[str] | None = None,
    ):
        """Store the model, which is placed by now.

        role: `setup.role` with what the strategy adds to it; None: it adds nothing
        reducer: makes what adds up gradients in this driver's place, from the driver
        dp_ranks: the ranks that train the same layers on different samples; None: all ranks
        held: the names of the tensors that this rank holds; None: it holds all of them
        """
        self.model = model  # the user's own, which the task calls
        self.runtime = setup.runtime
        self.role = role or setup.role
        self.names, self.parameters = trainable(model)
        self.inner_gradients = InnerGradients(self.before_inner_gradient)

        # What a strategy may have. Its constructor sets it.
        self.stateful: Mapping[str, Any] = {}  # further objects for the checkpoint, by name: see `Stateful`
        self.facts: Mapping[str, str] = {}  # lines for the banner
        self.broadcasts_buffers = False  # whether every step begins with rank 0's buffers on all ranks

        # What takes part in the steps. Features of the run are added when it is set up.
        self.parts = StepParts(overlapping=self.role.pipeline_depth > 1)
        self.statistics = running_statistics(model, dp_ranks or setup.runtime.collectives, held, setup.log_event)
        if self.statistics.layers:
            self.parts.add(self.statistics)

        self.reducer = reducer(self) if reducer else None
        if self.reducer:
            self.parts.add(self.reducer)

    @property
    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trainable parameters with their names, in the model's order."""
        return zip(self.names, self.parameters, strict=True)

    # ---- for evaluations, checkpoints and the set-up ----

    def evaluate(self, loss_fn: LossFn, data: Any, autocast: Autocast) -> Loss | None:
        """Return the loss of one batch, without gradients; None on ranks that do not compute it."""
        with autocast():
            return loss_fn(self.model, data)

    def many_forwards(self) -> AbstractContextManager[str | None]:
        """Return a context for many small forwards without gradients. It yields a warning for the user, or None.

        Every rank that runs these forwards must enter it. An error on one rank ends it on all of them.
        """
        return nullcontext()

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the L2 norm of each full tensor. `tensors` are sharded like the parameters."""
        return self.reducer.norms(tensors) if self.reducer else self._norms(tensors)

    def _norms(self, tensors: list[Tensor]) -> list[Tensor]:
        # Squares overflow in float16 and lose precision in bfloat16. Either all trained parameters are stored in half
        # precision, or none is (precision.py).
        half = bool(tensors) and tensors[0].dtype in (torch.bfloat16, torch.float16)
        return list(torch._foreach_norm(tensors, 2, torch.float32 if half else None))

    def drop_gathered(self) -> None:
        """Drop full parameters that were gathered from shards, because the shards are about to change."""

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        """Return the full tensor of the model's parameter or buffer `name`. Collective: every rank must call it."""
        return full_tensor(tensor)

    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks, before evaluating or saving.

        BatchNorm's running statistics are combined over the ranks; all other buffers are copied from rank 0.
        """
        self.statistics.combine()
        self._broadcast_buffers()
        self.statistics.forget()

    def _broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        broadcast_buffers(dict(self.model.named_buffers()), self.runtime.collectives)

    def use_parameter_hooks(self, hooks: Mapping[str, ParameterHooks]) -> None:
        """Call the user's parameter hooks, given by parameter name, from now on. They get full gradients."""
        for name, parameter in self.named:
            if name in hooks:
                hooks[name].register(parameter)

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        """Prepare for a gradient that the user's loss computes itself, or refuse it with a UserError."""
        refuse_backward(inner, self.leaf_names())

    def leaf_names(self) -> dict[int, str]:
        """Return the names of the trainable parameters by the id of the leaf tensor in the autograd graph."""
        return {id(p): name for name, p in self.named}

    # ---- the steps ----

    @cached_property
    def codec(self) -> ControlWordCodec:
        return ControlWordCodec(self.runtime.device, torch.float64)

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, progress: StepProgress) -> Reduced:
        """Run the micro-batches of this rank and reduce their gradients, with the control word, over all ranks."""
        self.begin_pass()
        inner_gradients = self.inner_gradients
        reduced = None

        for micro in batches.micro_batches:
            self.before_forward(micro, progress)
            inner_gradients.intercept()
            try:
                with progress.autocast():
                    loss = loss_fn(self.model, micro.data)
            finally:
                inner_gradients.release()

            reduced = self.backward(loss, progress)  # outside autocast, as torch recommends

        assert reduced is not None, "a step without its last micro-batch"
        return reduced

    def begin_pass(self) -> None:
        """Begin a pass: clear the gradients of the last one."""
        for parameter in self.parameters:
            parameter.grad = None

        # A custom loop may have caught an exception of the last backward.
        for part in self.parts:
            part.begin_pass()

        if self.broadcasts_buffers:
            self.sync_buffers()

    def before_forward(self, micro: MicroBatch, progress: StepProgress) -> None:
        progress.before_forward(micro)
        for part in self.parts:
            part.before_forward(micro, progress)

    def backward(self, loss: Loss, progress: StepProgress) -> Reduced | None:
        """Backpropagate the loss sum. The last backward of a step reduces and returns its gradients; others None."""
        grad_output = progress.record(loss)
        for part in self.parts:
            part.before_backward(loss, progress)

        # After `record`, because the control word carries the weights of all micro-batches.
        word = None
        if progress.is_last_micro_batch:
            for part in self.parts:
                part.before_all_reduce()

            word = progress.control_word()

        self._backward(loss.total, progress.constant(grad_output, loss.total.dtype), word)
        for part in self.parts:
            part.after_backward(progress)

        reduced = None
        if word is not None:
            reduced = self._collect(*(self.reducer or self).reduce(word))
            for part in self.parts:
                part.end_pass(progress)

        progress.backwards_done += 1
        return reduced

    def _collect(self, packed: Tensor, norms: Tensor) -> Reduced:
        """Return the gradients of the step with the summed control word and the norms, both from `reduce`."""
        parameters = [p for p in self.parameters if p.grad is not None]
        names = self.names

        # Usually every parameter has a gradient, and there is no need to build another list of names.
        if len(parameters) < len(names):
            names = [name for name, p in self.named if p.grad is not None]

        return Reduced(parameters, names, norms, packed, self.codec, self.to_sum)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        """Backpropagate `total * grad_output` (both scalars).

        Override it to reduce gradients while the backward runs. In the last backward of a step `word` is this rank's
        control word, which may be reduced with them.
        """
        backward((total,), (grad_output,))

    def reduce(self, word: ControlWord) -> tuple[Tensor, Tensor]:
        """Reduce over ranks whatever the backwards of the step have not reduced.

        Return the summed control word [LENGTH], and the norm of each gradient that this step has.
        """
        raise NotImplementedError


def backward(outputs: tuple[Tensor, ...], grad_outputs: tuple[Tensor, ...]) -> None:
    """Backpropagate as `torch.autograd.backward` does, without its checks of types and shapes.

    They took 11 of 33 us for the smallest graph (torch 2.13, one CPU core), in every micro-batch: more than 5 % of the
    step of a small model. Here they are known to hold.
    """
    # The first output is the loss. If it is a subclass of Tensor, torch's function may call a backward of that class.
    if type(outputs[0]) is not Tensor:
        torch.autograd.backward(outputs, grad_outputs)
        return

    TORCH_ENGINE(
        outputs,
        grad_outputs,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def sum_with_word(driver: Driver, word: ControlWord, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over all ranks of the control word [LENGTH] and of `numbers`, from one collective."""
    packed = driver.codec.pack(word)
    sums = driver.runtime.collectives.all_reduce_(torch.cat([packed, numbers.to(packed.device)]))
    return sums[:LENGTH], sums[LENGTH:]


def norms_of_gradients(driver: Driver) -> Tensor:
    """Return the norms for `reduce` of a driver with full gradients on this rank: [gradients]"""
    grads = [p.grad for p in driver.parameters if p.grad is not None]
    if not grads:
        raise no_gradient()

    return torch.stack(driver.norms(grads))


class SingleDriver(Driver):
    """Runs the model in one process, where there is nothing to sum."""

    def reduce(self, word: ControlWord) -> tuple[Tensor, Tensor]:
        return self.codec.pack(word), norms_of_gradients(self)


def no_gradient() -> UserError:
    """Return the error for a loss through which no parameter gets a gradient."""
    return UserError(
        "no parameter of the model gets a gradient: the loss does not depend on any of them",
        "",
        "look for torch.no_grad() or inference_mode() around model(...) in the loss, for .detach(), .item() or numpy "
        "on the way from its output to the loss, and for a loss that does not use the output",
    )


def check_reached(missed: list[str], trainable: int) -> None:
    """Raise if a backward missed some parameters. `trainable` is the number of all trainable parameters."""
    if len(missed) == trainable:
        raise no_gradient()

    if missed:
        raise UserError(
            f"the loss of a micro-batch does not depend on every trainable parameter: no gradient for "
            f"{some_names(missed)}",
            "",
            "freeze them (requires_grad=False) if nothing uses them; if only some losses or micro-batches do, set "
            "ddp.find_unused_parameters=true",
            cause="unused",
        )


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Return the names and tensors of the trainable parameters, in the model's order."""
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not pairs:
        raise UserError(
            f"{type(model).__name__} has no parameter with requires_grad=True: there is nothing to train",
            "",
            "unfreeze the parameters to train (requires_grad=True) before you pass the model to Lockstep",
        )

    return [name for name, _ in pairs], [p for _, p in pairs]


def broadcast_model(model: nn.Module, collectives: Collectives) -> None:
    """Copy rank 0's trainable parameters and buffers to all ranks. Frozen parameters must already be equal."""
    collectives.broadcast_([p.detach() for p in model.parameters() if p.requires_grad])
    collectives.broadcast_(list(model.buffers()))
