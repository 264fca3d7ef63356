"""Batch sources over datasets: they give this rank its micro-batches of each global step.

The state of a map-style source is one integer, its position in the endless order of samples: epoch 0, then epoch 1,
and so on. Skipped samples (`tail=drop`, `pass_over`) keep their positions. Spans skipped after a rewind are saved too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lockstep.config import DataConfig
from lockstep.data.loader import (
    Request,
    SampleReader,
    SideStream,
    collate_named,
    one_ahead,
    open_files,
    pin,
    read_all,
    start_worker,
    to_device,
)
from lockstep.data.sample_errors import Refusal, check_sendable, is_empty, name_samples, unless_refused
from lockstep.data.samplers import Sampled, Sampler, make_sampler
from lockstep.data.shard import Window, deal, micro_slice, next_window
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.runtime.world import World
from lockstep.task import BatchSource, MicroBatch, StepBatches, StepResult, Task


@dataclass(frozen=True)
class SourceOptions:
    """What a source over a dataset must know: the shape of a step, the configuration, and this rank."""

    global_batch: int
    micro_batch: int
    tail: str  # what happens to the last window of an epoch, see `next_window`
    config: DataConfig
    seed: int
    data_world: World  # the ranks that train on different samples, and which of them this one is
    device: torch.device
    interleaved: bool = False  # ranks take micro-batches in turns, instead of a range each
    collective_forwards: bool = False  # all ranks run the same number of micro-batches: some of weight 0 are added
    exact: bool = False

    @property
    def pins_memory(self) -> bool:
        pin_memory = self.config.pin_memory
        return self.device.type == "cuda" if pin_memory == "auto" else pin_memory


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
            "return its dataset, and set global_batch, data.shuffle and data.workers in the configuration",
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

    if config.sharding == "own" and not streams:
        raise UserError(
            f"data.sharding=own cannot be used with a {type(data).__name__} with __getitem__",
            "it is for a stream that deals its samples to the ranks by itself",
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

        # Micro-batches up to this position are dealt for good: workers may already be reading them.
        self.dealt_until = 0

        # (first position, speeds of the ranks), oldest first. The last entry at or before a position applies to it.
        self._deals: list[tuple[int, tuple[float, ...]]] = []

        # Batches that are read, or sent to the device, before their turn; and the position of the next one.
        self._ahead: Iterator[Any] | None = None
        self._ahead_at = 0
        self._filler: Any = None  # takes the place of an emptied micro-batch

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step. They are read while they are iterated over."""
        window = self._window(self.position)
        micros = self._micro_batches(window)
        after = self._after(window)
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
        return [self.reader((0, [index])) for index in sorted(ids)]

    def read_again(self, micro: MicroBatch) -> Any:
        """Return a micro-batch as this process reads it, to compare with what a loader process read."""
        return self.reader.read_again((micro.epoch, micro.ids))

    @property
    def reads_alike(self) -> bool:
        """Whether a loader process must read what this process reads: samples are drawn with seeds of their own."""
        return self.options.config.workers > 0 and self.options.config.seed_samples

    def next_request(self, most: int) -> Request:
        """Return the epoch and the ids of the next samples, at most those of one step: the same on every rank."""
        window = self._window(self.position)
        ids = self.sampler.ids(window.epoch, window.start, min(window.start + most, window.stop))
        return window.epoch, ids.tolist()

    def close(self) -> None:
        self._ahead = None  # which ends the worker processes

    def upcoming(self, most: int = 64) -> list[Any]:
        """Return the epoch and the ids of the next samples. A resumed run must find the same, whatever its batch."""
        # Only up to the end of the epoch: what follows depends on the batch.
        window = self._window(self.position)
        ids = self.sampler.ids(window.epoch, window.start, min(window.start + most, self.length))
        return [window.epoch, *ids.tolist()]

    def pass_over(self, span: tuple[int, int]) -> None:
        """Never train on these positions again: they spoiled a step."""
        self.passed_over = sorted({*self.passed_over, span})

    def deal_by(self, speeds: Sequence[float], position: int = 0) -> None:
        """Deal micro-batches to the ranks by their `speeds` from `position` on.

        All ranks must call it, before any of them has read that far.
        """
        assert position >= self.dealt_until
        self._deals.append((position, tuple(speeds)))

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
        self.dealt_until = self.position

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
        """Return this rank's micro-batches, still without data. A rank without work runs one as padding."""
        count = self._count(window)
        rank, size = self.data_world.rank, self.data_world.size
        self.dealt_until = max(self.dealt_until, self._after(window))

        if self.options.interleaved:
            own = range(rank, count, size)
        else:
            begin = window.epoch * self.length + window.start
            speeds = next((speeds for first, speeds in reversed(self._deals) if first <= begin), None)
            own = deal(count, rank, size, speeds)

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
            micro.data = next(ahead) if ahead is not None else self.reader((window.epoch, micro.ids))
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
            self._filler = to_device(self.reader.some_batch(self.options.micro_batch), self.options.device)
        micro.data, micro.padding = self._filler, True

    def _read_ahead(self, window: Window) -> Iterator[Any]:
        """Return batches on the device, an endless series from the present position on."""
        # The series of the last step continues, except at the start and after a resume.
        if self._ahead is None or self._ahead_at != self.position:
            config = self.options.config
            requests = self._requests(self.position)
            self._ahead = read_all(self.reader, requests, config.workers, config.prefetch, self.options.pins_memory)

            # On a CPU there is no copy to overlap.
            if self.options.device.type == "cuda":
                self._ahead = one_ahead(self._ahead, SideStream(self.options.device))

        self._ahead_at = self._after(window)
        return self._ahead

    def _requests(self, position: int) -> Iterator[Request]:
        """Yield the epoch and the ids of this rank's micro-batches from a position on, without end."""
        while True:
            window = self._window(position)
            for micro in self._micro_batches(window):
                yield window.epoch, micro.ids
            position = self._after(window)


class StreamSource:
    """An iterable dataset: every rank and worker reads its own shard. A resumed run repeats the epoch and says so."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], options: SourceOptions):
        self.dataset = dataset
        self.collate = collate
        self.options = options

        micro_batch = options.micro_batch
        ranks = options.data_world.size
        self._count, rest = divmod(options.global_batch, ranks * micro_batch)  # micro-batches of this rank in a step
        if rest:
            raise UserError(
                f"global_batch={options.global_batch} of a stream cannot be divided into micro-batches of "
                f"{micro_batch} on {ranks} ranks",
                "the samples of a stream cannot be dealt again for a window that does not divide evenly",
                f"choose a global_batch that is a multiple of {ranks} ranks x {micro_batch}",
            )

        self.epoch = 0
        self._batches: Iterator[Any] | None = None
        self._next: Any = None  # the batch that was read one ahead
        self._last: MicroBatch | None = None  # the newest of this epoch, which serves as padding
        self._ended = False
        self._first: StepBatches | None = None  # what was looked at before its turn

    def first_micro_batch(self) -> MicroBatch:
        """Return the first micro-batch of the next step, which `take` will return as well."""
        self._first = self._first or self.take()
        return next(iter(self._first))

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step: padding, if its shard of the stream has ended."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        micros = [] if self._ended else self._pull()

        # A rank whose shard ends before those of others repeats its last micro-batch with weight 0.
        self._last = last = micros[-1] if micros else self._last
        if last is None:
            world = self.options.data_world
            raise UserError(
                f"rank {world.rank} of {world.size} got no sample of the stream in epoch {self.epoch}",
                "a stream must have samples for every rank in every epoch",
                "give every rank at least one sample; a generator can be read only once, so return an iterable whose "
                "__iter__ starts again",
            )

        # The other ranks are not asked: their number of samples is an estimate.
        samples = sum(micro.samples for micro in micros) * self.options.data_world.size
        wanted = self._count if self.options.collective_forwards else 1
        micros += [
            MicroBatch(last.data, last.index, last.samples, self.epoch, padding=True)
            for _ in range(wanted - len(micros))
        ]
        return StepBatches(len(micros), micros, samples, exhausted=self._ended)

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        """Begin the next epoch, once the stream has ended on all ranks."""
        if result is not None and result.exhausted and self._ended:
            self.epoch += 1
            self._batches = None
            self._last = None
            self._ended = False

    def close(self) -> None:
        self._batches = None  # which ends the worker processes
        self._next = self._first = None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}  # the position in it is not known: it is repeated

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"])

    def _pull(self) -> list[MicroBatch]:
        """Read the micro-batches of one step. There are fewer at the end of the stream."""
        if self._batches is None:
            self._batches = iter(self._open())
            self._next = next(self._batches, None)

        # Micro-batches of a stream are numbered rank by rank, since their order in the stream is not known.
        index = self.options.data_world.rank * self._count
        micros: list[MicroBatch] = []

        # One is read ahead, so that the end is known with the last batch, not after it.
        while self._next is not None and len(micros) < self._count:
            samples, batch = self._next
            micros.append(MicroBatch(to_device(batch, self.options.device), index + len(micros), samples, self.epoch))
            self._next = next(self._batches, None)

        self._ended = self._next is None
        self._fill(micros)
        return micros

    def _fill(self, micros: list[MicroBatch]) -> None:
        """Make padding of micro-batches that a collate has emptied: they have weight 0."""
        empty = [micro for micro in micros if is_empty(micro.data)]
        if not empty:
            return
        full = [micro for micro in (*micros, self._last) if micro is not None and not is_empty(micro.data)]
        if not full:
            raise UserError(
                f"collate left none of the first {sum(m.samples for m in micros)} samples of this rank's stream",
                "a rank needs one micro-batch to repeat with weight 0 while the others train",
                "leave samples out in the stream's __iter__, not in collate",
            )
        for micro in empty:
            micro.data, micro.padding = full[0].data, True

    def read_again(self, micro: MicroBatch) -> Any:
        """Return the first micro-batch of the epoch, as a single loader process reads it."""
        # In another process: a stream may keep its place, and this rank's copy is read again in the next epoch.
        return unless_refused(next(iter(self._loader(workers=1))))[1]

    @property
    def reads_alike(self) -> bool:
        """Whether several loader processes must read the stream that one reads. One that shards itself need not."""
        return self.options.config.workers > 1 and self.options.config.sharding == "stride"

    def _open(self) -> Iterable[Any]:
        """Return an iterable over (number of samples, batch) of this rank's shard of an epoch."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

        workers = self.options.config.workers
        batches = map(unless_refused, self._loader(workers))

        # Batches that are read in this process are pinned in this process.
        if self.options.pins_memory and not workers and self.options.device.type != "cpu":
            return map(pin, batches)
        return batches

    def _loader(self, workers: int) -> DataLoader:
        options = self.options
        return DataLoader(
            _Shard(self.dataset, self.collate, options, self.epoch),
            # The shard already makes micro-batches and collates them.
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=options.config.prefetch if workers else None,
            pin_memory=options.pins_memory and workers > 0,
            worker_init_fn=partial(start_worker, open_files()) if workers else None,
        )


def _as_it_is(item: Any) -> Any:
    return item


@dataclass(eq=False)
class _Shard(IterableDataset):
    """The micro-batches of one worker of one rank of a stream, as (number of samples, batch).

    `stride`: a rank has every k-th sample, and its loader processes take its micro-batches in turns, so that the
    batches are the same without them. All read the whole stream, with the same random numbers at the same position, so
    a stream that shuffles or augments by itself is the same one everywhere. Slow, but right.
    `own`: the dataset shards itself; its random numbers then differ between ranks and workers.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    options: SourceOptions
    epoch: int

    def __iter__(self) -> Iterator[tuple[int, Any] | Refusal]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        world = self.options.data_world

        # (position in the stream, sample) of this rank, or of this process of a stream that shards itself.
        if self.options.config.sharding == "own":
            # Readers are numbered over all workers of all ranks.
            samples = self._seeded(world.rank * workers + worker)
            workers, worker = 1, 0
        else:
            samples = itertools.islice(self._seeded(0), world.rank, None, world.size)

        for number in itertools.count():
            micro_batch = list(itertools.islice(samples, self.options.micro_batch))
            if not micro_batch:
                return
            # torch asks its loader processes in turns, so the batches arrive in this order.
            if number % workers == worker:
                yield self._batch(
                    *map(list, zip(*micro_batch, strict=True)), check=info is not None and number < workers
                )

    def _batch(self, positions: list[int], samples: list[Any], check: bool) -> tuple[int, Any] | Refusal:
        where = f"of the stream, counted from 0, in epoch {self.epoch}"
        plain = getattr(self.collate, "__func__", self.collate) in (Task.collate, default_collate)
        try:
            batch = collate_named(self.collate, samples, positions, where, plain)
            if check:
                check_sendable(batch, positions, where)
        except UserError as error:
            return Refusal.of(error)
        return len(samples), batch

    def _seeded(self, stream: int) -> Iterator[tuple[int, Any]]:
        """Yield position and sample, each sample with its own seeds, which also depend on `stream`."""
        seed = self.options.seed

        # The dataset's `__iter__` may draw as well, for example the order of its files.
        seed_everything(derive(seed, "stream", self.epoch, stream))
        samples = iter(self.dataset)

        for position in itertools.count():
            # Seed before each sample: since the last one, training has drawn from the same generators.
            seed_everything(derive(seed, "stream", self.epoch, stream, position))
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                name_samples(error, [position], f"of the stream, counted from 0, in epoch {self.epoch}")
                raise
            yield position, sample
