"""Trackio: a local dashboard (`trackio show`). Its own variables choose where it keeps its data: TRACKIO_DIR."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.sinks.run_facts import settings_of
from lockstep.observe.sinks.scalars import scalars
from lockstep.observe.sinks.sink import Sink


class TrackioSink(Sink):
    """Writes the numbers of a run to trackio, in the project "lockstep" or TRACKIO_PROJECT."""

    package = "trackio"

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._run: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        numbers = scalars(record)
        if not numbers:
            return

        # The first number opens the run: importing the package takes a while.
        if self._run is None:
            import trackio

            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "lockstep"),
                name=self._run_dir.resolve().name,
                resume="allow",
                config=settings_of(self._run_dir),
                embed=False,
            )

        self._run.log(numbers, step=int(record["step"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
