"""`lockstep evaluate`: the numbers of training, from a checkpoint or a file, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from lockstep.config import read_layers
from lockstep.engine.evaluation import alone
from lockstep.engine.setup import open_run
from lockstep.errors import UserError
from lockstep.evaluate import command
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Task
from pool import Pool
from ranks.support import Regression, configured, fit

VALUES = {"global_batch": 8, "micro_batch": 3, "steps": 4, "evaluate.every": 2, "checkpoint.every": 2, "ema.decay": 0.5}


class Evaluated(Regression):
    """What it evaluates depends on its own state, too."""

    shift = 0.0

    def eval_data(self) -> Any:
        x, y = self.data()[:11]
        return {"val": TensorDataset(x, y), "shifted": TensorDataset(x, y + self.shift)}

    def before_training(self, run: Any) -> None:
        self.offset = 0.0 * run.steps_done  # the loss needs it

    def after_step(self, *facts: Any) -> None:
        self.shift += 0.25

    def state_dict(self) -> dict[str, Any]:
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shift = state["shift"]

    def loss(self, model: Any, batch: Any) -> Any:
        found = super().loss(model, batch)
        found.metrics["shift"] = (self.shift + self.offset, 1)
        return found


def evaluated(world: World, store: Any, task: Task, values: dict[str, Any]) -> dict[str, dict[str, float]]:
    resolved = configured(values)
    with context.start(world, resolved.config, store=store) as runtime:
        found = alone.evaluate(task, open_run(resolved, runtime, "test"), global_batch=None)
        return {str(evaluation.name): evaluation.named() for evaluation in found}


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_numbers_of_training(pool: Pool, tmp_path: Path, world: int) -> None:
    (trained,) = pool.run(fit, Evaluated(), VALUES | {"run_dir": str(tmp_path / "run")}, world=1)
    last = tmp_path / "run" / "checkpoints" / "step-00000004"
    again = {"init_from": str(last), "run_dir": str(tmp_path / "again")}
    for more in ({}, {"strategy": "fsdp", "blocks": ["Linear"]}):  # averages of weights are restored, too
        again["run_dir"] += "-"
        for found in pool.run(evaluated, Evaluated(), VALUES | again | more, world=world):
            assert found == trained.summary["evaluations"]


TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Loss, Task

class Line(Task):
    defaults = {"global_batch": 8, "log.progress": "off"}

    def model(self):
        return nn.Linear(3, 1)

    def data(self):
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    eval_data = data

    def loss(self, model, batch):
        return Loss(((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[0]))
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lockstep.cli import main

    monkeypatch.chdir(tmp_path)
    Path("line.py").write_text(TASK)
    settings = ["steps=4", "evaluate.every=1", "checkpoint.best=eval_loss", "lr.peak=0.1", "run_dir=runs/line"]
    assert main(["train", "line.py:Line", *settings]) == 0
    summary = json.loads(Path("runs/line/summary.json").read_text())

    assert main(["evaluate", "runs/line", "line.py:Line", "--best", "--json", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert found["sets"]["eval"]["loss"] == summary["best"]["value"]
    assert found["step"] == summary["best"]["step"]
    assert main(["evaluate", "runs/line/model.safetensors", "line.py:Line", "--json", "found.json"]) == 0
    assert json.loads(Path("found.json").read_text())["sets"]["eval"]["loss"] == summary["eval_loss"]
    assert "loss" in capsys.readouterr().out

    # Without a checkpoint, the final weights are evaluated; those of training were their averages.
    more = ["steps=4", "ema.decay=0.9", "lr.peak=0.1", "checkpoint.at_end=false", "run_dir=runs/averaged"]
    assert main(["train", "line.py:Line", *more]) == 0
    summary = json.loads(Path("runs/averaged/summary.json").read_text())
    assert main(["evaluate", "runs/averaged", "line.py:Line", "--json", "found.json"]) == 0
    assert json.loads(Path("found.json").read_text())["sets"]["eval"]["loss"] == summary["eval_loss"]

    request = command.EvaluateRequest("line.py:Line", Path("runs/line"), json_file=Path("nowhere/found.json"))
    with pytest.raises(UserError, match="its folder does not exist"):
        command.main(request, read_layers([], []))
    with pytest.raises(UserError, match="is not a run, so it has no steps to choose from"):
        command.main(command.EvaluateRequest("line.py:Line", Path("found.json"), best=True), read_layers([], []))
