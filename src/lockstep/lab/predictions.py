"""Predict first: a learner commits a guess before an exercise shows a number, and then compares it.

The guesses, what a formula says and what was measured are kept in one file of the lab's folder, and the page of the
learner is made from it. A guess cannot be changed once the measurement has been shown.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep import files
from lockstep.errors import UserError

FOLDER = Path("runs/lab")


@dataclass(frozen=True)
class Question:
    """A number that an exercise will show. `formula` is what theory says, in words or symbols."""

    key: str
    text: str
    unit: str
    formula: str


@dataclass
class Prediction:
    """A question with what was guessed, computed and measured so far."""

    exercise: str
    key: str
    text: str
    unit: str
    formula: str
    guess: float | None = None
    computed: float | None = None
    measured: float | None = None


def folder() -> Path:
    """Return where the lab keeps guesses and pictures: LAB_FOLDER, or runs/lab."""
    return Path(os.environ.get("LAB_FOLDER", FOLDER))


def load() -> list[Prediction]:
    """Return all predictions, in the order in which they were first made."""
    path = folder() / "predictions.json"
    if not path.exists():
        return []

    return [Prediction(**entry) for entry in json.loads(path.read_text())]


def _store(predictions: Sequence[Prediction]) -> None:
    """Write all predictions. The old file stays whole until the new one is."""
    folder().mkdir(parents=True, exist_ok=True)
    files.write(folder() / "predictions.json", json.dumps([asdict(prediction) for prediction in predictions], indent=1))


def _find(predictions: list[Prediction], exercise: str, question: Question) -> Prediction:
    """Return the prediction for a question, which is added if it is not there yet."""
    for prediction in predictions:
        if (prediction.exercise, prediction.key) == (exercise, question.key):
            return prediction

    predictions.append(Prediction(exercise, **asdict(question)))
    return predictions[-1]


def commit(exercise: str, question: Question, guess: float) -> None:
    """Write down a guess. It cannot be changed once the answer has been shown."""
    predictions = load()
    prediction = _find(predictions, exercise, question)
    if prediction.measured is not None:
        raise UserError(
            f"the answer to {question.key} of exercise {exercise} has been shown already",
            "",
            f"delete {folder() / 'predictions.json'} to begin again",
        )

    prediction.guess = guess
    _store(predictions)


def ask(exercise: str, questions: Sequence[Question]) -> None:
    """Ask for the guesses that are missing, if a person is there to answer. Call it before the ranks start."""
    # Ranks have no keyboard, and neither has a test.
    if not sys.stdin.isatty() or "RANK" in os.environ:
        return

    for question in questions:
        prediction = _find(load(), exercise, question)
        if prediction.guess is None and prediction.measured is None:
            _ask(exercise, question)


def _ask(exercise: str, question: Question) -> None:
    """Ask one question until the answer is a number, or nothing."""
    while answer := input(f"Predict: {question.text} [{question.unit}; Enter to skip] ").strip():
        try:
            commit(exercise, question, float(answer))
            return
        except ValueError:
            print(f"  {answer} is no number")


def reveal(exercise: str, question: Question, *, computed: float, measured: float) -> None:
    """Print guess, formula and measurement side by side and keep them for the page. Call it on rank 0."""
    predictions = load()
    prediction = _find(predictions, exercise, question)

    # Once the measurement is there, no guess can be committed.
    prediction.computed = computed
    prediction.measured = measured
    _store(predictions)

    guess = "no guess" if prediction.guess is None else f"guess {prediction.guess:.4g}"
    formula = f"formula {question.formula} = {computed:.4g}"
    print(f"  {question.text} {guess}, {formula}, measured {measured:.4g} {question.unit}", flush=True)
