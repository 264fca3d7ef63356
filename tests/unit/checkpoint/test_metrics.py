"""The metrics of checkpoints: those of an evaluation after the save, the best one, and damage."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import commit, load, same, savers, shard, state
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.choose import choose
from lockstep.checkpoint.command import ls, prune, show, verify
from lockstep.checkpoint.manifest import Damaged
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.metrics import CheckpointMetrics, metrics_of, read_metrics, write_metrics
from lockstep.checkpoint.retention import best_checkpoint
from lockstep.checkpoint.state.reshard import RankContents
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.config.sections import CheckpointConfig
from lockstep.errors import UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.run_folder.checkpoint_names import STEP_METRICS


class Scored(lockstep.Task):
    """Each evaluation is better than the one before it."""

    defaults = {"global_batch": 8, "steps": 12, "log": {"progress": "off"}, "checkpoint": {"best": "eval_loss"}}

    def __init__(self) -> None:
        self.evaluations = 0

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def data(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(dim=1, keepdim=True))

    def eval_data(self) -> Any:
        return TensorDataset(torch.ones(4, 4))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(((model(x) - y) ** 2).sum(), weight=len(x))

    def eval_loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.evaluations += 1
        return lockstep.Loss(torch.tensor(4.0 * (100 - self.evaluations)), weight=4)


# ---- an evaluation after the save ----


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_evaluation_is_the_best_even_if_its_step_was_saved_before(tmp_path: Path, asynchronous: bool) -> None:
    """Step 12 is saved because it is due, and evaluated after that; step 10 was called the best."""
    settings = {"every": 4, "final": "best", "asynchronous": asynchronous}
    result = lockstep.fit(Scored(), run_dir=tmp_path, evaluate={"every": 5}, checkpoint=settings)
    assert result.best is not None
    assert result.best.step == 12
    assert result.best.value == result.summary["eval_loss"]

    # It was saved once, and its weights are those that are left.
    saved = [event["step"] for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "checkpoint"]
    assert saved.count(12) == 1
    _, tensors = load(tmp_path / "checkpoints")
    assert all(torch.equal(weight, tensors[f"model.{name}"]) for name, weight in result.weights.items())


def test_an_evaluation_after_a_custom_loop_may_be_the_best(tmp_path: Path) -> None:
    task = Scored()
    model = task.model()
    settings = {"checkpoint": {"every": 4, "best": "eval_loss"}, "global_batch": 8, "steps": 8}
    with lockstep.start(run_dir=tmp_path, log={"progress": "off"}, **settings) as run:
        model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in run.steps(task.data()):
            for x, y in step:
                step.backward(((model(x) - y) ** 2).sum(), len(x))
            step.apply()
            if step.index == 2:
                run.evaluate(task.eval_data(), task.eval_loss)
        run.evaluate(task.eval_data(), task.eval_loss)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"]["step"] == 8


def test_metrics_that_cannot_be_added_cost_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = CheckpointStorage.replace

    def refuse(self: CheckpointStorage, key: str, data: bytes, durable: bool = False) -> None:
        if key == f"step-00000012/{STEP_METRICS}":
            raise OSError(errno.EIO, "the disk coughed")
        replace(self, key, data, durable)

    monkeypatch.setattr(CheckpointStorage, "replace", refuse)
    result = lockstep.fit(Scored(), run_dir=tmp_path, evaluate={"every": 5}, checkpoint={"every": 4})
    assert result.best is not None
    assert result.best.step == 10
    [warning] = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert warning.startswith("the checkpoint of step 12 does not have the metrics of its evaluation: ")


def test_an_attempt_that_was_replaced_adds_no_metrics(tmp_path: Path) -> None:
    """The other attempt may have gone back, and saved this step again with other weights."""

    class TakenOver(Scored):
        def eval_loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
            if self.evaluations == 1:
                claim(CheckpointStorage(tmp_path / "checkpoints"), "other")
            return super().eval_loss(model, batch)

    settings = {"every": 4, "asynchronous": False}
    with pytest.raises(UserError, match="another attempt has taken over this run"):
        lockstep.fit(TakenOver(), run_dir=tmp_path, evaluate={"every": 10}, checkpoint=settings)

    warnings = [e["reason"] for e in read_jsonl(tmp_path / "events.jsonl") if e["event"] == "warning"]
    assert "another attempt has taken over" in warnings[-1]
    assert read_metrics(Checkpoint(CheckpointStorage(tmp_path / "checkpoints"), "step-00000012")) == {}


def test_nothing_is_added_to_a_checkpoint_that_is_gone(tmp_path: Path) -> None:
    """A folder with nothing but metrics would count as a damaged checkpoint."""
    storage = CheckpointStorage(tmp_path)
    CheckpointMetrics(storage).write(3, {"loss": 1.0})
    assert storage.folders() == []


# ---- the file ----


def test_metrics_after_the_save_take_the_place_of_those_before(tmp_path: Path) -> None:
    checkpoint = commit(tmp_path, 1, metrics={"loss": 3.0, "old": 1.0})
    assert read_metrics(checkpoint) == {"loss": 3.0, "old": 1.0}
    write_metrics(checkpoint, {"loss": 2.0, "worst": -math.inf})
    assert read_metrics(checkpoint) == {"loss": 2.0, "worst": -math.inf}
    write_metrics(checkpoint, {"loss": math.nan})
    assert math.isnan(read_metrics(checkpoint)["loss"])


def test_no_byte_of_the_metrics_may_change(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    checkpoint = commit(root, 1)
    write_metrics(checkpoint, {"loss": 2.5})
    path = root / checkpoint.name / STEP_METRICS
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(Damaged, match=STEP_METRICS):
            read_metrics(checkpoint)

    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged, match=STEP_METRICS):
            read_metrics(checkpoint)

    # It is reported, and cannot be the best, but the run resumes from it.
    text, code = verify(tmp_path)
    assert code == 1
    assert f"{STEP_METRICS}: " in text
    assert CheckpointMetrics(CheckpointStorage(root)).by_step() == {1: {}}
    assert same(load(root)[1], state(1))


@pytest.mark.parametrize("damage", ["garbage", '{"format": 4}'])
def test_the_best_is_a_checkpoint_that_can_be_loaded(tmp_path: Path, damage: str) -> None:
    """Step 10 has the least loss, and a manifest that is damaged or of another version: step 20 was deleted for it."""
    root = tmp_path / "checkpoints"
    best = {"config": {"checkpoint.best": "loss", "checkpoint.keep": "1"}}
    for step, loss in [(10, 1.0), (20, 2.0), (30, 3.0)]:
        commit(root, step, values=best, metrics={"loss": loss})
    (root / "step-00000010" / "manifest.json").write_text(damage)

    config, storage = CheckpointConfig(keep=1, best="loss"), CheckpointStorage(root)
    found = best_checkpoint(CheckpointMetrics(storage), config)
    assert found is not None
    assert (found.checkpoint.step, found.value) == (20, 2.0)
    assert choose(tmp_path, best=True).step == 20

    [saver] = savers(root, settings=config)
    saver.copy_and_write(40, RankContents(shard(state(40), 0, 1)), {"loss": 4.0})
    assert saver.take_ended()[0].outcome.warnings == ()
    assert sorted(name for name in storage.folders()) == ["step-00000020", "step-00000040"]


def test_metrics_that_are_lost_are_missed(tmp_path: Path) -> None:
    """Without its file, a checkpoint that was evaluated looked like one that never was."""
    root = tmp_path / "checkpoints"
    evaluated, plain, later = commit(root, 1, metrics={"loss": 2.5}), commit(root, 2), commit(root, 3)
    write_metrics(later, {"loss": 1.5})
    assert verify(tmp_path)[1] == 0
    assert [metrics_of(checkpoint, read_manifest(checkpoint)) for checkpoint in (evaluated, plain, later)] == [
        {"loss": 2.5},
        {},
        {"loss": 1.5},
    ]

    (root / evaluated.name / STEP_METRICS).unlink()
    text, code = verify(tmp_path)
    assert code == 1
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["step-00000001", "damaged"],
        [f"{STEP_METRICS}:", "missing"],
    ]
    assert show(evaluated) == (f"damaged: {evaluated.name}/{STEP_METRICS}: missing", 1)
    assert f"damaged: {STEP_METRICS}: missing" in ls(tmp_path)[0]
    assert "step-00000001 is damaged and stays" in prune(tmp_path, 1, dry_run=True)[0]

    # It cannot be the best, but a run may resume from it.
    assert CheckpointMetrics(CheckpointStorage(root)).by_step() == {1: {}, 2: {}, 3: {"loss": 1.5}}
    assert same(load(root)[1], state(3))


@pytest.mark.parametrize("metrics", [{"loss": "1"}, {"loss": [1]}, {"loss": {"$float": "one"}}, {"loss": True}])
def test_a_metric_is_a_number(tmp_path: Path, metrics: Any) -> None:
    from lockstep.checkpoint.metrics import _digest

    checkpoint = commit(tmp_path, 1)
    content = {"metrics": metrics, "digest": _digest(metrics)}
    (tmp_path / checkpoint.name / STEP_METRICS).write_text(json.dumps(content))
    with pytest.raises(Damaged, match=STEP_METRICS):
        read_metrics(checkpoint)
