"""Drivers for replicated parameters: torch's DDP reduces gradients in buckets; without it, all are reduced together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import DDPConfig
from lockstep.errors import UserError, some_names
from lockstep.parallel.ddp.hook_table import HOOKS, HookArguments
from lockstep.parallel.ddp.hooks import CommHook, WideHook
from lockstep.parallel.ddp.wrapper import Wrapper
from lockstep.parallel.driver import Driver, Progress, broadcast_model, no_gradient, run_engine, sum_with_word
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord, ControlWordCodec, mean_is_exact
from lockstep.task import MicroBatch

# The option that broadcasts buffers before every forward; torch 2.13 renamed it.
BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


# The smallest and the largest bucket that is chosen for a model, in MiB. The largest is torch's default.
SMALLEST_BUCKET, LARGEST_BUCKET = 1.0, 25.0


class _WithControlWord(Wrapper):
    """The model with one more parameter, whose gradient is this rank's control word.

    So DDP sums the control word in a gradient bucket that is sent anyway, and it needs no separate collective (which on
    gloo would cost about a fifth of the step of a tiny model).
    """

    def __init__(self, model: nn.Module, packed: Tensor):
        super().__init__()
        self.module = model
        # In a module after the model: DDP fills buckets from the last parameter on, and the backward computes this
        # gradient first.
        self.word_holder = nn.ParameterList([nn.Parameter(packed)])

    def forward(self, *args: Any, _lockstep_function: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Call the model, or a function that calls the model itself (`Replica._lockstep_run`)."""
        # A task that calls `model.module` comes here without DDP. It must reach the check in `DDPDriver._backward`.
        return (_lockstep_function or self.module)(*args, **kwargs)

    # Unlike in `Wrapper`: DDP must find the control word among the parameters.
    named_parameters = nn.Module.named_parameters


@dataclass(slots=True)
class Calls:
    """The calls of a model in one micro-batch. Not attributes of the module itself, which are slow to set."""

    any: bool = False
    with_gradients: bool = False  # DDP prepares its reducer in a forward with gradients, and nowhere else


class Replica(Wrapper, DistributedDataParallel):
    """The module that the task calls. It has the attributes, parameters and names of the user's model."""

    def __init__(self, carrier: _WithControlWord, **options: Any):
        super().__init__(carrier, **options)

        # Assign parameters to buckets once and for all. torch would assign them again after the first step, and a
        # resumed run would differ in its last bits: with three or more ranks, the position of a gradient in its bucket
        # determines the order in which the ranks are added.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()
        self._lockstep_calls = Calls()  # a name that hides no attribute of the user's model
        self._is_complete = True  # from here on, `__setattr__` forwards attributes to the user's model

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Reverse the parameters: buckets then fill in about the order in which gradients are computed."""
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._lockstep_run(self.user_model(), *args, **kwargs)

    def _lockstep_run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function that calls the unwrapped model as a forward of DDP, which then expects its backward."""
        calls = self._lockstep_calls
        calls.any = True
        calls.with_gradients |= torch.is_grad_enabled()
        return super().forward(*args, _lockstep_function=function, **kwargs)

    def user_model(self) -> nn.Module:
        carrier: Any = super().user_model()
        return carrier.module

    def __setattr__(self, name: str, value: Any) -> None:
        # A task that sets an attribute of the model means its own model, not this wrapper.
        own = vars(self)
        if own.get("_is_complete") and name not in own and hasattr(self.user_model(), name):
            setattr(self.user_model(), name, value)
        else:
            super().__setattr__(name, value)


class DDPDriver(Driver):
    """Replicas of the model. torch's DDP reduces their gradients in buckets while the backward runs."""

    leaves_sums = False  # whether gradients are sums over ranks; DDP and its hooks leave the mean
    word_dtype: torch.dtype | None = None  # of the control word; None: see `codec`

    def __init__(self, model: nn.Module, config: DDPConfig, runtime: Runtime, seed: int = 0):
        super().__init__(model, runtime)
        self.to_sum = 1.0 if self.leaves_sums else float(runtime.world.size)

        # The control word is one more parameter. Frozen tensors are not reduced.
        carrier = _WithControlWord(model, torch.zeros(LENGTH, dtype=self.codec.dtype, device=runtime.device))
        self._word_parameter = carrier.word_holder[0]
        self._frozen = _frozen_names(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            carrier, [f"module.{name}" for name in self._frozen]
        )

        # DDP reads the ignored names when it is constructed.
        self._replica = Replica(
            carrier,
            bucket_cap_mb=bucket_mb_for(self.parameters) if config.bucket_mb == "auto" else config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            # DDP would also broadcast in evaluations, in which ranks may run different numbers of forwards.
            **{BUFFERS_OPTION: False},
        )
        self.module = self._replica

        group = self._replica.process_group
        assert group is not None
        self.hook = self._make_hook(group, config, seed)
        if self.hook:
            self._replica.register_comm_hook(self.hook, lambda hook, bucket: hook(bucket))
            self.parts = self.hook.parts

        # The ids of the parameters that the last backward reached. Not needed if gradients are views of buckets:
        # `_check_complete` then looks at the gradients themselves.
        self._reached = reached = set[int]()
        if not config.gradient_as_bucket_view:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(lambda p: reached.add(id(p)))

        self.broadcasts_buffers = config.broadcast_buffers
        self.sync_buffers()

    @cached_property
    def codec(self) -> ControlWordCodec:
        # The word shares a bucket with the last parameter, but half precision has too few bits for its integers, and on
        # many ranks the mean of float32 has too few as well. A word of another dtype gets a bucket of its own.
        in_bucket = torch.promote_types(self.parameters[-1].dtype, torch.float32)
        dtype = in_bucket if mean_is_exact(self.runtime.world.size) else torch.float64
        return ControlWordCodec(self.runtime.device, self.word_dtype or dtype)

    def begin(self) -> None:
        super().begin()
        self._word_parameter.grad = None

    def before_forward(self, micro: MicroBatch, progress: Progress) -> None:
        super().before_forward(micro, progress)

        # Record anew what the forward of this micro-batch calls, and what its backward reaches.
        replica = self._replica
        calls = replica._lockstep_calls
        calls.any = calls.with_gradients = False

        # Setting an attribute of a module is slow, so it is set only if it changes.
        if replica.require_backward_grad_sync != progress.is_last_micro_batch:
            replica.require_backward_grad_sync = progress.is_last_micro_batch

        self._reached.clear()

    def call_inside(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._replica._lockstep_run(function, *args)

    def no_exchange(self) -> AbstractContextManager[Any]:
        return self._replica.no_sync()

    def _broadcast_buffers(self) -> None:
        buffers = [buffer for name, buffer in self.model.named_buffers() if name not in self._frozen]
        self.runtime.collectives.broadcast_(buffers)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        if not self._replica._lockstep_calls.with_gradients:
            if self._replica._lockstep_calls.any:
                raise no_gradient()

            raise UserError(
                "the loss was computed without calling the model that Lockstep passed in",
                f"{type(self.model).__name__} or a part of it was called directly, so its gradients would not be "
                "reduced and the replicas would drift apart",
                "in `loss(model, batch)` call `model(...)`, not `self.net(...)`, `model.module(...)` or "
                "`model.encoder(...)`; give the model's forward an argument that selects what to compute",
                cause="bypass",
            )

        if self.hook:
            self.hook.prepare(grad_output, word)

        # Before the last backward of the step, gradients only accumulate on this rank.
        if word is None:
            run_engine((total,), (grad_output,))
            return

        # DDP divides by the world size, so the control word is multiplied by it first.
        packed = self.codec.pack(word, factor=self.to_sum)
        run_engine((total, self._word_parameter), (grad_output, packed))

    def _reduce(self, word: ControlWord) -> tuple[Tensor, None]:
        # DDP has reduced everything in the last backward.
        self._check_complete()
        assert self._word_parameter.grad is not None
        return self._word_parameter.grad, None

    def _make_hook(self, group: dist.ProcessGroup, config: DDPConfig, seed: int) -> CommHook | None:
        parameter = self._word_parameter
        if config.hook != "none":
            named = dict(zip(self.names, self.parameters, strict=True))
            return HOOKS[config.hook].make(HookArguments(parameter, group, named, config, seed))

        # Without a hook, DDP would sum bf16 gradients in bf16.
        return WideHook(parameter, group) if self.parameters[-1].dtype == torch.bfloat16 else None

    def _check_complete(self) -> None:
        """Raise if the last backward did not reach a parameter, so that its bucket was not reduced.

        DDP itself reports this one step later and without names, and not at all after the last step.
        """
        pairs = zip(self.names, self.parameters, strict=True)
        # After the reduction, a gradient is a view of its bucket.
        if self._replica.gradient_as_bucket_view:
            check_reached([name for name, p in pairs if p.grad is None or not p.grad._is_view()], len(self.names))
        else:
            check_reached([name for name, p in pairs if id(p) not in self._reached], len(self.names))


class FlatReduceDriver(Driver):
    """Replicas whose gradients are reduced together, after the last backward.

    This is slower than DDP's buckets, which are reduced while the backward runs. But it works with any autograd graph:
    parameters may be unused on some ranks, in some micro-batches, or everywhere.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, broadcast_buffers: bool = False):
        super().__init__(model, runtime)
        self.broadcasts_buffers = broadcast_buffers
        broadcast_model(model, runtime.collectives)

    def _reduce(self, word: ControlWord) -> tuple[Tensor, None]:
        # The first sum carries the control word and counts the ranks that used each parameter.
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float64)
        packed, users = sum_with_word(self, word, used)

        # A parameter that no rank uses gets no gradient, so that the optimizer skips it, as in a single process.
        used_anywhere = [p for p, count in zip(self.parameters, users.tolist(), strict=True) if count > 0]

        # One all-reduce for each dtype, in the same order on all ranks (which a set would not guarantee).
        for dtype in dict.fromkeys(p.dtype for p in used_anywhere):
            parameters = [p for p in used_anywhere if p.dtype == dtype]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = torch.cat([grad.flatten() for grad in grads])

            # Half-precision gradients are added in float32 and rounded once.
            flat = self.runtime.collectives.all_reduce_(flat.to(torch.promote_types(dtype, torch.float32))).to(dtype)
            for p, summed in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = summed.view_as(p)

        return packed, None


def bucket_mb_for(parameters: Sequence[nn.Parameter]) -> float:
    """Return the size of a bucket for these gradients, in MiB.

    The last bucket is full only when the backward ends, so its all-reduce overlaps with nothing. With a single bucket,
    none does.
    """
    size = sum(p.nbytes for p in parameters) / 2**20
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, size / 4))


def _frozen_names(model: nn.Module) -> list[str]:
    """Return the names of frozen parameters, and of buffers in modules whose parameters are all frozen."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for prefix, module in model.named_modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            frozen += [f"{prefix}.{name}" for name, _ in module.named_buffers()]

    return sorted(set(frozen))


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
