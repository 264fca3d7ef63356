"""Calls the loss of a few samples, as training would, and leaves nothing behind.

The model is called without its wrapper, without compiled code and CUDA graphs, and gradients are computed without
being accumulated: no hook of a wrapper runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.data.loader import to_device
from lockstep.engine.start_check.judge import Measured
from lockstep.engine.start_check.random_numbers import HeldStill, seed_all
from lockstep.parallel.driver import RanksDiffer, trainable
from lockstep.parallel.inner_gradients import InnerGradient, watched
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
    gradients: bool  # whether they can be computed here: not where ranks hold shards

    def __post_init__(self) -> None:
        self.names, self.parameters = trainable(self.run.driver.model)
        self.inner: InnerGradient | None = None  # the newest gradient that the loss computed itself

    def measure(self, make_batch: Callable[[], Any], gradients: bool = True) -> Measured:
        """Return the loss of a batch, with the random numbers of the first micro-batch."""
        run = self.run

        with self._errors_of_the_user():
            # A loss may change its batch, so each call gets its own. A collate may draw as well: seed after it.
            batch = to_device(make_batch(), run.runtime.device)
            self.seed()
            with nullcontext() if self.gradients else torch.no_grad(), run.stepper.context.precision.autocast():
                loss = watched(self.loss_fn, self._note)(run.driver.model, batch)

            computed = None
            if gradients and self.gradients:
                computed = torch.autograd.grad(loss.total, self.parameters, allow_unused=True)
                if any(gradient is not None and gradient.is_sparse for gradient in computed):
                    raise CannotSay("it has sparse gradients")
            return Measured(float(loss.total.detach()), float(loss.weight), computed)

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
            if self.inner and not self.gradients:
                reason = f"it computes gradients itself ({self.inner.place}), and parameters are sharded"
                raise CannotSay(reason) from error
            raise CannotSay(f"it raises {type(error).__name__}: {error}".splitlines()[0]) from error

    def seed(self) -> None:
        run = self.run
        seed_all(derive(run.config.seed, "model", 0, 0), run.runtime.device)

    def still(self, make_batch: Callable[[], Any]) -> Measured:
        """Return the loss of a batch with random numbers that are the same for every sample."""
        with HeldStill() as mode:
            measured = self.measure(make_batch)
        if not mode.missed:
            return measured

        # Kernels that draw by themselves do so in training mode only.
        with eval_mode(self.run.driver.model), HeldStill() as mode:
            measured = self.measure(make_batch)
        if mode.missed:
            raise CannotSay(f"the loss draws random numbers in a way that follows the batch ({', '.join(mode.missed)})")
        return measured


# ---- modes of modules ----


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    with _training(model.modules(), mode=False):
        yield


@contextmanager
def without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use its running statistics: it is known to depend on the micro-batch, and meant to.

    One without running statistics is lent some.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
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
