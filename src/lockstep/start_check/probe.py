"""Calls the loss on a few samples as training would, without changing the run.

The model is called without compiled code or CUDA graphs. Gradients are computed but not accumulated, so the
hooks of DDP or FSDP do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lockstep.data.transfer import Transfer
from lockstep.errors import UserError
from lockstep.observe.metrics import detached
from lockstep.parallel.calls.state import restore_modes
from lockstep.parallel.inner_gradients import InnerGradient, InnerGradients
from lockstep.parallel.progress import check_total
from lockstep.parallel.sharded import RanksDiffer, check_same_action
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.start_check.checked_run import CheckedRun
from lockstep.start_check.mistakes import Measurement
from lockstep.start_check.random_numbers import ConstantDraws
from lockstep.task import Loss


class Inconclusive(Exception):
    """The loss cannot be judged. The message tells the user why."""

    def __init__(self, reason: str, recurs: bool = False):
        """`recurs`: the first step will raise an error that says so, whatever its samples."""
        super().__init__(reason)
        self.recurs = recurs


@dataclass
class Probe:
    """Calls the loss of one task on samples.

    The loss is called as in the first step: the same seed, the same number format, on the same device. What it changes,
    such as BatchNorm statistics, is restored by the caller.
    """

    run: CheckedRun
    loss_fn: Callable[[nn.Module, Any], Loss]

    def __post_init__(self) -> None:
        self.names = [*self.run.driver.parameters]
        self.parameters = [*self.run.driver.parameters.values()]
        self.inner: InnerGradient | None = None  # the newest gradient that the loss computed itself
        self._transfer = Transfer(self.run.runtime.device)
        self._inner_gradients = InnerGradients(self._note)
        self._sharded = not self.run.driver.role.replicated
        self._may_draw = True  # until a batch has shown that the loss draws nothing

    def measure(self, make_batch: Callable[[], Any], gradients: bool = True) -> Measurement:
        """Call the loss on a batch with the seed of the first micro-batch, and return the result."""
        run = self.run

        with self._catch_user_errors():
            # A loss may change its batch in place, so each call gets a new one. Seed after collate, which may draw too.
            batch = self._transfer(make_batch())
            self.seed()

            # With grad mode on, FSDP would keep the blocks gathered until a backward.
            forward_only = torch.no_grad() if self._sharded and not gradients else nullcontext()
            with forward_only, run.precision.autocast():
                with self._inner_gradients:
                    loss = self.loss_fn(run.driver.model, batch)

                if torch.is_grad_enabled():
                    _check_total(loss)

            computed = self._gradients(loss.total) if gradients else None
            weight = float(detached(loss.weight))
            return Measurement(float(loss.total.detach()), weight, computed, _metrics(loss))

    def _gradients(self, total: Tensor) -> list[Tensor]:
        """Return the gradient of every trainable parameter, or this rank's shard of the summed gradient."""
        if not self._sharded:
            computed = torch.autograd.grad(total, self.parameters, allow_unused=True)
        else:
            # This backward is collective. If a rank failed before it, the others must not wait there.
            check_same_action("a backward", self.run.runtime.collectives)

            total.backward()
            # Taken off again, because the first step begins without gradients.
            computed = [p.grad for p in self.parameters]
            for p in self.parameters:
                p.grad = None

        if any(gradient is not None and gradient.is_sparse for gradient in computed):
            raise Inconclusive("it has sparse gradients")

        # A parameter that the loss does not reach has a gradient of 0, whole or in halves.
        gradients = []
        for p, gradient in zip(self.parameters, computed, strict=True):
            gradients.append(torch.zeros_like(p) if gradient is None else gradient.detach())

        return gradients

    def _note(self, inner: InnerGradient) -> None:
        self.inner = inner

    @contextmanager
    def _catch_user_errors(self) -> Iterator[None]:
        """Turn errors of the user's code into `Inconclusive`: training will raise them again, with a traceback."""
        try:
            yield
        except (Inconclusive, RanksDiffer):
            raise
        except UserError as error:
            raise Inconclusive(error.problem) from error
        except Exception as error:
            if self.inner and self._sharded:
                reason = f"it computes gradients itself ({self.inner.call_site}), and parameters are sharded"
                raise Inconclusive(reason) from error

            raise Inconclusive(f"it raises {type(error).__name__}: {error}".splitlines()[0]) from error

    def seed(self) -> None:
        """Seed as for micro-batch 0 of step 0."""
        run = self.run
        seed_everything(derive(run.config.seed, "model", 0, 0), run.runtime.device)

    def measure_with_constant_draws(self, make_batch: Callable[[], Any], gradients: bool) -> Measurement:
        """Call the loss on a batch with every random draw replaced by a constant, and return the result.

        The first batch must be the largest. If the loss draws nothing for it, draws are not looked for any more: that
        takes as long as the loss of a small model.
        """
        if not self._may_draw:
            return self.measure(make_batch, gradients)

        with ConstantDraws() as mode:
            measured = self.measure(make_batch, gradients)

        self._may_draw = mode.used
        if not mode.unsupported:
            return measured

        # Fused kernels with dropout inside cannot be replaced, but in eval mode they do not draw.
        with _in_eval_mode([*self.run.driver.model.modules()]), ConstantDraws() as mode:
            measured = self.measure(make_batch, gradients)

        if mode.unsupported:
            names = ", ".join(mode.unsupported)
            raise Inconclusive(f"the loss draws random numbers in a way that depends on the batch ({names})")

        return measured


def _check_total(loss: Loss) -> None:
    try:
        check_total(loss)
    except UserError as error:
        raise Inconclusive(error.problem, recurs=True) from error


def _metrics(loss: Loss) -> dict[str, float]:
    """Return the metrics that must be sums, those without a weight of their own; what is no number is left out."""
    metrics = {}
    for name, value in loss.metrics.items():
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if is_number and not torch.is_complex(torch.as_tensor(value)):
            metrics[name] = float(detached(value))

    return metrics


# ---- modes of modules ----


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module normalises over the micro-batch (BatchNorm) or has running statistics (InstanceNorm)."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.running_mean is not None)


@contextmanager
def without_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Let BatchNorm use its running statistics, because its dependence on the micro-batch is known and intended.

    A BatchNorm without running statistics gets a mean of 0 and a variance of 1 meanwhile.
    """
    norms = [module for module in model.modules() if has_statistics(module)]
    with ExitStack() as stack:
        stack.enter_context(_in_eval_mode(norms))

        # In eval mode a norm needs running statistics. One that has none gets neutral ones for a while.
        for norm in norms:
            if norm.running_mean is None and norm.running_var is None:
                like = norm.weight if norm.weight is not None else next(iter(model.parameters()))

                norm._buffers["running_mean"] = torch.zeros(norm.num_features, device=like.device, dtype=like.dtype)
                norm._buffers["running_var"] = torch.ones(norm.num_features, device=like.device, dtype=like.dtype)
                stack.callback(norm._buffers.update, running_mean=None, running_var=None)

        yield


@contextmanager
def _in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which these modules are in eval mode."""
    with restore_modes(modules):
        # Set the attribute instead of calling eval(): a module may override train().
        for module in modules:
            module.training = False

        yield
