"""The base of all sources over a stream. A step is read whole; an epoch ends when the stream has ended on all ranks.

A step waits in host memory. Its micro-batches are moved to the device when they are needed.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from lockstep.data.dataset_source import DatasetSource, SourceOptions
from lockstep.data.loader import already_collated, is_empty, start_loader
from lockstep.data.sample_errors import check_sendable
from lockstep.data.windows import padding_count
from lockstep.data.worker_process import LoaderBatches
from lockstep.errors import UserError
from lockstep.task import MicroBatch, StepBatches, StepResult


class EpochSource(DatasetSource):
    """Reads a stream, step by step and epoch by epoch.

    Ranks may have different amounts of data. An epoch ends when all ranks have read theirs; until then, a rank that has
    nothing left repeats its last micro-batch with weight 0.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], options: SourceOptions):
        super().__init__(collate, options)
        self.epoch = 0
        self._last: MicroBatch | None = None  # the newest of this epoch, which is repeated as padding
        self._ended = False  # whether this rank has read everything of the epoch
        self._first_step = 0  # the first step of this epoch
        self._peeked: StepBatches | None = None  # read by `first_micro_batch` for the next `take`, in host memory
        self._peek_error: Exception | None = None

    @abstractmethod
    def _pull(self) -> list[MicroBatch]:
        """Read this rank's micro-batches of the next step, and set `_ended` if they are its last."""

    @abstractmethod
    def _find_padding(self) -> MicroBatch:
        """Return a micro-batch to run with weight 0 if this rank has read none in this epoch."""

    def first_micro_batch(self) -> MicroBatch:
        """Return the first micro-batch of the next step, in host memory. `take` will return it again."""
        try:
            self._peeked = self._peeked or self._read_step()
            return next(iter(self._peeked))
        except Exception as error:  # of any kind: `take` raises it again
            self._peek_error = error
            raise

    def _start_reading(self, dataset: IterableDataset, **options: Any) -> LoaderBatches:
        """Return what `dataset` yields, which is collated already. Worker processes read it if there are any.

        `options` are further arguments of the DataLoader.
        """
        config, pins_memory = self.options.config, self.options.pins_memory
        options |= {"batch_size": None, "collate_fn": already_collated}
        return start_loader(dataset, config.workers, config.prefetch, pins_memory, **options)

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step, or padding if its shard has ended."""
        # A generator that has raised is exhausted, so raise its error again.
        if self._peek_error is not None:
            raise self._peek_error

        batches = self._peeked or self._read_step()
        self._peeked = None

        moved = (micro.data for micro in batches)
        if self._needs_transfer:
            moved = self._transfer.prefetch(moved)

        # Copies, because the engine may replace the data of a micro-batch, and the last one is kept here.
        # `map`, because a generator would keep the last one on the device until it has the next.
        copies = map(lambda micro, data: replace(micro, data=data), batches, moved)
        return replace(batches, micro_batches=copies)

    def _read_step(self) -> StepBatches:
        """Read the next global step, and return it with its micro-batches in host memory."""
        micro_batches = [] if self._ended else self._pull()
        self._make_padding(micro_batches)
        samples = self._samples_on_all_ranks(micro_batches)

        # If this rank's shard ends before the others, repeat its last micro-batch with weight 0.
        last = micro_batches[-1] if micro_batches else self._last
        if last is None:
            last = self._find_padding()

        self._last = last
        options = self.options
        count = options.global_num_micro_batches
        padding = padding_count(count, len(micro_batches), options.data_world, options.collective_forwards)
        micro_batches += [self._as_padding(last) for _ in range(padding)]
        return StepBatches(len(micro_batches), micro_batches, samples, exhausted=self._ended)

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        """Begin the next epoch if the stream has ended on all ranks."""
        if result is not None:
            self._end_epoch(result, batches.step + 1)

    def note_result(self, result: StepResult) -> None:
        """Begin the next epoch before a save, so that a run that resumes from it does not begin this one again."""
        self._end_epoch(result, result.step + 1)

    def _end_epoch(self, result: StepResult, next_step: int) -> None:
        # A result may come one step late. One from the previous epoch says nothing about this one.
        if result.exhausted and result.step >= self._first_step:
            self._begin_epoch(self.epoch + 1, next_step)

    def _begin_epoch(self, epoch: int, first_step: int) -> None:
        self.close()  # stops reading the epoch before
        self.epoch = epoch
        self._first_step = first_step
        self._last = None
        self._ended = False

    def _samples_on_all_ranks(self, micro_batches: list[MicroBatch]) -> int:
        """Return an estimate, which assumes that the other ranks have the same number of samples."""
        return sum(micro.num_samples for micro in micro_batches) * self.options.data_world.size

    def _as_padding(self, micro: MicroBatch) -> MicroBatch:
        """Return a copy that runs with weight 0. Its samples count elsewhere, so it has no ids."""
        return replace(micro, epoch=self.epoch, ids=(), padding=True)

    def _make_padding(self, micro_batches: list[MicroBatch]) -> None:
        """Turn micro-batches that collate emptied into padding, with the data of another one and weight 0."""
        empty = [micro for micro in micro_batches if is_empty(micro.data)]
        if not empty:
            return

        # One of this step, or the last one before it.
        nonempty = [micro for micro in (*micro_batches, self._last) if micro is not None and not is_empty(micro.data)]
        if not nonempty:
            raise UserError(
                f"collate dropped the first {sum(m.num_samples for m in micro_batches)} samples of this rank's stream",
                "a rank needs one micro-batch to repeat with weight 0 while the others train",
                "drop samples in the stream's __iter__, not in collate",
            )

        for micro in empty:
            micro.data = nonempty[0].data
            micro.padding = True


def comparable_copy(sample: Any) -> Any:
    """Return a copy of a stream's first sample for ranks to compare, or None if it cannot be copied or sent."""
    try:
        # A copy, because collate may change the sample in place.
        copied = copy.deepcopy(sample)
        check_sendable(copied, [0], "")
    except Exception:  # the user's class refuses one of the two
        return None

    return copied
