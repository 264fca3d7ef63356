"""The base of all sources over a dataset, map-style or a stream: what the engine asks only of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from lockstep.data.worker_process import LoaderBatches
from lockstep.task import BatchSource, MicroBatch


class DatasetSource(BatchSource):
    """A source that reads a dataset of the user's. By default it answers nothing.

    A source whose worker processes read sets `_reading`, so that `close` ends them.
    """

    _reading: Iterator[Any] | None = None

    # The first sample of a stream, which must be the same on all ranks; None if it is not known.
    beginning: Any = None

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if isinstance(self._reading, LoaderBatches):
            self._reading.close()
        self._reading = None

    def largest_input(self) -> Tensor | None:
        """Return the largest tensor of a sample, or None. The number of threads is chosen by it."""
        return None

    def reading_here(self) -> AbstractContextManager[None]:
        """Return a context in which this process reads the dataset that worker processes read as well."""
        return nullcontext()

    def some_samples(self) -> list[Any]:
        """Return a few samples. If they differ, two ranks may begin with equal batches; otherwise that is refused."""
        return []

    def read_again(self, micro: MicroBatch) -> Any:
        """Read the first micro-batch again, in another process than before. None if it need not be the same."""
        return None
