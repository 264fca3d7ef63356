"""Unfreezing, progressive sizes and all_gather: functions of the step, the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.callbacks import ProgressiveSizes, Unfreeze, crop_sequences, resize_images
from lockstep.engine import loop
from lockstep.errors import UserError
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import ALL_PAIRS, Trace, assert_user_errors, open_watched

SAMPLES = 8
BASE = {"global_batch": SAMPLES, "micro_batch": 2, "steps": 5, "clip.norm": 0.1, "evaluate.at_end": False}


class Layers(Task):
    """Every step trains on all samples."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"0": "colwise", "2": "rowwise"}

    def data(self) -> Any:
        x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def trained(world: Any, store: Any, task: Any, values: dict[str, Any], *callbacks: Any) -> Trace:
    """A job: train with callbacks."""
    with open_watched(world, store, BASE | values) as builder:
        builder.callbacks += callbacks
        loop.fit(task, builder)
        run: Any = builder.run
        return run.trace


def assert_same_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


# ---- unfreezing -----------------------------------------------------------------------------------------


FIRST = {"0.*": 4, "2.weight": 2}


def by_hand() -> list[dict[str, Tensor]]:
    """The same in one process. A parameter that is frozen has no gradient, so the optimizer does not touch it."""
    task = Layers()
    model, data = task.model(), task.data()
    optimizer = task.optimizer(model)
    weights = []
    for step in range(5):
        for name, p in model.named_parameters():
            p.requires_grad_(step >= (4 if name.startswith("0.") else 2 if name == "2.weight" else 0))
            p.grad = None
        loss = task.loss(model, data.tensors)
        (loss.total / loss.weight).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
        optimizer.step()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return weights


@pytest.mark.parametrize("world", [1, 2])
def test_unfreezing_is_that_of_plain_torch(pool: Pool, world: int) -> None:
    for trace in pool.run(trained, Layers(), {}, Unfreeze(FIRST), world=world):
        for note, expected in zip(trace.steps, by_hand(), strict=True):
            assert_same_weights(note.weights, expected)


CHANGES = [("zero1", "fsdp")]
ALL = ("ddp", "zero1", "fsdp", "fsdp-grads", "tp")


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in ALL for b in ALL] if ALL_PAIRS else CHANGES)
def test_unfreezing_goes_on_after_a_resume_on_other_ranks(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    """The checkpoint is that of a moment at which some layers have no optimizer state yet."""
    values = {"run_dir": str(tmp_path), "mesh.tp": None}
    pool.run(trained, Layers(), values | {"steps": 3, "strategy": before}, Unfreeze(FIRST), world=2)
    resumed = {"resume": "auto", "strategy": after}
    traces = pool.run(saved, Layers(), values | resumed, Unfreeze(FIRST), world=3 if after != "tp" else 2)
    assert_same_weights(traces[0], by_hand()[-1])


def saved(world: Any, store: Any, task: Any, values: dict[str, Any], *callbacks: Any) -> dict[str, Tensor]:
    """A job: train, and return the weights that were saved."""
    from safetensors.torch import load_file

    trained(world, store, task, values, *callbacks)
    return load_file(Path(values["run_dir"]) / "model.safetensors")


def test_schedules_that_cannot_be_meant_are_refused(pool: Pool) -> None:
    for schedule, words in [({"layer.*": 3}, "no trainable parameter matches"), ({"*": 3}, "before step 3")]:
        assert_user_errors(pool.errors(trained, Layers(), {}, Unfreeze(schedule), world=1), words)
    with pytest.raises(UserError, match="which is no step"):
        Unfreeze({"0.*": -1})


# ---- progressive sizes ----------------------------------------------------------------------------------


class Seen(Layers):
    """Notes the length of what its loss gets."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Conv1d(1, 2, 2)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        self.lengths.append(x.shape[1])
        return Loss(F.cross_entropy(model(x[:, None]).mean(-1), y, reduction="sum"), len(y))


def lengths(world: Any, store: Any, values: dict[str, Any]) -> list[int]:
    task = Seen()
    trained(world, store, task, values, ProgressiveSizes({0: 3, 2: 4, 4: 6}, crop_sequences))
    return task.lengths


def test_sizes_follow_the_step_also_after_a_resume(pool: Pool, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path), "data.workers": 1, "micro_batch": 4}
    assert pool.run(lengths, values | {"steps": 3}, world=2) == [[3, 3, 4]] * 2
    assert pool.run(lengths, values | {"resume": "auto"}, world=1) == [[4, 4, 6, 6]]


def test_images_are_resized_and_other_tensors_are_not() -> None:
    images, labels = resize_images((torch.rand(2, 3, 8, 8), torch.zeros(2)), 4)
    assert (images.shape, labels.shape) == ((2, 3, 4, 4), (2,))
    with pytest.raises(UserError, match="no size for step 0"):
        ProgressiveSizes({5: 3}, resize_images)
    with pytest.raises(UserError, match="'9' is no step"):
        ProgressiveSizes({0: 3, "9": 4}, resize_images)  # pyrefly: ignore[bad-argument-type]


# ---- all_gather -----------------------------------------------------------------------------------------


class Contrastive(Layers):
    """Each sample must be found among the other samples of the global batch."""

    def before_training(self, run: Any) -> None:
        self.run = run

    def data(self) -> Any:
        return TensorDataset(torch.randn(10, 6, generator=torch.Generator().manual_seed(0)))

    def eval_data(self) -> Any:
        return self.data()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        (x,) = batch
        one, other = model(x), model(x + 0.1)
        scores = one @ self.run.all_gather(other).T
        labels = self.run.row_offset + torch.arange(len(x))
        return Loss(F.cross_entropy(scores, labels, reduction="sum"), len(x))


# The last batch of an epoch has two samples, so not every rank has some.
CONTRASTIVE = {"global_batch": 8, "steps": 4, "evaluate.batch": 5, "evaluate.at_end": True}


def test_gathered_gradients_are_those_of_the_whole_batch(pool: Pool) -> None:
    (whole,) = pool.run(trained, Contrastive(), CONTRASTIVE | {"micro_batch": 8}, world=1)
    for world, strategy in ((2, "ddp"), (3, "fsdp")) if not ALL_PAIRS else ((2, "ddp"), (3, "ddp"), (3, "fsdp")):
        values = CONTRASTIVE | {"micro_batch": -(-8 // world), "strategy": strategy}
        for trace in pool.run(trained, Contrastive(), values, world=world):
            assert [note.result.grad_norm for note in trace.steps] == pytest.approx(
                [note.result.grad_norm for note in whole.steps], rel=1e-5
            )

    # And one process does what plain autograd does.
    task = Contrastive()
    model = task.model()
    ids = whole.steps[0].ids
    (x,) = task.data()[ids]
    mean = F.cross_entropy(model(x) @ model(x + 0.1).T, torch.arange(8))
    mean.backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert whole.steps[0].result.grad_norm == pytest.approx(float(norm), rel=1e-5)


class Narrow(Contrastive):
    """Its rows have other lengths on each rank, like texts that are padded in each micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.run.all_gather(batch[0][:, self.run.rank :])
        return super().loss(model, batch)


def test_rows_of_different_shapes_are_refused(pool: Pool) -> None:
    errors = pool.errors(trained, Narrow(), CONTRASTIVE | {"micro_batch": 4}, world=2)
    assert_user_errors(errors, "rows of different shapes or dtypes", "by rank, are (4, 6), (4, 5)")


def test_a_global_batch_in_several_parts_is_refused(pool: Pool) -> None:
    errors = pool.errors(trained, Contrastive(), CONTRASTIVE | {"micro_batch": 2}, world=2)
    assert_user_errors(errors, "one micro-batch of each rank, and the global batch has 4 on 2", "set micro_batch=4")
    exact = pool.errors(trained, Contrastive(), CONTRASTIVE | {"micro_batch": 8, "exact": True}, world=1)
    assert_user_errors(exact, "cannot be used with exact=true")
