"""A run folder, read back: whatever is there, and a note for what is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import UserError
from lockstep.observe.formats import SAMPLE, number
from lockstep.observe.sinks import read_jsonl

Record = dict[str, Any]


@dataclass
class Run:
    """What was found in the folder; `notes` says for each file that is not here why."""

    name: str
    metrics: list[Record]  # flat: the task's own metrics are `metrics.NAME`
    events: list[Record]
    config: Record
    sources: Record
    plan: Record
    summary: Record
    notes: dict[str, str]

    @cached_property
    def evals(self) -> list[Record]:
        return without_undone(flat(event) for event in self.events if event.get("event") == "eval")

    @cached_property
    def facts(self) -> Record:
        """All that is known of the run as a whole; what was said later counts."""
        places = (self.plan, self.last_event("start"), self.last_event("end"), self.summary)
        return {key: value for place in places for key, value in place.items() if value is not None}

    @property
    def unit(self) -> str:
        return str(self.facts.get("unit", SAMPLE))

    def last_event(self, kind: str) -> Record:
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})


def read_run(folder: Path) -> Run:
    notes: dict[str, str] = {}

    def read(file: str, reader: Callable[[Path], Any], otherwise: Any) -> Any:
        try:
            return reader(folder / file)
        except FileNotFoundError:
            notes[file] = f"{file} is not there"
        except (OSError, ValueError, yaml.YAMLError, UserError) as error:
            notes[file] = f"{file} could not be read: {error}"
        return otherwise

    return Run(
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
    text = path.read_text(encoding="utf-8")
    found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(found, dict):
        raise ValueError(f"a mapping was expected, a {type(found).__name__} was found")
    return found


def flat(values: Mapping[Any, Any], prefix: str = "") -> Record:
    """Nested mappings as one, with dotted keys."""
    found: Record = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        found |= flat(value, f"{dotted}.") if isinstance(value, Mapping) else {dotted: value}
    return found


def without_undone(records: Iterable[Record]) -> list[Record]:
    """One record per step, the newest: a resumed run repeats the steps after its checkpoint."""
    kept: list[Record] = []
    for record in records:
        step = number(record.get("step"))
        if step is None:
            continue
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(record)
    return kept
