"""Reads one virtual shard in one epoch, from its beginning or from a saved state.

It gives one sample after another, and after each of them the state from which the next one follows. A dataset that has
a state of its own is asked for it; otherwise the samples before the position are read again and dropped.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lockstep.data.sample_errors import name_samples
from lockstep.data.streams.shards import DROPPED, Shards, apply
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything

_END = object()  # stands for a sample where the shard has ended


@dataclass(frozen=True)
class ShardEpoch:
    """One virtual shard in one epoch, which a cursor reads."""

    shards: Shards
    files: list[Any]  # the files of this shard, in the order of the epoch
    seed: int
    epoch: int
    shard: int


@dataclass
class Reread:
    """Samples that are read again after a resume, because the stream has no state that says where it was."""

    left: int = 0  # still to be read again
    samples: int = 0  # how many there were in all
    seconds: float = 0.0  # how long it took so far


class Cursor:
    """A position in a virtual shard.

    A sample of a file passes through the functions `Shards.before`, which may drop it. Without a packer that is all. A
    packer joins samples into rows, and these pass through `Shards.after`.

    After each `take`, `state` is the position after the samples that were taken, as plain values and tensors. The
    sample after them may already be read, to know whether there is one.
    """

    def __init__(self, source: ShardEpoch, state: dict[str, Any] | None = None, reread: bool = False):
        """Begin at the first sample, or at a saved state. `reread`: see `data.resume`."""
        self._source = source
        self._ignores_states = reread
        self.reread = Reread()

        # The position: the current file, samples read of it, and samples read of the shard in this epoch.
        self._file = 0
        self._in_file = 0
        self._read_so_far = 0
        self._opened: Any = None  # what `read` returned for the current file
        self._iterator: Iterator[Any] | None = None

        # The packer holds samples that were read and are in no complete row yet, so a resume needs its state as well.
        self._packer = source.shards.make_packer() if source.shards.make_packer else None
        self._flushed = False  # the files have ended, and the packer has completed its last rows

        self.taken = 0  # samples taken in this epoch, after filtering and packing
        self.ended = False
        self._peeked: list[Any] = []  # the next sample, or nothing

        if state is not None:
            self._restore(state)

        self.state = self._state()

    def take(self, count: int) -> list[Any]:
        """Return the next samples: `count`, or fewer if the shard ends. `catch_up` must have returned True."""
        assert not self.reread.left, "the position is not restored yet"
        samples, self._peeked = self._peeked, []
        while len(samples) < count and (sample := self._next()) is not _END:
            samples.append(sample)

        # The state comes before the look at the next sample, which is not taken yet: a resume has to return it.
        self.taken += len(samples)
        self.state = self._state()

        # The end of a shard is reported with its last samples. A stream has no length, so the next sample is read now;
        # if the shard ended above, there is none.
        sample = self._next() if len(samples) == count else _END
        self.ended = sample is _END
        self._peeked = [] if self.ended else [sample]
        self.state["ended"] = self.ended
        return samples

    # ---- the state ----

    def _state(self) -> dict[str, Any]:
        """Return the position as plain values: of the files, of the iterable that is open, and of the packer."""
        by_state = self._iterator is not None and has_state(self._opened) and not self._ignores_states
        return {
            "file": self._file,
            "in_file": self._in_file,
            "read": self._read_so_far,
            "taken": self.taken,
            # A copy: some streams return the object that their next sample changes.
            "inner": copy.deepcopy(self._opened.state_dict()) if by_state else None,
            "packer": self._packer.state_dict() if self._packer else None,
            "flushed": self._flushed,
            "ended": self.ended,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Continue at a saved state. If it has to be found by reading, `catch_up` does that later."""
        self._file = int(state["file"])
        self.taken = int(state["taken"])
        self.ended = bool(state["ended"])
        self._flushed = bool(state["flushed"])
        if self._packer:
            self._packer.load_state_dict(state["packer"])

        # Nothing is read any more, so no file needs to be opened.
        if self.ended:
            return

        # By the state of the iterable, or else by reading the samples of this file again. The files before are passed
        # over in any case.
        self._read_so_far = int(state["read"])
        in_file = int(state["in_file"])
        if state["inner"] is not None and not self._ignores_states:
            self._open(state["inner"])
            self._in_file = in_file
        else:
            # From the beginning of the file, in `catch_up`: it may take long, and the watchdog must hear from us. The
            # numbers of samples begin there, too, as their random numbers depend on them.
            self._read_so_far -= in_file
            self.reread = Reread(left=in_file, samples=in_file)

    def catch_up(self, seconds: float = 1.0) -> bool:
        """Read samples again for some time, until the position is restored. Return whether it is."""
        # Raw samples only: the packer's state has those that were filtered and packed before the resume.
        file = self._file
        began = time.perf_counter()
        while self.reread.left and time.perf_counter() < began + seconds:
            # All of them were samples of this file. If it ends sooner, or the shard does, the data has changed.
            if self._read_raw() is _END or self._file != file:
                raise UserError(
                    f"virtual shard {self._source.shard} has fewer samples than when its position was saved",
                    f"epoch {self._source.epoch}, {name_of(self._source.files[file])}",
                    "resume with the same data, or start a new run from the weights (init_from=RUN)",
                )

            self.reread.left -= 1

        self.reread.seconds += time.perf_counter() - began
        return not self.reread.left

    # ---- reading ----

    def _next(self) -> Any:
        """Return the next sample after filtering and packing, or _END."""
        shards = self._source.shards
        packer = self._packer
        while True:
            # Complete rows come first: a sample may complete several, and the packer should not hold more than it must.
            row = packer.pop() if packer else None
            if row is not None:
                row = self._named(apply, shards.after, row)
                if row is not DROPPED:
                    return row

                continue

            # At the end of the files, the packer completes the rows that are still open.
            sample = _END if self._flushed else self._read_raw()
            if sample is _END:
                if packer is None or self._flushed:
                    return _END

                packer.flush()
                self._flushed = True
                continue

            # Without a packer, what `before` leaves is the sample.
            sample = self._named(apply, shards.before, sample)
            if sample is DROPPED:
                continue
            if packer is None:
                return sample

            self._named(packer.add, sample)

    def _named(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function of the newest sample. An error names that sample."""
        try:
            return function(*arguments)
        except UserError as error:
            where = f"sample {self._newest} {self._where}"
            raise UserError(error.problem, f"{error.found}; {where}" if error.found else where, error.fix) from error
        except Exception as error:  # the stream is the user's code
            name_samples(error, [self._newest], self._where, "fix it in the data, or skip it with filter()")
            raise

    def _read_raw(self) -> Any:
        """Return the next sample of the files, or _END. Each is seeded by its number in the shard."""
        while self._file < len(self._source.files):
            if self._iterator is None:
                try:
                    self._open()
                except UserError:
                    raise
                except Exception as error:  # the stream is the user's code
                    error.add_note(f"lockstep: read() was called for {name_of(self._source.files[self._file])}")
                    raise

            assert self._iterator is not None

            # By its number, so that a sample is the same after a resume, and on any rank.
            seed_everything(self._derive("shard", self._read_so_far))
            try:
                sample = next(self._iterator)
            except StopIteration:
                # Go on with the next file.
                self._file += 1
                self._in_file = 0
                self._iterator = self._opened = None
                continue
            except Exception as error:  # the stream is the user's code
                name_samples(error, [self._in_file], self._where, "fix it in the data, or skip it where it is read")
                raise

            self._in_file += 1
            self._read_so_far += 1
            return sample

        return _END

    def _open(self, inner: Any = None) -> None:
        """Open the current file, and continue at its state `inner` if there is one."""
        # The file may draw random numbers when it is opened, to shuffle itself for example.
        seed_everything(self._derive("file", self._file))
        opened: Any = self._source.shards.read(self._source.files[self._file])
        self._set_epoch(opened)

        # Refuse a state that cannot be restored now, and not at the resume.
        if not self._ignores_states:
            _check_state_is_whole(opened)
            _check_state_needs_no_arguments(opened)

        # The iterable has the state, or else its iterator may have it.
        self._opened = opened if has_state(opened) else iter(opened)
        if inner is not None:
            self._opened.load_state_dict(inner)

        self._iterator = iter(self._opened)

    def _set_epoch(self, opened: Any) -> None:
        """Tell an iterable which epoch begins; for torchdata's loader, also its dataset and its sampler."""
        sampler = getattr(opened, "sampler", None)
        for part in (opened, getattr(opened, "dataset", None), sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._source.epoch)

        # The generator of a sampler goes on from epoch to epoch, but not in a worker process or a resumed run, which
        # begin with what data() returned. So it is seeded for each epoch after the first.
        generator = getattr(sampler, "generator", None)
        if generator is not None and self._source.epoch:
            generator.manual_seed(self._derive("loader", self._file))

    def _derive(self, purpose: str, number: int) -> int:
        """Return a seed that is the same on any rank and after any resume."""
        return derive(self._source.seed, purpose, self._source.epoch, self._source.shard, number)

    @property
    def _newest(self) -> int:
        """The number of the newest sample in its file. The last rows of a shard come after all its files."""
        return max(0, self._in_file - 1)

    @property
    def _where(self) -> str:
        files = self._source.files
        file = files[min(self._file, len(files) - 1)]
        return f"of {name_of(file)}, counted from 0, in epoch {self._source.epoch}"


def name_of(file: Any) -> str:
    """Return the name of a file of a stream for messages."""
    return f"the file {file}" if isinstance(file, str | PurePath) else f"a stream ({type(file).__name__})"


def has_state(iterable: Any) -> bool:
    """Return whether an iterable can say where its newest iterator is, and can continue there."""
    return hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")


def _check_state_is_whole(iterable: Any) -> None:
    """Refuse a dataset of Hugging Face that shuffles in a buffer: its state does not hold the buffer."""
    # By the name of the class: the package need not be installed, and has no public way to ask. A torchdata loader
    # has a dataset; a dataset has stages, and interleaved or concatenated ones have several.
    stages = [getattr(getattr(iterable, "dataset", iterable), "_ex_iterable", None)]
    while stages:
        stage = stages.pop()
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            raise UserError(
                "the dataset shuffles in a buffer, and its state does not hold what is in the buffer",
                "datasets.IterableDataset.shuffle(buffer_size=...): a resume would lose those samples",
                "set data.resume=reread, which reads the epoch again up to the position; or shuffle the files before, "
                "and leave shuffle() out",
            )

        inner = [getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())]
        stages += [part for part in inner if part is not None]


def _check_state_needs_no_arguments(iterable: Any) -> None:
    """Refuse a stream whose state_dict() needs arguments, such as mosaicml's StreamingDataset."""
    if not has_state(iterable):
        return

    # Only bound, not called: nothing is read yet, and there need not be a state.
    try:
        inspect.signature(iterable.state_dict).bind()
    except TypeError as error:
        raise UserError(
            f"state_dict() of {type(iterable).__name__} cannot be called without arguments",
            f"{error}; a run asks a stream for its position and passes nothing",
            "return a class of your own around it, with state_dict() and load_state_dict(state); or "
            "lockstep.Shards(files, read) over its files",
        ) from error
    except ValueError:  # a method written in C has no signature
        return
