"""The Driver: one way to execute a model, behind one interface. The step does not know which driver it has.

`Driver` is the interface. `BaseDriver` runs one micro-batch after another, and its subclasses sum over ranks: in one
process (`SingleDriver`) there is nothing to sum, `UnusedParametersDriver` in ddp/driver.py is a small example for
replicas, and `ShardedDriver` is the base of those whose ranks hold shards. A pipeline overrides `forward_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError
from lockstep.parallel.batchnorm.statistics import RunningStatistics
from lockstep.parallel.hooks.parameter_hooks import ParameterHooks
from lockstep.parallel.inner_gradients import InnerGradient, asked_for, refuse_backward, watched
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord, ControlWordCodec
from lockstep.runtime.layout import full_tensor, squared_norms
from lockstep.task import Loss, MicroBatch, StepBatches

LossFn = Callable[[Any, Any], Loss]
Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class RankRole:
    """Where a driver keeps the model, and which share of the data this rank trains on. It is fixed for a run."""

    replicated: bool = True  # every rank holds every parameter in full
    collective_forwards: bool = False  # a forward waits for the other ranks: all must run the same number
    interleaved: bool = False  # ranks take micro-batches in turns, instead of one contiguous range each
    runs_whole_model: bool = True  # a rank can call the model by itself; False in a pipeline
    pipeline_depth: int = 1  # micro-batches in flight at once: one for each rank of a pipeline
    data_rank: int = 0  # ranks with the same number train on the same samples
    data_size: int = 1  # how many different data_ranks there are
    reports_loss: bool = True  # whether this rank's loss and weight count; one rank per data_rank reports them
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ranks that hold a tensor, where not all do
    # Tensors whose identical shard a lower rank also holds (so this rank need not save them).
    duplicates: frozenset[str] = frozenset()
    facts: Mapping[str, str] = field(default_factory=dict)  # lines for the banner


@dataclass(frozen=True)
class Reduced:
    """The gradients of one step, reduced over micro-batches and ranks; times `to_sum` they are sums."""

    parameters: list[nn.Parameter]  # those of this rank that have a gradient
    names: list[str]  # of the gradients that `norms` describes; in a pipeline those of all stages
    norms: Tensor  # [len(names)]: L2 norm of each full gradient as reduced, the same bits on every rank
    packed: Tensor  # [LENGTH]: the summed control word
    codec: ControlWordCodec
    to_sum: float  # N where DDP leaves means over N ranks, else 1

    def only(self, ids: Collection[int]) -> Reduced:
        """Drop the gradients of all parameters but those with these ids. Not in a pipeline."""
        kept = [number for number, p in enumerate(self.parameters) if id(p) in ids]
        for p in self.parameters:
            if id(p) not in ids:
                p.grad = None

        return replace(
            self,
            parameters=[self.parameters[number] for number in kept],
            names=[self.names[number] for number in kept],
            norms=self.norms[kept],
        )


class Control(Protocol):
    """One step as a driver sees it: everything that is not about executing the model.

    `StepControl` (`engine/control.py`) implements it, and says what each method does.
    """

    batches: StepBatches
    micro: MicroBatch | None
    backwards_done: int
    autocast: Autocast

    @property
    def last(self) -> bool: ...

    def before_forward(self, micro: MicroBatch, stage: int = 0) -> None: ...

    def record(self, loss: Loss) -> float: ...

    @property
    def needs_reference_weight(self) -> bool: ...

    def find_reference_weight(self, micro: MicroBatch, weight: Any) -> None: ...

    def before_reduce(self) -> ControlWord: ...

    def constant(self, value: float, dtype: torch.dtype) -> Tensor: ...


class Driver(Protocol):
    """Executes a model: forward and backward of a step's micro-batches, with gradients summed over all ranks."""

    role: RankRole
    model: nn.Module  # the user's, unwrapped: it owns the names
    module: nn.Module  # what the task calls
    extra_state: Mapping[str, Any]  # what a checkpoint must also hold: objects with state_dict and load_state_dict

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, control: Control) -> Reduced:
        """Run the micro-batches of this rank and reduce their gradients, with the control word, over all ranks."""

    def evaluate(self, loss_fn: LossFn, data: Any, autocast: Autocast) -> Loss | None:
        """Return the loss of one batch without gradients; None on ranks that do not know it."""

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the L2 norm of each full tensor; `tensors` are sharded as the parameters are."""

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        """Return the model's full tensor of that name. Collective: every rank must call it."""

    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks, before evaluating or saving: combined statistics, or else rank 0's."""

    def many_forwards(self) -> AbstractContextManager[str | None]:
        """Enclose many small forwards without gradients. Yields a warning for the user, or None.

        Every rank that takes part in the forwards must enter it, and an error on one of them ends it on all.
        """


class BaseDriver(Driver):
    """Runs micro-batches in turn and leaves the sums over ranks to subclasses (`_reduce`).

    A custom loop calls `begin`, `before_forward`, `backward` and `reduced` itself.
    """

    role = RankRole()
    extra_state: Mapping[str, Any] = {}
    broadcasts_buffers = False  # before every step
    to_sum = 1.0
    _word: Tensor  # the reduced control word of the newest step

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        replicas: Collectives | None = None,
        held: Collection[str] | None = None,
    ):
        """Take over the model.

        replicas: the ranks that train on different samples with the same layers; None: all ranks
        held: the names of the tensors that this rank holds; None: it holds all
        """
        self.model = model
        self.module: nn.Module = model
        self.runtime = runtime
        self.statistics = RunningStatistics(
            model, replicas or runtime.collectives, held
        )  # `sync_buffers` combines them
        self.names, self.parameters = trainable(model)
        self.codec = ControlWordCodec(runtime.device, torch.float64)

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, control: Control) -> Reduced:
        self.begin()
        loss_fn = watched(loss_fn, self.before_inner_gradient)
        for micro in batches.micro_batches:
            self.before_forward(micro, control)
            with control.autocast():
                loss = loss_fn(self.module, micro.data)

            self.backward(loss, control)  # outside autocast

        return self.reduced()

    # ---- one micro-batch at a time ----

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

        if self.broadcasts_buffers:
            self.sync_buffers()

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        control.before_forward(micro)
        self.statistics.begin(micro)

    def backward(self, loss: Loss, control: Control) -> None:
        """Backpropagate the loss sum. The last backward of a step reduces gradients and control word."""
        grad_output = control.record(loss)

        # After `record`: the word carries the weights of all micro-batches.
        word = control.before_reduce() if control.last else None
        self._backward(loss.total, control.constant(grad_output, loss.total.dtype), word)
        if control.last:
            self.statistics.end_step(control.batches)
        control.backwards_done += 1

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        """Prepare for a gradient that the user's loss computes itself, or refuse it."""
        refuse_backward(inner, self.leaf_names())

    def leaf_names(self) -> dict[int, str]:
        """Return the names of the trainable parameters, by the id of the tensor that a graph ends in."""
        return {id(p): name for name, p in zip(self.names, self.parameters, strict=True)}

    def reduced(self) -> Reduced:
        """Return the summed gradients, after the last backward."""
        parameters = [p for p in self.parameters if p.grad is not None]
        names = self.names
        if not parameters and self.role.runs_whole_model:
            raise no_gradient()

        # Nearly always every parameter has a gradient, and building the list of names would be wasted time.
        if len(parameters) < len(names):
            names = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]

        norms = self._gradient_norms([p.grad for p in parameters])  # pyrefly: ignore[bad-argument-type]
        return Reduced(parameters, names, norms, self._word, self.codec, self.to_sum)

    # ---- outside a step ----

    def evaluate(self, loss_fn: LossFn, data: Any, autocast: Autocast) -> Loss | None:
        with autocast():
            return loss_fn(self.model, data)  # unwrapped: ranks may run different numbers of forwards

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        # In half precision, squares would overflow or lose their bits.
        half = bool(tensors) and tensors[0].dtype in (torch.bfloat16, torch.float16)
        return list(torch._foreach_norm(tensors, 2, torch.float32 if half else None))

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        return full_tensor(tensor)

    def sync_buffers(self) -> None:
        self.statistics.combine()
        self._broadcast_buffers()
        self.statistics.forget()

    def use_hooks(self, hooks: Mapping[str, ParameterHooks]) -> None:
        """Call the hooks that the user set on parameters, by name. They get full gradients."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name in hooks:
                hooks[name].register(parameter)

    def many_forwards(self) -> AbstractContextManager[str | None]:
        return nullcontext()

    # ---- for subclasses ----

    def _broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers."""
        self.runtime.collectives.broadcast_(list(self.model.buffers()))

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        """Backpropagate `total * grad_output`, both (). Given the control word, also reduce it and the gradients."""
        torch.autograd.backward(total, grad_output)
        if word is not None:
            self._reduce(word)

    def _reduce(self, word: ControlWord) -> None:
        """Sum gradients and control word over ranks, after the last backward. Sets `_word`."""
        raise NotImplementedError

    def _sum_with_word(self, word: ControlWord, numbers: Tensor) -> Tensor:
        """Return the sums of `numbers` over all ranks. The control word travels in the same collective."""
        packed = self.codec.pack(word, times=1.0)
        sums = self.runtime.collectives.sum_(torch.cat([packed, numbers.to(packed.device)]))
        self._word = sums[:LENGTH]
        return sums[LENGTH:]

    def _gradient_norms(self, grads: list[Tensor]) -> Tensor:
        return torch.stack(self.norms(grads))  # of gradients as reduced: the same bits on every rank


class SingleDriver(BaseDriver):
    """Runs the model in one process, where there is nothing to sum."""

    def _reduce(self, word: ControlWord) -> None:
        self._word = self.codec.pack(word, times=1.0)


def no_gradient() -> UserError:
    """Return the error for a step that would train nothing."""
    return UserError(
        "no parameter of the model gets a gradient: the loss does not depend on any of them",
        "",
        "look for torch.no_grad() or inference_mode() around model(...) in the loss, for .detach(), .item() or numpy "
        "on the way from its output to the loss, and for a loss that does not use the output",
    )


class RanksDiffer(Exception):
    """Ranks that should run the same forwards do not."""


class ShardedDriver(BaseDriver):
    """The base of drivers whose ranks hold shards of the parameters. The model is sharded before `__init__` gets it.

    Forward and backward are those of a single process; gradients are summed and never divided, and norms are sums over
    ranks.
    """

    role = RankRole(replicated=False, collective_forwards=True)
    _hooks: Mapping[str, ParameterHooks] = {}

    def use_hooks(self, hooks: Mapping[str, ParameterHooks]) -> None:
        self._hooks = hooks  # called with the sums of a step

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        # A forward waits for the other ranks. So before each one, all ranks tell the others what they do next.
        with self.model.register_forward_pre_hook(lambda *_: self._agree("another forward"), prepend=True):
            try:
                yield None
            except RanksDiffer:
                # All ranks raise this together, so nobody is left to tell.
                raise
            except Exception as error:
                # Tell the others before they wait for another forward.
                self._agree(f"{type(error).__name__}: {error}")
                raise  # all ranks failed in the same way

            self._agree("the end")

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        super().before_inner_gradient(inner)
        names = {id(p): name for name, p in zip(self.names, self.parameters, strict=True) if isinstance(p, DTensor)}
        if sharded := asked_for(inner, names):
            raise UserError(
                f"the loss asks for the gradient of {sharded!r}, which is sharded: no rank holds it in full",
                inner.place,
                "type strategy=ddp or strategy=zero1, which keep full parameters on every rank",
            )

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        squared = self.runtime.collectives.sum_(squared_norms(tensors).to(self.runtime.device))
        return list(squared.sqrt().unbind())

    def _reduce(self, word: ControlWord) -> None:
        self._reduce_gradients()
        self._call_hooks()
        squared = squared_norms([p.grad for p in self.parameters if p.grad is not None])
        self._squared_norms = self._sum_with_word(word, squared)

    def _reduce_gradients(self) -> None:
        """Complete the sums of the gradients over all ranks, where the backward does not."""

    def _call_hooks(self) -> None:
        """Let the user's hooks change the sums of the step, which each rank holds a shard of."""
        if self._hooks:
            for name, parameter in zip(self.names, self.parameters, strict=True):
                if name in self._hooks:
                    self._hooks[name].change_sum(parameter)

    def _gradient_norms(self, grads: list[Tensor]) -> Tensor:
        return self._squared_norms.sqrt()

    def _agree(self, action: str) -> None:
        actions = self.runtime.collectives.gather_json(action)
        if len(set(actions)) > 1:
            raise RanksDiffer("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(actions)))


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Return the names and tensors of the trainable parameters, in the model's order."""
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not pairs:
        raise UserError(
            f"{type(model).__name__} has no parameter with requires_grad=True: there is nothing to train",
            "",
            "unfreeze what should be trained before Lockstep gets the model",
        )

    return [name for name, _ in pairs], [p for _, p in pairs]


def broadcast_model(model: nn.Module, collectives: Collectives) -> None:
    """Start every rank with rank 0's trainable weights and buffers. Frozen weights must already be equal."""
    collectives.broadcast_([p.detach() for p in model.parameters() if p.requires_grad])
    collectives.broadcast_(list(model.buffers()))
