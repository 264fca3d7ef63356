"""Grades a learner's file: `lockstep lab check N FILE` calls its functions, and says what is wrong and why.

A grader is a module of `lab/graders`. It yields findings in the order in which the file is written and stops where a
mistake would make everything after it wrong, too. Each finding that fails says what the mistake does to a training run.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

from lockstep.errors import UserError
from lockstep.lab.course import GRADERS
from lockstep.lab.learner import LIMIT, Learner, LearnerFailed


@dataclass(frozen=True)
class Finding:
    """One thing that a grader has looked at. `why` explains a failure: what the mistake does to a training run."""

    statement: str
    passed: bool
    found: str = ""
    why: str = ""


class Grader(Protocol):
    """A module of `lockstep.lab.graders`."""

    FUNCTIONS: tuple[str, ...]  # that the file must define
    ERRORS: dict[str, str]  # words of an error that a usual mistake raises -> what to do about it

    def grade(self, learner: Learner) -> Iterator[Finding]:
        """Yield one finding after the other; a call that raises `LearnerFailed` ends the grading with that message."""
        ...


def grader_of(number: str) -> Grader:
    """Return the grader of an exercise."""
    exercise = GRADERS[number]
    if not exercise.grader:
        raise UserError(f"exercise {number} has no grader: its script checks itself", "", f"python {exercise.file}")
    return cast(Grader, importlib.import_module(f"lockstep.lab.graders.{exercise.grader}"))


def grade(number: str, path: Path, *, limit: timedelta = LIMIT) -> Iterator[Finding]:
    """Yield the findings of an exercise's grader for this file. A call that exceeds `limit` counts as a hang."""
    grader = grader_of(number)
    learner = Learner(path.resolve(), limit=limit)

    # Names first: a missing one would fail later, in a rank, with a message that explains less.
    missing = [name for name in grader.FUNCTIONS if name not in _defined(learner.path)]
    if missing:
        yield Finding(
            f"the file defines {', '.join(missing)}",
            False,
            "not found",
            "the grader calls what the starter file defines: keep its names",
        )
        return

    try:
        yield from grader.grade(learner)
    except LearnerFailed as failure:
        why = next((why for words, why in grader.ERRORS.items() if words in str(failure)), "")
        yield Finding("the code runs on all ranks", False, str(failure), why)


def _defined(path: Path) -> set[str]:
    """Return the names that a file defines, without running it."""
    try:
        tree = ast.parse(path.read_text(), path.name)
    except SyntaxError as error:
        text = (error.text or "").strip()
        raise UserError(
            f"{path.name} is not valid Python: {error.msg}", f"line {error.lineno}: {text}", "fix that line"
        ) from None

    return {name for node in tree.body for name in _names(node)}


def _names(node: ast.stmt) -> list[str]:
    """Return what a statement of the file defines: by def, class, an assignment or an import."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]

    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return []

    return [target.id for target in targets if isinstance(target, ast.Name)]
