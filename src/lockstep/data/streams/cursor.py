"""Reads one virtual shard in one epoch, from its beginning or from a saved state.

It gives one sample after another, and after each of them the state from which the next one follows. A dataset that has
a state of its own is asked for it; otherwise the samples before the position are read again and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lockstep.data.sample_errors import name_samples
from lockstep.data.streams.shards import DROPPED, Shards, apply
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything

_END = object()  # in place of a sample: the shard has ended


class Cursor:
    """A position in a virtual shard.

    After each `take`, `state` is the position behind the samples that were taken, as plain values and tensors. The
    sample after them may already be read, to know whether there is one.
    """

    def __init__(
        self,
        shards: Shards,
        files: list[Any],
        seed: int,
        epoch: int,
        shard: int,
        state: dict[str, Any] | None = None,
        reread: bool = False,
    ):
        """`files` are those of this shard, in the order of the epoch. `reread`: see `data.resume`."""
        self._shards = shards
        self._files = files
        self._seed = seed
        self._epoch = epoch
        self._shard = shard
        self._reread = reread

        # The position: the current file, samples read of it, and samples read of the shard in this epoch.
        self._file = 0
        self._in_file = 0
        self._read_so_far = 0
        self._opened: Any = None  # what `read` returned for the current file
        self._iterator: Iterator[Any] | None = None
        self._packer = shards.make_packer() if shards.make_packer else None
        self._flushed = False  # the files have ended, and the packer has completed its last rows

        self.taken = 0  # samples taken in this epoch, after filtering and packing
        self.ended = False
        self._peeked: list[Any] = []  # at most one sample: the next one

        # How many samples were read again to restore the position, and how long that took.
        self.reread_samples, self.reread_s = 0, 0.0

        if state is not None:
            self._restore(state)
        self.state = self._state()

    def take(self, count: int) -> list[Any]:
        """Return the next samples: `count`, or fewer if the shard ends."""
        samples, self._peeked = self._peeked, []
        while len(samples) < count and (sample := self._next()) is not _END:
            samples.append(sample)

        self.taken += len(samples)

        # The state comes before the look at the next sample, which is not taken yet.
        self.state = self._state()
        sample = self._next() if len(samples) == count else _END
        self.ended = sample is _END
        self._peeked = [] if self.ended else [sample]
        self.state["ended"] = self.ended
        return samples

    # ---- the state ----

    def _state(self) -> dict[str, Any]:
        by_state = self._iterator is not None and has_state(self._opened) and not self._reread
        return {
            "file": self._file,
            "in_file": self._in_file,
            "read": self._read_so_far,
            "taken": self.taken,
            "inner": self._opened.state_dict() if by_state else None,
            "packer": self._packer.state_dict() if self._packer else None,
            "flushed": self._flushed,
            "ended": self.ended,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self._file = int(state["file"])
        self.taken = int(state["taken"])
        self.ended = bool(state["ended"])
        self._flushed = bool(state["flushed"])
        if self._packer:
            self._packer.load_state_dict(state["packer"])
        if self.ended:
            return

        # By the state of the iterable, or else by reading the samples of this file again.
        self._read_so_far = int(state["read"])
        in_file = int(state["in_file"])
        if state["inner"] is not None and not self._reread:
            self._open(state["inner"])
            self._in_file = in_file
        elif in_file:
            began = time.perf_counter()
            self._read_so_far -= in_file
            self.reread_samples = in_file
            for _ in range(in_file):
                self._read_or_refuse()
            self.reread_s = time.perf_counter() - began

    def _read_or_refuse(self) -> None:
        """Read a sample that was trained before the resume."""
        file = self._file
        if self._read_raw() is _END or self._file != file:
            raise UserError(
                f"virtual shard {self._shard} has fewer samples than when its position was saved",
                f"epoch {self._epoch}, file {file} of the shard",
                "resume with the same data, or start a new run from the weights (init_from=RUN)",
            )

    # ---- reading ----

    def _next(self) -> Any:
        """Return the next sample after filtering and packing, or _END."""
        shards, packer = self._shards, self._packer
        while True:
            # Complete rows come first.
            row = packer.pop() if packer else None
            if row is not None:
                row = apply(shards.after, row)
                if row is not DROPPED:
                    return row
                continue

            sample = _END if self._flushed else self._read_raw()
            if sample is _END:
                if packer is None or self._flushed:
                    return _END
                packer.flush()
                self._flushed = True
                continue

            sample = self._applied(sample)
            if sample is DROPPED:
                continue
            if packer is None:
                return sample
            packer.add(sample)

    def _applied(self, sample: Any) -> Any:
        try:
            return apply(self._shards.before, sample)
        except Exception as error:
            name_samples(error, [self._read_so_far - 1], self._where)
            raise

    def _read_raw(self) -> Any:
        """Return the next sample of the files, or _END. Each is seeded by its number in the shard."""
        while self._file < len(self._files):
            if self._iterator is None:
                self._open()

            assert self._iterator is not None
            seed_everything(derive(self._seed, "shard", self._epoch, self._shard, self._read_so_far))
            try:
                sample = next(self._iterator)
            except StopIteration:
                self._file += 1
                self._in_file = 0
                self._iterator = self._opened = None
                continue
            except Exception as error:
                name_samples(error, [self._read_so_far], self._where)
                raise

            self._in_file += 1
            self._read_so_far += 1
            return sample

        return _END

    def _open(self, inner: Any = None) -> None:
        """Open the current file, and continue at its state `inner` if there is one."""
        # The file may draw random numbers when it is opened, to shuffle itself for example.
        seed_everything(derive(self._seed, "file", self._epoch, self._shard, self._file))
        opened: Any = self._shards.read(self._files[self._file])
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(self._epoch)
        if not self._reread:
            _check_state_is_whole(opened)

        # The iterable has the state, or else its iterator may have it.
        self._opened = opened if has_state(opened) else iter(opened)
        if inner is not None:
            self._opened.load_state_dict(inner)
        self._iterator = iter(self._opened)

    @property
    def _where(self) -> str:
        return f"of virtual shard {self._shard}, counted from 0, in epoch {self._epoch}"


def has_state(iterable: Any) -> bool:
    """Return whether an iterable can say where its newest iterator is, and can continue there."""
    return hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")


def _check_state_is_whole(iterable: Any) -> None:
    """Refuse a dataset of Hugging Face that shuffles in a buffer: its state does not hold the buffer."""
    stage = getattr(iterable, "_ex_iterable", None)
    while stage is not None:
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            raise UserError(
                "the dataset shuffles in a buffer, and its state does not hold what is in the buffer",
                "datasets.IterableDataset.shuffle(buffer_size=...): a resume would lose those samples",
                "set data.resume=reread, which reads the epoch again up to the position; or shuffle the files before, "
                "and leave shuffle() out",
            )

        stage = getattr(stage, "ex_iterable", None)
