"""Split a model between its blocks, by looking at what its forward does with two samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.config import RunConfig
from lockstep.data.loader import SampleReader
from lockstep.errors import UserError
from lockstep.parallel.call_state import StateSnapshot
from lockstep.parallel.pipeline.auto_split.forward_stage import ForwardStage
from lockstep.parallel.pipeline.auto_split.trace import split_forward
from lockstep.parallel.pipeline.pipeline import model_input
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, ModelInput
from lockstep.precision import choose


def split_between_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    task: Any,
    config: RunConfig,
    data: Any,
    count: int,
    device: torch.device,
) -> tuple[Sequence[ForwardStage], list[list[Tensor]]]:
    """Return `count` stages, and the tensors that each uses.

    model, blocks: in full, and on the CPU
    data: the samples, two of which are read
    device: where the stages will run
    """
    # The trace runs on the CPU, in the precision of the run.
    precision = replace(choose(config, device), device_type="cpu")
    # The loss may call parts of the model, or draw random numbers, before it calls the model.
    with StateSnapshot(model):
        given = _example_input(model, task, config, data)

    return split_forward(model, blocks, given, count, precision.autocast)


def _example_input(model: nn.Module, task: Any, config: RunConfig, data: Any) -> ModelInput:
    """Return what the task passes to the model for two of its samples."""
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            f"{type(model).__name__} cannot be split into stages between its blocks without two samples to look at",
            f"the data is a {type(data).__name__}, of which none can be read without being used up",
            WHAT_TO_WRITE,
        )

    # Read as a run reads them, with the same transforms; the first two of epoch 0.
    read = SampleReader(data, task.collate, config.seed, config.data.seed_samples)
    return model_input(task.loss, model, read((0, range(min(2, len(data))))))
