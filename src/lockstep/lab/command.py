"""`lockstep lab`: the contents of the course, the grader, the guesses and the page.

Nothing here imports torch before it must: the contents, the guesses and the calculators answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import ExitCode, UserError
from lockstep.lab import calculators, course, predictions, readiness

# Carries out a verb, and returns an exit code, or None for 0.
Verb = Callable[[argparse.Namespace], int | None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the verbs of the lab."""
    parser.set_defaults(lab_run=_contents)
    verbs = parser.add_subparsers(dest="lab_verb", metavar="VERB")

    # The defaults of a verb replace those of the command, so that `run` needs no list of verbs.
    def add_verb(name: str, carry_out: Verb, help: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=help)
        verb.set_defaults(lab_run=carry_out)
        return verb

    # The exercises.
    check = add_verb("check", _check, "run your solution of an exercise, and say what is wrong with it and why")
    check.add_argument("number", metavar="N", help="the exercise: 1 to 9")
    check.add_argument("file", type=Path, metavar="FILE", help="the file that you have edited")

    predict = add_verb("predict", _predict, "show the questions of an exercise, or commit your guesses")
    predict.add_argument("number", metavar="N")
    predict.add_argument("guesses", nargs="*", metavar="key=value")

    # Calculators.
    memory = add_verb("memory", _memory, "the memory of parameters, gradients and AdamW, by strategy")
    memory.add_argument(
        "--parameters", type=float, metavar="P", help="default: the tables of the original course, 70e9 on 4 GPUs"
    )
    memory.add_argument("--gpus", type=int, default=4, metavar="N")
    memory.add_argument("--format", choices=["mixed", "fp32"], default="mixed")

    cost = add_verb("cost", _cost, "what GPUs cost")
    cost.add_argument("--gpus", type=int, metavar="N", help="default: the figures of the original course")
    cost.add_argument("--hours", type=float, default=1.0)
    cost.add_argument("--price", type=float, default=2.0, help="dollars for one GPU and hour (default 2)")
    cost.add_argument("--busy", type=float, default=1.0, help="share of the time that GPUs compute (default 1)")

    # How far the learner is.
    ready = add_verb("ready", _ready, "the ten lines of 'You're ready when': what is shown, and what is open")
    ready.add_argument("answers", nargs="*", metavar="LINE=ANSWER", help="answer the question of a line: 5=60")

    add_verb("page", _page, "write one HTML page of your guesses, the formulas, the measurements and pictures")


def run(options: argparse.Namespace) -> int:
    """Carry out a verb of the lab, and return its exit code."""
    return options.lab_run(options) or ExitCode.FINISHED


def _contents(options: argparse.Namespace) -> None:
    """Print the course, with what has been passed."""
    # This is the first thing that a learner types, so it ends with the next one.
    passed = course.passed()
    print("The course (lab/README.md explains each part):\n")
    for number, exercise in course.GRADERS.items():
        state = "passed" if number in passed else ""
        print(f"  {number:>3}  {exercise.title:38} {exercise.file:44} {state}".rstrip())

    _say_next()
    print("Your guesses and pictures: lockstep lab predict N, lockstep lab page")


def _say_next() -> None:
    """Print how many exercises have passed, and what to type next."""
    # Bonus exercises have no grader, so they are not counted.
    passed = course.passed()
    graded = {number: exercise for number, exercise in course.GRADERS.items() if exercise.grader}
    left = [number for number in graded if number not in passed]
    print(f"\n{len(graded) - len(left)} of {len(graded)} graded exercises passed.")

    # In the order of the course, whatever has been passed out of order.
    if left:
        file = graded[left[0]].file
        print(f"Next: edit {file}, then type\n  lockstep lab check {left[0]} {file}")
    else:
        print("Next: lockstep lab ready")


def _check(options: argparse.Namespace) -> int | None:
    """Grade a file, and print each finding as soon as it is there."""
    from lockstep.lab.grading import grade

    # Flushed line by line: a grader may start processes and train for a while, and the learner should see it work.
    number = course.number_of(options.number)
    print(f"Exercise {number}: {course.GRADERS[number].title}", flush=True)

    failed = 0
    for finding in grade(number, options.file):
        found = f": {finding.found}" if finding.found else ""
        print(f"  {'ok  ' if finding.passed else 'FAIL'} {finding.statement}{found}", flush=True)

        # The reason is the lesson: what the mistake would do to a training run.
        failed += not finding.passed
        if not finding.passed and finding.why:
            print(f"       {finding.why}", flush=True)

    if failed:
        print(f"not yet: {failed} to fix")
        return ExitCode.FAILED

    course.remember_passed(number)
    print("passed")
    _say_next()
    return None


def _predict(options: argparse.Namespace) -> None:
    """Commit guesses, and print the questions with what was guessed so far."""
    number = course.number_of(options.number)
    questions = {question.key: question for question in course.questions_of(number)}

    # Each guess is kept as soon as it is read: a mistake in the third one must not cost the first two.
    for text in options.guesses:
        key, _, value = text.partition("=")
        if key not in questions:
            raise UserError(f"exercise {number} has no question {key}", "", f"its questions are {', '.join(questions)}")

        try:
            guess = float(value)
        except ValueError:
            raise UserError(f"the guess {text} is not a number", "", f"write {key}=12.5") from None

        predictions.commit(number, questions[key], guess)

    # Guesses of this exercise, those of earlier calls included.
    entries = {entry.key: entry for entry in predictions.load() if entry.exercise == number}
    missing = []
    for key, question in questions.items():
        entry = entries.get(key)
        unit = f" [{question.unit}]" if question.unit else ""
        if entry is not None and entry.guess is not None:
            print(f"  {key}: {question.text}{unit} your guess: {entry.guess:g}")
            continue

        # After the measurement was shown, a guess would be none.
        print(f"  {key}: {question.text}{unit} no guess yet")
        if entry is None or entry.measured is None:
            missing.append(f"{key}=NUMBER")

    if missing:
        print(f"To guess: lockstep lab predict {number} {' '.join(missing)}")


def _page(options: argparse.Namespace) -> None:
    """Write the page, and print where it is."""
    from lockstep.lab import page

    print(f"page: {page.write()}")


def _memory(options: argparse.Namespace) -> None:
    """Print the memory of a model by strategy, or the course's tables."""
    # Without options, the tables of the course.
    if options.parameters is None:
        print(calculators.table(calculators.memory_rows()))
        return

    if options.parameters <= 0 or options.gpus < 1:
        raise UserError("a model has parameters, and runs on at least one GPU", "", "--parameters 7e9 --gpus 8")

    print(f"  GB per GPU, {options.parameters:g} parameters on {options.gpus} GPUs, {options.format}, no activations")
    print("         parameters  gradients  AdamW  total")

    for strategy in calculators.STRATEGIES:
        held = calculators.memory(options.parameters, options.gpus, strategy, options.format)
        parts = [part / calculators.GB for part in (held.parameters, held.gradients, held.optimizer, held.total)]
        print("  {:5}  {:10.1f}  {:9.1f}  {:5.1f}  {:5.1f}".format(strategy, *parts))


def _cost(options: argparse.Namespace) -> None:
    """Print what GPUs cost, and how much of that pays for waiting, or the course's figures."""
    if options.gpus is None:
        print(calculators.table(calculators.cost_rows()))
        return

    if not 0 < options.busy <= 1:
        raise UserError(f"--busy {options.busy:g} is no share of the time", "", "--busy 0.6 means 60 %")

    paid = calculators.cost(options.gpus, options.hours, options.price)
    print(f"  {options.gpus} GPUs for {options.hours:g} hours at ${options.price:g}: ${paid:,.0f}")

    # The same work at full use would cost less; the rest was paid for idle GPUs.
    if options.busy < 1:
        wasted = paid - calculators.cost_at(paid, options.busy, 1.0)
        print(f"  busy for {100 * options.busy:g} % of the time: ${wasted:,.0f} of it pay for waiting")


def _ready(options: argparse.Namespace) -> int:
    """Take answers, print the ten lines, and fail while one of them is open."""
    for text in options.answers:
        line, _, value = text.partition("=")
        try:
            said = readiness.answer(int(line), float(value))
        except ValueError:
            raise UserError(f"{text} is no answer", "", "write LINE=NUMBER, for example 5=60") from None

        print(said)

    found = readiness.states()
    print(readiness.report(found))
    return ExitCode.FINISHED if all(state.ready for state in found) else ExitCode.FAILED
