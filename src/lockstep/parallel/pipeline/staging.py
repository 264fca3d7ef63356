"""The stages of a model: as the task lists them, the parts of an nn.Sequential, or cut between its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.config import RunConfig
from lockstep.data.loader import SampleReader
from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.pipeline.gates import Span
from lockstep.parallel.pipeline.pipeline import Stage, model_input
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, Chunk, Given, cut, list_pieces
from lockstep.parallel.pipeline.survey import cut_forward
from lockstep.parallel.surroundings import SourceContext
from lockstep.precision import choose

Data = Callable[[], Any]


def make_stages(
    model: nn.Module, task: Any, config: RunConfig, data: Data | None, count: int, device: torch.device
) -> tuple[Sequence[Stage], list[list[Tensor]]]:
    """`count` of them, and the tensors that each uses. `model` is on the CPU; `device` is where it will run."""
    pieces = list_pieces(model, task.stages(model) if hasattr(task, "stages") else None)
    if pieces is not None:
        chunks = [Chunk(some) for some in cut(pieces, count)]
        return chunks, [[*chunk.parameters(), *chunk.buffers()] for chunk in chunks]
    blocks = find_blocks(model, config.blocks)
    if not blocks or data is None:
        found = f"{type(model).__name__}, whose forward says by itself what runs after what"
        found += ", and no list of equal modules in it to cut between" * (not blocks)
        fix = WHAT_TO_WRITE if blocks else WHAT_TO_WRITE.replace("*model.blocks", "Middle(model)")
        raise UserError("a model that can be cut into stages", found, fix)
    precision = replace(choose(config, device), device_type="cpu")
    samples = data()
    with SourceContext(model):
        given = _example(model, task, config, samples)
    return cut_forward(model, blocks, given, count, precision.autocast)


def blocks_of(stage: Stage, model: nn.Module, named: Sequence[str] | None) -> list[nn.Module]:
    """The blocks that run in this stage."""
    if isinstance(stage, Span):
        return stage.blocks
    inside = {id(module) for module in stage.modules()}
    return [block for block in find_blocks(model, named) if id(block) in inside]


def _example(model: nn.Module, task: Any, config: RunConfig, data: Any) -> Given:
    """What the task passes to the model for two of its samples."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            f"to cut {type(model).__name__} into stages between its blocks, by looking at two samples",
            f"a {type(data).__name__}, of which none can be read without being used up",
            WHAT_TO_WRITE,
        )
    read = SampleReader(data, task.collate, config.seed, config.data.seed_samples)
    return model_input(task.loss, model, read((0, range(min(2, len(data))))))
