"""A run folder, read back: everything that is there, and a note for each file that is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import UserError
from lockstep.observe.formats import SAMPLE, flat, number
from lockstep.observe.sinks.jsonl import read_jsonl

Record = dict[str, Any]


@dataclass
class RunRecord:
    """The contents of a run folder."""

    name: str
    # Flat: the task's own metrics are `metrics.NAME`.
    metrics: list[Record]
    events: list[Record]
    config: Record
    sources: Record
    plan: Record
    summary: Record
    # File -> why it could not be read.
    notes: dict[str, str]

    @cached_property
    def evals(self) -> list[Record]:
        """The evaluations, flat, one per step."""
        return without_undone(flat(event) for event in self.events if event.get("event") == "eval")

    @cached_property
    def facts(self) -> Record:
        """All that is known of the run as a whole. Where two records differ, the later one counts."""
        # In the order in which they were written.
        found: Record = {}
        for record in (self.plan, self.last_event("start"), self.last_event("end"), self.summary):
            found |= {key: value for key, value in record.items() if value is not None}
        return found

    @property
    def unit(self) -> str:
        """What a loss weight of 1 is."""
        return str(self.facts.get("unit", SAMPLE))

    def last_event(self, kind: str) -> Record:
        """Return the last event of a kind, or an empty record."""
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. A file that is missing or damaged is a note, not an error."""
    notes: dict[str, str] = {}

    def read(file: str, reader: Callable[[Path], Any], otherwise: Any) -> Any:
        try:
            return reader(folder / file)
        except FileNotFoundError:
            notes[file] = f"{file} is not there"
        except (OSError, ValueError, yaml.YAMLError, UserError) as error:
            notes[file] = f"{file} could not be read: {error}"

        return otherwise

    return RunRecord(
        name=folder.resolve().name,
        metrics=without_undone(map(flat, read("metrics.jsonl", read_jsonl, []))),
        events=read("events.jsonl", read_jsonl, []),
        config=read("config.yaml", _read_mapping, {}),
        sources=read("config.sources.json", _read_mapping, {}),
        plan=read("plan.json", _read_mapping, {}),
        summary=read("summary.json", _read_mapping, {}),
        notes=notes,
    )


def _read_mapping(path: Path) -> Record:
    # `safe_load`: nothing that a file holds can run code.
    text = path.read_text(encoding="utf-8")
    found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"a mapping was expected, a {type(found).__name__} was found")
    return found


def without_undone(records: Iterable[Record]) -> list[Record]:
    """Return one record per step, the newest: a resumed run repeats the steps after its checkpoint."""
    kept: list[Record] = []
    for record in records:
        step = number(record.get("step"))
        if step is None:
            continue

        # A step that comes again undoes all that came after it.
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(record)

    return kept
