"""The source over a map-style dataset: reads this rank's micro-batches of each step.

`StepOrder` says which samples these are. Batches are prefetched in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from lockstep.data.dataset_source import DatasetSource, SourceOptions
from lockstep.data.loader import BatchRequest, SampleReader, is_empty, read_all
from lockstep.data.samplers import Sampler
from lockstep.data.windows import StepOrder, Window
from lockstep.data.worker_copies import WorkerCopies
from lockstep.errors import UserError
from lockstep.task import MicroBatch, StepBatches, StepResult

UPCOMING = 64  # how many ids `upcoming` compares after a resume


class MapSource(DatasetSource):
    """A map-style dataset in the order of its sampler, which depends neither on the rank nor on the world size.

    A step is a window of consecutive positions. Its micro-batches are numbered over all ranks, and `take` returns
    those of this rank. Only `commit` moves the position, so a step that did not end is taken again. A step that was
    skipped has ended.
    """

    step_order: StepOrder

    def __init__(
        self, reader: SampleReader, sampler: Sampler, options: SourceOptions, sample_lengths: np.ndarray | None = None
    ):
        super().__init__(reader.collate, options)
        self.reader = reader
        self.step_order = StepOrder(sampler, len(reader.dataset), options, sample_lengths)

        # On a CPU without workers nothing would overlap with prefetching, and a batch needs no `Transfer` either.
        self._prefetches = bool(options.config.workers) or self._needs_transfer

        # An iterator over prefetched batches, and the position of its next step.
        self._prefetched: Iterator[Any] | None = None
        self._prefetched_position = 0
        self._padding_batch: Any = None  # runs in place of a micro-batch that collate emptied

        # Detects changes of the dataset that its worker processes would not see.
        watches = options.config.workers and options.watches_dataset
        self._copies = WorkerCopies(reader.dataset) if watches else None

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step. Iterating over them reads them."""
        # In every step, because user code may change the dataset at any time.
        if self._copies:
            self._copies.check()

        # The window at the position, even if it was taken before and never committed.
        order = self.step_order
        window = order.window(order.position)
        after = order.end_position(window)
        size = window.size
        micro_batches = order.micro_batches(window)
        return StepBatches(
            len(micro_batches),
            self._load(window, micro_batches),
            size,
            global_num_micro_batches=order.count(window),
            span=(after - size, after),
        )

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        assert batches.span is not None
        self.step_order.advance(batches.span[1])

    def state_dict(self) -> dict[str, Any]:
        return self.step_order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_order.load_state_dict(state)
        self.close()  # prefetched batches belong to the old position

    @property
    def skipped_spans(self) -> list[tuple[int, int]]:
        """All spans [start, stop) of positions that are left out."""
        return self.step_order.skipped_spans

    def skip(self, span: tuple[int, int]) -> None:
        self.step_order.skip(span)

    def read_again(self, micro: MicroBatch) -> Any:
        """Read a micro-batch in this process, to compare it with a worker's. None if samples are not seeded."""
        if not (self.options.config.workers and self.options.config.seed_samples):
            return None

        with self.reading_here():
            return self.reader.read_again(BatchRequest(micro.epoch, micro.ids))

    def reading_here(self) -> AbstractContextManager[None]:
        """Return a context for reading in this process: changes that reading makes to the dataset are ignored."""
        return self._copies.ignore_changes() if self._copies else nullcontext()

    def read_samples(self, epoch: int, ids: Sequence[int]) -> Any:
        """Read these samples in this process, and return them as they are before collate."""
        with self.reading_here():
            return self.reader.read_samples(BatchRequest(epoch, ids))

    def first_sample(self) -> Any:
        """Return a sample, to see how large one is; None if none can be read before the worker processes start."""
        # A dataset may open files for its first sample, which forked workers would share.
        if self.options.config.workers and not isinstance(self.reader.innermost, TensorDataset | list | tuple):
            return None

        # The same reader that training uses, so that the sample is transformed as it will be.
        try:
            return self.reader.read_samples(BatchRequest(0, [0]))
        except Exception:  # the first step will report it
            return None

    def start_workers(self) -> None:
        """Start the worker processes, if there are any. It is called before this process reads a sample."""
        if self.options.config.workers and self._prefetched is None:
            self._prefetched = self._start_prefetch()
            self._prefetched_position = self.step_order.position

    def close(self) -> None:
        super().close()
        self._prefetched = None

    def upcoming(self) -> list[Any]:
        """Return the epoch and the ids of the next samples. A resumed run must have the same, at any batch size."""
        # Only up to the end of the epoch: where the next one begins depends on the batch size.
        epoch, ids = self.step_order.next_ids(UPCOMING, beyond_step=True)
        return [epoch, *ids]

    # ---- reading samples ----

    def _load(self, window: Window, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a window with their data."""
        if self._prefetches:
            batches = self._prefetch(window)  # the requests of `_requests`, which come in the same order
        else:
            batches = map(self.reader, (BatchRequest(micro.epoch, micro.ids) for micro in micro_batches))

        # No loop: its variable would keep a micro-batch until the next one is there.
        yield from map(self._with_data, micro_batches, batches)

    def _with_data(self, micro: MicroBatch, data: Any) -> MicroBatch:
        """Return a micro-batch with its data, or as padding if collate has dropped all of its samples."""
        # A batch that collate has emptied still takes part in the step, with weight 0.
        if is_empty(data):
            return self._as_padding(micro)

        return replace(micro, data=data)

    def _as_padding(self, micro: MicroBatch) -> MicroBatch:
        """Return a micro-batch that collate emptied as padding: its weight is 0, but every rank must run it."""
        if self.options.exact:
            raise UserError(
                f"exact=true needs samples in every micro-batch, and collate dropped all of {micro.ids.tolist()}",
                "the order of additions follows the micro-batches",
                "leave such samples out of the dataset, or leave exact out",
            )

        # Found once, and kept on the device: its values do not matter, as long as the model accepts it.
        if self._padding_batch is None:
            with self.reading_here():
                batch = self.reader.nonempty_batch(self.options.micro_batch_size)

            self._padding_batch = self._transfer(batch)

        return replace(micro, data=self._padding_batch, padding=True)

    def _prefetch(self, window: Window) -> Iterator[Any]:
        """Return an endless iterator over batches on the device, from the current position on."""
        # Continue the iterator of the last step, except at the start and after a resume.
        if self._prefetched is None or self._prefetched_position != self.step_order.position:
            self._prefetched = self._start_prefetch()

        self._prefetched_position = self.step_order.end_position(window)
        return self._prefetched

    def _start_prefetch(self) -> Iterator[Any]:
        """Start to prefetch from the current position, and drop batches that were prefetched from another one."""
        self.close()
        config = self.options.config

        # The workers that start now get copies of the dataset as it is.
        if self._copies:
            self._copies.record()

        requests = self._requests(self.step_order.position)
        batches = read_all(self.reader, requests, config.workers, config.prefetch, self.options.pins_memory)
        self._loader_batches = batches
        return self._transfer.prefetch(batches) if self._needs_transfer else batches

    def _requests(self, position: int) -> Iterator[BatchRequest]:
        """Yield requests for this rank's micro-batches from a position on, endlessly."""
        while True:
            window = self.step_order.window(position)
            position = self.step_order.end_position(window)
            for micro in self.step_order.micro_batches(window):
                yield BatchRequest(micro.epoch, micro.ids)
