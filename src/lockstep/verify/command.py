"""`lockstep verify`: runs the trials, compares them, and explains the differences in a VerifyReport.

The layouts of a task are trained for a few steps and compared with one process. The first thing that differs names the
cause, with the evidence and the fix: a loss that is a mean, a metric that is not summed, an untied weight.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import targets
from lockstep.causes import Cause, in_own_loop, named, of_failure
from lockstep.config import Layer
from lockstep.config import check as check_layers
from lockstep.errors import UserError, printable
from lockstep.observe.formats import finite
from lockstep.verify.compare import Comparison, Divergence, first_chaotic_step
from lockstep.verify.diagnose import TrialCache, explain
from lockstep.verify.record import TrialRecord
from lockstep.verify.runner import Runner
from lockstep.verify.trials import Trial, VerifyOptions, check, choose

WIDTH = 100  # characters of a line

# Causes that one process cannot show.
SHOWN_BY_RANKS = ("rank-in-loss", "not-synchronised", "data", "augmentation", "hang", "refused")

# Causes that show in another split of the batch: if they are meant, no other split is compared.
SPLIT_CAUSES = {"mean-of-means", "mean-for-sum", "loss-weight", "penalty", "batch-coupled"}

# The names of Comparison.errors and Comparison.identical.
COLUMNS = ("gradients", "parameters", "losses")


@dataclass(frozen=True)
class TrialRow:
    trial: Trial
    role: str  # reference, again, rounding, world, split
    verdict: str  # reference, ok, yardstick, not judged; bad ones in capitals: DIFFERS, REFUSED, FAILED
    comparison: Comparison | None = None


@dataclass(frozen=True)
class VerifyReport:
    target: str
    steps: int
    facts: dict[str, Any]
    rows: list[TrialRow]
    causes: list[Cause]
    notes: list[str]
    seconds: float
    exact: bool
    condition: str = ""  # under which the layouts are the same, if the run itself does not meet it

    @property
    def passed(self) -> bool:
        return not self.causes and not any(row.verdict.isupper() for row in self.rows)

    @property
    def first(self) -> tuple[TrialRow, Divergence] | None:
        """The first divergence of the first trial that has one."""
        bad = [(row, row.comparison.first) for row in self.rows if row.verdict.isupper() and row.comparison]
        return next(((row, first) for row, first in bad if first), None)


def main(
    target: str, layers: list[Layer], options: VerifyOptions, json_file: str | None, arguments: Sequence[str] = ()
) -> int:
    """Print the table; return 0 if all trials trained the same model, else 1. `arguments` are those of a script."""
    if json_file:
        _write(Path(json_file), "")  # fail now rather than after all the work

    report = verify(target, layers, options, arguments=arguments)
    print(printable(text_of(report)))
    if json_file:
        _write(Path(json_file), json.dumps(json_of(report), indent=2) + "\n")

    return 0 if report.passed else 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--json {path} cannot be written", str(error), "use a file in a folder that you may write to"
        ) from error


def verify(
    target: str,
    layers: Sequence[Layer],
    options: VerifyOptions = VerifyOptions(),
    runner: Runner | None = None,
    arguments: Sequence[str] = (),
) -> VerifyReport:
    """Verify a target. To verify several, start one `runner` for all of them. `arguments` are those of a script."""
    targets.check(target)
    check(options)

    # The source is named after the option, so that a conflict with it names what was typed.
    layers = [*layers, ("--exact", {"exact": True})] if options.exact else list(layers)
    check_layers(layers)

    if runner is not None:
        return _verify(target, layers, options, runner, arguments)

    with Runner() as own:
        return _verify(target, layers, options, own, arguments)


def _verify(
    target: str, layers: list[Layer], options: VerifyOptions, runner: Runner, arguments: Sequence[str]
) -> VerifyReport:
    began = time.monotonic()
    run = partial(runner.run, target, arguments=arguments)

    # One step on one process shows the batch, the strategy and the device, by which the trials are chosen.
    # There the loss is also checked as at the start of every run.
    alone = Trial(finds=True)
    first = run(layers, 1, [alone])[alone]

    # A micro_batch for several ranks is too small for a loss over the global batch on one.
    if first.ranks and first.failure and first.failure.cause == "gathered":
        alone = replace(alone, micro_batch=first.facts["global_batch"])
        first = run(layers, 1, [alone])[alone]

    if not first.ranks:
        return _failed_alone(target, options, first, began)

    # The batch is fixed: with local_batch it would depend on the number of ranks.
    matrix = choose(options, first.facts)
    fixed = [*layers, ("verify", {"global_batch": first.facts["global_batch"]})]
    trials = TrialCache(matrix, partial(run, fixed, options.steps))

    # Without a reference there is nothing to compare.
    trials.need([matrix.reference, matrix.again, *matrix.nudged])
    if trials.reference.failure:
        return _failed_alone(target, options, trials.reference, began)

    # All other trials run in parallel. Then comes the verdict, which may run a few more probes.
    splits, notes = _splits(trials)

    worlds = _worlds(trials)
    trials.need([*worlds, *splits])

    causes = explain(trials, [*worlds, *splits]) or _inexact(trials, worlds, options)
    causes = _with_finding(causes, first.facts.get("found"))

    if trials.reference.facts["own_loop"]:
        causes = [in_own_loop(cause) for cause in causes]

    follows = _follows_micro_batches(trials)
    condition = _condition(trials, worlds, follows, first.facts["follows_ranks"])
    notes = [*matrix.notes, *notes, *_about_micro_batches(trials, follows, condition, splits), *_about_rounding(trials)]

    # What could not be compared is a condition as well.
    untried = "without other splits of the batch: the loss fails in eval mode" if _eval_failure(trials) else ""
    condition = "; and ".join(filter(None, [condition, untried]))
    return VerifyReport(
        target,
        options.steps,
        trials.reference.facts,
        _rows(trials, worlds, splits, options),
        causes,
        notes,
        time.monotonic() - began,
        options.exact,
        condition,
    )


# ---- what is compared ----


def _worlds(trials: TrialCache) -> list[Trial]:
    """Return the trials with several ranks.

    The ranks of a stream split it into other micro-batches than one process does, and so do ranks that have one
    micro-batch each. If the loss draws random numbers, these would differ, and the trials are run in eval mode.
    """
    other_micro_batches = trials.reference.facts["stream"] or trials.matrix.one_each
    eval_mode = bool(other_micro_batches and trials.reference.drawn)
    return [replace(trial, eval_mode=eval_mode) for trial in trials.matrix.worlds]


def _splits(trials: TrialCache) -> tuple[list[Trial], list[str]]:
    """Return the other splits of the batch, and a note if they cannot be compared.

    Random numbers and the statistics of BatchNorm depend on the micro-batch, so with either of them splits are compared
    in eval mode.
    """
    splits = list(trials.matrix.splits)
    facts = trials.reference.facts

    meant = sorted(SPLIT_CAUSES & set(facts["accepted"]))
    if meant and splits:
        return [], [f"checks.loss={meant[0]}: other splits of the batch are meant to differ, and are not compared"]

    if not _follows_micro_batches(trials) or not splits:
        return splits, []

    # In eval mode dropout draws nothing and BatchNorm takes no statistics: a batch and its parts can be compared.
    splits = [replace(split, eval_mode=True) for split in splits]
    measures = [replace(trial, eval_mode=True) for trial in (trials.matrix.reference, *trials.matrix.nudged)]
    reference, *_ = trials.need([*measures, *splits])

    if failure := _eval_failure(trials):
        return [], [
            f"{' and '.join(_follows_micro_batches(trials))} follow the micro-batch, so other splits of the batch can "
            f"be compared only in eval mode, where the loss fails: {failure}"
        ]

    if reference.drawn:
        return [], [
            "the loss draws random numbers even in eval mode, and they follow the micro-batch: other splits of the "
            "batch are not compared"
        ]

    return splits, []


def _with_finding(causes: list[Cause], found: list[str] | None) -> list[Cause]:
    """Return the causes, with what the check at the start of a run found.

    That check sees one call of the loss and its halves, and so it is more precise than a comparison of runs, except
    for what shows on several ranks only.
    """
    # A run that differs from its own repetition explains everything, and its halves differ by chance.
    if not found or any(cause.key in (*SHOWN_BY_RANKS, "nondeterminism") for cause in causes):
        return causes

    return [named(*found)]


def _inexact(trials: TrialCache, worlds: list[Trial], options: VerifyOptions) -> list[Cause]:
    """Return, with --exact, the first trial whose bits are not identical, as a cause."""
    # The first one is enough: others most likely have the same cause.
    for trial in (trials.matrix.again, *worlds) if options.exact else ():
        comparison = trials.compare(trial)

        if not comparison.bits:
            errors = [
                f"{name} {comparison.errors[name]:.1e}" for name, same in comparison.identical.items() if not same
            ]
            return [named("bits", f"{trial.text}: {', '.join(errors)}")]

    return []


# ---- verdicts and notes ----


def _rows(trials: TrialCache, worlds: list[Trial], splits: list[Trial], options: VerifyOptions) -> list[TrialRow]:
    """Return the rows of the table, with one of the two nudged runs."""
    return [
        TrialRow(trials.matrix.reference, "reference", "reference"),
        _row(trials, trials.matrix.again, "again", options),
        _row(trials, trials.matrix.nudged[0], "rounding", options),
        *(_row(trials, trial, "world", options) for trial in worlds),
        *(_row(trials, trial, "split", options) for trial in splits),
    ]


def _row(trials: TrialCache, trial: Trial, role: str, options: VerifyOptions) -> TrialRow:
    failure = trials.record(trial).failure
    if failure:
        return TrialRow(trial, role, "REFUSED" if failure.for_user else "FAILED")

    comparison = trials.itself() if role == "again" else trials.compare(trial)
    # Other splits add in another order, so they need not have identical bits.
    inexact = options.exact and role != "split" and not comparison.bits
    verdict = "DIFFERS" if comparison.first or inexact else "ok"

    if role == "rounding":
        verdict = "yardstick"
    elif role != "again" and not trials.repeatable:
        verdict = "not judged"  # the reference itself is different every time

    return TrialRow(trial, role, verdict, comparison)


def _follows_micro_batches(trials: TrialCache) -> list[str]:
    """Return what training takes from a whole micro-batch, so that another split of the batch trains otherwise."""
    reference = trials.reference
    numbers = ["random numbers (dropout, noise)"] if reference.drawn else []
    return numbers + (["the statistics of BatchNorm"] if reference.facts["batchnorm"] else [])


def _eval_failure(trials: TrialCache) -> str:
    """Return the first line of the error with which the loss fails in eval mode; "" if it works or was not tried.

    A model may return something else in eval mode, as models for detection do. Training never calls its loss there.
    """
    record = trials.records.get(replace(trials.matrix.reference, eval_mode=True))
    failure = record.failure if record else None
    return f"{failure.kind}: {failure.message}".splitlines()[0] if failure and failure.origin == "exception" else ""


def _condition(trials: TrialCache, worlds: list[Trial], follows: list[str], follows_ranks: bool) -> str:
    """Return what verify has set to make the layouts equal, and the run has not; "" if there is nothing of that kind.

    follows: `_follows_micro_batches`
    follows_ranks: without what verify sets, the micro-batches follow the number of ranks
    """
    if any(world.eval_mode for world in worlds):
        return "in eval mode; in training the random numbers follow the number of processes"

    if not follows or not follows_ranks or trials.matrix.one_each:
        return ""

    size = trials.matrix.reference.micro_batch
    return f"with micro_batch={size}; it is not set, so this run follows the number of processes"


def _about_micro_batches(trials: TrialCache, follows: list[str], condition: str, splits: list[Trial]) -> list[str]:
    """Return a note about what the condition is for."""
    if not condition:
        return []

    # Worlds in eval mode have other micro-batches than one process, whatever is set.
    size = trials.matrix.reference.micro_batch
    advice = "" if trials.matrix.one_each or trials.reference.facts["stream"] else f": set micro_batch={size}"
    compared = "; other splits of the batch are compared in eval mode" if splits else ""
    return [f"{' and '.join(follows)} follow the micro-batches, and these the number of processes{advice}{compared}"]


def _about_rounding(trials: TrialCache) -> list[str]:
    """Return a note for models that amplify rounding until nothing can be compared."""
    step = first_chaotic_step(trials.reference, trials.need(trials.matrix.nudged)) if trials.repeatable else None
    if step is None:
        return []

    return [
        f"a change in the last bit of the weights changes the gradients of step {step + 1} by as much as their own "
        "size (a decision that depends on a single bit, or chaos): from that step on, verify cannot distinguish a "
        "mistake from rounding"
    ]


def _failed_alone(target: str, options: VerifyOptions, record: TrialRecord, began: float) -> VerifyReport:
    failure = record.failure
    assert failure is not None

    # A mistake that the engine refuses, such as a loss that is no sum, is a result. Other refusals are raised.
    cause = of_failure(failure.cause, failure.message, failure.for_user)
    if cause.key == "refused":
        # All that a rank leaves of a UserError is its text.
        head, _, fix = failure.message.partition("\n  do:    ")
        problem, _, found = head.partition("\n  found: ")
        raise UserError(problem, found, fix or "see above")

    facts = {"global_batch": "?", "device": "", "precision": ""} | (record.facts if record.ranks else {})
    return VerifyReport(
        target,
        options.steps,
        facts,
        [TrialRow(record.trial, "reference", "REFUSED" if failure.for_user else "FAILED")],
        [replace(cause, evidence=failure.message if failure.for_user else failure.text())],
        [],
        time.monotonic() - began,
        options.exact,
    )


# ---- the report ----


def text_of(report: VerifyReport) -> str:
    lines = [
        f"verify {report.target}  {report.steps} steps of {report.facts['global_batch']} samples  "
        f"{report.facts['device']}  {report.facts['precision']}",
        "",
    ]

    # The table.
    width = max(len(row.trial.text) for row in report.rows)
    lines.append(f"{'layout':{width}}" + "".join(f"{column:>12}" for column in COLUMNS) + "  verdict")
    lines += [*(_line(row, width) for row in report.rows), ""]

    # What it means, in labelled paragraphs.
    paragraphs = [("note", note) for note in report.notes]
    if report.first:
        row, divergence = report.first
        paragraphs.append(("first", f"{row.trial.text}: {divergence.text}"))

    for cause in report.causes:
        paragraphs += [("cause", f"{cause.title} [{cause.key}]"), ("seen", cause.evidence), ("do", cause.fix)]

    for label, text in paragraphs:
        lines += textwrap.wrap(f"{label:7}{' '.join(text.split())}", WIDTH, subsequent_indent=" " * 7)

    # The last line is the answer. Its first words name a condition that the run itself does not meet.
    verdict = "PASS  the same training in every layout, up to rounding"
    if not report.passed:
        verdict = "FAIL  not the same training in every layout"
    elif report.condition:
        verdict = f"PASS {report.condition}"
    elif report.exact:
        verdict = "PASS  identical bits in every world"

    return "\n".join([*lines, f"{verdict} ({report.seconds:.0f} s)"])


def _line(row: TrialRow, width: int) -> str:
    cells = ["-"] * len(COLUMNS)
    if row.comparison:
        errors = row.comparison.errors
        cells = ["identical" if row.comparison.identical[name] else f"{errors[name]:.1e}" for name in COLUMNS]

    return f"{row.trial.text:{width}}" + "".join(f"{cell:>12}" for cell in cells) + f"  {row.verdict}"


def json_of(report: VerifyReport) -> dict[str, Any]:
    first = report.first
    return {
        "target": report.target,
        "passed": report.passed,
        "condition": report.condition or None,
        "exact": report.exact,
        "steps": report.steps,
        "global_batch": report.facts["global_batch"],
        "device": report.facts["device"],
        "precision": report.facts["precision"],
        "layouts": [_row_json(row) for row in report.rows],
        "first": first and finite({"layout": first[0].trial.text, **asdict(first[1]), "step": first[1].steps_done}),
        "causes": [asdict(cause) for cause in report.causes],
        "notes": report.notes,
        "seconds": round(report.seconds, 3),
    }


def _row_json(row: TrialRow) -> dict[str, Any]:
    comparison = row.comparison
    return {
        "layout": row.trial.text,
        "role": row.role,
        "world": row.trial.world,
        "strategy": row.trial.strategy,
        "micro_batch": row.trial.micro_batch,
        "verdict": row.verdict,
        "identical": comparison.identical if comparison else None,
        "errors": finite(comparison.errors) if comparison else None,
    }
