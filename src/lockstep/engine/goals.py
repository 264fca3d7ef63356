"""What a run is meant to reach (`goals: ["accuracy >= 0.9"]`), and whether it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

COMPARE = {">=": lambda value, bound: value >= bound, "<=": lambda value, bound: value <= bound}


def judge(goals: Sequence[str], values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Each goal with the value that was found. A value that is missing, or not a number, reaches nothing."""
    return [_judge(goal, values) for goal in goals]


def _judge(goal: str, values: Mapping[str, float | None]) -> dict[str, Any]:
    name, sign, bound = goal.split()
    value = values.get(name)
    reached = value is not None and not math.isnan(value) and COMPARE[sign](value, float(bound))
    return {"target": goal, "value": value, "pass": reached}
