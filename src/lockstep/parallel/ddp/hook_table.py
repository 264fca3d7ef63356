"""The communication hooks by their names in `ddp.hook`: how each is made, and what it loses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config import DDPConfig
from lockstep.parallel.ddp.hooks import HalfHook, Hook
from lockstep.parallel.ddp.powersgd import PowerSGDHook


@dataclass(frozen=True)
class HookArguments:
    """What a hook may be made from."""

    word: nn.Parameter  # whose gradient is the control word
    group: dist.ProcessGroup
    named: dict[str, nn.Parameter]  # the model's trainable parameters
    config: DDPConfig
    seed: int


@dataclass(frozen=True)
class HookKind:
    make: Callable[[HookArguments], Hook]
    about: Callable[[DDPConfig], str]  # a line for the banner that says what the hook loses


def _about_half(bits: int, config: DDPConfig) -> str:
    return f"{config.hook}: gradients travel rounded to {bits} bits, and are added so; sums differ from exact ones"


def _about_powersgd(config: DDPConfig) -> str:
    feedback = "is sent later" if config.error_feedback else "is lost (ddp.error_feedback=false)"
    return (
        f"powersgd: from step {config.powersgd_start} on, matrices as products of rank {config.powersgd_rank}; "
        f"what that leaves out {feedback}"
    )


HOOKS = {
    "fp16": HookKind(lambda a: HalfHook(a.word, a.group, torch.float16), partial(_about_half, 11)),
    "bf16": HookKind(lambda a: HalfHook(a.word, a.group, torch.bfloat16), partial(_about_half, 8)),
    "powersgd": HookKind(lambda a: PowerSGDHook(a.word, a.group, a.named, a.config, a.seed), _about_powersgd),
}
