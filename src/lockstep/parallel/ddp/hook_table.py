"""The communication hooks by their names in `ddp.hook`, with a banner line that says how each one rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config import DDPConfig
from lockstep.parallel.ddp.comm_hooks import CommHook, HalfHook, WideHook
from lockstep.parallel.ddp.powersgd import PowerSGDHook


@dataclass(frozen=True)
class HookArguments:
    """The arguments from which a hook is constructed."""

    word_parameter: nn.Parameter  # the parameter whose gradient is the control word
    group: dist.ProcessGroup
    parameters: dict[str, nn.Parameter]  # the model's trainable parameters by name
    config: DDPConfig
    seed: int


@dataclass(frozen=True)
class HookKind:
    make: Callable[[HookArguments], CommHook]
    banner: Callable[[DDPConfig], str]  # returns a line for the banner


def _half_banner(bits: int, config: DDPConfig) -> str:
    return f"{config.hook}: gradients are sent and added with {bits} significant bits; sums are rounded accordingly"


def _powersgd_banner(config: DDPConfig) -> str:
    feedback = "added to the next step" if config.error_feedback else "lost (ddp.error_feedback=false)"
    return (
        f"powersgd: from step {config.powersgd_start} on, matrices are sent as products of rank "
        f"{config.powersgd_rank}; the approximation error is {feedback}"
    )


COMM_HOOKS = {
    "fp16": HookKind(lambda a: HalfHook(a.word_parameter, a.group, torch.float16), partial(_half_banner, 11)),
    "bf16": HookKind(lambda a: HalfHook(a.word_parameter, a.group, torch.bfloat16), partial(_half_banner, 8)),
    "powersgd": HookKind(
        lambda a: PowerSGDHook(a.word_parameter, a.group, a.parameters, a.config, a.seed), _powersgd_banner
    ),
}


def make_hook(arguments: HookArguments) -> CommHook | None:
    """Return the hook for the setting `ddp.hook`; None: DDP needs none."""
    if arguments.config.hook != "none":
        return COMM_HOOKS[arguments.config.hook].make(arguments)

    # Without a hook, DDP would sum bf16 gradients in bf16. Either all parameters are stored in bf16, or none is.
    *_, last = arguments.parameters.values()
    return WideHook(arguments.word_parameter, arguments.group) if last.dtype == torch.bfloat16 else None
