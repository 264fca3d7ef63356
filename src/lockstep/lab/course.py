"""The contents of the course, and what a learner has passed so far. Imports no torch."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.lab.predictions import Question, folder


@dataclass(frozen=True)
class Exercise:
    """One piece of the course: the file that a learner edits or runs, relative to the repository."""

    title: str
    file: str
    grader: str = ""  # a module of lockstep.lab.graders; without one, the script checks itself
    solutions: str = "lab/solution/"  # the folder of the finished script

    @property
    def script(self) -> str:
        """The finished script, which declares the questions and draws the picture."""
        return self.file.replace("lab/exercises/", self.solutions)


# By the number that a learner types.
GRADERS = {
    "1": Exercise("DDP by hand", "lab/exercises/01_ddp_basic.py", "ddp_basic"),
    "2": Exercise("Gradient accumulation", "lab/exercises/02_gradient_accumulation.py", "gradient_accumulation"),
    "3": Exercise("FSDP", "lab/exercises/03_fsdp.py", "fsdp"),
    "4": Exercise("Mixed precision", "lab/exercises/04_mixed_precision.py", "mixed_precision"),
    "5": Exercise("Several nodes", "lab/exercises/05_multi_node.py", "multi_node"),
    "6": Exercise("Profiling", "lab/exercises/06_profiling.py", "profiling"),
    "7": Exercise("Failure", "lab/exercises/07_failure.py", "failure", "lab/beyond/"),
    "8": Exercise("Resume", "lab/exercises/08_resume.py", "resume", "lab/beyond/"),
    "9": Exercise("Determinism", "lab/exercises/09_determinism.py", "determinism", "lab/beyond/"),
    "b1": Exercise("Bonus: ZeRO from scratch", "lab/bonus/01_zero.py"),
    "b2": Exercise("Bonus: PowerSGD from scratch", "lab/bonus/02_powersgd.py"),
    "b3": Exercise("Bonus: elastic training", "lab/bonus/03_elastic.py"),
    "b4": Exercise("Bonus: pipeline", "lab/bonus/04_pipeline.py"),
    "b5": Exercise("Bonus: all-reduce from send and recv", "lab/bonus/05_all_reduce.py"),
}


def number_of(text: str) -> str:
    """Return the number of the exercise that a learner typed: "01" is 1."""
    number = text.lower().lstrip("0")
    if number not in GRADERS:
        raise UserError(f"there is no exercise {text}", "", f"the exercises are {', '.join(GRADERS)}")
    return number


def questions_of(number: str) -> Sequence[Question]:
    """Return `QUESTIONS` of the exercise's script."""
    path = Path(GRADERS[number].script)
    if not path.is_file():
        raise UserError(f"there is no file {path} here", "", "type the command in the folder that contains lab/")

    # A script is no module of a package, so it is run by its path, up to its `main`.
    return runpy.run_path(str(path))["QUESTIONS"]


def passed() -> set[str]:
    """Return the numbers of the exercises that a check has passed."""
    path = folder() / "passed.json"
    return set(json.loads(path.read_text())) if path.exists() else set()


def remember_passed(number: str) -> None:
    """Write down that an exercise was passed."""
    folder().mkdir(parents=True, exist_ok=True)
    (folder() / "passed.json").write_text(json.dumps(sorted(passed() | {number})))
