"""Build the stages of a model: as the task lists them, from an nn.Sequential, or split automatically between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, SequentialStage, Stage, list_layers, split_layers

Data = Callable[[], Any]


def make_stages(
    model: nn.Module, task: Any, config: RunConfig, data: Data | None, count: int, device: torch.device
) -> tuple[Sequence[Stage], list[list[Tensor]]]:
    """Return `count` stages, and the tensors that each uses.

    model: in full, and on the CPU
    data: returns the samples, two of which are read if the model is split automatically; None: there are none
    device: where the stages will run
    """
    # What the user has said counts, then the structure of the model, then what its forward does.
    layers = list_layers(model, task.stages(model) if hasattr(task, "stages") else None)
    if layers is not None:
        stages = [SequentialStage(some) for some in split_layers(layers, count)]
        return stages, [[*stage.parameters(), *stage.buffers()] for stage in stages]

    blocks = find_blocks(model, config.blocks)
    # In a loop of the user's own there is no data to look at.
    if not blocks or data is None:
        why = "only its forward knows what runs after what"
        fix = WHAT_TO_WRITE
        if not blocks:
            why += ", and it has no list of modules of one class to split between"
            fix = WHAT_TO_WRITE.replace("*model.blocks", "Middle(model)")

        raise UserError(f"{type(model).__name__} cannot be split into stages", why, fix)

    from lockstep.parallel.pipeline.auto_split.split import split_between_blocks  # only where nothing else is given

    return split_between_blocks(model, blocks, task, config, data(), count, device)
