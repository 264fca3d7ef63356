"""Batch sources over datasets: `take` returns this rank's micro-batches of each global step.

The state of a map-style source is one integer, a position in the endless sequence of samples: epoch 0, then epoch 1,
and so on. Skipped samples (`tail=drop`, `skip`) keep their positions. Spans skipped after a rewind are saved too.
Streams are in the package streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, TensorDataset

from lockstep.config import DataConfig
from lockstep.data.length_balance import check_lengths, divide_by_length
from lockstep.data.loader import (
    CopyStream,
    Request,
    SampleReader,
    is_empty,
    prefetch_to_device,
    read_all,
    to_device,
)
from lockstep.data.samplers import Sampled, Sampler, make_sampler
from lockstep.data.samplers.sampler import OrderCache, checked_ids
from lockstep.data.samplers.shuffled import SequentialSampler, ShuffledSampler
from lockstep.data.samplers.torch_samplers import bind_sampler
from lockstep.data.source_options import SourceOptions
from lockstep.data.streams.cursor import has_state
from lockstep.data.streams.exact import ExactStreamSource
from lockstep.data.streams.shards import Shards
from lockstep.data.streams.strided import StreamSource
from lockstep.data.windows import Window, micro_slice, next_window, rank_range, steps_before
from lockstep.data.worker_copies import WorkerCopies, check_no_connection
from lockstep.errors import UserError
from lockstep.task import BatchSource, MicroBatch, StepBatches, StepResult

# How many samples `some_samples` returns, and how many ids `upcoming` compares after a resume.
SOME = 8
UPCOMING = 64


def open_source(data: Any, collate: Callable[[list[Any]], Any], options: SourceOptions) -> BatchSource:
    """Return a source over `data`, the return value of `Task.data()`.

    `data` is a dataset with `__getitem__`, optionally with a sampler (`Sampled`), a stream, or already a source.
    """
    if isinstance(data, BatchSource):
        _refuse_balance(data, options.config)
        _refuse_reading(data, options.config)
        return data

    if hasattr(data, "take") and hasattr(data, "commit"):
        raise UserError(
            f"a batch source must derive from lockstep.BatchSource; {type(data).__name__} does not",
            "the engine also calls methods for which that class has defaults",
            f"write class {type(data).__name__}(lockstep.BatchSource)",
        )

    if isinstance(data, Shards):
        _refuse_balance(data, options.config)
        _check_not_own(options.config)
        return ExactStreamSource(data, collate, options)

    # A dataset with its own sampler, a plain dataset, or a stream.
    data = bind_sampler(data, options.seed)
    dataset, sampler = (data.dataset, data.sampler) if isinstance(data, Sampled) else (data, None)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    _check_readable(dataset, is_stream, options.config)

    if not is_stream:
        reader = SampleReader(dataset, collate, options.seed, options.config.seed_samples)
        if sampler is None:
            sampler = make_sampler(len(dataset), options.seed, options.config.shuffle)
        elif not options.config.shuffle:
            raise UserError(
                f"data.shuffle=false has no effect: the training data has a sampler, {type(sampler).__name__}",
                "the order is the sampler's",
                "leave data.shuffle out; or return the dataset without the sampler",
            )

        lengths = None
        if options.config.balance == "length":
            lengths = check_lengths(data.known_lengths if isinstance(data, Sampled) else None, len(dataset))

        return MapSource(reader, sampler, options, lengths)

    if isinstance(data, Sampled):
        raise UserError(
            f"a sampler needs a dataset with __getitem__; it got a {type(dataset).__name__}",
            "",
            "return the stream alone, or a dataset with __getitem__ and __len__",
        )

    _refuse_balance(data, options.config)
    if options.config.workers and getattr(dataset, "num_workers", 0):
        raise UserError(
            f"data.workers={options.config.workers} and num_workers={dataset.num_workers} of the "
            f"{type(dataset).__name__} would nest worker processes",
            "a worker process cannot start worker processes of its own",
            "set data.workers=0, or leave num_workers out of the loader",
        )

    if options.config.resume == "reread":
        _check_not_own(options.config)
        return ExactStreamSource(Shards([dataset]), collate, options)

    if has_state(dataset) and options.config.sharding == "stride":
        return ExactStreamSource(Shards([dataset]), collate, options)

    return StreamSource(dataset, collate, options)


def _check_not_own(config: DataConfig) -> None:
    """Refuse a stream that resumes exactly and assigns its samples to ranks itself."""
    if config.sharding == "own":
        raise UserError(
            "data.sharding=own cannot be used with a stream that resumes exactly",
            "a stream that assigns its samples to ranks itself has a different position on each rank",
            "leave data.sharding out; or leave data.resume out, and return an iterable dataset instead of Shards",
        )


def _refuse_balance(data: Any, config: DataConfig) -> None:
    """Refuse to balance the lengths of a stream, which are not known in advance."""
    if config.balance != "none":
        raise UserError(
            f"data.balance={config.balance} needs a dataset with __getitem__; the training data is a "
            f"{type(data).__name__}",
            "a step is divided by the lengths of its samples, before they are read",
            "leave data.balance out, or pack the stream (lockstep.data.packing)",
        )


def _refuse_reading(data: BatchSource, config: DataConfig) -> None:
    """Refuse settings that say how samples are read: a source of the user's own reads them itself."""
    defaults = DataConfig()
    for key in ("shuffle", "workers", "resume", "sharding"):
        value = getattr(config, key)
        if value != getattr(defaults, key):
            raise UserError(
                f"data.{key}={str(value).lower()} has no effect: the training data is a batch source, "
                f"{type(data).__name__}",
                "a source chooses and reads its samples itself",
                f"leave data.{key} out",
            )


def _check_readable(data: Any, is_stream: bool, config: DataConfig) -> None:
    """Refuse data that cannot be read, and settings that are for other kinds of data."""
    if not hasattr(data, "__iter__" if is_stream else "__len__"):
        problem = "can neither be indexed nor iterated over" if is_stream else "has no __len__"
        raise UserError(
            f"the training data cannot be read: a {type(data).__name__} {problem}",
            "",
            "return a torch Dataset, a list, or an IterableDataset",
        )

    if config.workers and is_stream:
        check_no_connection(data)

    if config.resume == "reread" and not is_stream:
        raise UserError(
            f"data.resume=reread cannot be used with a {type(data).__name__} with __getitem__",
            "it is for streams; a dataset with __getitem__ resumes at the next sample without reading",
            "leave data.resume out",
        )

    if config.sharding == "own" and not is_stream:
        raise UserError(
            f"data.sharding=own cannot be used with a {type(data).__name__} with __getitem__",
            "it is for a stream that assigns its samples to the ranks itself",
            "return all samples on every rank, and leave data.sharding out",
        )


class MapSource(BatchSource):
    """A map-style dataset in the order of its sampler, which depends neither on the rank nor on the world size.

    A step is a window of consecutive positions. Its micro-batches are numbered over all ranks, and `take` gives this
    rank the ones that are its own. The position moves on in `commit` alone, so a step that did not end is taken
    again. A step that was skipped has ended.
    """

    can_skip = True

    def __init__(
        self, reader: SampleReader, sampler: Sampler, options: SourceOptions, lengths: np.ndarray | None = None
    ):
        self.reader = reader
        self.sampler = sampler
        self.samples = len(reader.dataset)

        # These give every sample once, so that their ids need no check. Anyone may write another sampler.
        own = isinstance(sampler, ShuffledSampler | SequentialSampler)
        self._is_permutation = own and len(sampler) == self.samples

        self.lengths = lengths  # (samples,) of the dataset, for data.balance=length
        self.options = options
        self.data_world = options.data_world
        self.length = len(sampler)
        self.position = 0  # where the next step begins, in the endless sequence of samples

        # Spans [start, stop) of positions that are left out because their step was skipped.
        self.skipped_spans = []

        # (first position, speeds of the ranks), oldest first. The last entry at or before a position applies to it.
        self._speeds: list[tuple[int, tuple[float, ...]]] = []

        # This rank's micro-batches, as (index, padding), of each window in progress, by the window's end position.
        self._assigned: dict[int, list[tuple[int, bool]]] = {}

        # An iterator over batches that are read and copied ahead, and the position of its next step.
        self._prefetched: Iterator[Any] | None = None
        self._prefetched_position = 0
        self._padding_batch: Any = None  # runs in place of a micro-batch that collate emptied

        # Detects changes of the dataset that its worker processes would not see.
        watches = options.config.workers and options.watches_dataset
        self._copies = WorkerCopies(reader.dataset) if watches else None

        self._divisions = OrderCache()  # the last windows that were divided by length

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step. Iterating over them reads them."""
        # In every step, because user code may change the dataset at any time.
        if self._copies:
            self._copies.check()

        window = self._window(self.position)
        after = self._end_position(window)
        assigned = self._assign(window)
        return StepBatches(
            len(assigned),
            self._load(window, assigned),
            window.size,
            count_all_ranks=self._count(window),
            span=(after - window.size, after),
        )

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        assert batches.span is not None
        self.position = batches.span[1]
        self._assigned.pop(self.position, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for all ranks: it does not depend on them."""
        return {
            "position": self.position,
            "length": self.length,
            "skipped_spans": [list(span) for span in self.skipped_spans],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, on any number of ranks."""
        if state["length"] != self.length:
            raise UserError(
                f"an epoch has {self.length} samples, but had {state['length']} when the position was saved",
                f"the dataset has {self.samples} samples, and an epoch of its {type(self.sampler).__name__} "
                f"{self.length}",
                "resume with the same dataset and the same sampler, or start a new run",
            )

        # Prefetched batches belong to the old position.
        self.position = int(state["position"])
        self.skipped_spans = [(int(start), int(stop)) for start, stop in state["skipped_spans"]]
        self._prefetched = None
        self._assigned.clear()

    def some_samples(self) -> list[Any]:
        """Return a few samples, evenly spread over the dataset, each as a batch of one."""
        ids = {index * len(self.reader.dataset) // SOME for index in range(SOME)}
        with self.reading_here():
            return [self.reader(Request(0, [index])) for index in sorted(ids)]

    def largest_input(self) -> Tensor | None:
        """Return the largest tensor of the first sample, or None if it must not be read before the workers start."""
        # A dataset may open files for its first sample, which forked workers would share.
        if self.options.config.workers and not isinstance(self.reader.innermost, TensorDataset | list | tuple):
            return None

        try:
            leaves = tree_leaves(self.reader.samples(Request(0, [0])))
            tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
        except Exception:  # the first step will report it
            return None

        return max(tensors, key=Tensor.numel, default=None)

    def read_again(self, micro: MicroBatch) -> Any:
        """Read a micro-batch in this process, to compare it with what a worker read. None if samples are not seeded."""
        if not (self.options.config.workers and self.options.config.seed_samples):
            return None

        with self.reading_here():
            return self.reader.read_again(Request(micro.epoch, micro.ids))

    def reading_here(self) -> AbstractContextManager[None]:
        """Return a context for reading in this process: changes that reading makes to the dataset are ignored."""
        return self._copies.ignore_changes() if self._copies else nullcontext()

    def next_request(self, count: int, beyond_step: bool = False) -> Request:
        """Return a request for up to `count` next samples, the same on every rank.

        It does not go beyond the end of the step, or of the epoch if `beyond_step` is true.
        """
        window = self._window(self.position)
        stop = min(window.start + count, self.length if beyond_step else window.stop)
        return Request(window.epoch, self._ids(window.epoch, window.start, stop).tolist())

    def start_workers(self) -> None:
        """Start the worker processes, if there are any.

        Call it before this process reads a sample: a dataset may open files for its first sample, which forked workers
        would share.
        """
        if self.options.config.workers and self._prefetched is None:
            self._prefetched = self._start_reading()
            self._prefetched_position = self.position

    def close(self) -> None:
        self._prefetched = None  # ends the worker processes

    def upcoming(self) -> list[Any]:
        """Return the epoch and the ids of the next samples. A resumed run must have the same, at any batch size."""
        # Only up to the end of the epoch: where the next one begins depends on the batch size.
        request = self.next_request(UPCOMING, beyond_step=True)
        return [request.epoch, *request.ids]

    def skip(self, span: tuple[int, int]) -> None:
        """Leave these positions out from now on, because their step was skipped."""
        self.skipped_spans = sorted({*self.skipped_spans, span})

    def assign_by(self, speeds: Sequence[float], position: int = 0) -> None:
        """Assign micro-batches to the ranks by their `speeds` from `position` on.

        All ranks must call it with the same arguments, before any of them has read up to `position`.
        """
        assert position >= self.assigned_until
        self._speeds.append((position, tuple(speeds)))

    @property
    def steps_counted(self) -> int:
        """How many steps of the present size lead to the position, without those whose spans are left out.

        It is the number of steps done, unless the run was resumed with another batch size.
        """
        left_out = sum(stop <= self.position for _, stop in self.skipped_spans)
        return steps_before(self.position, self.length, self.options.global_batch, self.options.tail) - left_out

    @property
    def assigned_until(self) -> int:
        """Up to this position the assignment to ranks can no longer change: workers may already be reading."""
        return max(self._assigned, default=self.position)

    # ---- choosing samples ----

    def _window(self, position: int) -> Window:
        """Return the window at a position, without the skipped spans."""
        for start, stop in self.skipped_spans:
            if start <= position < stop:
                position = stop

        window = next_window(position, self.length, self.options.global_batch, self.options.tail)
        if not self.skipped_spans:
            return window

        # With `tail=drop` the window may begin in the next epoch, in a skipped span there.
        begin = self._end_position(window) - window.size
        if any(start <= begin < stop for start, stop in self.skipped_spans):
            return self._window(begin)

        # After a resume with a different batch size, a window may reach into a skipped span.
        for start, _ in self.skipped_spans:
            offset = start - window.epoch * self.length
            if window.start < offset < window.stop:
                window = Window(window.epoch, window.start, offset)

        return window

    def _ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        if self._is_permutation:
            return self.sampler.ids(epoch, start, stop)
        return checked_ids(self.sampler, epoch, start, stop, self.samples)

    def _end_position(self, window: Window) -> int:
        return window.epoch * self.length + window.stop

    def _count(self, window: Window) -> int:
        return -(-window.size // self.options.micro_batch)

    def _assign(self, window: Window) -> list[tuple[int, bool]]:
        """Return (index, padding) of this rank's micro-batches of a window. A rank without work runs one as padding.

        A window is assigned once, when it is read ahead or taken, and stays so until its step has ended.
        """
        after = self._end_position(window)
        if after in self._assigned:
            return self._assigned[after]

        count = self._count(window)
        rank, size = self.data_world.rank, self.data_world.size

        if self.options.interleaved:
            local = range(rank, count, size)
        else:
            local = rank_range(count, rank, size, self._speeds_at(after - window.size))

        assigned = [(index, False) for index in local]

        # Padding repeats a micro-batch with weight 0, since collectives need every rank.
        needed = -(-count // size) if self.options.collective_forwards else 1
        if len(assigned) < needed:
            assigned += [(local[0] if local else 0, True)] * (needed - len(assigned))

        self._assigned[after] = assigned
        return assigned

    def _speeds_at(self, position: int) -> tuple[float, ...] | None:
        """Return the speeds of the ranks that apply at a position, if there are any."""
        if not self._speeds:
            return None
        return next((speeds for first, speeds in reversed(self._speeds) if first <= position), None)

    def _micro_batch(self, window: Window, index: int, padding: bool) -> MicroBatch:
        """Return a micro-batch of a window without its data: which samples it has, and its place in the step."""
        if self.lengths is not None:
            parts = self._divisions.get(window, lambda: self._divide(window))
            ids, first = parts[index], sum(map(len, parts[:index]))
            return MicroBatch(None, index, len(ids), window.epoch, ids, padding, first)

        start, stop = micro_slice(window, self.options.micro_batch, index)
        ids = self._ids(window.epoch, start, stop)
        return MicroBatch(None, index, stop - start, window.epoch, ids, padding, start - window.start)

    def _divide(self, window: Window) -> list[np.ndarray]:
        """Return the ids of each micro-batch of a window, divided by length."""
        assert self.lengths is not None
        ids = self._ids(window.epoch, window.start, window.stop)
        return [ids[places] for places in divide_by_length(self.lengths[ids], self._count(window))]

    # ---- reading samples ----

    def _load(self, window: Window, assigned: list[tuple[int, bool]]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a window with their data. None of them is kept here."""
        # Without workers or a GPU, prefetching would overlap with nothing.
        prefetches = self.options.config.workers or self.options.device.type == "cuda"
        batches = self._prefetch(window) if prefetches else None
        for index, padding in assigned:
            micro = self._micro_batch(window, index, padding)
            micro.data = self.reader(Request(window.epoch, micro.ids)) if batches is None else next(batches)

            # A batch that collate has emptied still takes part in the step, with weight 0.
            if is_empty(micro.data):
                self._make_padding(micro)

            yield micro

    def _make_padding(self, micro: MicroBatch) -> None:
        """Turn a micro-batch that collate emptied into padding: its weight is 0, but every rank must run it."""
        if self.options.exact:
            raise UserError(
                f"exact=true needs samples in every micro-batch, and collate dropped all of {micro.ids.tolist()}",
                "the order of additions follows the micro-batches",
                "leave such samples out of the dataset, or leave exact out",
            )

        if self._padding_batch is None:
            with self.reading_here():
                batch = self.reader.nonempty_batch(self.options.micro_batch)
            self._padding_batch = to_device(batch, self.options.device)

        micro.data, micro.padding = self._padding_batch, True

    def _prefetch(self, window: Window) -> Iterator[Any]:
        """Return an endless iterator over batches on the device, from the current position on."""
        # Continue the iterator of the last step, except at the start and after a resume.
        if self._prefetched is None or self._prefetched_position != self.position:
            self._prefetched = self._start_reading()
        self._prefetched_position = self._end_position(window)
        return self._prefetched

    def _start_reading(self) -> Iterator[Any]:
        """Start to read ahead from the current position."""
        config = self.options.config
        if self._copies:
            self._copies.record()

        requests = self._requests(self.position)
        batches = read_all(self.reader, requests, config.workers, config.prefetch, self.options.pins_memory)

        # On a CPU there is no copy to overlap.
        if self.options.device.type != "cuda":
            return batches

        return prefetch_to_device(batches, CopyStream(self.options.device))

    def _requests(self, position: int) -> Iterator[Request]:
        """Yield requests for this rank's micro-batches from a position on, endlessly."""
        while True:
            window = self._window(position)
            position = self._end_position(window)
            for index, padding in self._assign(window):
                yield Request(window.epoch, self._micro_batch(window, index, padding).ids)
