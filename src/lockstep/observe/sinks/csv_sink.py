"""`metrics.csv`: one row per metrics record, for spreadsheets. Events are left out."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.files import replacing
from lockstep.observe.formats import flat
from lockstep.observe.sinks.sink import Sink


class CsvSink(Sink):
    """Appends rows to `metrics.csv` in the run folder. Nested keys are dotted: `metrics.accuracy`.

    A new key becomes a new column on the right; the file is then rewritten.
    """

    files = ("metrics.csv",)

    def __init__(self, run_dir: Path):
        self.path = run_dir / "metrics.csv"

        # A resumed run appends to the rows that are there.
        self._columns = next(iter(self._rows()), [])

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one row. The file is opened and closed each time, so that a reader always sees whole rows."""
        if "event" in record:
            return

        # A header must name every column before the first row that has it.
        values = flat(record)
        new = [key for key in values if key not in self._columns]
        if new:
            self._add_columns(new)

        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([values.get(column, "") for column in self._columns])

    def close(self) -> None:
        """Do nothing: the file is not kept open between two records."""

    def _rows(self) -> list[list[str]]:
        """Return all rows of the file, the header first; [] if there is no file."""
        if not self.path.exists():
            return []

        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.reader(file))

    def _add_columns(self, new: list[str]) -> None:
        """Rewrite the file with more columns on the right. Earlier rows are shorter then, which readers accept."""
        self._columns = [*self._columns, *new]

        # A reader never sees half of the new file.
        with replacing(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self._columns, *self._rows()[1:]])
