"""`optimizer: adamw8bit | adafactor`: the task's parameter groups, under an optimizer that keeps less of them."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.optim.adafactor import Adafactor
from lockstep.optim.adamw8bit import SMALLEST, AdamW8bit

# The optimizer, and what it takes over from the task's groups.
KINDS = {
    "adamw8bit": (AdamW8bit, ("lr", "betas", "eps", "weight_decay")),
    "adafactor": (Adafactor, ("lr", "weight_decay")),
}

KEEPS = {  # told before the first step
    "adamw8bit": f"moments of parameters from {SMALLEST} elements on in 8 bits, of others in float32",
    "adafactor": "of squared gradients the means of rows and columns, no momentum",
}


def chosen(config: RunConfig, made: Any) -> Any:
    """What the task has made, or optimizers of the kind that was asked for, with the same groups."""
    if config.optimizer == "task":
        return made
    _check(config)
    every = made if isinstance(made, list | tuple) else [made]
    kind, keys = KINDS[config.optimizer]
    found: list[torch.optim.Optimizer] = []
    for optimizer in every:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return made  # refused later, in words
        if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            found.append(optimizer)  # it moves something that no gradient reaches: nobody else would
            continue
        groups = [{key: group[key] for key in ("params", *keys) if key in group} for group in optimizer.param_groups]
        found.append(kind(groups))
    return found


def _check(config: RunConfig) -> None:
    cut = config.strategy == "tp" or (config.mesh.tp or 1) > 1
    if cut:
        raise UserError(
            f"optimizer={config.optimizer} with {'strategy=tp' if config.strategy == 'tp' else 'mesh.tp'}",
            "rows of a parameter that are cut in two, of which its state keeps sums or blocks",
            "type strategy=fsdp without mesh.tp, or optimizer=task",
        )
