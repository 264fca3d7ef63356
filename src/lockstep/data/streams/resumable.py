"""Streams in virtual shards: the same steps on any number of ranks and workers, and an exact resume on another number.

A step takes the same number of samples from every virtual shard. Its global batch holds those of shard 0, then those of
shard 1, and so on, and is cut into micro-batches, which are assigned to the ranks as those of a map-style dataset. Each
rank, and each of its workers, reads the shards of its own micro-batches. If a micro-batch of another one is in the same
shard, both read that shard.

When a shard has ended, its places in the global batch stay empty until all shards have ended.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.data.dataset_source import SourceOptions
from lockstep.data.loader import collate_samples, is_empty
from lockstep.data.sample_errors import batch_to_send
from lockstep.data.samplers import make_sampler
from lockstep.data.streams.cursor import Cursor, Reread, ShardEpoch, has_state
from lockstep.data.streams.epochs import EpochSource, comparable_copy
from lockstep.data.streams.shards import Shards
from lockstep.data.torch_private import forget_worker
from lockstep.data.windows import rank_range, rank_share
from lockstep.errors import UserError, plural
from lockstep.task import MicroBatch, StepBatches, StepResult

State = dict[str, Any]  # the state of a `Cursor`


class _Read(NamedTuple):
    """A micro-batch, as a worker process sends it."""

    index: int  # the number of the micro-batch in the global step
    ids: np.ndarray  # (samples,) int64: the number of a sample in its shard x shards + its shard
    batch: Any  # collated


class _StepRead(NamedTuple):
    """The part of a step that one worker process has read."""

    micro_batches: list[_Read]
    states: dict[int, State]  # the state of each shard after this step
    ended: bool  # all shards of this worker have ended
    reread: list[Reread]  # set in the first step: what each shard read again to restore its position
    first_sample: Any  # set in the first step: the first sample of one shard, which ranks compare
    spare: _Read | None  # samples of other readers, for a rank that has none of its own in this step


class ResumableStreamSource(EpochSource):
    """A stream whose position is a part of the checkpoint.

    The dataset is divided into virtual shards, whose number does not depend on the ranks. A step takes the same number
    of samples from each of them, and any number of ranks can share them out: so a run can resume on other ranks.
    """

    def __init__(self, shards: Shards, collate: Callable[[list[Any]], Any], options: SourceOptions):
        if options.global_batch % shards.shards:
            raise UserError(
                f"global_batch={options.global_batch} cannot be divided among {shards.shards} virtual shards",
                "a step takes the same number of samples from every shard",
                f"choose a global_batch that is a multiple of {shards.shards}, or another number of shards",
            )

        _refuse_repeated_streams(shards)
        self.shards = shards
        self.indices = local_micro_batches(options)
        self._own_shards = shards_of(self.indices, shards, options)
        super().__init__(collate, options)
        self.banner = self._make_banner()

        # By shard: the position after the last step that has ended. Empty at the beginning of an epoch.
        self._states: dict[int, State] = {}
        self._states_taken: dict[int, State] = {}  # the position after the step that was taken
        self._reads: Iterator[_StepRead | None] | None = None
        self._arrived: list[deque[_StepRead]] = []  # the parts of each worker process that were not taken yet
        self._turn = 0  # the worker process that sends the next part

    def close(self) -> None:
        super().close()
        self._reads = None
        self._peeked = None

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        # Before the base class, which may begin an epoch, and with it empty states.
        self._states |= self._states_taken
        super().commit(batches, result)

    def _begin_epoch(self, epoch: int, first_step: int) -> None:
        super()._begin_epoch(epoch, first_step)
        self._states = {}
        self._states_taken = {}

    # ---- the state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position in every shard. Collective: each rank has the positions in the shards that it reads."""
        # Only shards that this rank reads: of the others it has old positions.
        own = {shard: self._states[shard] for shard in self._own_shards if shard in self._states}

        # Several ranks may read one shard, all of them up to the same position. The lowest rank's state is used.
        states: dict[int, State] = {}
        for of_rank in reversed(self.options.gather_states(own)):
            states |= of_rank

        return {
            "epoch": self.epoch,
            "shards": self.shards.shards,
            "files": len(self.shards.files),
            "names": self._names_digest(),
            "states": [states.get(shard) for shard in range(self.shards.shards)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Without a position, it was saved by a run whose stream had none: the epoch begins again, as its banner said.
        self._begin_epoch(int(state["epoch"]), first_step=0)
        if "shards" not in state:
            return

        for name, now in (("shards", self.shards.shards), ("files", len(self.shards.files))):
            if int(state[name]) != now:
                raise UserError(
                    f"the stream has {now} {name}, and had {state[name]} when its position was saved",
                    "",
                    f"resume with the same {name} in the same order, or start a new run from the weights",
                )

        if state.get("names", self._names_digest()) != self._names_digest():
            raise UserError(
                "the files of the stream have other names, or another order, than when its position was saved",
                "a position is a number of samples in one of the files",
                "return the same files in the same order, for example sorted(folder.glob('*.jsonl')); or start a new "
                "run from the weights",
            )

        self._states = {shard: saved for shard, saved in enumerate(state["states"]) if saved is not None}

    def _names_digest(self) -> str:
        """Return a digest of the names of the files. Their folder may be another one after a resume."""
        names = [PurePath(file).name for file in self._paths()]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def _paths(self) -> list[str | PurePath]:
        return [file for file in self.shards.files if isinstance(file, str | PurePath)]

    # ---- reading ----

    def _pull(self) -> list[MicroBatch]:
        begins = self._reads is None
        self._reads = self._reads or self._start_loader()

        # One part of the step from each worker process, in turn.
        parts = self._next_parts(self._reads)
        self._ended = all(part.ended for part in parts)
        for part in parts:
            self._states_taken |= part.states

        # Now, and not when the first checkpoint is saved, which may be hours later.
        if begins:
            self.options.check_state(self._states_taken)
            self._note_start(parts)

        micro_batches = [self._micro_batch(read) for part in parts for read in part.micro_batches]

        # A rank that has had no micro-batch in this epoch needs something to run as padding.
        if not micro_batches and self._last is None:
            spares = [part.spare for part in parts if part.spare is not None]
            micro_batches = [self._micro_batch(spare, padding=True) for spare in spares[:1]]

        return micro_batches

    def _next_parts(self, reads: Iterator[_StepRead | None]) -> list[_StepRead]:
        """Return the next part of each worker process. One that still restores its position sends None."""
        # They send in turn. The parts of a worker that is ahead of the others wait here.
        while not all(self._arrived):
            part = next(reads)
            arrived = self._arrived[self._turn]
            self._turn = (self._turn + 1) % len(self._arrived)
            if part is None:
                self.options.beat()
            else:
                arrived.append(part)

        return [arrived.popleft() for arrived in self._arrived]

    def _micro_batch(self, read: _Read, padding: bool = False) -> MicroBatch:
        # An offset says that the samples lie side by side from there on. With several shards, one that has ended leaves
        # empty places between those of the others; with a single shard only the last places can be empty.
        offset = read.index * self.options.micro_batch_size if self.shards.shards == 1 else None
        return MicroBatch(read.batch, read.index, len(read.ids), self.epoch, read.ids, padding, offset)

    def _note_start(self, parts: list[_StepRead]) -> None:
        """Note where the stream begins, and how much was read again after a resume."""
        first_samples = [part.first_sample for part in parts if part.first_sample is not None]
        if first_samples:
            self.same_on_all_ranks = first_samples[0]

        # Worker processes read at the same time, and each of them one shard after another.
        samples = sum(reread.samples for part in parts for reread in part.reread)
        seconds = max(sum(reread.seconds for reread in part.reread) for part in parts)
        if samples:
            reason = f"the stream was read again up to its position: {plural(samples, 'sample')} in {seconds:.1f} s"
            self.options.log_event("note", reason=reason)

    def _start_loader(self) -> Iterator[_StepRead | None]:
        # Nothing has arrived. Without workers, this process is the only reader.
        options = self.options
        self._arrived = [deque() for _ in range(max(1, options.config.workers))]
        self._turn = 0

        # A single stream may split itself by rank, so ranks compare its first sample; otherwise the names of the files.
        self.same_on_all_ranks = list(map(str, self._paths())) if self.shards.shards > 1 else None

        reader = _StepReader(self.shards, self.collate, options, self.epoch, dict(self._states))
        self._loader_batches = self._start_reading(reader)
        return self._loader_batches

    def _find_padding(self) -> MicroBatch:
        """Read the first samples of the epoch again: this rank has none left, or never had any."""
        # A copy, because opening a stream a second time would change its state.
        try:
            shards = copy.deepcopy(self.shards)
        except Exception as error:  # copying calls the user's code
            raise UserError(
                "a rank without samples in this step cannot read a sample to run with weight 0",
                f"the stream cannot be copied: {type(error).__name__}: {error}",
                "set data.workers=1, or fewer ranks; or open files and connections in __iter__, not in __init__",
            ) from error

        where = f"of the stream, in epoch {self.epoch}"
        for shard in range(shards.shards):
            cursor = open_cursor(shards, self.options, self.epoch, shard)
            while samples := cursor.take(self.options.micro_batch_size):
                batch = collate_samples(self.collate, samples, list(range(len(samples))), where)
                if not is_empty(batch):
                    offset = 0 if self.shards.shards == 1 else None
                    return MicroBatch(batch, 0, len(samples), self.epoch, offset=offset)

        raise UserError(
            f"the stream has no sample in epoch {self.epoch}",
            "",
            "return a stream with samples, whose __iter__ starts again after its end: a generator can be read only "
            "once, and a stream with a state must set it back",
        )

    def _samples_on_all_ranks(self, micro_batches: list[MicroBatch]) -> int:
        """Return the global batch, or an estimate if places in it are empty."""
        places = sum(len(places_of(index, self.options)) for index in self.indices)
        samples = sum(micro.num_samples for micro in micro_batches if not micro.padding)
        return samples * self.options.global_batch // places if places else 0

    def _make_banner(self) -> str:
        count = self.shards.shards
        how = "is read again up to its position" if self.options.config.resume == "reread" else "continues exactly"
        text = f"a stream in {plural(count, 'virtual shard')}; a resumed run {how}"

        # A shard that lies in the micro-batches of several readers is read by each of them.
        readers = self.options.data_world.size * max(1, self.options.config.workers)
        if readers > count:
            text += f"; there are {readers} readers, so that some shards are read more than once"

        return text


def _refuse_repeated_streams(shards: Shards) -> None:
    """Refuse an object that is listed twice and has a state: the state belongs to one of its iterators only."""
    stateful = [id(file) for file in shards.files if has_state(file)]
    if len(set(stateful)) < len(stateful):
        raise UserError(
            "a stream with a state is listed several times in Shards",
            "its state_dict() says where one of its iterators is, so the others could not be resumed",
            "make an object for each virtual shard, for example dataset.shard(8, i) for i in range(8)",
        )


def local_micro_batches(options: SourceOptions) -> range:
    """Return the indices of this rank's micro-batches in a global step."""
    return rank_share(options.global_num_micro_batches, options.data_world, options.round_robin)


def places_of(index: int, options: SourceOptions) -> range:
    """Return the places of a micro-batch in the global batch."""
    start = index * options.micro_batch_size
    return range(start, min(start + options.micro_batch_size, options.global_batch))


def shards_of(indices: range, shards: Shards, options: SourceOptions) -> list[int]:
    """Return the virtual shards in which these micro-batches lie."""
    each = options.global_batch // shards.shards
    return sorted({place // each for index in indices for place in places_of(index, options)})


def open_cursor(shards: Shards, options: SourceOptions, epoch: int, shard: int, state: State | None = None) -> Cursor:
    """Open a virtual shard: every epoch shuffles the files, and deals them to the shards like cards."""
    # The order depends on the seed and the epoch alone, so all readers deal alike.
    count = len(shards.files)
    order = make_sampler(count, options.seed, options.config.shuffle).ids(epoch, 0, count)
    files = [shards.files[index] for index in order[shard :: shards.shards]]
    source = ShardEpoch(shards, files, options.seed, epoch, shard)
    return Cursor(source, state, reread=options.config.resume == "reread")


@dataclass(eq=False)
class _StepReader(IterableDataset):
    """The part of every step that one worker process of one rank reads. It never ends: after the epoch it is empty.

    It yields None about once a second while it reads samples again to restore a position.
    """

    shards: Shards
    collate: Callable[[list[Any]], Any]
    options: SourceOptions
    epoch: int
    states: dict[int, State]

    def __iter__(self) -> Iterator[_StepRead | UserError | None]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)

        # A dataset that splits itself by worker process must not: each shard is read whole.
        forget_worker()

        # This worker's range of its rank's micro-batches, and the shards that they lie in.
        of_rank = local_micro_batches(self.options)
        of_worker = rank_range(len(of_rank), worker, workers)
        indices = of_rank[of_worker.start : of_worker.stop]
        needed = shards_of(indices, self.shards, self.options)

        cursors: dict[int, Cursor] = {}
        first = True
        while True:
            read = partial(self._read_step, cursors, needed, indices, first)
            step = batch_to_send(read, [], self._where, first and bool(info))
            yield step
            if isinstance(step, UserError):
                return

            # None: the position is not restored yet, and the first step is still to come.
            first = first and step is None

    def _read_step(
        self, cursors: dict[int, Cursor], needed: list[int], indices: range, opens: bool
    ) -> _StepRead | None:
        # Here and not before the loop, so that errors are sent too.
        if not cursors:
            for shard in needed:
                cursors[shard] = open_cursor(self.shards, self.options, self.epoch, shard, self.states.get(shard))

        # About a second for each shard, and then a sign of life.
        if opens and not all(cursor.catch_up() for cursor in cursors.values()):
            return None

        # As many samples of each shard as it has places in the global batch, also of places in others' micro-batches:
        # every reader of a shard must come to the same position.
        each = self.options.global_batch // self.shards.shards
        begins = {shard: cursor.taken for shard, cursor in cursors.items()}
        samples = {shard: [] if cursor.ended else cursor.take(each) for shard, cursor in cursors.items()}
        first_sample = self._first_sample(samples) if opens else None

        # Without those whose places are all empty.
        found = [self._micro_batch(index, each, samples, begins) for index in indices]
        micro_batches = [read for read in found if read is not None]
        return _StepRead(
            micro_batches,
            {shard: cursor.state for shard, cursor in cursors.items()},
            all(cursor.ended for cursor in cursors.values()),
            [cursor.reread for cursor in cursors.values()] if opens else [],
            first_sample,
            None if micro_batches else self._spare(samples),
        )

    def _micro_batch(
        self, index: int, each: int, samples: dict[int, list[Any]], begins: dict[int, int]
    ) -> _Read | None:
        """Return a micro-batch, or None if all its places are empty.

        `samples`: of this step, by shard, `each` of them if the shard has not ended. `begins`: the number of the first.
        """
        # (shard, number among the samples of this step) of each place.
        places = [divmod(place, each) for place in places_of(index, self.options)]
        filled = [(shard, number) for shard, number in places if number < len(samples[shard])]
        if not filled:
            return None

        # Unique in the epoch, and the same on any number of ranks.
        ids = [(begins[shard] + number) * self.shards.shards + shard for shard, number in filled]
        chosen = [samples[shard][number] for shard, number in filled]
        return _Read(index, np.array(ids, dtype=np.int64), self._collate(chosen, ids))

    def _spare(self, samples: dict[int, list[Any]]) -> _Read | None:
        """Return a micro-batch of samples that other readers train. Small, and rare: at the end of an epoch."""
        others = [sample for of_shard in samples.values() for sample in of_shard]
        chosen = others[: self.options.micro_batch_size]
        if not chosen:
            return None
        return _Read(0, np.arange(len(chosen)), self._collate(chosen, list(range(len(chosen)))))

    def _collate(self, samples: list[Any], ids: list[int]) -> Any:
        return collate_samples(self.collate, samples, ids, self._where)

    def _first_sample(self, samples: dict[int, list[Any]]) -> Any:
        """Return the first sample of a single shard, for ranks to compare, or None if there is no need."""
        world = self.options.data_world
        all_read_it = self.shards.shards == 1 and self.options.global_num_micro_batches >= world.size
        if world.alone or not all_read_it or not samples.get(0):
            return None
        return comparable_copy(samples[0][0])

    @property
    def _where(self) -> str:
        return f"of the stream, in epoch {self.epoch}"
