"""The hook `first_steps`: which parameters a step trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine.hooks.calls import Hook, find
from lockstep.engine.hooks.trained_parameters import TrainedParameters
from lockstep.errors import UserError
from lockstep.parallel.driver import RankRole, Reduced

NAMES = ["body", "head"]


class Delays:
    def __init__(self, steps: Any):
        self.steps = steps

    def first_steps(self, names: list[str]) -> Any:
        return self.steps


def delaying(steps: Any) -> Hook:
    hook = find(Delays(steps), "first_steps")
    assert hook is not None
    return hook


def driver() -> Any:
    return SimpleNamespace(role=RankRole(), parameters={name: nn.Parameter(torch.ones(1)) for name in NAMES})


def test_the_latest_step_counts_and_a_name_that_is_left_out_is_trained_at_once():
    made = driver()
    trained = TrainedParameters(made, [delaying({"body": 2}), delaying({"body": 3})])

    names = []
    for step in (0, 2, 3):
        reduced = Reduced([*made.parameters.values()], NAMES, torch.ones(2), torch.zeros(0), None, 1.0)  # pyrefly: ignore
        names.append(trained.drop_untrained(reduced, step).names)
    assert names == [["head"], ["head"], NAMES]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        (["body"], "Delays.first_steps must return a dictionary; it returned a list"),
        ({"tail": 1}, "Delays.first_steps names 'tail', which is no trainable parameter"),
        ({"body": 1.5}, "Delays.first_steps returned 1.5 for 'body', which is no step"),
    ],
)
def test_other_answers_are_refused(steps: Any, problem: str):
    with pytest.raises(UserError, match=problem):
        TrainedParameters(driver(), [delaying(steps)])
