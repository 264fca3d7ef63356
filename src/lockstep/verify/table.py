"""The report of a verification: a table that fits a terminal, what diverged first, and why."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.verify.causes import Cause
from lockstep.verify.compare import Comparison, Divergence
from lockstep.verify.layouts import Layout

WIDTH = 100  # characters of a line

# The names of Comparison.errors and Comparison.identical.
COLUMNS = ("gradients", "parameters", "losses")


@dataclass(frozen=True)
class Row:
    """One layout of the table."""

    layout: Layout
    role: str  # reference, again, rounding, world, split
    verdict: str  # reference, ok, yardstick, not judged, DIFFERS, REFUSED, FAILED
    comparison: Comparison | None = None

    @property
    def bad(self) -> bool:
        """Whether the verdict is one in capitals."""
        return self.verdict.isupper()


@dataclass(frozen=True)
class Report:
    """The result of a verification."""

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
        """Whether every layout trained the same model."""
        return not self.causes and not any(row.bad for row in self.rows)

    @property
    def first(self) -> tuple[Row, Divergence] | None:
        """What diverged first, in the first layout that did."""
        for row in self.rows:
            if row.bad and row.comparison and row.comparison.first:
                return row, row.comparison.first
        return None


# ---- for a terminal -----------------------------------------------------------------------------------


def text_of(report: Report) -> str:
    """Return the report for a terminal."""
    facts = report.facts
    head = f"verify {report.target}  {report.steps} steps of {facts['global_batch']} samples  {facts['device']}"
    lines = [f"{head}  {facts['precision']}", ""]

    # The table.
    width = max(len(row.layout.text) for row in report.rows)
    lines.append(f"{'layout':{width}}" + "".join(f"{column:>12}" for column in COLUMNS) + "  verdict")
    lines += [_line(row, width) for row in report.rows]
    lines.append("")

    # What it means.
    for note in report.notes:
        lines += _paragraph("note", note)
    if report.first:
        row, divergence = report.first
        lines += _paragraph("first", f"{row.layout.text}: {divergence.text}")
    for cause in report.causes:
        lines += _paragraph("cause", f"{cause.title} [{cause.key}]")
        lines += _paragraph("seen", cause.evidence)
        lines += _paragraph("do", cause.fix)

    # The last line is the answer.
    if not report.passed:
        verdict = "FAIL  not the same training in every layout"
    elif report.exact:
        verdict = "PASS  identical bits in every world"
    else:
        verdict = "PASS  the same training in every layout, up to rounding"
    lines.append(f"{verdict} ({report.seconds:.0f} s)")
    return "\n".join(lines)


def _line(row: Row, width: int) -> str:
    """Return a line of the table: the layout, an error for each column, and the verdict."""
    cells = ["-"] * 3
    if row.comparison:
        same = row.comparison.identical
        errors = row.comparison.errors
        cells = ["identical" if same[column] else f"{errors[column]:.1e}" for column in COLUMNS]
    return f"{row.layout.text:{width}}" + "".join(f"{cell:>12}" for cell in cells) + f"  {row.verdict}"


def _paragraph(label: str, text: str) -> list[str]:
    """Return text under a label, wrapped and indented."""
    body = " ".join(text.split())
    return textwrap.wrap(f"{label:7}{body}", WIDTH, subsequent_indent=" " * 7)


# ---- for a program ------------------------------------------------------------------------------------


def json_of(report: Report) -> dict[str, Any]:
    """Return the report for a program."""
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
        "first": first and _finite({"layout": first[0].layout.text, **asdict(first[1])}),
        "causes": [asdict(cause) for cause in report.causes],
        "notes": report.notes,
        "seconds": round(report.seconds, 3),
    }


def _row_json(row: Row) -> dict[str, Any]:
    found = row.comparison
    return {
        "layout": row.layout.text,
        "role": row.role,
        "world": row.layout.world,
        "strategy": row.layout.strategy,
        "micro_batch": row.layout.micro_batch,
        "verdict": row.verdict,
        "identical": found.identical if found else None,
        "errors": _finite(found.errors) if found else None,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity, which JSON does not have, by null: it could not be compared."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
