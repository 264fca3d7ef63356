"""Batch sources over datasets: they give this rank its micro-batches of each global step.

The state of a map-style source is one integer, its position in the endless order of samples: epoch 0, then epoch 1,
and so on. Skipped samples (`tail=drop`, `pass_over`) keep their positions. Spans skipped after a rewind are saved too.
Streams, which have no position, are in streams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from lockstep.config import DataConfig
from lockstep.data.loader import (
    Request,
    SampleReader,
    SideStream,
    check_no_connection,
    one_ahead,
    plain_attributes,
    read_all,
    to_device,
)
from lockstep.data.sample_errors import is_empty
from lockstep.data.samplers import Sampled, Sampler, make_sampler
from lockstep.data.shard import Window, micro_slice, next_window, rank_range
from lockstep.data.source_options import SourceOptions
from lockstep.data.streams import StreamSource
from lockstep.errors import UserError
from lockstep.task import BatchSource, MicroBatch, StepBatches, StepResult


def open_source(data: Any, collate: Callable[[list[Any]], Any], options: SourceOptions) -> BatchSource:
    """Return the source for what `Task.data()` returned.

    `data` is a dataset with `__getitem__`, one with its own sampler (`Sampled`), a stream, or already a source.
    """
    if isinstance(data, BatchSource):
        return data
    if isinstance(data, DataLoader):
        raise UserError(
            "the training data must be a dataset; data() returned a torch DataLoader",
            "it has already decided batch size, order and sharding",
            "return its dataset, and set global_batch, data.shuffle and data.workers in the configuration; its "
            "collate_fn becomes Task.collate, and a custom sampler Sampled(dataset, sampler): see docs/data.md",
        )

    dataset, sampler = (data.dataset, data.sampler) if isinstance(data, Sampled) else (data, None)
    streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _check_readable(dataset, streams, options.config)

    if not streams:
        reader = SampleReader(dataset, collate, options.seed, options.config.seed_samples)
        if sampler is None:
            sampler = make_sampler(len(dataset), options.seed, options.config.shuffle)
        return MapSource(reader, sampler, options)

    if isinstance(data, Sampled):
        raise UserError(
            f"a sampler needs a dataset with __getitem__; it was given a {type(dataset).__name__}",
            "",
            "return the stream alone, or a dataset with __getitem__ and __len__",
        )
    return StreamSource(dataset, collate, options)


def _check_readable(data: Any, streams: bool, config: DataConfig) -> None:
    if not (hasattr(data, "__iter__") if streams else hasattr(data, "__len__")):
        lack = "can neither be indexed nor iterated over" if streams else "has no __len__"
        raise UserError(
            f"the training data cannot be read: a {type(data).__name__} {lack}",
            "",
            "return a torch Dataset, a list, or an IterableDataset",
        )

    if config.workers and streams:
        check_no_connection(data)
    if config.sharding == "own" and not streams:
        raise UserError(
            f"data.sharding=own cannot be used with a {type(data).__name__} with __getitem__",
            "it is for a stream that assigns its samples to the ranks by itself",
            "return all samples on every rank, and leave data.sharding out",
        )


class MapSource:
    """A map-style dataset in the order of its sampler, which depends neither on the rank nor on the world size."""

    def __init__(self, reader: SampleReader, sampler: Sampler, options: SourceOptions):
        self.reader = reader
        self.sampler = sampler
        self.options = options
        self.data_world = options.data_world
        self.length = len(sampler)
        self.position = 0  # of the next step, in the endless order of samples

        # Positions (start, stop) that are skipped from now on, because they spoiled a step.
        self.passed_over: list[tuple[int, int]] = []

        # Micro-batches up to this position are assigned for good: workers may already be reading them.
        self.assigned_until = 0

        # (first position, speeds of the ranks), oldest first. The last entry at or before a position applies to it.
        self._assignments: list[tuple[int, tuple[float, ...]]] = []

        # Batches that are read, or sent to the device, before their turn; and the position of the next one.
        self._ahead: Iterator[Any] | None = None
        self._ahead_at = 0
        self._filler: Any = None  # takes the place of an emptied micro-batch
        self._held_by_workers: dict[str, Any] = {}  # see `plain_attributes`

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step. They are read while they are iterated over."""
        window = self._window(self.position)
        after = self._after(window)
        self.assigned_until = max(self.assigned_until, after)
        micros = self._micro_batches(window)
        return StepBatches(
            len(micros),
            self._deliver(window, micros),
            window.size,
            total=self._count(window),
            span=(after - window.size, after),
        )

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        assert batches.span is not None
        self.position = batches.span[1]

    def some_samples(self, most: int = 8) -> list[Any]:
        """Return a few samples from all over the dataset, each as a batch of one."""
        ids = {index * len(self.reader.dataset) // most for index in range(most)}
        with self.reading_here():
            return [self.reader(Request(0, [index])) for index in sorted(ids)]

    def largest_input(self) -> Tensor | None:
        """Return the largest tensor of the first sample, or None where it cannot be read before the workers start."""
        # What a dataset opens for its first sample must not be shared with worker processes.
        innermost = self.reader.dataset
        while isinstance(innermost, Subset):
            innermost = innermost.dataset
        if self.options.config.workers and not isinstance(innermost, TensorDataset | list | tuple):
            return None
        try:
            leaves = tree_leaves(self.reader.samples(Request(0, [0])))
            tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
        except Exception:  # the first step reports it
            return None
        return max(tensors, key=Tensor.numel, default=None)

    def read_again(self, micro: MicroBatch) -> Any:
        """Return a micro-batch as this process reads it, to compare with what a worker process read."""
        with self.reading_here():
            return self.reader.read_again(Request(micro.epoch, micro.ids))

    @contextmanager
    def reading_here(self) -> Iterator[None]:
        """Read in this process beside the worker processes: a dataset may keep what it read last, or count."""
        changed_before = {name: self._held_by_workers[name] for name in self._changed()}
        try:
            yield
        finally:
            self._note_dataset()
            self._held_by_workers |= changed_before

    def check_dataset(self) -> None:
        """Refuse a dataset that was changed in this process: its worker processes would read on from the old one."""
        for name in self._changed():
            raise UserError(
                f"the dataset's {name} was changed after its worker processes had started, and they do not see it",
                "they have copies of the dataset, and read ahead",
                "type data.workers=0; or leave the dataset as it is: what depends on the epoch can be drawn from "
                "torch, numpy or random, which are seeded by epoch and sample. If it does not matter, type "
                "checks.first_batch=false",
            )

    def _changed(self) -> Iterator[str]:
        """Yield the names of attributes that are others than when they were noted."""
        now = plain_attributes(self.reader.dataset) if self._held_by_workers else {}
        for name, old in self._held_by_workers.items():
            new = now.get(name)
            if new is not None and new is not old and not (isinstance(old, int | float | str) and old == new):
                yield name

    def _note_dataset(self) -> None:
        """Note what the dataset holds, to compare it later."""
        if self.options.config.workers:
            self._held_by_workers = plain_attributes(self.reader.dataset)

    @property
    def workers_must_match(self) -> bool:
        """Whether workers and rank must read identical samples; true when each sample is seeded."""
        return self.options.config.workers > 0 and self.options.config.seed_samples

    def next_request(self, most: int, beyond_step: bool = False) -> Request:
        """Return a request for the next samples, the same on every rank.

        It ends with the step at the latest, or with the epoch if it may go `beyond_step`.
        """
        window = self._window(self.position)
        stop = min(window.start + most, self.length if beyond_step else window.stop)
        return Request(window.epoch, self.sampler.ids(window.epoch, window.start, stop).tolist())

    def start_workers(self) -> None:
        """Start the worker processes, if there are any.

        Called before this process reads: what a dataset opens for its first sample must not be shared with them.
        """
        if self.options.config.workers and self._ahead is None:
            self._ahead = self._start_reading()
            self._ahead_at = self.position

    def close(self) -> None:
        self._ahead = None  # which ends the worker processes

    def upcoming(self, most: int = 64) -> list[Any]:
        """Return the epoch and the ids of the next samples. A resumed run must find the same, whatever its batch."""
        # Only up to the end of the epoch: what follows depends on the batch.
        request = self.next_request(most, beyond_step=True)
        return [request.epoch, *request.ids]

    def pass_over(self, span: tuple[int, int]) -> None:
        """Never train on these positions again: they spoiled a step."""
        self.passed_over = sorted({*self.passed_over, span})

    def assign_by(self, speeds: Sequence[float], position: int = 0) -> None:
        """Assign micro-batches to the ranks by their `speeds` from `position` on.

        All ranks must call it, before any of them has read that far.
        """
        assert position >= self.assigned_until
        self._assignments.append((position, tuple(speeds)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "length": self.length,
            "passed_over": [list(span) for span in self.passed_over],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["length"] != self.length:
            raise UserError(
                f"the dataset has {self.length} samples, but had {state['length']} when the position was saved",
                "",
                "give the run its old dataset back, or start a new run",
            )

        # The batches that were read ahead are those of the old position.
        self.position = int(state["position"])
        self.passed_over = [(int(start), int(stop)) for start, stop in state["passed_over"]]
        self._ahead = None
        self.assigned_until = self.position

    # ---- which samples ----

    def _window(self, position: int) -> Window:
        """Return the window at a position, without the samples that are passed over."""
        for start, stop in self.passed_over:
            if start <= position < stop:
                position = stop
        window = next_window(position, self.length, self.options.global_batch, self.options.tail)

        # After a resume with another batch, a window may reach into the samples that are passed over.
        for start, _ in self.passed_over:
            offset = start - window.epoch * self.length
            if window.start < offset < window.stop:
                window = Window(window.epoch, window.start, offset)
        return window

    def _after(self, window: Window) -> int:
        return window.epoch * self.length + window.stop

    def _count(self, window: Window) -> int:
        return -(-window.size // self.options.micro_batch)

    def _micro_batches(self, window: Window) -> list[MicroBatch]:
        """Return this rank's micro-batches, still without data. A rank without work runs one as padding.

        Each step calls it twice if batches are read ahead: first `_requests`, then `take`. `_deliver` pairs the batches
        of the one with the micro-batches of the other by their order alone, so both calls must return the same. They
        do, because the callers move `assigned_until`, before which `assign_by` changes nothing.
        """
        count = self._count(window)
        rank, size = self.data_world.rank, self.data_world.size

        if self.options.interleaved:
            own = range(rank, count, size)
        else:
            begin = window.epoch * self.length + window.start
            speeds = next((speeds for first, speeds in reversed(self._assignments) if first <= begin), None)
            own = rank_range(count, rank, size, speeds)

        # Padding repeats a micro-batch with weight 0, since collectives need every rank.
        wanted = -(-count // size) if self.options.collective_forwards else 1
        padding = [own[0] if own else 0] * (wanted - len(own))
        micros = [self._micro_batch(window, index, padding=False) for index in own]
        return micros + [self._micro_batch(window, index, padding=True) for index in padding]

    def _micro_batch(self, window: Window, index: int, padding: bool) -> MicroBatch:
        start, stop = micro_slice(window, self.options.micro_batch, index)
        ids = self.sampler.ids(window.epoch, start, stop)
        return MicroBatch(None, index, stop - start, window.epoch, ids, padding, start - window.start)

    # ---- reading them ----

    def _deliver(self, window: Window, micros: list[MicroBatch]) -> Iterator[MicroBatch]:
        # Without workers or a GPU, reading ahead would overlap with nothing.
        reads_ahead = self.options.config.workers or self.options.device.type == "cuda"
        ahead = self._read_ahead(window) if reads_ahead else None
        for micro in micros:
            micro.data = next(ahead) if ahead is not None else self.reader(Request(window.epoch, micro.ids))
            if is_empty(micro.data):
                self._fill(micro)
            yield micro

    def _fill(self, micro: MicroBatch) -> None:
        """Make padding of a micro-batch that a collate has emptied: it has weight 0, but every rank must run it."""
        if self.options.exact:
            raise UserError(
                f"exact=true needs samples in every micro-batch, and collate left none of {micro.ids.tolist()}",
                "the order of additions follows the micro-batches",
                "leave such samples out of the dataset, or leave exact out",
            )
        if self._filler is None:
            with self.reading_here():
                filler = self.reader.some_batch(self.options.micro_batch)
            self._filler = to_device(filler, self.options.device)
        micro.data, micro.padding = self._filler, True

    def _read_ahead(self, window: Window) -> Iterator[Any]:
        """Return batches on the device, an endless series from the present position on."""
        # The series of the last step continues, except at the start and after a resume.
        if self._ahead is None or self._ahead_at != self.position:
            self._ahead = self._start_reading()
        self._ahead_at = self._after(window)
        return self._ahead

    def _start_reading(self) -> Iterator[Any]:
        config = self.options.config
        self._note_dataset()
        requests = self._requests(self.position)
        batches = read_all(self.reader, requests, config.workers, config.prefetch, self.options.pins_memory)

        # On a CPU there is no copy to overlap.
        return one_ahead(batches, SideStream(self.options.device)) if self.options.device.type == "cuda" else batches

    def _requests(self, position: int) -> Iterator[Request]:
        """Yield a request for each of this rank's micro-batches from a position on, without end."""
        while True:
            window = self._window(position)
            position = self._after(window)
            self.assigned_until = max(self.assigned_until, position)
            for micro in self._micro_batches(window):
                yield Request(window.epoch, micro.ids)
