"""Batch sources over datasets. The whole state of a map-style source is one integer: samples consumed so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.config import DataConfig
from lockstep.data.loader import Request, SampleReader, pin, read_ahead, stay_with_the_rank, to_device
from lockstep.data.order import SampleOrder
from lockstep.data.prefetch import SideStream, one_ahead
from lockstep.data.shard import Window, deal, micro_slice, next_window
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.runtime.world import World
from lockstep.task import BatchSource, MicroBatch, StepBatches, StepResult


@dataclass(frozen=True)
class BatchShape:
    """How many samples an optimizer step takes, and in what pieces."""

    global_batch: int
    micro_batch: int
    tail: str
    interleaved: bool = False  # ranks take micro-batches in turns, instead of a range each
    even: bool = False  # every rank runs equally many micro-batches, padded with ones that weigh nothing


def open_source(
    data: Any,
    collate: Callable[[list[Any]], Any],
    shape: BatchShape,
    config: DataConfig,
    seed: int,
    world: World,
    device: torch.device,
) -> BatchSource:
    """The source for whatever `Task.data()` returned."""
    if isinstance(data, BatchSource):
        return data
    if isinstance(data, DataLoader):
        raise UserError(
            "the training data must be a dataset",
            "a torch DataLoader, which has already decided batch size, order and sharding",
            "return its dataset, and set global_batch, data.shuffle and data.workers in the configuration",
        )
    pin = device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
    streams = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
    _check_readable(data, streams, config)
    if streams:
        return StreamSource(data, collate, shape, config, seed, world, device, pin)
    return MapSource(SampleReader(data, collate, seed, config.seed_samples), shape, config, seed, world, device, pin)


def _check_readable(data: Any, streams: bool, config: DataConfig) -> None:
    if not (hasattr(data, "__iter__") if streams else hasattr(data, "__len__")):
        raise UserError(
            "training data: a dataset with __getitem__ and __len__, or one to iterate over",
            f"a {type(data).__name__} " + ("that can do neither" if streams else "without __len__"),
            "return a torch Dataset, a list, or an IterableDataset",
        )
    if config.sharding == "own" and not streams:
        raise UserError(
            "data.sharding=own, for a dataset that deals its samples to the ranks by itself",
            f"a {type(data).__name__} with __getitem__, whose samples we deal",
            "return all samples on every rank, and leave data.sharding out",
        )


class MapSource:
    """A map-style dataset. Each epoch visits each sample once, in an order no rank and no world size enters."""

    def __init__(
        self,
        reader: SampleReader,
        shape: BatchShape,
        config: DataConfig,
        seed: int,
        world: World,
        device: torch.device,
        pin_memory: bool,
    ):
        self.reader, self.shape, self.config, self.world = reader, shape, config, world
        self.device, self.pin_memory = device, pin_memory
        self.length = len(reader.dataset)
        self.order = SampleOrder(self.length, seed, config.shuffle)
        self.position = 0
        self.passed_over: list[tuple[int, int]] = []
        self.dealt_until = 0  # the position up to which this rank's share is settled: workers may be reading it
        self._deals: list[tuple[int, tuple[float, ...]]] = []  # (position, from which on these weights count)
        self._ahead: Iterator[Any] | None = None  # batches that are read, or sent to the device, before their turn
        self._ahead_at = 0  # the position of the next one

    def take(self) -> StepBatches:
        window = self._window(self.position)
        pieces = self._pieces(window)
        after = self._after(window)
        return StepBatches(
            len(pieces),
            self._deliver(window, pieces),
            window.size,
            total=self._count(window),
            span=(after - window.size, after),
        )

    def commit(self, share: StepBatches, result: StepResult | None) -> None:
        assert share.span is not None
        self.position = share.span[1]

    def some_samples(self, most: int = 8) -> list[Any]:
        """A few samples from all over the dataset, each alone."""
        ids = sorted({index * self.length // most for index in range(most)})
        return [self.reader((0, [index])) for index in ids]

    def close(self) -> None:
        """End the worker processes."""
        self._ahead = None

    def upcoming(self, most: int = 64) -> list[Any]:
        """The epoch and ids of the next samples, whatever the batch: what resuming must find again."""
        window = self._window(self.position)
        stop = min(window.start + most, self.length)
        return [window.epoch, *self.order.ids(window.epoch, window.start, stop).tolist()]

    def pass_over(self, span: tuple[int, int]) -> None:
        """Never train on these positions again: they have spoiled a step."""
        self.passed_over = sorted({*self.passed_over, span})

    def deal_by(self, weights: Sequence[float], position: int = 0) -> None:
        """From `position` on the ranks' shares follow `weights`. All ranks must say so, before any has read so far."""
        assert position >= self.dealt_until
        self._deals.append((position, tuple(weights)))

    def state_dict(self) -> dict[str, Any]:
        passed_over = [list(span) for span in self.passed_over]
        return {"position": self.position, "length": self.length, "passed_over": passed_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["length"] != self.length:
            raise UserError(
                "continuing at the next sample of the same dataset",
                f"{self.length} samples now, {state['length']} when the position was saved",
                "give the run its old dataset back, or start a new run",
            )
        self.position = int(state["position"])
        self.passed_over = [(int(start), int(stop)) for start, stop in state["passed_over"]]
        self._ahead, self.dealt_until = None, self.position

    def _window(self, position: int) -> Window:
        for start, stop in self.passed_over:
            if start <= position < stop:
                position = stop
        window = next_window(position, self.length, self.shape.global_batch, self.shape.tail)
        for start, _ in self.passed_over:  # a window of another size may reach into what is left out
            offset = start - window.epoch * self.length
            if window.start < offset < window.stop:
                window = Window(window.epoch, window.start, offset)
        return window

    def _after(self, window: Window) -> int:
        return window.epoch * self.length + window.stop

    def _pieces(self, window: Window) -> list[MicroBatch]:
        """This rank's micro-batches, still without data. With nothing to do it repeats the first, as padding."""
        count, rank, size = self._count(window), self.world.rank, self.world.size
        begin = window.epoch * self.length + window.start
        weights = next((weights for first, weights in reversed(self._deals) if first <= begin), None)
        mine = range(rank, count, size) if self.shape.interleaved else deal(count, rank, size, weights)
        self.dealt_until = max(self.dealt_until, self._after(window))
        most = -(-count // size) if self.shape.even else 1
        padding = [self._piece(window, mine[0] if mine else 0, padding=True) for _ in range(most - len(mine))]
        return [*(self._piece(window, index, padding=False) for index in mine), *padding]

    def _count(self, window: Window) -> int:
        """Its micro-batches."""
        return -(-window.size // self.shape.micro_batch)

    def _piece(self, window: Window, index: int, padding: bool) -> MicroBatch:
        start, stop = micro_slice(window, self.shape.micro_batch, index)
        ids = self.order.ids(window.epoch, start, stop)
        return MicroBatch(None, index, stop - start, window.epoch, ids, padding, start - window.start)

    def _deliver(self, window: Window, pieces: list[MicroBatch]) -> Iterator[MicroBatch]:
        ahead = self._read_ahead(window) if self.config.workers or self.device.type == "cuda" else None
        for piece in pieces:
            piece.data = next(ahead) if ahead is not None else self.reader((window.epoch, piece.ids))
            yield piece

    def _read_ahead(self, window: Window) -> Iterator[Any]:
        """The running workers, or new ones if they stand elsewhere (at the start, after a resume)."""
        if self._ahead is None or self._ahead_at != self.position:
            self._ahead = self._batches(self._requests(self.position))
        self._ahead_at = self._after(window)
        return self._ahead

    def _batches(self, requests: Iterator[Request]) -> Iterator[Any]:
        workers, prefetch = self.config.workers, self.config.prefetch
        if workers:
            read = read_ahead(self.reader, requests, workers, prefetch, self.pin_memory)
        else:
            read = map(self.reader, requests)
            read = map(pin, read) if self.pin_memory else read
        return one_ahead(read, SideStream(self.device)) if self.device.type == "cuda" else read

    def _requests(self, position: int) -> Iterator[Request]:
        while True:
            window = self._window(position)
            for piece in self._pieces(window):
                yield window.epoch, piece.ids
            position = self._after(window)


class StreamSource:
    """An iterable dataset: every rank and worker reads its own part. Resuming it is approximate, and said so."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        shape: BatchShape,
        config: DataConfig,
        seed: int,
        world: World,
        device: torch.device,
        pin_memory: bool,
    ):
        self.dataset, self.collate, self.shape, self.config, self.seed = dataset, collate, shape, config, seed
        self.world, self.device, self.pin_memory = world, device, pin_memory
        self.samples, rest = divmod(shape.global_batch, world.size)  # this rank's, per global step
        if rest or self.samples % shape.micro_batch:
            raise UserError(
                f"global_batch={shape.global_batch} in micro-batches of {shape.micro_batch} on {world.size} ranks",
                "a stream, whose samples cannot be dealt again for a window that does not divide evenly",
                f"choose a global_batch that is a multiple of {world.size} ranks x {shape.micro_batch}",
            )
        self.epoch = 0
        self._batches: Iterator[Any] | None = None
        self._next: Any = None
        self._began = self._ended = False  # whether this epoch has given samples, and whether it is over
        self._last: MicroBatch | None = None

    def take(self) -> StepBatches:
        pieces = [] if self._ended else self._pull()
        if pieces:
            self._last, self._began = pieces[-1], True
        elif self._last is None or not self._began:
            raise UserError(
                "a stream with samples for every rank in every epoch",
                f"rank {self.world.rank} of {self.world.size} got none in epoch {self.epoch}",
                "give every rank at least one sample; a generator can be read only once, so return an iterable whose "
                "__iter__ starts anew",
            )
        else:
            pieces = []
        most = self.samples // self.shape.micro_batch if self.shape.even else 1
        assert self._last is not None
        for _ in range(most - len(pieces)):
            last = self._last
            pieces.append(MicroBatch(last.data, last.index, last.samples, self.epoch, padding=True))
        samples = sum(piece.samples for piece in pieces if not piece.padding)
        return StepBatches(len(pieces), pieces, samples * self.world.size, exhausted=self._ended)

    def commit(self, share: StepBatches, result: StepResult | None) -> None:
        if result is not None and result.exhausted and self._ended:
            self.epoch, self._batches = self.epoch + 1, None
            self._ended = self._began = False

    def close(self) -> None:
        """End the worker processes."""
        self._batches = self._next = None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = int(state["epoch"])

    def _pull(self) -> list[MicroBatch]:
        if self._batches is None:
            self._batches = iter(self._open())
            self._next = next(self._batches, None)
        count = self.samples // self.shape.micro_batch
        found = []
        while self._next is not None and len(found) < count:
            found.append(self._next)
            self._next = next(self._batches, None)  # one ahead: the end is known with the last batch, not after it
        self._ended = self._next is None
        first = self.world.rank * count
        return [
            MicroBatch(to_device(batch, self.device), first + i, samples, self.epoch)
            for i, (samples, batch) in enumerate(found)
        ]

    def _open(self) -> Iterable[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        workers = self.config.workers
        loader = DataLoader(
            _Shard(self.dataset, self.world, self.config.sharding, self.shape.micro_batch, (self.seed, self.epoch)),
            batch_size=None,  # the shard already cuts micro-batches
            collate_fn=_Collate(self.collate),
            num_workers=workers,
            prefetch_factor=self.config.prefetch if workers else None,
            pin_memory=self.pin_memory and workers > 0,
            worker_init_fn=stay_with_the_rank,
        )
        here = self.pin_memory and not workers and self.device.type != "cpu"
        return map(pin, loader) if here else loader


class _Shard(IterableDataset):
    """The samples of one (rank, worker) of a stream, in micro-batches.

    `stride`: every k-th sample. All ranks and workers read the whole stream, with the same random numbers at the same
    position, so a stream that shuffles or augments by itself is the same one everywhere. Slow, but right.
    `own`: the dataset shards itself; its random numbers then differ between ranks and workers.
    """

    def __init__(self, dataset: Any, world: World, sharding: str, micro: int, key: tuple[int, int]):
        self.dataset, self.rank, self.size, self.sharding = dataset, world.rank, world.size, sharding
        self.micro, self.key = micro, key

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        place, places = self.rank * workers + worker, self.size * workers
        if self.sharding == "own":
            samples = self._keyed(place)
        else:
            samples = itertools.islice(self._keyed(0), place, None, places)
        while chunk := list(itertools.islice(samples, self.micro)):
            yield chunk

    def _keyed(self, place: int) -> Iterator[Any]:
        seed, epoch = self.key
        seed_everything(derive(seed, "stream", epoch, place))
        samples = iter(self.dataset)
        for position in itertools.count():
            # Before each sample anew: between two of them the training has drawn from the same generators.
            seed_everything(derive(seed, "stream", epoch, place, position))
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample


@dataclass
class _Collate:
    collate: Callable[[list[Any]], Any]

    def __call__(self, chunk: list[Any]) -> tuple[int, Any]:
        return len(chunk), self.collate(chunk)
