"""The communication hooks by their names in `ddp.hook`, with a banner line that says how each one rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config import DDPConfig
from lockstep.parallel.ddp.comm_hooks import CommHook, HalfHook
from lockstep.parallel.ddp.powersgd import PowerSGDHook


@dataclass(frozen=True)
class HookArguments:
    """The arguments from which a hook is constructed."""

    word_parameter: nn.Parameter  # the parameter whose gradient is the control word
    group: dist.ProcessGroup
    named: dict[str, nn.Parameter]  # the model's trainable parameters
    config: DDPConfig
    seed: int


@dataclass(frozen=True)
class HookKind:
    make: Callable[[HookArguments], CommHook]
    about: Callable[[DDPConfig], str]  # returns a line for the banner


def _about_half(bits: int, config: DDPConfig) -> str:
    return f"{config.hook}: gradients are sent and added with {bits} significant bits; sums are rounded accordingly"


def _about_powersgd(config: DDPConfig) -> str:
    feedback = "added to the next step" if config.error_feedback else "lost (ddp.error_feedback=false)"
    return (
        f"powersgd: from step {config.powersgd_start} on, matrices are sent as products of rank "
        f"{config.powersgd_rank}; the approximation error is {feedback}"
    )


HOOKS = {
    "fp16": HookKind(lambda a: HalfHook(a.word_parameter, a.group, torch.float16), partial(_about_half, 11)),
    "bf16": HookKind(lambda a: HalfHook(a.word_parameter, a.group, torch.bfloat16), partial(_about_half, 8)),
    "powersgd": HookKind(lambda a: PowerSGDHook(a.word_parameter, a.group, a.named, a.config, a.seed), _about_powersgd),
}
