"""Calls the loss of a few samples, as training would, and leaves nothing behind.

The model is called without its wrapper, without compiled code and CUDA graphs, and gradients are computed without
being accumulated: no hook of a wrapper runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lockstep.data.loader import to_device
from lockstep.engine.start_check.judge import Measured
from lockstep.engine.start_check.random_numbers import HeldStill, seed_all
from lockstep.parallel.driver import RanksDiffer, trainable
from lockstep.parallel.inner_gradients import InnerGradient, watch_loss
from lockstep.runtime.seeds import derive
from lockstep.task import Loss

if TYPE_CHECKING:
    from lockstep.engine.run import Run  # which calls this check


class CannotSay(Exception):
    """The loss cannot be judged; the reason is for the user."""


@dataclass
class Probe:
    """The loss of one task, called on samples."""

    run: Run
    loss_fn: Callable[[nn.Module, Any], Loss]

    def __post_init__(self) -> None:
        self.names, self.parameters = trainable(self.run.driver.model)
        self.inner: InnerGradient | None = None  # the newest gradient that the loss computed itself
        self._sharded = not self.run.driver.role.replicated

    def measure(self, make_batch: Callable[[], Any], gradients: bool = True) -> Measured:
        """Return the loss of a batch, with the random numbers of the first micro-batch."""
        run = self.run

        with self._errors_of_the_user():
            # A loss may change its batch, so each call gets its own. A collate may draw as well: seed after it.
            batch = to_device(make_batch(), run.runtime.device)
            self.seed()
            # A forward of a sharded model that no backward follows would leave its blocks gathered.
            forward_only = torch.no_grad() if self._sharded and not gradients else nullcontext()
            with forward_only, run.stepper.context.precision.autocast():
                loss = watch_loss(self.loss_fn, self._note)(run.driver.model, batch)
            computed = self._gradients(loss.total) if gradients else None
            return Measured(float(loss.total.detach()), float(loss.weight), computed)

    def _gradients(self, total: Tensor) -> list[Tensor]:
        """Return the gradient of every trainable parameter; where ranks hold shards, this rank's part of its sum."""
        if not self._sharded:
            computed = torch.autograd.grad(total, self.parameters, allow_unused=True)
        else:
            # The backward exchanges gradients, so a rank that failed must not leave the others waiting in it.
            agree(self.run, "a backward")
            total.backward()
            computed = [p.grad for p in self.parameters]
            for p in self.parameters:
                p.grad = None
        if any(gradient is not None and gradient.is_sparse for gradient in computed):
            raise CannotSay("it has sparse gradients")
        return [
            torch.zeros_like(p) if g is None else g.detach() for g, p in zip(computed, self.parameters, strict=True)
        ]

    def _note(self, inner: InnerGradient) -> None:
        self.inner = inner

    @contextmanager
    def _errors_of_the_user(self) -> Iterator[None]:
        """Turn an error of the user's code into a reason not to judge: training will show it, with its traceback."""
        try:
            yield
        except (CannotSay, RanksDiffer):
            raise
        except Exception as error:
            if self.inner and self._sharded:
                reason = f"it computes gradients itself ({self.inner.call_site}), and parameters are sharded"
                raise CannotSay(reason) from error
            raise CannotSay(f"it raises {type(error).__name__}: {error}".splitlines()[0]) from error

    def seed(self) -> None:
        run = self.run
        seed_all(derive(run.config.seed, "model", 0, 0), run.runtime.device)

    def still(self, make_batch: Callable[[], Any], gradients: bool) -> Measured:
        """Return the loss of a batch with random numbers that are the same for every sample."""
        with HeldStill() as mode:
            measured = self.measure(make_batch, gradients)
        if not mode.missed:
            return measured

        # Kernels that draw by themselves do so in training mode only.
        with eval_mode(self.run.driver.model), HeldStill() as mode:
            measured = self.measure(make_batch, gradients)
        if mode.missed:
            raise CannotSay(f"the loss draws random numbers in a way that follows the batch ({', '.join(mode.missed)})")
        return measured


def agree(run: Run, action: str) -> None:
    """Tell the other ranks what this one does next, inside `many_forwards`; all raise if they do not do the same."""
    actions = run.runtime.collectives.gather_json(action)
    if len(set(actions)) > 1:
        raise RanksDiffer("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(actions)))


@contextmanager
def told_alone() -> Iterator[None]:
    """Tell whoever asks torch, or the environment, that there is one rank: sums over ranks are then its own."""
    with ExitStack() as stack:
        answers = {"get_world_size": 1, "get_rank": 0, "all_reduce": None, "barrier": None}
        for name, answer in answers.items():
            stack.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, lambda *_, _answer=answer, **__: _answer)
        for name, text in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
            if name in os.environ:
                stack.callback(os.environ.__setitem__, name, os.environ[name])
                os.environ[name] = text
        yield


# ---- modes of modules ----


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    with _training(model.modules(), mode=False):
        yield


def has_statistics(module: nn.Module) -> bool:
    """Whether it is a norm that takes statistics of a micro-batch, or keeps some: InstanceNorm only keeps them."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.running_mean is not None)


@contextmanager
def without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use its running statistics: it is known to depend on the micro-batch, and meant to.

    One without running statistics is lent some.
    """
    norms = [module for module in model.modules() if has_statistics(module)]
    with ExitStack() as stack:
        stack.enter_context(_training(norms, mode=False))
        for norm in norms:
            if norm.running_mean is None and norm.running_var is None:
                like = norm.weight if norm.weight is not None else next(iter(model.parameters()))
                norm._buffers["running_mean"] = torch.zeros(norm.num_features, device=like.device, dtype=like.dtype)
                norm._buffers["running_var"] = torch.ones(norm.num_features, device=like.device, dtype=like.dtype)
                stack.callback(norm._buffers.update, running_mean=None, running_var=None)
        yield


@contextmanager
def _training(modules: Any, mode: bool) -> Iterator[None]:
    # The attribute, not eval(): a module may have its own way of keeping its mode.
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        module.training = mode
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
