"""The report of a verification: a table that fits a terminal, what diverged first, and why."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.verify.causes import Cause
from lockstep.verify.compare import Comparison, Divergence
from lockstep.verify.trials import Trial

WIDTH = 100  # characters of a line

# The names of Comparison.errors and Comparison.identical.
COLUMNS = ("gradients", "parameters", "losses")


@dataclass(frozen=True)
class Row:
    """A trial, and what became of it."""

    trial: Trial
    role: str  # reference, again, rounding, world, split
    verdict: str  # reference, ok, yardstick, not judged, DIFFERS, REFUSED, FAILED
    comparison: Comparison | None = None

    @property
    def bad(self) -> bool:
        """Whether the verdict is one in capitals."""
        return self.verdict.isupper()


@dataclass(frozen=True)
class Report:
    target: str
    steps: int
    facts: dict[str, Any]
    rows: list[Row]
    causes: list[Cause]
    notes: list[str]
    seconds: float
    exact: bool

    @property
    def passed(self) -> bool:
        return not self.causes and not any(row.bad for row in self.rows)

    @property
    def first(self) -> tuple[Row, Divergence] | None:
        """What diverged first, in the first trial that did."""
        for row in self.rows:
            if row.bad and row.comparison and row.comparison.first:
                return row, row.comparison.first
        return None


def text_of(report: Report) -> str:
    facts = report.facts
    head = f"verify {report.target}  {report.steps} steps of {facts['global_batch']} samples  {facts['device']}"
    lines = [f"{head}  {facts['precision']}", ""]

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
        words = " ".join(text.split())
        lines += textwrap.wrap(f"{label:7}{words}", WIDTH, subsequent_indent=" " * 7)

    # The last line is the answer.
    verdict = "PASS  the same training in every layout, up to rounding"
    if not report.passed:
        verdict = "FAIL  not the same training in every layout"
    elif report.exact:
        verdict = "PASS  identical bits in every world"
    return "\n".join([*lines, f"{verdict} ({report.seconds:.0f} s)"])


def _line(row: Row, width: int) -> str:
    cells = ["-"] * len(COLUMNS)
    if row.comparison:
        same = row.comparison.identical
        errors = row.comparison.errors
        cells = ["identical" if same[column] else f"{errors[column]:.1e}" for column in COLUMNS]
    return f"{row.trial.text:{width}}" + "".join(f"{cell:>12}" for cell in cells) + f"  {row.verdict}"


def json_of(report: Report) -> dict[str, Any]:
    first = report.first
    return {
        "target": report.target,
        "passed": report.passed,
        "exact": report.exact,
        "steps": report.steps,
        "global_batch": report.facts["global_batch"],
        "device": report.facts["device"],
        "precision": report.facts["precision"],
        "layouts": [_row_json(row) for row in report.rows],
        "first": first and _finite({"layout": first[0].trial.text, **asdict(first[1])}),
        "causes": [asdict(cause) for cause in report.causes],
        "notes": report.notes,
        "seconds": round(report.seconds, 3),
    }


def _row_json(row: Row) -> dict[str, Any]:
    comparison = row.comparison
    return {
        "layout": row.trial.text,
        "role": row.role,
        "world": row.trial.world,
        "strategy": row.trial.strategy,
        "micro_batch": row.trial.micro_batch,
        "verdict": row.verdict,
        "identical": comparison.identical if comparison else None,
        "errors": _finite(comparison.errors) if comparison else None,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity, which JSON does not have, by null: it could not be compared."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
