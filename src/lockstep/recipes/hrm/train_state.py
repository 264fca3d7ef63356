"""A run of HRM step by step, by the names of its own document, over `lockstep.start`:

with init_train_state(config) as state:
    for batch in state.batches:
        metrics = train_batch(config, state, batch, rank, world_size)
    evaluate(state, state.task.eval_data(), rank, world_size)
    save_train_state(config, state)
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
from lockstep.errors import UserError
from lockstep.recipes.hrm.data import PuzzleDatasetMetadata, read_metadata
from lockstep.recipes.hrm.losses import IGNORED, solved
from lockstep.recipes.hrm.model import HierarchicalReasoningModel
from lockstep.recipes.hrm.pretrain import PretrainConfig
from lockstep.recipes.hrm.task import HRM
from lockstep.task import MicroBatch

Sums = dict[str, tuple[Any, Any]]  # what was added up, and how many terms it has: divided once, at the end


@dataclass
class TrainState:
    task: HRM
    model: Any  # to be called
    run: Any  # of `lockstep.start`
    batches: Iterator[Any]  # global steps; each gives this rank's micro-batches
    step: int = 0  # of the run: how many are done


@contextmanager
def init_train_state(config: PretrainConfig) -> Iterator[TrainState]:
    """At the end of the block the weights are saved, and the run is closed."""
    values = {key: value for key, value in config.settings().items() if key not in ("task", "preset")}
    with lockstep.start({"tail": "drop", **values}) as run:
        task = HRM(**config.options())
        model = create_model(config, read_metadata(Path(config.data_path) / "train"), run.world_size)
        called, *_ = run.setup(model, *task.optimizer(model))
        run.register("task", task)
        yield TrainState(task, called, run, run.steps(task.data(), task.collate))


def create_model(
    config: PretrainConfig, metadata: PuzzleDatasetMetadata, world_size: int
) -> HierarchicalReasoningModel:
    """The same weights on every rank: rank 0's parameters and buffers."""
    model = HRM(**config.options()).model()
    if len(model.puzzle_emb.table) != metadata.num_puzzle_identifiers:
        raise UserError(
            f"a model for {metadata.num_puzzle_identifiers} puzzle ids",
            f"{len(model.puzzle_emb.table)} in {config.data_path}",
            "give the metadata of data_path/train",
        )
    if world_size > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                travelling = tensor.to(device)
                dist.broadcast(travelling, src=0)
                tensor.copy_(travelling)
    return model


def train_batch(
    config: PretrainConfig, train_state: TrainState, batch: Any, rank: int, world_size: int
) -> dict[str, float] | None:
    """One optimizer step, on a step of `train_state.batches`. Rank 0 gets the means over all ranks."""
    task, device, added = train_state.task, train_state.run.device, {}
    for micro in batch:
        task.before_batch(MicroBatch(micro, 0, len(micro["inputs"]), padding=batch.padding, first=batch.first))
        loss = task.loss(train_state.model, micro)
        batch.backward(loss.total, loss.weight, **loss.metrics)
        sums = {"loss": (loss.total.detach(), loss.weight), **loss.metrics}
        added = _added(added, sums, 0 if batch.padding else 1)
    batch.apply()
    train_state.step = batch.index + 1  # not a count of its own: a run that goes on does not begin at 0
    task.after_step(train_state.model, train_state.step)
    return _on_rank_0(added, device, rank, world_size)


def evaluate(train_state: TrainState, eval_loader: Any, rank: int, world_size: int) -> dict[str, float] | None:
    """Every sample of the loader's dataset once, whoever reads it. Rank 0 gets the metrics."""
    task = train_state.task
    found = train_state.run.evaluate(getattr(eval_loader, "dataset", eval_loader), task.eval_loss, task.collate)
    return found if rank == 0 else None


def compute_metrics(predictions: Tensor, labels: Tensor) -> Sums:
    """Of symbols (B, S): sums and counts, which can be added over batches and ranks."""
    asked = labels != IGNORED
    right = (predictions == labels) & asked
    return {"cell": (right.sum(), asked.sum()), "exact": (solved(asked, right).sum(), len(labels))}


def process_aggregated_metrics(sums: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    return {name: float(total) / float(weight) if float(weight) else math.nan for name, (total, weight) in sums.items()}


def save_train_state(config: PretrainConfig, train_state: TrainState) -> Path:
    """The weights as one file, by rank 0 alone, and never as a pickle. What a run needs to go on (optimizers, carry,
    position) is in the run's own checkpoints, to which all ranks write: `use_distributed_checkpoint`."""
    path = train_state.run.run_dir / f"checkpoint_step_{train_state.step}.safetensors"
    if train_state.run.rank == 0:
        from safetensors.torch import save_file

        save_file({name: t.detach().cpu().contiguous() for name, t in train_state.model.state_dict().items()}, path)
    return path


def _added(so_far: Sums, more: Mapping[str, Any], times: int) -> Sums:
    before = {name: so_far.get(name, (0, 0)) for name in more}
    return {name: (before[name][0] + times * s, before[name][1] + times * w) for name, (s, w) in more.items()}


def _on_rank_0(sums: Sums, device: torch.device, rank: int, world_size: int) -> dict[str, float] | None:
    """One message: names in one order, so that all ranks stack alike."""
    names = sorted(sums)
    parts = [torch.as_tensor(part, dtype=torch.float64, device=device) for name in names for part in sums[name]]
    stacked = torch.stack(parts)
    if world_size > 1:
        dist.all_reduce(stacked)  # not `reduce`: gloo, which ranks on one GPU talk over, cannot do that on a GPU
    if rank != 0:
        return None
    pairs = stacked.view(-1, 2).tolist()
    return process_aggregated_metrics({name: (s, w) for name, (s, w) in zip(names, pairs, strict=True)})
