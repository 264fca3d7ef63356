"""Batch sources over streams: every rank and every worker process reads its own shard of an iterable dataset."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data.loader import collate_named, is_plain, pin, to_device
from lockstep.data.sample_errors import Refusal, batch_to_send, check_sendable, is_empty, name_samples, unless_refused
from lockstep.data.source_options import SourceOptions
from lockstep.data.worker_process import open_files, start_reading, start_worker
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.task import MicroBatch, StepBatches, StepResult


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
                "the samples of a stream cannot be assigned again for a window that does not divide evenly",
                f"choose a global_batch that is a multiple of {ranks} ranks x {micro_batch}",
            )

        self.epoch = 0
        self._batches: Iterator[Any] | None = None
        self._next: Any = None  # the batch that was read one ahead
        self._last: MicroBatch | None = None  # the newest of this epoch, which serves as padding
        self._ended = False
        self._first: StepBatches | None = None  # what was looked at before its turn
        self._failed: Exception | None = None  # how that ended, if not well

        # The first sample of the whole stream, which all ranks must find there; None if it is not known.
        self.beginning: Any = None

    def first_micro_batch(self) -> MicroBatch:
        """Return the first micro-batch of the next step, which `take` will return as well."""
        try:
            self._first = self._first or self.take()
            return next(iter(self._first))
        except Exception as error:
            self._failed = error
            raise

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next global step: padding, if its shard of the stream has ended."""
        # An iterator that has raised only says that it has ended.
        if self._failed is not None:
            raise self._failed
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
            self.beginning = self._next[2] if self._next else None

        # Micro-batches of a stream are numbered rank by rank, since their order in the stream is not known.
        index = self.options.data_world.rank * self._count
        micros: list[MicroBatch] = []

        # One is read ahead, so that the end is known with the last batch, not after it.
        while self._next is not None and len(micros) < self._count:
            samples, batch, _ = self._next
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
        """Return the epoch's first micro-batch as read by the last worker."""
        # In another process: a stream may keep its place, and this rank's copy is read again in the next epoch.
        workers = self.options.config.workers
        return unless_refused(next(start_reading(self._loader(workers, only=workers - 1))))[1]

    @property
    def workers_must_match(self) -> bool:
        """Whether all worker processes must read the same stream. One that shards itself need not."""
        return self.options.config.workers > 1 and self.options.config.sharding == "stride"

    def _open(self) -> Iterable[Any]:
        """Return an iterable over the items of this rank's shard of an epoch, see `_Shard`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

        workers = self.options.config.workers
        batches = map(unless_refused, start_reading(self._loader(workers)))

        # Batches that are read in this process are pinned in this process.
        if self.options.pins_memory and not workers and self.options.device.type != "cpu":
            return map(pin, batches)
        return batches

    def _loader(self, workers: int, only: int | None = None) -> DataLoader:
        options = self.options
        return DataLoader(
            _Shard(self.dataset, self.collate, options, self.epoch, only),
            # The shard already makes micro-batches and collates them.
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=options.config.prefetch if workers else None,
            pin_memory=options.pins_memory and workers > 0,
            worker_init_fn=partial(start_worker, open_files()) if workers else None,
            generator=self._worker_seeds(),
        )

    def _worker_seeds(self) -> torch.Generator:
        """Return what `get_worker_info().seed` is drawn from: the same on every rank that reads the whole stream."""
        seed, config = self.options.seed, self.options.config
        rank = self.options.data_world.rank if config.sharding == "own" else 0
        return torch.Generator().manual_seed(derive(seed, "loaders", self.epoch, rank))


def _as_it_is(item: Any) -> Any:
    return item


@dataclass(eq=False)
class _Shard(IterableDataset):
    """The micro-batches of one worker of one rank of a stream, as (number of samples, batch, beginning).

    `stride`: a rank has every k-th sample, and its worker processes take its micro-batches in turns, so that the
    batches are the same without them. All read the whole stream, with the same random numbers at the same position, so
    a stream that shuffles or augments by itself is the same one everywhere. Slow, but right.
    `own`: the dataset shards itself; its random numbers then differ between ranks and workers.

    The beginning, which comes with the first micro-batch, is the first sample that was read, for ranks to compare.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    options: SourceOptions
    epoch: int
    only: int | None = None  # the worker process that reads everything; None: they take turns
    beginning: Any = None

    def __iter__(self) -> Iterator[tuple[int, Any, Any] | Refusal]:
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
        if self.only is not None:
            if worker != self.only:
                return
            workers, worker = 1, 0

        for number in itertools.count():
            micro_batch = batch_to_send(
                lambda: list(itertools.islice(samples, self.options.micro_batch)), [], self._where, check=False
            )
            if isinstance(micro_batch, Refusal):
                yield micro_batch
                return
            if not micro_batch:
                return
            # torch asks its worker processes in turns, so the batches arrive in this order.
            if number % workers == worker:
                yield self._batch(
                    *map(list, zip(*micro_batch, strict=True)), check=info is not None and number < workers
                )

    def _batch(self, positions: list[int], samples: list[Any], check: bool) -> tuple[int, Any, Any] | Refusal:
        def collated() -> Any:
            return collate_named(self.collate, samples, positions, self._where, is_plain(self.collate))

        batch = batch_to_send(collated, positions, self._where, check)
        if isinstance(batch, Refusal):
            return batch
        beginning, self.beginning = self.beginning, None
        return len(samples), batch, beginning

    @property
    def _where(self) -> str:
        return f"of the stream, counted from 0, in epoch {self.epoch}"

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
                name_samples(error, [position], self._where)
                raise
            if position == 0:
                self.beginning = self._kept(sample)
            yield position, sample

    def _kept(self, sample: Any) -> Any:
        """Return a copy of a sample that ranks can compare; None if they need not, or it cannot be copied or sent."""
        if self.options.config.sharding == "own" or self.options.data_world.alone:
            return None
        try:
            # A copy, as collate may change what it is given.
            kept = copy.deepcopy(sample)
            check_sendable(kept, [0], "")
        except Exception:
            return None
        return kept
