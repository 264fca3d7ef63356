"""The base of all sources over a dataset, map-style or a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.data.worker_process import LoaderBatches
from lockstep.task import BatchSource, MicroBatch


class DatasetSource(BatchSource):
    """A source that reads the user's dataset. The start check compares what ranks and workers read of it.

    A source whose worker processes read sets `_reading`, so that `close` ends them.
    """

    _reading: Iterator[Any] | None = None

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if isinstance(self._reading, LoaderBatches):
            self._reading.close()

        self._reading = None

    def read_again(self, micro: MicroBatch) -> Any:
        """Read a micro-batch again, in another process. Return None if it need not be the same."""
        return None
