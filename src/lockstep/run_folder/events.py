"""The events of a run, to which its launcher and rank 0 both append."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.files.jsonl import JsonlSink
from lockstep.run_folder.names import EVENTS


def append_event(run_dir: Path, event: Mapping[str, Any]) -> None:
    """Append an event of the launcher to the run's events. Without a time of its own it gets the present."""
    # A full disk must not end the launcher in the middle of a restart: better to lose the event.
    with suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        with JsonlSink(run_dir / EVENTS) as events:
            events.write({"time": time.time(), **event})
