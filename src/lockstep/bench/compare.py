"""`lockstep bench compare A B`: what changed between two results, and whether the change is larger than the noise.

Rows are matched by what names them, not by their order, so a result may have more rows than the other. A change counts
as one only if the two confidence intervals are apart. Sections that measured different things are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.bench.intervals import ENOUGH
from lockstep.bench.results import Result, Section, cell, is_estimate, middle, read, table_lines
from lockstep.errors import UserError

# The columns that name a row; all others are measurements.
LABELS = (
    "case",
    "loop",
    "world",
    "backend",
    "operation",
    "bytes",
    "way",
    "what",
    "accumulation",
    "workers",
    "step",
    "ranks",
)

# Less is better for all other measurements: times, ratios of times, and memory.
HIGHER_IS_BETTER = {
    *("throughput", "speedup", "scaling_efficiency", "machine_limit", "of_machine_limit", "compute_fraction"),
    *("overlap_fraction", "algorithm_gb_s", "bus_gb_s", "loader", "headroom"),
    *("write_mb_s", "load_mb_s"),
}
UNDIRECTED = {"need", "torch_loader"}  # figures of the model and of torch


def compare(before: Path, after: Path) -> str:
    """Return the comparison as text."""
    old = read(before)
    new = read(after)
    lines = [
        f"A  {before}: {old.time}, {old.hardware['text']}",
        f"B  {after}: {new.time}, {new.hardware['text']}",
    ]

    if old.hardware["text"] != new.hardware["text"]:
        lines.append("   The hardware differs: times cannot be compared, only ratios.")

    # Only figures that both have measured can be compared.
    by_name = {section.name: section for section in new.sections}
    pairs = [(section, by_name[section.name]) for section in old.sections if section.name in by_name]
    if not pairs:
        raise UserError(
            f"{before} and {after} have nothing in common to compare",
            f"A has {_names(old)}, B has {_names(new)}",
            "compare two results of the same kind of `lockstep bench`",
        )

    for one, other in pairs:
        _check_settings(one, other)
        lines += ["", one.title, *_changes(one, other)]

    return "\n".join(lines)


def _names(result: Result) -> str:
    return ", ".join(section.name for section in result.sections) or "nothing"


def _check_settings(old: Section, new: Section) -> None:
    """Refuse to compare a section with one that measured something else."""
    for key in sorted(old.settings.keys() | new.settings.keys()):
        one = old.settings.get(key)
        other = new.settings.get(key)
        if one != other:
            raise UserError(
                f"the two results measured different things in {old.name}",
                f"{key} is {one} in A and {other} in B",
                "measure both with the same target, batch and settings",
            )


def _changes(old: Section, new: Section) -> list[str]:
    """Return a table of the values that both sections have: A, B, the relative change, and whether it is noise."""
    # Rows are matched by label, since the two sections may have other rows, or in another order.
    others = {_label(row): row for row in new.rows}
    measured = [column for column in old.columns if column.key not in LABELS]

    body = []
    for row in old.rows:
        label = _label(row)
        other = others.get(label, {})
        for column in measured:
            # Words and missing values have no change to show.
            a = row.get(column.key)
            b = other.get(column.key)
            if not _has_ratio(a, b):
                continue

            change = middle(b) / middle(a) - 1
            body.append([label, column.head, cell(a), cell(b), f"{change:+.1%}", _verdict(column.key, a, b)])

    if not body:
        return ["  nothing in common"]
    return table_lines(["row", "value", "A", "B", "B / A - 1", ""], body)


def _has_ratio(a: Any, b: Any) -> bool:
    """Return whether both are numbers, or estimates of numbers, and the first is not 0."""
    return isinstance(middle(a), int | float) and isinstance(middle(b), int | float) and bool(middle(a))


def _label(row: dict[str, Any]) -> str:
    """Return the name of a row: the values of the columns that name it."""
    parts = []
    for key in LABELS:
        if key in row:
            parts.append(f"world {row[key]}" if key == "world" else str(row[key]))

    return ", ".join(parts)


def _verdict(key: str, a: Any, b: Any) -> str:
    """Return whether B is better or worse, if two confidence intervals are apart."""
    if a == b:
        return "the same"
    if not (is_estimate(a) and is_estimate(b)):
        return ""
    if min(a["count"], b["count"]) < ENOUGH:
        return f"fewer than {ENOUGH} rounds"

    # Intervals that touch may hold the same true value.
    overlap = a["high"] >= b["low"] and b["high"] >= a["low"]
    if overlap:
        return "within the noise"
    if key in UNDIRECTED:
        return "changed"

    higher = b["median"] > a["median"]
    return "better" if higher == (key in HIGHER_IS_BETTER) else "worse"
