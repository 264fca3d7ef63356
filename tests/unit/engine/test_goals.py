"""Goals: written in a configuration, judged at the end."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import resolve
from lockstep.engine.log.summary import judge
from lockstep.errors import ConfigError
from lockstep.task import Loss, Task


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [
        ("accuracy >= 0.9", 0.9, True),
        ("accuracy >= 0.9", 0.8999, False),
        ("accuracy <= .25", 0.3, False),
        ("accuracy <= 2.5e-1", 0.25, True),
        ("accuracy >= 0.9", math.nan, False),
        ("accuracy <= 0.9", math.nan, False),
        ("other >= 0.9", 1.0, False),
    ],
)
def test_a_goal_is_reached_or_not(goal, value, reached):
    [found] = judge([goal], {"accuracy": value})
    assert found["pass"] is reached
    assert found["target"] == goal


@pytest.mark.parametrize("goal", ["accuracy", "accuracy > 0.9", "accuracy >= high", ">= 0.9"])
def test_what_is_no_goal_is_refused(goal):
    with pytest.raises(ConfigError, match=r"accuracy >= 0\.9"):
        resolve([("argument", {"goals": [goal]})])


class Line(Task):
    def model(self):
        return nn.Linear(2, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def data(self):
        return TensorDataset(torch.ones(8, 2))

    def eval_data(self):
        return self.data()

    def loss(self, model, batch):
        n = len(batch[0])
        return Loss(model(batch[0]).square().sum(), n, {"other": n * 100.0})


@pytest.mark.slow
@pytest.mark.usefixtures("zygotes")
def test_a_finished_run_that_is_started_again_has_still_reached_its_goal(tmp_path):
    values = {"steps": 4, "global_batch": 8, "evaluate.every": 2, "device": "cpu", "log.progress": "off"}
    values |= {"run_dir": str(tmp_path / "run"), "resume": "auto", "goals": ["eval_loss <= 50"]}
    first, again = (lockstep.fit(Line(), values, nproc=1).summary for _ in range(2))
    assert first["pass"]
    assert again["pass"]
    assert again["eval_loss"] == first["eval_loss"] < 50
