"""Reports what depends on the number of ranks, where the size of a micro-batch does: dropout, noise, BatchNorm, fp16.

Layers and the precision are known before the first step, and get a line of the banner. Whether the forward, the loss or
the user's loop draws random numbers is known after the first step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lockstep.config import RunConfig
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger
from lockstep.runtime.seeds import rng_states, used_generators
from lockstep.task import Loss, MicroBatch

EXAMPLE_RANKS = 4  # for which a micro-batch is proposed, unless there are more


def has_dropout(model: nn.Module) -> bool:
    return any(map(_drops, model.modules()))


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops values: a layer of dropout, or one with a rate, as attention and LSTMs have it."""
    # An RNN has dropout between its layers only.
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:
        return False

    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, int | float) and rate > 0


def takes_batch_statistics(model: nn.Module, config: RunConfig) -> bool:
    """Whether a BatchNorm normalises over a micro-batch. A SyncBatchNorm does so over those of all ranks together."""
    if config.ddp.sync_batchnorm:
        return False

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not is_synchronised(m)]
    return any(norm.training or norm.running_mean is None for norm in norms)


def advise(plan: Plan) -> str:
    """Return what to set, so that the micro-batches do not follow the number of ranks."""
    # The ranks of a stream have micro-batches of their own, whatever their size.
    if plan.samples is None:
        return "in a stream they follow the number of ranks"

    # Up to four ranks get the same advice, unless memory holds less; more ranks get the size that they use now.
    size = min(plan.micro_batch, max(1, plan.global_batch // EXAMPLE_RANKS))
    most = math.ceil(plan.global_batch / size)
    return f"set micro_batch={size} for the same model on any number of ranks, up to {most}"


class FirstDraws(StepPart):
    """Logs a note if the first step draws random numbers from a global generator. It takes part in that step only."""

    slot = "log"

    def __init__(self, plan: Plan, device: torch.device, log_event: EventLogger):
        self._plan = plan
        self._device = device
        self._log_event = log_event
        self._states: dict[str, Any] = {}
        self._drew = False

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        self._states = rng_states(self._device)  # no device is waited for

    def before_backward(self, loss: Loss, progress: PassProgress) -> None:
        self._drew |= bool(used_generators(self._states, rng_states(self._device)))

    def end_step(self, progress: PassProgress) -> None:
        if self._drew:
            self._log_event(
                "note",
                reason=f"random numbers that are drawn in a step follow its micro-batches: {advise(self._plan)}",
            )

        self.is_done = True
