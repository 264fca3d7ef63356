"""The result of a benchmark: sections with rows, as JSON, as CSV and as text. Nothing here imports torch.

A result is a list of sections; each kind of benchmark makes one or more. The JSON file is the whole result: the page,
the plots, the CSV files and `bench compare` are made from it, and can be made again.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lockstep
from lockstep import files
from lockstep.bench.intervals import ENOUGH, Estimate
from lockstep.errors import UserError
from lockstep.observe.formats import finite

FILE = "results.json"
FORMAT = 1  # the format of that file


@dataclass(frozen=True)
class Column:
    """A column of a section: the key of its values in a row, its heading and its unit."""

    key: str
    title: str
    unit: str = ""

    @property
    def head(self) -> str:
        """The heading with its unit, for text."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title


@dataclass(frozen=True)
class Verdict:
    """A target, the measurement, and whether it can be judged on this hardware."""

    text: str  # such as "weak scaling efficiency at 2 ranks > 90 %"
    value: float
    limit: float
    higher_is_better: bool = True
    refusal: str = ""  # why it is not judged; empty if it is
    low: float | None = None  # the interval of the value, if it has one
    high: float | None = None

    @property
    def undecided(self) -> bool:
        """Whether the interval of the value holds the limit: then the value may be on either side of it."""
        return self.low is not None and self.high is not None and self.low < self.limit < self.high

    @property
    def passed(self) -> bool | None:
        """Whether the target was met; None if that is not judged, or not certain."""
        if self.refusal or self.undecided:
            return None

        return self.value >= self.limit if self.higher_is_better else self.value <= self.limit

    def __str__(self) -> str:
        if self.refusal:
            return f"not judged: {self.text} (measured {self.value:.3f}): {self.refusal}"
        if self.undecided:
            return f"undecided: {self.text}, measured {self.value:.3f}, between {self.low:.3f} and {self.high:.3f}"
        return f"{'PASS' if self.passed else 'FAIL'}: {self.text}, measured {self.value:.3f}"


def judged(text: str, value: Estimate, limit: float, higher_is_better: bool, refusal: str) -> Verdict:
    """Return the verdict on an estimate."""
    return Verdict(text, value["median"], limit, higher_is_better, refusal, value["low"], value["high"])


@dataclass
class Section:
    """The result of one kind of benchmark."""

    name: str
    title: str
    columns: list[Column]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # data for plots besides the rows
    settings: dict[str, Any] = field(default_factory=dict)  # of the measurement: others cannot be compared with it
    stamp: dict[str, str] = field(default_factory=dict)  # when, by which version and by which command

    @property
    def failed(self) -> bool:
        """Whether a target was missed, or something that was asked for could not be measured."""
        # A verdict that is not judged, or undecided, is None: on other hardware a target says nothing.
        return bool(self.extra.get("not_measured")) or any(verdict.passed is False for verdict in self.verdicts)


def now() -> str:
    """Return the time in UTC, since results of several machines are compared."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


@dataclass
class Result:
    """Everything that one call of `lockstep bench` has measured."""

    command: str
    hardware: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)
    time: str = field(default_factory=now)
    version: str = lockstep.__version__
    format: int = FORMAT

    def put(self, section: Section) -> None:
        """Add a section, or replace the one of the same name. It says itself when and how it was measured."""
        section.stamp = {
            "time": now(),
            "version": lockstep.__version__,
            "command": self.command,
        }

        # The newest is last, and the page shows them in this order.
        others = [other for other in self.sections if other.name != section.name]
        self.sections = [*others, section]


def begin(folder: Path, command: str, hardware: dict[str, Any]) -> Result:
    """Make the folder and return a new result. It keeps the sections that the folder already holds.

    Sections of another machine are refused: one report names one machine.
    """
    # A new section replaces the one of the same name, and the others stay (`Result.put`).
    result = Result(command, hardware)
    if (folder / FILE).exists():
        earlier = read(folder)
        if earlier.hardware["text"] != hardware["text"]:
            raise UserError(
                f"{folder} holds results of other hardware",
                f"{earlier.hardware['text']}; this machine is {hardware['text']}",
                "name another folder with --out",
            )

        result.sections = earlier.sections
        result.facts = earlier.facts

    # Now, not at the end: a folder that cannot be written to must not cost a measurement.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be made", str(error), "name another one with --out") from error

    return result


def write(result: Result, folder: Path) -> None:
    """Write results.json and a CSV file for each section."""
    folder.mkdir(parents=True, exist_ok=True)

    # Replaced at once: an interrupted write must not destroy the earlier measurements.
    files.write(folder / FILE, json.dumps(finite(asdict(result)), indent=1) + "\n")

    for section in result.sections:
        (folder / f"{section.name}.csv").write_text(csv_of(section), encoding="utf-8")


def read(path: Path) -> Result:
    """Read a result from its folder or its JSON file."""
    file = path / FILE if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        sections = []
        for values in data.pop("sections"):
            # JSON has dictionaries where a section has records.
            columns = [Column(**column) for column in values.pop("columns")]
            verdicts = [Verdict(**verdict) for verdict in values.pop("verdicts")]
            sections.append(Section(**values, columns=columns, verdicts=verdicts))

        return Result(**data, sections=sections)

    # A file of something else fails in one of these ways: no such file or no text, no JSON, no such key, or a key that
    # no record has.
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not the result of a benchmark",
            str(error),
            "name the folder of an earlier `lockstep bench KIND --out FOLDER`",
        ) from error


def csv_of(section: Section) -> str:
    """Return the rows with two more columns for the confidence interval of each value that has one."""
    # Rows may have different keys; a dict keeps the order in which they first appear.
    rows = [_spread(row) for row in section.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))

    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _spread(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with single values: an estimate becomes three, and nested values are left out."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if is_estimate(value):
            flat |= {key: value["median"], f"{key}_low": value["low"], f"{key}_high": value["high"]}
        elif not isinstance(value, dict | list):
            flat[key] = value

    return flat


def is_estimate(value: Any) -> bool:
    """Return whether a value is an `Estimate`, also one that was read from JSON."""
    return isinstance(value, dict) and {"median", "low", "high"} <= value.keys()


def middle(value: Any) -> Any:
    """Return the median of an estimate, or the value itself."""
    return value["median"] if is_estimate(value) else value


# ---- text ----


def text_of(section: Section) -> str:
    """Return the table of a section for a terminal, with its notes and verdicts."""
    heads = [column.head for column in section.columns]
    body = [[cell(row.get(column.key)) for column in section.columns] for row in section.rows]
    lines = [section.title, *table_lines(heads, body)]

    for note in section.notes:
        lines += textwrap.wrap(note, 110, initial_indent="  ", subsequent_indent="  ")

    # A verdict that is refused already says what makes the test unfair.
    refusal = section.extra.get("refusal")
    if refusal and section.rows and not any(verdict.refusal for verdict in section.verdicts):
        lines.append(f"  Not a fair test: {refusal}.")

    lines += [f"  {verdict}" for verdict in section.verdicts]
    return "\n".join(lines)


def table_lines(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Columns of words are flush left, columns of numbers flush right."""
    # Column by column, since the longest text of a column sets its width. A column with one word in it is one of words:
    # "-", which stands for a missing number, is none.
    padded = []
    for head, *cells in zip(heads, *body, strict=True):
        width = max(map(len, (head, *cells)))
        has_words = any(text[:1].isalpha() for text in cells)
        align = str.ljust if has_words else str.rjust
        padded.append([align(text, width) for text in (head, *cells)])

    # From columns back to rows.
    return ["  " + "  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def cell(value: Any) -> str:
    """Return a value of a row as text: an estimate with half the width of its interval, or with the range of few."""
    if value is None:
        return "-"
    if not is_estimate(value):
        return figure(value) if isinstance(value, float) else str(value)

    # Few measurements have no confidence interval, so `low` and `high` are their range. One has none at all.
    count = value.get("count", 1)
    if count >= ENOUGH:
        return f"{figure(value['median'])} ± {figure((value['high'] - value['low']) / 2)}"

    span = f" ({figure(value['low'])} to {figure(value['high'])})" if count > 1 else ""
    return figure(value["median"]) + span


def figure(value: float) -> str:
    """Return about three significant digits."""
    # Tiny and huge numbers with an exponent, large ones without decimals.
    size = abs(value)
    if value and not 1e-3 <= size < 1e6:
        return f"{value:.2e}"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10 or value == 0:
        return f"{value:.3g}"
    return f"{value:.3f}"
