"""HRM in a loop of plain PyTorch, by the names of its own document, over `lockstep.start`:

with init_train_state(config) as state:
    for batch in state.batches:
        metrics = train_batch(config, state, batch, rank, world_size)
    evaluate(state, state.task.eval_data(), rank, world_size)
    save_train_state(config, state)

`lockstep train` needs none of this: there the engine decides which rank reads what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep.classic.hrm.pretrain_config import PretrainConfig
from lockstep.errors import UserError
from lockstep.recipes.hrm.data import PuzzleDatasetMetadata, read_metadata
from lockstep.recipes.hrm.losses import correct_cells, solved
from lockstep.recipes.hrm.model import HierarchicalReasoningModel
from lockstep.recipes.hrm.task import HRM
from lockstep.task import MicroBatch

Sums = dict[str, tuple[Any, Any]]  # a sum and the number of its terms, which are divided once, at the end


@dataclass
class TrainState:
    """A run of HRM between two steps."""

    task: HRM
    model: Any  # the model to call
    optimizers: list[Any]  # all of them are stepped in every step
    run: Any  # from `lockstep.start`
    batches: Iterator[Any]  # global steps; each yields this rank's micro-batches
    step: int = 0  # steps of the run so far


@contextmanager
def init_train_state(config: PretrainConfig) -> Iterator[TrainState]:
    """Start a run. At the end of the block its weights are saved and the run is closed."""
    values = {key: value for key, value in config.settings().items() if key not in ("task", "preset")}
    with lockstep.start({"tail": "drop", **values}) as run:
        # The same pieces as in `lockstep train`: the task is called step by step, not by the engine.
        task = HRM(**config.options())
        model = create_model(config, read_metadata(Path(config.data_path) / "train"), run.world_size)

        called, *optimizers = run.setup(model, *task.optimizer(model))
        run.register("task", task)
        yield TrainState(task, called, optimizers, run, run.steps(task.data(), task.collate))


def create_model(
    config: PretrainConfig, metadata: PuzzleDatasetMetadata, world_size: int
) -> HierarchicalReasoningModel:
    """Create the model with rank 0's parameters and buffers on every rank. Collective: every rank must call it."""
    model = HRM(**config.options()).model()
    ids = len(model.puzzle_emb.table)
    if ids != metadata.num_puzzle_identifiers:
        raise UserError(
            f"the metadata has {metadata.num_puzzle_identifiers} puzzle ids, but {config.data_path} has {ids}",
            "",
            "give the metadata of data_path/train",
        )

    # NCCL cannot send CPU tensors, and the model is still on the CPU.
    if world_size > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"

        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                on_device = tensor.to(device)
                dist.broadcast(on_device, src=0)
                tensor.copy_(on_device)

    return model


def train_batch(
    config: PretrainConfig, train_state: TrainState, batch: Any, rank: int, world_size: int
) -> dict[str, float] | None:
    """Take one optimizer step with a step of `train_state.batches`. Rank 0 gets the means over all ranks."""
    task = train_state.task
    sums: Sums = {}

    # The task's own hook and loss, as `fit` would call them.
    for micro in batch:
        place = MicroBatch(micro, 0, len(micro["inputs"]), padding=batch.padding, offset=batch.sample_offset)
        task.before_batch(train_state.run, place)
        loss = task.loss(train_state.model, micro)

        batch.backward(loss.total, loss.weight, **loss.metrics)
        # A padding batch weighs nothing.
        factor = 0 if batch.padding else 1
        sums = _add(sums, {"loss": (loss.total.detach(), loss.weight), **loss.metrics}, factor)

    batch.apply(*train_state.optimizers)

    # The index of the run, not a count of our own: a resumed run does not begin at 0.
    train_state.step = batch.index + 1
    task.after_step(train_state.run, batch.result)
    return _means_on_rank_0(sums, train_state.run.device, rank, world_size)


def evaluate(train_state: TrainState, eval_loader: Any, rank: int, world_size: int) -> dict[str, float] | None:
    """Evaluate every sample of the loader's dataset once, on all ranks together. Rank 0 gets the metrics."""
    task = train_state.task
    dataset = getattr(eval_loader, "dataset", eval_loader)
    metrics = train_state.run.evaluate(dataset, task.eval_loss, task.collate)
    return metrics if rank == 0 else None


def compute_metrics(predictions: Tensor, labels: Tensor) -> Sums:
    """Return sums and counts of symbols (B, S), which can be added over batches and ranks."""
    labelled, correct = correct_cells(predictions, labels)
    return {"cell": (correct.sum(), labelled.sum()), "exact": (solved(labelled, correct).sum(), len(labels))}


def process_aggregated_metrics(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Divide each sum by its count. A metric without terms is NaN."""
    means = {}
    for name, (total, weight) in sums.items():
        means[name] = float(total) / float(weight) if float(weight) else math.nan

    return means


def save_train_state(config: PretrainConfig, train_state: TrainState) -> Path:
    """Save the weights as one safetensors file, from rank 0.

    What a run needs to resume (optimizers, carry, position) is in the run's own checkpoints, which all ranks write:
    `use_distributed_checkpoint`.
    """
    path = train_state.run.run_dir / f"checkpoint_step_{train_state.step}.safetensors"
    if train_state.run.rank == 0:
        from safetensors.torch import save_file

        weights = train_state.model.state_dict()
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)

    return path


def _add(sums: Sums, more: Mapping[str, Any], factor: int) -> Sums:
    """Return sums with others added to them, `factor` times."""
    added = {}
    for name, (total, weight) in more.items():
        old_total, old_weight = sums.get(name, (0, 0))
        added[name] = (old_total + factor * total, old_weight + factor * weight)

    return added


def _means_on_rank_0(sums: Sums, device: torch.device, rank: int, world_size: int) -> dict[str, float] | None:
    """Add the sums over all ranks in one message. The names are sorted, so that all ranks stack in the same order."""
    names = sorted(sums)
    # float64: sums of counts stay exact.
    parts = [torch.as_tensor(part, dtype=torch.float64, device=device) for name in names for part in sums[name]]
    stacked = torch.stack(parts)
    # Not `reduce`: gloo, which ranks that share a GPU use, cannot do that on a GPU.
    if world_size > 1:
        dist.all_reduce(stacked)

    if rank != 0:
        return None

    pairs = stacked.view(-1, 2).tolist()
    return process_aggregated_metrics({name: (s, w) for name, (s, w) in zip(names, pairs, strict=True)})
