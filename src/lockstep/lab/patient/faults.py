"""The truth about the patient: which fault is on which rank, in which line, at which step. Imports no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

TASK = Path(__file__).with_name("task.py")

# The causes that a learner can name, with the line of task.py that the screen leads to. A kill leaves no line.
CAUSES = {
    "exception": "return x / scale[:, None]",
    "hang": "time.sleep(0.05)",
    "killed": None,
    "exit": "sys.exit(0)",
}
STEPS = (4, 8, 12, 16)  # one fault each

# The mistakes that show no screen, by the key of `lockstep verify`.
SILENT = ("not-synchronised", "rank-in-loss")


@dataclass(frozen=True)
class PlantedFault:
    """One planted fault. `line` is the text of a line of task.py."""

    cause: str
    rank: int
    step: int
    line: str | None


def plan(seed: int) -> list[PlantedFault]:
    """Return the faults of a seed, by step."""
    draw = random.Random(f"faults {seed}")
    causes = draw.sample(sorted(CAUSES), len(CAUSES))
    return [
        PlantedFault(cause, draw.randrange(2), step, CAUSES[cause]) for cause, step in zip(causes, STEPS, strict=True)
    ]


def silent_mistake(seed: int) -> str:
    """Return the mistake of the second task."""
    return random.Random(f"silent {seed}").choice(SILENT)
