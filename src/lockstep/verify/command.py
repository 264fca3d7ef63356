"""`lockstep verify`: run the layouts, compare, explain. Returns a Report; the command prints it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep import targets
from lockstep.config import Layer
from lockstep.config import check as check_layers
from lockstep.errors import UserError
from lockstep.verify.causes import Cause, in_own_loop, named, refusal
from lockstep.verify.compare import Comparison, turned_over
from lockstep.verify.diagnose import Case, explain
from lockstep.verify.layouts import Layout, Matrix, VerifyOptions, check, choose
from lockstep.verify.record import Record
from lockstep.verify.runner import Runner, Target
from lockstep.verify.table import Report, Row, json_of, text_of


def main(target: str, layers: list[Layer], wishes: VerifyOptions, json_file: str | None) -> int:
    """Print the table; 0 if all layouts trained the same model, else 1."""
    if json_file:
        _write(Path(json_file), "")  # rather now than after all the work
    report = verify(target, layers, wishes)
    print(text_of(report))
    if json_file:
        _write(Path(json_file), json.dumps(json_of(report), indent=2) + "\n")
    return 0 if report.passed else 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"--json {path}", str(error), "type a file in a folder that you may write to") from error


def verify(
    target: str, layers: Sequence[Layer], wishes: VerifyOptions = VerifyOptions(), runner: Runner | None = None
) -> Report:
    """`runner`: one that has started already, for many verifications in a row."""
    targets.check(target)
    check(wishes)
    asked = [*layers, ("--exact", {"exact": True})] if wishes.exact else list(layers)
    check_layers(asked)
    if runner is not None:
        return _verify(target, asked, wishes, runner)
    with Runner() as own:
        return _verify(target, asked, wishes, own)


def _verify(target: str, layers: list[Layer], wishes: VerifyOptions, runner: Runner) -> Report:
    began = time.monotonic()
    scout = runner.run(Target(target, layers, steps=1), [Layout()])[Layout()]
    if not scout.ranks:
        return _refused_at_once(target, wishes, scout, began)
    matrix = choose(wishes, scout.facts)
    fixed = Target(target, [*layers, ("verify", {"global_batch": scout.facts["global_batch"]})], wishes.steps)
    case = Case(matrix, {}, lambda layouts: runner.run(fixed, layouts))
    case.need([matrix.reference, matrix.again, *matrix.nudged])
    if case.reference.failure:
        return _refused_at_once(target, wishes, case.reference, began)
    splits, notes = _splits(case)
    case.need([*matrix.worlds, *splits])
    compared = _stream_in_eval_mode(case)
    rows = [*compared, *splits]
    causes = explain(case, rows) or _inexact(case, compared, wishes)
    if case.reference.facts["own_loop"]:
        causes = [in_own_loop(cause) for cause in causes]
    lines = [Row(matrix.reference, "reference", "reference")]
    repeatable = case.repeatable()
    lines += [_row(case, layout, role, wishes, repeatable) for layout, role in _roles(matrix, compared, splits)]
    notes = [*matrix.notes, *notes, *_about_cuts(case, scout), *(_about_rounding(case) if repeatable else [])]
    return Report(
        target, wishes.steps, case.reference.facts, lines, causes, notes, time.monotonic() - began, wishes.exact
    )


def _roles(matrix: Matrix, worlds: list[Layout], splits: list[Layout]) -> list[tuple[Layout, str]]:
    found = [(matrix.again, "again"), (matrix.nudged[0], "rounding")]
    return found + [(layout, "world") for layout in worlds] + [(layout, "split") for layout in splits]


def _splits(case: Case) -> tuple[list[Layout], list[str]]:
    """Random numbers in the model follow the micro-batch. So other cuts are compared in eval mode, if it draws any."""
    splits = list(case.matrix.splits)
    if not case.reference.drawn or not splits:
        return splits, []
    quiet = replace(case.matrix.reference, quiet=True)
    case.need([quiet, *(replace(each, quiet=True) for each in (*case.matrix.nudged, *splits))])
    if case.record(quiet).drawn:
        return [], [
            "the loss draws random numbers in eval mode too, and they follow the micro-batch: other cuts of the batch "
            "are not compared"
        ]
    return [replace(split, quiet=True) for split in splits], []


def _stream_in_eval_mode(case: Case) -> list[Layout]:
    """The ranks of a stream cut it into other micro-batches than one process does."""
    worlds = list(case.matrix.worlds)
    if case.reference.facts["stream"] and case.reference.drawn:
        return [replace(layout, quiet=True) for layout in worlds]
    return worlds


def _about_cuts(case: Case, scout: Record) -> list[str]:
    if not case.reference.drawn or scout.facts["micro_batch_asked"]:
        return []
    return [
        "the loss draws random numbers (dropout) per micro-batch: set micro_batch to draw the same ones at any number "
        "of processes; other cuts of the batch are compared in eval mode"
    ]


def _about_rounding(case: Case) -> list[str]:
    step = turned_over(case.reference, [case.record(each) for each in case.matrix.nudged])
    if step is None:
        return []
    return [
        f"a change in the last place of the weights turns the gradients of step {step} over (a decision that hangs by "
        "a bit, or chaos): from there on a mistake may pass for rounding"
    ]


def _inexact(case: Case, worlds: list[Layout], wishes: VerifyOptions) -> list[Cause]:
    """With --exact nothing less than identical bits will do."""
    for layout in (case.matrix.again, *worlds) if wishes.exact else ():
        found = case.compare(layout)
        if not found.bits:
            errors = ", ".join(
                f"{name} {error:.1e}" for name, error in found.errors.items() if not found.identical[name]
            )
            return [named("bits", f"{layout.text}: {errors}")]
    return []


def _row(case: Case, layout: Layout, role: str, wishes: VerifyOptions, repeatable: bool) -> Row:
    record = case.record(layout)
    if record.failure:
        return Row(layout, role, "REFUSED" if record.failure.for_user else "FAILED")
    found = case.itself() if role == "again" else case.compare(layout)
    if role == "rounding":
        return Row(layout, role, "yardstick", found)
    if role != "again" and not repeatable:
        return Row(layout, role, "not judged", found)  # the reference itself is another one every time
    if wishes.exact and role in ("again", "world") and not found.bits:
        return Row(layout, role, "DIFFERS", found)
    return Row(layout, role, _verdict(found), found)


def _verdict(found: Comparison) -> str:
    return "ok" if found.first is None else "DIFFERS"


def _refused_at_once(target: str, wishes: VerifyOptions, record: Record, began: float) -> Report:
    """One process alone does not get through. A known cause is a result; anything else is for the user to mend."""
    failure = record.failure
    assert failure is not None
    cause = refusal(failure.message, failure.for_user)
    if cause.key == "refused":
        asked, _, rest = failure.message.partition("\n  found: ")
        found, _, fix = rest.partition("\n  do:    ")
        raise UserError(asked, found or failure.message, fix or "see above")
    row = Row(record.layout, "reference", "REFUSED" if failure.for_user else "FAILED")
    facts = {"global_batch": "?", "device": "", "precision": ""} | (record.facts if record.ranks else {})
    evidence = replace(cause, evidence=failure.message if failure.for_user else failure.text())
    return Report(target, wishes.steps, facts, [row], [evidence], [], time.monotonic() - began, wishes.exact)
