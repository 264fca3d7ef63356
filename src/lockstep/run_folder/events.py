"""The events of a run, to which its launcher and rank 0 both append."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.files.jsonl import JsonlSink
from lockstep.run_folder.names import EVENTS
from lockstep.run_folder.run_dir import holds_a_run


def append_event(run_dir: Path, event: Mapping[str, Any]) -> None:
    """Append an event of the launcher to the run's events. Without a time of its own it gets the present."""
    # A full disk must not end the launcher in the middle of a restart: better to lose the event.
    with suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        with JsonlSink(run_dir / EVENTS) as events:
            events.write({"time": time.time(), **event})


def end_of_earlier_run(run_dir: Path) -> int | None:
    """Return where the events of the run end that a folder holds before this one begins; None if it holds none."""
    with suppress(OSError):
        if holds_a_run(run_dir):
            path = run_dir / EVENTS
            return path.stat().st_size if path.exists() else 0

    return None


def belongs_to_earlier_run(run_dir: Path, earlier_end: int | None) -> bool:
    """Return whether a folder is still that of an earlier run: this one has neither begun nor failed there.

    Then a request that is refused leaves it as it is. `earlier_end`: from `end_of_earlier_run`.
    """
    if earlier_end is None:
        return False

    # Both kinds of events are written before anything that a run changes in its folder.
    with suppress(OSError):
        since = files.read_bytes(run_dir / EVENTS)[earlier_end:]
        return not any(f'"event": "{kind}"'.encode() in since for kind in ("start", "failure", "error"))

    return True
