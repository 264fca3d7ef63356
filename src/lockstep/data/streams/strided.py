"""Streams without a state: every rank and every worker process reads its own shard of an iterable dataset.

The stride is over all worker processes of all ranks, as in torch's documentation. This has limits: the shards may end
at different times, and a resumed run begins the epoch again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data.dataset_source import SourceOptions
from lockstep.data.loader import collate_samples
from lockstep.data.sample_errors import batch_to_send, name_samples
from lockstep.data.streams.epochs import EpochSource, comparable_copy
from lockstep.data.worker_process import LoaderBatches
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.task import MicroBatch


class _Item(NamedTuple):
    """A micro-batch of a stream, as a worker process sends it."""

    num_samples: int
    batch: Any  # collated
    first_sample: Any  # set in the first item: the first sample of the stream, which ranks compare


class StridedStreamSource(EpochSource):
    """A stream without a state, of which every rank and worker reads its own shard. A resumed run repeats the epoch.

    It takes any iterable dataset. Nothing is known about its order, so no position can be saved; the exact way is
    `ResumableStreamSource`.
    """

    banner = "a stream; without a state_dict, a resumed run repeats its epoch"

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], options: SourceOptions):
        micro_batch = options.micro_batch_size
        ranks = options.data_world.size

        micro_batches_per_step, remainder = divmod(options.global_batch, ranks * micro_batch)
        if remainder:
            raise UserError(
                f"global_batch={options.global_batch} of a stream cannot be divided into micro-batches of "
                f"{micro_batch} on {ranks} ranks",
                "every rank reads the same number of micro-batches of a stream in each step",
                f"choose a global_batch that is a multiple of {ranks} ranks x {micro_batch}",
            )

        super().__init__(collate, options)
        self._micro_batches_per_step = micro_batches_per_step
        self.dataset = dataset
        self._batches: Iterator[Any] | None = None
        self._next: _Item | None = None  # the item after the current one, read one ahead

    def close(self) -> None:
        super().close()
        self._batches = None
        self._next = self._peeked = None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}  # a stream has no position, so a resumed run repeats the epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "shards" in state:
            raise UserError(
                "the checkpoint holds a position in the stream, and this stream cannot continue there",
                "the saved run could resume exactly; this one would repeat the epoch",
                "return the same stream as before from data(), with the same data.resume and data.sharding",
            )

        self._begin_epoch(int(state["epoch"]), first_step=0)

    def _pull(self) -> list[MicroBatch]:
        """Read the micro-batches of one step and return them. There may be fewer at the end of the stream."""
        if self._batches is None:
            self._batches = iter(self._open())
            self._next = next(self._batches, None)
            self.same_on_all_ranks = self._next.first_sample if self._next else None

        # Micro-batches of a stream are numbered rank by rank, because their order in the stream is unknown. So they
        # have no place in the global batch either.
        index = self.options.data_world.rank * self._micro_batches_per_step
        micro_batches: list[MicroBatch] = []

        # Read one item ahead, so that the last batch is known to be the last.
        while self._next is not None and len(micro_batches) < self._micro_batches_per_step:
            item, number = self._next, index + len(micro_batches)
            micro_batches.append(MicroBatch(item.batch, number, item.num_samples, self.epoch))
            self._next = next(self._batches, None)

        self._ended = self._next is None
        return micro_batches

    def _find_padding(self) -> MicroBatch:
        world = self.options.data_world
        raise UserError(
            f"rank {world.rank} of {world.size} got no sample of the stream in epoch {self.epoch}",
            "a stream must have samples for every rank in every epoch",
            "give every rank at least one sample; a generator can be read only once, so return an iterable whose "
            "__iter__ starts again",
        )

    def read_again(self, micro: MicroBatch) -> Any:
        """Return the epoch's first micro-batch as the last worker reads it. None if the stream shards itself."""
        if self.options.config.workers < 2 or self.options.config.sharding != "stride":
            return None

        # Not in this process: reading may change the state of a stream, and later epochs start from this rank's copy.
        with closing(self._start_loader(only_worker=self.options.config.workers - 1)) as batches:
            return next(batches).batch

    def _open(self) -> Iterable[Any]:
        """Return an iterable over the items of this rank's shard of the epoch; see `_Shard`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)

        self._loader_batches = self._start_loader()
        return self._loader_batches

    def _start_loader(self, only_worker: int | None = None) -> LoaderBatches:
        shard = _Shard(self.dataset, self.collate, self.options, self.epoch, only_worker)
        return self._start_reading(shard, generator=self._worker_seeds())

    def _worker_seeds(self) -> torch.Generator:
        """Return the generator for `get_worker_info().seed`, the same on all ranks unless the stream shards itself."""
        seed, config = self.options.seed, self.options.config
        rank = self.options.data_world.rank if config.sharding == "own" else 0
        return torch.Generator().manual_seed(derive(seed, "loaders", self.epoch, rank))


@dataclass(eq=False)
class _Shard(IterableDataset):
    """The micro-batches that one worker of one rank reads.

    `stride`: a rank gets every k-th sample, and its workers take turns with its micro-batches, so that the batches are
    the same with any number of workers. All of them read the whole stream with the same seed for each sample, so a
    stream that shuffles or augments is the same everywhere. This is slow but correct.
    `own`: the dataset shards itself, and its seeds differ between ranks and workers.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    options: SourceOptions
    epoch: int
    only_worker: int | None = None  # this worker process reads everything; None: workers take turns
    first_sample: Any = None  # the first sample of the stream, until it is sent with the first micro-batch

    def __iter__(self) -> Iterator[_Item | UserError]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        world = self.options.data_world

        # An iterator over (number in the stream, sample).
        if self.options.config.sharding == "own":
            # Readers are numbered over all workers of all ranks.
            samples = self._seeded(world.rank * workers + worker)
            workers, worker = 1, 0
        else:
            samples = itertools.islice(self._seeded(0), world.rank, None, world.size)

        # For `read_again`, one worker reads all micro-batches, which the workers otherwise read in turn.
        if self.only_worker is not None:
            if worker != self.only_worker:
                return

            workers, worker = 1, 0

        # Every worker reads all micro-batches of the rank, and collates and sends its own.
        for index in itertools.count():
            pairs = batch_to_send(
                lambda: list(itertools.islice(samples, self.options.micro_batch_size)), [], self._where, check=False
            )
            if isinstance(pairs, UserError):
                yield pairs
                return

            if not pairs:
                return

            # The DataLoader collects from its workers in turn, so the batches arrive in this order.
            if index % workers == worker:
                numbers, samples_read = map(list, zip(*pairs, strict=True))
                yield self._batch(numbers, samples_read, check=info is not None and index < workers)

    def _batch(self, numbers: list[int], samples: list[Any], check: bool) -> _Item | UserError:
        def collate() -> Any:
            return collate_samples(self.collate, samples, numbers, self._where)

        batch = batch_to_send(collate, numbers, self._where, check)
        if isinstance(batch, UserError):
            return batch

        # Sent once.
        first_sample = self.first_sample
        self.first_sample = None
        return _Item(len(samples), batch, first_sample)

    @property
    def _where(self) -> str:
        return f"of the stream, counted from 0, in epoch {self.epoch}"

    def _seeded(self, stream: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, sample). Each sample is seeded by its number and by `stream`, the number of the reader."""
        seed = self.options.seed

        # The dataset's `__iter__` may also draw random numbers, for example to shuffle its files.
        seed_everything(derive(seed, "stream", self.epoch, stream))
        samples = iter(self.dataset)

        for number in itertools.count():
            # Seed before each sample, because training has drawn from the same generators since the last one.
            seed_everything(derive(seed, "stream", self.epoch, stream, number))
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:  # the stream is the user's code
                name_samples(error, [number], self._where)
                raise

            # The first sample must be the same on all ranks, unless the stream shards itself.
            if number == 0 and self.options.config.sharding == "stride" and not self.options.data_world.alone:
                self.first_sample = comparable_copy(sample)

            yield number, sample
