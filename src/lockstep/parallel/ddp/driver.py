"""Drivers for replicated parameters: torch's DDP reduces gradients in buckets; without it, all are reduced together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from lockstep.config import DDPConfig
from lockstep.errors import UserError
from lockstep.parallel.batchnorm.buffers import broadcast_buffers
from lockstep.parallel.ddp.comm_hooks import CommHook
from lockstep.parallel.ddp.hook_table import HookArguments, make_hook
from lockstep.parallel.ddp.torch_private import BUFFERS_OPTION, FixedBucketsDDP, leave_out, split_graphs
from lockstep.parallel.driver import Driver, DriverSetup, broadcast_model, trainable
from lockstep.parallel.exact.buckets import BucketReducer, OrderedHook
from lockstep.parallel.exact.reducers import ReplicaReducer
from lockstep.parallel.gradients import (
    check_reached,
    have_gradients,
    sum_used,
    sum_with_word,
)
from lockstep.parallel.micro_batches import MicroBatchDriver, backward_unchecked
from lockstep.parallel.parameter_hooks.hooks import register_hooks
from lockstep.parallel.progress import PassProgress
from lockstep.runtime.control_word import LENGTH, ControlWord, ControlWordCodec, mean_is_exact
from lockstep.task import MicroBatch

# The smallest and the largest bucket that is chosen for a model, in MiB. The largest is torch's default.
SMALLEST_BUCKET, LARGEST_BUCKET = 1.0, 25.0


class _WithControlWord(nn.Module):
    """The module that DDP wraps: the model, and one more parameter whose gradient is this rank's control word.

    So DDP sums the control word in a gradient bucket that is sent anyway, and it needs no separate collective (which on
    gloo would cost about a fifth of the step of a tiny model).
    """

    def __init__(self, model: nn.Module, packed: Tensor):
        super().__init__()
        self.module = model
        # In a module after the model: DDP fills buckets from the last parameter on, and the backward computes this
        # gradient first.
        self.word_holder = nn.ParameterList([nn.Parameter(packed)])

    def forward(self, total: Tensor) -> Tensor:
        """Return the loss as it is: see `DDPDriver`."""
        return total


class DDPDriver(MicroBatchDriver):
    """Replicas of the model. torch's DDP reduces their gradients in buckets while the backward runs.

    The task calls its own model, which is not wrapped. All that DDP does in its own forward is to prepare for the
    backward that follows. So it gets the loss instead of a batch, right before the last backward of a pass, and it does
    not matter which part of the model the loss has called, or how often.
    """

    def __init__(self, model: nn.Module, setup: DriverSetup):
        config, runtime, exact = setup.config.ddp, setup.runtime, setup.config.exact
        dtype = word_dtype(trainable(model), runtime.world.size, exact)
        super().__init__(model, setup, codec=ControlWordCodec(runtime.device, dtype))
        register_hooks(setup.hooks, self.parameters)

        # DDP and its hooks leave the mean over ranks. Exact mode leaves sums: dividing by 3 ranks would round, while
        # dividing by 2 does not.
        self.to_sum = 1.0 if exact else float(runtime.world.size)
        self.exact_reducer = self.parts.add(BucketReducer(self.parameters)) if exact else None

        # The control word is one more parameter. Frozen tensors are not reduced.
        carrier = _WithControlWord(model, torch.zeros(LENGTH, dtype=dtype, device=runtime.device))
        self._word_parameter = carrier.word_holder[0]
        self._frozen = _frozen_names(model)
        leave_out(carrier, [f"module.{name}" for name in self._frozen])

        # DDP makes parameters equal on all ranks, and we buffers.
        self._ddp = _make_ddp(carrier, config, [*self.parameters.values()])
        broadcast_buffers(_buffers_except(model, self._frozen), runtime.collectives)

        group = self._ddp.process_group
        assert group is not None
        self.hook: CommHook | None
        if self.exact_reducer:
            self.hook = OrderedHook(self._word_parameter, group, self.exact_reducer)
        else:
            arguments = HookArguments(self._word_parameter, group, self.parameters, config, setup.config.seed)
            self.hook = make_hook(arguments)

        # A hook may have a state that a checkpoint must hold, such as the errors of PowerSGD.
        if self.hook:
            self._ddp.register_comm_hook(self.hook, lambda hook, bucket: hook(bucket))
            for name, stateful in self.hook.stateful.items():
                setup.register(name, stateful)

        # The ids of the parameters that the last backward reached. Not needed if gradients are views of buckets:
        # `_check_complete` then looks at the gradients themselves.
        self._reached = reached = set[int]()
        if not config.gradient_as_bucket_view:
            for parameter in self.parameters.values():
                parameter.register_post_accumulate_grad_hook(lambda p: reached.add(id(p)))

        self._counts_gradients = True  # until the first backward that reduces, see `_each_gradient_once`

    def begin_pass(self) -> None:
        super().begin_pass()
        self._word_parameter.grad = None
        split_graphs(None)  # the last forward may have failed

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        super().before_forward(micro, progress)
        split_graphs(self._ddp)  # what the forward compiles; `_run_backward` ends this
        self._reached.clear()

    def _broadcast_buffers(self) -> None:
        broadcast_buffers(_buffers_except(self.model, self._frozen), self.runtime.collectives)

    def _run_backward(self, total: Tensor, grad_output: Tensor, control_word: ControlWord | None) -> None:
        split_graphs(None)
        if self.hook:
            self.hook.prepare(grad_output, control_word)

        # Before the last backward of the pass, gradients only accumulate on this rank.
        if control_word is None:
            backward_unchecked((total,), (grad_output,))
        else:
            self._backward_and_reduce(total, grad_output, control_word)
            self._check_complete()

    def _backward_and_reduce(self, total: Tensor, grad_output: Tensor, control_word: ControlWord) -> None:
        """Run the last backward of a pass. DDP reduces each bucket as soon as its gradients are there."""
        # DDP's forward returns the loss as it is, and prepares DDP: it now expects one gradient of every parameter.
        with torch.enable_grad():
            total = self._ddp(total)

        # Where DDP divides by the number of ranks, the control word is multiplied by it first.
        packed = self.codec.pack(control_word, factor=self.to_sum)

        # The backward starts from two tensors. The second is a leaf, so that its gradient is what is passed for it.
        with self._each_gradient_once() if self._counts_gradients else nullcontext():
            backward_unchecked((total, self._word_parameter), (grad_output, packed))

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        # DDP has reduced everything in the last backward.
        assert self._word_parameter.grad is not None
        return self._word_parameter.grad, self._norms_of_gradients()

    @contextmanager
    def _each_gradient_once(self) -> Iterator[None]:
        """Raise if the backward inside adds to a gradient twice: DDP would reduce it after the first time.

        DDP itself does not notice it if the first time completes the last bucket. Only one backward is checked, because
        hooks take time.
        """
        self._counts_gradients = False
        seen = set[str]()

        def count(name: str) -> None:
            if name in seen:
                raise gradient_in_parts(f"the gradient of {name!r}")
            seen.add(name)

        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: count(name))
            for name, p in self.parameters.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _check_complete(self) -> None:
        """Raise if the last backward did not reach a parameter, so that its bucket was not reduced.

        DDP itself reports this one backward later and without names, and not at all after the last one.
        """
        # After the reduction, a gradient is a view of its bucket.
        if self._ddp.gradient_as_bucket_view:
            missed = [name for name, p in self.parameters.items() if p.grad is None or not p.grad._is_view()]
        else:
            missed = [name for name, p in self.parameters.items() if id(p) not in self._reached]

        check_reached(missed, len(self.parameters))


class FlatReduceDriver(MicroBatchDriver):
    """Replicas whose gradients are reduced together, after the last backward.

    This is slower than DDP's buckets, which are reduced while the backward runs. But it works with any autograd graph:
    parameters may be unused on some ranks, in some micro-batches, or everywhere.
    """

    def __init__(self, model: nn.Module, setup: DriverSetup):
        collectives = setup.runtime.collectives
        broadcast_model(model, collectives)
        super().__init__(model, setup)
        register_hooks(setup.hooks, self.parameters)

        exact = setup.config.exact
        self._exact_reducer = self.parts.add(ReplicaReducer(self.parameters, collectives)) if exact else None

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        packed = self.codec.pack(control_word)
        if self._exact_reducer:
            packed = self._exact_reducer.reduce(packed)
        else:
            # The first sum carries the control word and counts the ranks that used each parameter. On a GPU the host
            # waits for it, because it decides what the next sums are.
            parameters = [*self.parameters.values()]
            packed, users = sum_with_word(packed, have_gradients(parameters), self.runtime.collectives)
            sum_used(parameters, users.tolist(), self.runtime.collectives)

        return packed, self._norms_of_gradients()


def make_driver(model: nn.Module, setup: DriverSetup) -> Driver:
    """Return the driver for replicas: torch's DDP, unless some parameters may get no gradient."""
    if setup.config.ddp.find_unused_parameters:
        return FlatReduceDriver(model, setup)

    return DDPDriver(model, setup)


def _make_ddp(carrier: _WithControlWord, config: DDPConfig, parameters: Sequence[nn.Parameter]) -> FixedBucketsDDP:
    """Return torch's DDP of a model, whose `parameters` get gradients."""
    return FixedBucketsDDP(
        carrier,
        bucket_cap_mb=bucket_mb_for(parameters) if config.bucket_mb == "auto" else config.bucket_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        # DDP would also broadcast in evaluations, in which ranks may run different numbers of forwards.
        **{BUFFERS_OPTION: False},
    )


def bucket_mb_for(parameters: Sequence[nn.Parameter]) -> float:
    """Return the size of a bucket for these gradients, in MiB.

    The last bucket is full only when the backward ends, so its all-reduce overlaps with nothing. With a single bucket,
    none does.
    """
    size = sum(p.nbytes for p in parameters) / 2**20
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, size / 4))


def word_dtype(parameters: Mapping[str, nn.Parameter], ranks: int, exact: bool) -> torch.dtype:
    """Return the dtype of the control word.

    The word shares a bucket with the last parameter, but half precision has too few bits for its integers, and on many
    ranks the mean of float32 has too few as well. A word of another dtype gets a bucket of its own.
    """
    in_bucket = torch.promote_types([*parameters.values()][-1].dtype, torch.float32)
    return in_bucket if mean_is_exact(ranks) and not exact else torch.float64


def gradient_in_parts(what: str) -> UserError:
    """Return the error for a backward that computes a gradient in several parts, each in a backward of its own."""
    return UserError(
        f"{what} is computed in several parts in one backward, and DDP would reduce only the first",
        "activation checkpointing with use_reentrant=True runs a backward of its own for each call that it recomputes, "
        "and several of them use the same parameter",
        "pass use_reentrant=False to torch.utils.checkpoint (in transformers: gradient_checkpointing_kwargs="
        "{'use_reentrant': False}); or set ddp.find_unused_parameters=true",
    )


def _frozen_names(model: nn.Module) -> list[str]:
    """Return the names of frozen parameters, and of buffers in modules whose parameters are all frozen."""
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for prefix, module in model.named_modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            frozen += [f"{prefix}.{name}" for name, _ in module.named_buffers()]

    return sorted(set(frozen))


def _buffers_except(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name not in names}
