"""The ten lines of "You're ready when", as ten checks: passed exercises, a measurement, and questions with numbers.

The numbers of a question are drawn anew for each learner, so that an answer must be computed. Imports no torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.errors import UserError
from lockstep.lab import course
from lockstep.lab.calculators import ring_share
from lockstep.lab.predictions import folder

NEEDED_BUSY = 0.9


@dataclass(frozen=True)
class Quiz:
    """A question with numbers in it. `draw` makes the text and the right answer from random numbers."""

    draw: Callable[[random.Random], tuple[str, float]]
    why: str  # said after a wrong answer


@dataclass(frozen=True)
class Line:
    """One line of the list: an exercise that must be passed, a quiz, or, with neither, the measured utilisation."""

    text: str
    exercise: str = ""
    quiz: Quiz | None = None


@dataclass(frozen=True)
class State:
    """How a line stands. `todo` says what to type."""

    line: Line
    ready: bool
    found: str
    todo: str = ""


# ---- The questions --------------------------------------------------------------------------------------------


def _mean_gradient(draw: random.Random) -> tuple[str, float]:
    gradients = [draw.randint(1, 9) for _ in range(4)]
    text = (
        f"4 ranks with equal batches find the gradients {', '.join(map(str, gradients))} for a weight that is 1. "
        "What is the weight after a step of SGD with learning rate 0.1?"
    )
    return text, 1 - 0.1 * sum(gradients) / 4


def _through_first_gpu(draw: random.Random) -> tuple[str, float]:
    gpus, megabytes = draw.choice([3, 5, 7, 9]), draw.randint(20, 90)
    text = (
        f"DataParallel on {gpus} GPUs, {megabytes} MB of weights: in every step GPU 0 sends the weights to the others, "
        "and receives their gradients. How many MB does GPU 0 send and receive in a step?"
    )
    return text, 2 * (gpus - 1) * megabytes


def _ring(draw: random.Random) -> tuple[str, float]:
    ranks, megabytes = draw.choice([4, 5, 8, 10]), 40 * draw.randint(2, 9)
    text = f"A ring all-reduce of {megabytes} MB on {ranks} ranks: how many MB does each rank send?"
    return text, ring_share(ranks) * megabytes


def _warm_up(draw: random.Random) -> tuple[str, float]:
    times, warm = draw.choice([2, 4, 8]), draw.choice([10, 20, 50])
    text = (
        f"Batch 32 was trained with learning rate 0.001. Now the batch is {32 * times}, the rule is linear, and the "
        f"rate rises linearly over the first {warm} steps. What is it in step {warm // 2} (the first step is step 1)?"
    )
    return text, 0.001 * times * (warm // 2) / warm


LINES = (
    Line(
        "You understand data parallelism fundamentals",
        quiz=Quiz(_mean_gradient, "the ranks' gradients are averaged, and every rank does the same step"),
    ),
    Line("You can setup and run DDP training", exercise="1"),
    Line(
        "You know DDP vs DP differences",
        quiz=Quiz(_through_first_gpu, "with N GPUs, weights go to N - 1 others, and N - 1 gradients come back"),
    ),
    Line("You've implemented gradient accumulation", exercise="2"),
    Line(
        "You understand AllReduce operation",
        quiz=Quiz(_ring, "each rank sends N - 1 pieces of D / N twice: reduce-scatter, then all-gather"),
    ),
    Line("You can use FSDP for large models", exercise="3"),
    Line("You've applied mixed precision training", exercise="4"),
    Line(
        "You understand linear LR scaling",
        quiz=Quiz(_warm_up, "the rate grows as much as the batch, and step k of n in the warm-up has k / n of it"),
    ),
    Line("You can profile and optimize training", exercise="6"),
    Line("You've achieved 90%+ GPU utilization"),
)


# ---- What the learner has done --------------------------------------------------------------------------------


@dataclass
class Answers:
    """What a learner was asked and has answered: one seed for all questions, answers by number of the line."""

    seed: int
    right: list[int]

    @staticmethod
    def load() -> Answers:
        """Return what is stored, or new questions."""
        path = folder() / "ready.json"
        if path.exists():
            return Answers(**json.loads(path.read_text()))

        answers = Answers(random.SystemRandom().randrange(2**32), [])
        answers.store()
        return answers

    def store(self) -> None:
        """Write it down."""
        folder().mkdir(parents=True, exist_ok=True)
        (folder() / "ready.json").write_text(json.dumps(asdict(self)))

    def question(self, number: int) -> tuple[str, float]:
        """Return the question of a line for this learner, and its right answer."""
        quiz = LINES[number - 1].quiz
        if quiz is None:
            raise UserError(f"line {number} has no question", "", "lockstep lab ready shows what each line needs")
        return quiz.draw(random.Random(self.seed + number))


def answer(number: int, given: float) -> str:
    """Take an answer, and return what to say about it. A right answer counts from now on."""
    if not 1 <= number <= len(LINES):
        raise UserError(f"there is no line {number}", "", f"the lines are 1 to {len(LINES)}")

    answers = Answers.load()
    question, right = answers.question(number)
    if abs(given - right) <= 1e-3 * abs(right):
        answers.right = sorted({*answers.right, number})
        answers.store()
        return f"line {number}: right"

    # Another try gets other numbers: guessing on does not help.
    quiz = LINES[number - 1].quiz
    assert quiz is not None
    while answers.question(number)[0] == question:
        answers.seed += len(LINES)

    answers.store()
    return f"line {number}: {given:g} is wrong: {quiz.why}. The next question has other numbers."


def states() -> list[State]:
    """Return how each of the ten lines stands."""
    answers, passed = Answers.load(), course.passed()
    found = []
    for number, line in enumerate(LINES, start=1):
        if line.exercise:
            file = course.GRADERS[line.exercise].file
            ready = line.exercise in passed
            found.append(State(line, ready, f"exercise {line.exercise}", f"lockstep lab check {line.exercise} {file}"))
        elif line.quiz:
            text, _ = answers.question(number)
            found.append(State(line, number in answers.right, text, f"lockstep lab ready {number}=ANSWER"))
        else:
            found.append(_utilisation(line))

    return found


def _utilisation(line: Line) -> State:
    """Return the state of the line that asks for a measurement, which exercise 6 leaves in a file."""
    path = folder() / "busy.json"
    todo = "python lab/solution/06_profiling.py, on a machine that does nothing else"
    if not path.exists():
        return State(line, False, "not measured yet", todo)

    measured = json.loads(path.read_text())
    found = f"{100 * measured['busy']:.0f} % of the time on this {measured['device']}"
    return State(line, measured["busy"] >= NEEDED_BUSY, found, todo)


def report(found: list[State]) -> str:
    """Return the list as text."""
    lines = []
    for number, state in enumerate(found, start=1):
        lines.append(f"  {'ready' if state.ready else 'open '} {number:2} {state.line.text}: {state.found}")
        if not state.ready:
            lines.append(f"           {state.todo}")

    lines.append(f"{sum(state.ready for state in found)} of {len(found)}")
    return "\n".join(lines)
