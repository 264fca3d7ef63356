"""Divides an epoch into windows (one per optimizer step), and a window into micro-batches for the ranks.

Windows and micro-batches do not depend on the number of ranks. Each rank gets a contiguous range of micro-batches.
A *position* counts the samples of all epochs in order: epoch 0, then epoch 1, and so on, without an end. An *offset*
counts those of one epoch. `StepOrder` puts all of this together for a run; its state is one position. Nothing here
reads a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.data.length_balance import divide_by_length
from lockstep.data.samplers import Sampler
from lockstep.data.samplers.sampler import checked_ids
from lockstep.data.samplers.shuffled import OrderCache, SequentialSampler, ShuffledSampler
from lockstep.errors import UserError
from lockstep.runtime.world import World
from lockstep.task import MicroBatch

if TYPE_CHECKING:
    from lockstep.data.dataset_source import SourceOptions


class Window(NamedTuple):
    """The samples of one global step: offsets [start, stop) in the order of `epoch`."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def next_window(position: int, epoch_length: int, batch: int, tail: str) -> Window:
    """Return the first window at or after `position`, which counts the samples of all epochs in order.

    A window never crosses the end of an epoch: the last window is short (`tail="short"`) or dropped (`tail="drop"`).
    Dropped samples keep their positions.
    """
    epoch, start = divmod(position, epoch_length)

    # No whole window is left in this epoch.
    if tail == "drop" and start + batch > epoch_length:
        epoch += 1
        start = 0

    return Window(epoch, start, min(start + batch, epoch_length))


def steps_before(position: int, epoch_length: int, batch: int, tail: str) -> int:
    """Return how many windows of size `batch` lead to `position`.

    After a resume with another batch size the position may lie within a window of the new size. Such a window counts,
    if the rest of its epoch has one window less.
    """
    # With short tails a begun window counts as one: rounding up, by adding batch - 1 before the division.
    epoch, start = divmod(position, epoch_length)
    whole = epoch_length if tail == "drop" else epoch_length + batch - 1
    return epoch * (whole // batch) + whole // batch - (whole - start) // batch


def micro_slice(window: Window, micro_batch_size: int, index: int) -> tuple[int, int]:
    """Return the offsets [start, stop) of one micro-batch of a window. The last micro-batch may be short."""
    start = window.start + index * micro_batch_size
    return start, min(start + micro_batch_size, window.stop)


def rank_range(count: int, rank: int, size: int, speeds: Sequence[float] | None = None) -> range:
    """Divide `count` items among the ranks and return the contiguous range for `rank`.

    Without `speeds` the ranges differ in length by at most one.
    """
    if speeds is None:
        return range(count * rank // size, count * (rank + 1) // size)

    # Every rank computes the counts of all ranks, so no communication is needed.
    counts = rank_counts(count, tuple(speeds))
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


def rank_share(count: int, world: World, round_robin: bool = False, speeds: Sequence[float] | None = None) -> range:
    """Return the indices of this rank's micro-batches, of the `count` of a step: round-robin, or a contiguous range."""
    return range(world.rank, count, world.size) if round_robin else rank_range(count, world.rank, world.size, speeds)


def padding_count(count: int, local: int, world: World, collective_forwards: bool) -> int:
    """Return how many micro-batches a rank with `local` of the `count` of a step runs as padding, with weight 0.

    If forwards are collective every rank runs as many as the others, or else at least one, for the all-reduce.
    """
    needed = -(-count // world.size) if collective_forwards else 1
    return max(0, needed - local)


@lru_cache(maxsize=64)
def rank_counts(count: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many of `count` equal items each rank gets, so that the slowest rank finishes as early as possible.

    Items are assigned one after another, each to the rank that would finish it first; ties go to the lowest rank.
    Every rank gets at least one item if there are enough: without one, it would have to run padding anyway.
    """
    # One for each rank to begin with, if there are enough.
    minimum = int(count >= len(speeds))
    counts = [minimum] * len(speeds)

    # A heap of (time at which the rank would finish its next item, rank).
    finishing = [((minimum + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapify(finishing)

    for _ in range(count - sum(counts)):
        rank = finishing[0][1]
        counts[rank] += 1
        heapreplace(finishing, ((counts[rank] + 1) / speeds[rank], rank))

    return tuple(counts)


# ---- one run ----


class StepOrder:
    """The order of a map-style dataset: which samples each step has, and which of its micro-batches are this rank's.

    A step is the window at its position. Skipped samples (`tail=drop`, `skip`) keep their positions. Spans skipped
    after a rewind are saved with the position.
    """

    def __init__(
        self, sampler: Sampler, dataset_length: int, options: SourceOptions, sample_lengths: np.ndarray | None = None
    ):
        """`sample_lengths` (dataset_length,): for data.balance=length."""
        self.sampler = sampler
        self.dataset_length = dataset_length
        self.epoch_length = len(sampler)  # a sampler may leave samples out, or repeat some
        self.sample_lengths = sample_lengths
        self.options = options
        self.data_world = options.data_world
        self.position = 0  # where the next step begins

        # Our own samplers give every sample once, so their ids need no check. Those of users do, also if they derive
        # theirs from ours.
        own = type(sampler) in (ShuffledSampler, SequentialSampler)
        self._is_permutation = own and self.epoch_length == dataset_length

        # Spans [start, stop) of positions that are left out because their step was skipped.
        self.skipped_spans: list[tuple[int, int]] = []

        # (position, speeds of the ranks from there on), oldest first.
        self._speeds: list[tuple[int, tuple[float, ...]]] = []

        # This rank's micro-batches of each window in progress, without data, by the window's end position.
        self._assigned: dict[int, list[MicroBatch]] = {}

        self._divisions = OrderCache()  # the last windows that were divided by length

    # ---- the position ----

    def advance(self, position: int) -> None:
        """Move past a step that has ended."""
        self.position = position
        self._assigned.pop(position, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for all ranks: it does not depend on them."""
        return {
            "position": self.position,
            "length": self.epoch_length,
            "skipped_spans": [list(span) for span in self.skipped_spans],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, on any number of ranks."""
        if state["length"] != self.epoch_length:
            raise UserError(
                f"an epoch has {self.epoch_length} samples, but had {state['length']} when the position was saved",
                f"the dataset has {self.dataset_length} samples, and an epoch of its {type(self.sampler).__name__} "
                f"{self.epoch_length}",
                "resume with the same dataset and the same sampler, or start a new run",
            )

        self.position = int(state["position"])
        self.skipped_spans = [(int(start), int(stop)) for start, stop in state["skipped_spans"]]
        self._assigned.clear()

    def skip(self, span: tuple[int, int]) -> None:
        """Leave these positions out from now on, because their step was skipped."""
        self.skipped_spans = sorted({*self.skipped_spans, span})

    @property
    def steps_counted(self) -> int:
        """The number of steps of the current size that lead to the position, without those whose spans are left out.

        It is the number of steps done, unless the run was resumed with another batch size.
        """
        left_out = sum(stop <= self.position for _, stop in self.skipped_spans)
        return steps_before(self.position, self.epoch_length, self.options.global_batch, self.options.tail) - left_out

    # ---- the samples of a step ----

    def window(self, position: int) -> Window:
        """Return the window at a position, without the skipped spans."""
        options = self.options
        if not self.skipped_spans:
            return next_window(position, self.epoch_length, options.global_batch, options.tail)

        position = self._after_skipped(position)
        window = next_window(position, self.epoch_length, options.global_batch, options.tail)

        # `tail=drop` may have moved on to the next epoch, and into a skipped span there.
        begin = self.end_position(window) - window.size
        if self._after_skipped(begin) != begin:
            return self.window(begin)

        # A span of a step of another size, from before a resume, may begin within the window, which then ends there.
        offsets = [start - window.epoch * self.epoch_length for start, _ in self.skipped_spans]
        stop = min([window.stop, *(offset for offset in offsets if offset > window.start)])
        return Window(window.epoch, window.start, stop)

    def _after_skipped(self, position: int) -> int:
        """Return the first position from here on that is in no skipped span."""
        # Spans are sorted, so one pass also leads out of spans that follow each other.
        for start, stop in self.skipped_spans:
            if start <= position < stop:
                position = stop

        return position

    def end_position(self, window: Window) -> int:
        """Return the position after a window, counted over all epochs."""
        return window.epoch * self.epoch_length + window.stop

    def count(self, window: Window) -> int:
        """Return the number of micro-batches of a window, on all ranks together."""
        return -(-window.size // self.options.micro_batch_size)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the ids (stop - start,) of the samples at the offsets [start, stop) of an epoch."""
        if self._is_permutation:
            return self.sampler.ids(epoch, start, stop)
        return checked_ids(self.sampler, epoch, start, stop, self.dataset_length)

    def next_ids(self, count: int, beyond_step: bool = False) -> tuple[int, list[int]]:
        """Return the epoch and the ids of the next samples, at most `count`, the same on every rank.

        They do not go beyond the end of the step, or of the epoch if `beyond_step` is true.
        """
        # A window lies in one epoch, and so do these samples.
        window = self.window(self.position)
        stop = min(window.start + count, self.epoch_length if beyond_step else window.stop)
        return window.epoch, self.ids(window.epoch, window.start, stop).tolist()

    def recent_ids(self, count: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (epoch, ids) for the samples of the next step, and for up to `count` samples that came before them.

        The newest epoch comes first; the ids of each epoch are in their order.
        """
        window = self.window(self.position)
        start = window.start - count
        yield window.epoch, self.ids(window.epoch, max(0, start), window.stop).tolist()

        # The rest are the last samples of the previous epoch.
        if start < 0 < window.epoch:
            stop = self.epoch_length
            yield window.epoch - 1, self.ids(window.epoch - 1, max(0, stop + start), stop).tolist()

    def _micro_batch(self, window: Window, index: int, padding: bool = False) -> MicroBatch:
        """Return a micro-batch of a window without its data: which samples it has, and its place in the step."""
        if self.sample_lengths is not None:
            # It has no place in the global batch: its samples lie anywhere in it.
            ids = self._divisions.get(window, lambda: self._divide(window))[index]
            return MicroBatch(None, index, len(ids), window.epoch, ids, padding)

        start, stop = micro_slice(window, self.options.micro_batch_size, index)
        ids = self.ids(window.epoch, start, stop)
        return MicroBatch(None, index, stop - start, window.epoch, ids, padding, start - window.start)

    def _divide(self, window: Window) -> list[np.ndarray]:
        """Return the ids of each micro-batch of a window, divided by length."""
        assert self.sample_lengths is not None
        ids = self.ids(window.epoch, window.start, window.stop)
        return [ids[places] for places in divide_by_length(self.sample_lengths[ids], self.count(window))]

    # ---- the ranks ----

    def micro_batches(self, window: Window) -> list[MicroBatch]:
        """Return this rank's micro-batches of a window, without their data. A rank without work runs one as padding.

        A window is assigned once, when it is prefetched or taken, and stays so until its step has ended. The list is
        kept until then, so the caller must not put data into it.
        """
        after = self.end_position(window)
        if after in self._assigned:
            return self._assigned[after]

        # By the speeds that apply where the window begins.
        count = self.count(window)
        begin = window.epoch * self.epoch_length + window.start
        speeds = next((speeds for since, speeds in reversed(self._speeds) if since <= begin), None)
        local = rank_share(count, self.data_world, self.options.round_robin, speeds)

        # Padding repeats a micro-batch, since collectives need every rank.
        padding = padding_count(count, len(local), self.data_world, self.options.collective_forwards)
        repeated = local[0] if local else 0
        assigned = [self._micro_batch(window, index) for index in local]
        assigned += [self._micro_batch(window, repeated, padding=True) for _ in range(padding)]
        self._assigned[after] = assigned
        return assigned

    def assign_by(self, speeds: Sequence[float], position: int = 0) -> None:
        """Assign micro-batches to the ranks by their `speeds` from `position` on.

        All ranks must call it with the same arguments, before any of them has read up to `position`.
        """
        assert position >= self.assigned_until
        self._speeds.append((position, tuple(speeds)))

    @property
    def assigned_until(self) -> int:
        """Up to this position the assignment to ranks can no longer change: workers may already be reading."""
        return max(self._assigned, default=self.position)
