"""Trackio: a local dashboard (`trackio show`). Its own variables choose where it keeps its data: TRACKIO_DIR."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lockstep.observe.sinks.sink import ServiceSink, scalars, settings_of


class TrackioSink(ServiceSink):
    """Writes the numbers of a run to trackio, in the project "lockstep" or TRACKIO_PROJECT."""

    package = "trackio"

    def write(self, record: Mapping[str, Any]) -> None:
        numbers = scalars(record)
        if numbers:
            self._run.log(numbers, step=int(record["step"]))

    def _open(self) -> Any:
        import trackio

        return trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "lockstep"),
            name=self._run_dir.resolve().name,
            resume="allow",
            config=settings_of(self._run_dir),
            embed=False,
        )
