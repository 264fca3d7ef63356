"""Replicas that exchange gradients: torch's DistributedDataParallel, driven for sums instead of means."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import DDPConfig
from lockstep.errors import UserError
from lockstep.parallel.drivers import Word, WordCodec, trainable
from lockstep.runtime.context import Runtime

# torch 2.13 renamed it.
_BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class _WithWord(nn.Module):
    """The model plus a handful of numbers that look like one more parameter.

    Their "gradient" is this rank's control word. So the word is summed inside a gradient bucket that travels
    anyway, and the agreement of all ranks costs no collective of its own (on gloo one costs as much as half a
    step of a small model).
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.model = model
        # Last in the list: DDP fills buckets from the back, and this gradient is known first.
        self.word = nn.Parameter(torch.zeros(Word.length(), dtype=dtype, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Replica(DistributedDataParallel):
    """What the task calls. Attributes of the user's model stay readable through it."""

    def __init__(self, carrier: _WithWord, **options: Any):
        super().__init__(carrier, **options)
        self.armed = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.armed = True  # torch prepares the exchange here, and only here
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            carrier: Any = super().__getattr__("module")
            return getattr(carrier.model, name)


class DDPDriver:
    def __init__(self, model: nn.Module, config: DDPConfig, runtime: Runtime):
        self.model, self.runtime, self.config = model, runtime, config
        self.names, self.parameters = trainable(model)
        self.gradient_factor = float(runtime.world.size)  # DDP leaves the mean over ranks; we want the sum
        # Unused-parameter search walks the graph from the outputs, where the word does not appear.
        self.word_rides_along = not (config.find_unused_parameters or config.static_graph)
        dtype = self.parameters[-1].dtype if self.word_rides_along else torch.float64
        carrier = _WithWord(model, dtype, runtime.device)
        carrier.word.requires_grad_(self.word_rides_along)
        _ignore_frozen(carrier)
        self._replica = Replica(
            carrier,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=True,
            **{_BUFFERS_OPTION: False},  # not on every forward: `sync_buffers`, when somebody looks at them
        )
        self.call: nn.Module = self._replica
        self.codec = WordCodec(runtime.device, dtype)

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._replica.module.word.grad = None

    def arm(self, last: bool) -> None:
        self._replica.require_backward_grad_sync = last
        self._replica.armed = False

    def backward(self, total: Tensor, start: Tensor, word: Word | None) -> None:
        if not self._replica.armed:
            raise _bypassed(type(self.model).__name__)
        if word is None:
            torch.autograd.backward(total, start)
        elif self.word_rides_along:
            # `times` the world size, since DDP will divide by it: whole numbers stay exact.
            carried = self.codec.pack(word, times=self.gradient_factor)
            parameter = self._replica.module.word
            torch.autograd.backward((total, parameter), (start, carried))
            assert parameter.grad is not None
            self._summed = parameter.grad
        else:
            self._summed = self.codec.pack(word, times=1.0)
            work = dist.all_reduce(self._summed, async_op=True)  # overlaps with backward
            torch.autograd.backward(total, start)
            work.wait()
        if word is not None:
            self._check_complete()

    def word(self) -> Tensor:
        return self._summed

    def sync_buffers(self) -> None:
        self.runtime.collectives.broadcast_(list(self.model.buffers()))

    def _check_complete(self) -> None:
        """A parameter without a gradient leaves its bucket unsent: DDP says so one step later, without names."""
        unused = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
        if unused and not self.config.find_unused_parameters:
            raise UserError(
                "every trainable parameter takes part in the loss",
                f"no gradient for {_some(unused)}",
                "freeze them (requires_grad=False) before training, or type ddp.find_unused_parameters=true",
            )


def _ignore_frozen(carrier: _WithWord) -> None:
    """Frozen parameters, and buffers of modules without any trainable parameter, are moved but never wrapped."""
    frozen = [name for name, p in carrier.named_parameters() if not p.requires_grad]
    for prefix, module in carrier.named_modules():
        if any(True for _ in module.parameters()) and not any(p.requires_grad for p in module.parameters()):
            frozen += [f"{prefix}.{name}" for name, _ in module.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(carrier, sorted(set(frozen)))


def _bypassed(model: str) -> UserError:
    return UserError(
        "a training forward through the model that Lockstep passed in",
        f"a loss made without it: {model} or a part of it was called directly, so its gradients would not be "
        "exchanged and the replicas would drift apart",
        "in `loss(model, batch)` call `model(...)`, not `self.net(...)`, `model.module(...)` or `model.encoder(...)`; "
        "give the model's forward an argument that selects what to compute",
    )


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
