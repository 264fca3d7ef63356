"""The sink that every run has, which writes JSON lines (`lockstep.launch.jsonl`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.launch.jsonl import EVENTS, JsonlSink


class RunJsonl:
    """The sink that every run has: `metrics.jsonl` and `events.jsonl` in its folder."""

    def __init__(self, run_dir: Path):
        self._metrics = JsonlSink(run_dir / "metrics.jsonl")
        self._events = JsonlSink(run_dir / EVENTS)

    def write(self, record: Mapping[str, Any]) -> None:
        (self._events if "event" in record else self._metrics).write(record)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
