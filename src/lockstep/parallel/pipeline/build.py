"""Build the stages of a model: from the task's list, from an nn.Sequential, or by an automatic split between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lockstep.config import RunConfig
from lockstep.data.loader import BatchRequest, SampleReader
from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.caches import disable_kv_cache
from lockstep.parallel.calls.state import StateSnapshot
from lockstep.parallel.pipeline.pipeline import model_input
from lockstep.parallel.pipeline.stages import (
    WHAT_TO_WRITE,
    ModelInput,
    SequentialStage,
    Stage,
    list_layers,
    split_layers,
)
from lockstep.precision import Precision


def make_stages(
    model: nn.Module,
    task: Any,
    config: RunConfig,
    data: Callable[[], Any] | None,
    count: int,
    precision: Precision,
) -> tuple[Sequence[Stage], list[list[Tensor]]]:
    """Return `count` stages, and the tensors that each stage uses.

    model: the full model, on the CPU
    data: returns the samples, of which an automatic split reads two; None: there are no samples
    precision: the one of the run
    """
    # Use the user's list if there is one, or else the structure of the model, or else a trace of its forward.
    layers = list_layers(model, task.stages(model) if hasattr(task, "stages") else None)
    if layers is not None:
        stages = [SequentialStage(group) for group in split_layers(layers, count)]
        return stages, [[*stage.parameters(), *stage.buffers()] for stage in stages]

    blocks = find_blocks(model, config.blocks)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} cannot be split into stages",
            "it is not an nn.Sequential, the task has no stages(model), and it has no ModuleList of equal blocks to "
            "split between",
            WHAT_TO_WRITE.replace("*model.blocks", "Middle(model)"),
        )

    # A custom loop passes no data.
    if data is None:
        raise UserError(
            f"{type(model).__name__} cannot be split into stages",
            "it is not an nn.Sequential, and a custom loop has no samples with which to trace its forward",
            WHAT_TO_WRITE,
        )

    from lockstep.parallel.pipeline.auto_split import split_forward  # most pipelines need no trace

    disable_kv_cache(model, always=True)
    samples = data()

    # Before the loss calls the model, it may call parts of the model, or draw random numbers.
    with StateSnapshot(model):
        arguments = _example_input(model, task, config, samples)

    # The trace runs on the CPU, in the precision of the run.
    return split_forward(model, blocks, arguments, count, replace(precision, device_type="cpu"))


def _example_input(model: nn.Module, task: Any, config: RunConfig, data: Any) -> ModelInput:
    if isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UserError(
            f"{type(model).__name__} cannot be split into stages between its blocks without two samples to trace it",
            f"the data is a {type(data).__name__}: samples that the trace read would be missing in training",
            WHAT_TO_WRITE,
        )

    # Read the first two samples of epoch 0, with the same transforms as in training.
    read = SampleReader(data, task.collate, config.seed, config.data.seed_samples)
    return model_input(task.loss, model, read(BatchRequest(0, range(min(2, len(data))))))
