"""The Driver: what the step needs from any way of executing a model. The step never asks which one it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord, ControlWordCodec
from lockstep.runtime.layout import squared_norms, whole
from lockstep.task import Loss, MicroBatch


class Pipelined(Protocol):
    """What a driver can do whose ranks hold different parts of the model, through which micro-batches flow."""

    def run(
        self,
        micros: Sequence[MicroBatch],
        loss_of: Callable[[Any, Any], Loss],
        begin: Callable[[MicroBatch, int], None],
        finish: Callable[[MicroBatch, Loss], Tensor],
    ) -> None:
        """Forward and backward of all micro-batches of a step, in the order that suits the pipeline. `begin(micro,
        stage)` comes before every forward; `finish(micro, loss)`, where the loss is known, gives what to
        backpropagate."""

    def exchange(self, word: ControlWord) -> None:
        """After `run`: gradients and word become sums over all ranks."""


@dataclass(frozen=True)
class Placement:
    """Where a driver keeps the model and whose samples this rank trains on: facts that do not change during a run."""

    replicated: bool = True  # every rank holds every parameter in full
    collective_forwards: bool = False  # a forward waits for the other ranks: all must run equally many
    interleaved: bool = False  # ranks take micro-batches in turns, instead of one contiguous range each
    runs_whole_model: bool = True  # a rank can call the model by itself; False in a pipeline
    pipeline_depth: int = 1  # micro-batches in flight at once: one for each rank of a pipeline
    data_rank: int = 0  # ranks with the same number train on the same samples
    data_size: int = 1  # how many different data_ranks there are
    reports_loss: bool = True  # of the ranks with one data_rank, the one whose loss and weight count
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # ranks that hold a tensor, where not all do
    duplicates: frozenset[str] = frozenset()  # tensors of this rank that a lower rank holds too, sharded alike
    facts: Mapping[str, str] = field(default_factory=dict)  # lines for the banner


class Driver(Protocol):
    """Runs forward and backward of this rank's micro-batches, and leaves summed gradients on `parameters`."""

    model: nn.Module  # the user's, unwrapped: it owns the names
    module: nn.Module  # what the task calls
    parameters: list[nn.Parameter]  # trainable, in the model's order
    names: list[str]
    gradient_factor: float  # what turns `.grad` after the exchange into the sum over all ranks
    codec: ControlWordCodec
    placement: Placement
    pipeline: Pipelined | None  # runs all micro-batches of a step at once, stage by stage
    extra_state: Mapping[str, Any]  # what a checkpoint must hold of it, by name: has state_dict and load_state_dict

    def begin(self) -> None:
        """A step begins: no gradients yet."""

    def note(self, micro: MicroBatch, total: int | None) -> None:
        """The next forward is that of `micro`; `total`: micro-batches of the step, all ranks together."""

    def arm(self, last: bool) -> None:
        """Before a forward: will its backward be this step's last, the one that exchanges?"""

    def backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        """Backpropagate `total` times `start`. On the last micro-batch `word` is given and travels along."""

    def word(self) -> Tensor:
        """The summed word of this step, packed by `codec`."""

    def norms(self, grads: list[Tensor]) -> Tensor:
        """The lengths of this step's gradients as a whole, in their order, the same bits on every rank."""

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of tensors that are laid out like the parameters."""

    def evaluate(self, loss_fn: Callable[[Any, Any], Loss], data: Any) -> Loss | None:
        """The loss of one batch without gradients; None on ranks that do not know it."""

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        """The full tensor of the model, gathered from the ranks that hold it. Collective: every rank must call it."""

    def sync_buffers(self) -> None:
        """Make buffers (running statistics) equal everywhere, before evaluating or saving."""

    def many_forwards(self) -> AbstractContextManager[str | None]:
        """Around hundreds of small forwards, without gradients and without a step among them. Every rank calls it that
        takes part in them, and an error of one ends them for all. Gives what is to be told about them."""


class Whole:
    """What drivers have in common whose ranks each hold the whole model."""

    gradient_factor = 1.0
    placement = Placement()
    pipeline: Pipelined | None = None
    extra_state: Mapping[str, Any] = {}
    model: nn.Module

    def note(self, micro: MicroBatch, total: int | None) -> None:
        pass

    def norms(self, grads: list[Tensor]) -> Tensor:
        return torch.stack(self.lengths(grads))  # of the gradients as exchanged: same bits on every rank

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        low = bool(tensors) and tensors[0].dtype in (torch.bfloat16, torch.float16)
        return list(torch._foreach_norm(tensors, 2, torch.float32 if low else None))

    def evaluate(self, loss_fn: Callable[[Any, Any], Loss], data: Any) -> Loss | None:
        return loss_fn(self.model, data)  # unwrapped: ranks may run unequally many forwards

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def many_forwards(self) -> AbstractContextManager[str | None]:
        return nullcontext()


class SingleDriver(Whole):
    """One process: there is nobody to exchange with."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = self.module = model
        self.names, self.parameters = trainable(model)
        self.codec = ControlWordCodec(device, torch.float64)

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, last: bool) -> None:
        pass

    def backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        torch.autograd.backward(total, start)
        if word is not None:
            self._word = self.codec.pack(word, times=1.0)

    def word(self) -> Tensor:
        return self._word

    def sync_buffers(self) -> None:
        pass


class _Apart(Exception):
    """Ranks that should go through the same forwards do not."""


class ShardedDriver(SingleDriver):
    """What drivers have in common of whose parameters this rank holds parts: a single process, as far as forward and
    backward go; gradients are summed, and never divided, and lengths are sums over ranks."""

    placement = Placement(replicated=False, collective_forwards=True)

    def __init__(self, model: nn.Module, runtime: Runtime):
        """`model` has been cut."""
        super().__init__(model, runtime.device)
        self.runtime = runtime

    def backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        torch.autograd.backward(total, start)
        if word is not None:
            self.add_gradients()
            self._exchange(word)

    def add_gradients(self) -> None:
        """After the last backward: whatever is still to be done for gradients that are sums over all ranks."""

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        """A forward waits for the other ranks, so before each one they all say that they go on."""
        before = self.model.register_forward_pre_hook(lambda *_: self._go_on("another forward"), prepend=True)
        try:
            yield None
        except _Apart:
            raise
        except Exception as error:
            self._go_on(f"{type(error).__name__}: {error}")
            raise  # all ranks have failed alike
        else:
            self._go_on("the end")
        finally:
            before.remove()

    def _go_on(self, what: str) -> None:
        every = self.runtime.collectives.gather_json(what)
        if len(set(every)) > 1:
            raise _Apart("; ".join(f"rank {rank}: {words}" for rank, words in enumerate(every)))

    def norms(self, grads: list[Tensor]) -> Tensor:
        return self._squared.sqrt()

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        squared = squared_norms(tensors).to(self.runtime.device)
        return list(self.runtime.collectives.sum_(squared).sqrt().unbind())

    def sync_buffers(self) -> None:
        self.runtime.collectives.broadcast_(list(self.model.buffers()))

    def _exchange(self, word: ControlWord) -> None:
        """The word and the gradients' squared lengths, in one sum."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        packed = self.codec.pack(word, times=1.0)
        everything = torch.cat([packed, squared_norms(grads).to(packed.device)])
        self.runtime.collectives.sum_(everything)
        self._word, self._squared = everything[:LENGTH], everything[LENGTH:]


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not pairs:
        raise UserError(
            "a model to train",
            f"{type(model).__name__} has no parameter with requires_grad=True",
            "unfreeze what should be trained before Lockstep gets the model",
        )
    return [name for name, _ in pairs], [p for _, p in pairs]
