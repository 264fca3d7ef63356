"""Goals: written in a configuration, judged at the end."""

import math

import pytest

from lockstep.config import resolve
from lockstep.engine.goals import judge
from lockstep.errors import ConfigError


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
