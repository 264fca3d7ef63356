"""The samples on which the check calls the loss. They are read once, and parts of them are collated into batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from lockstep.checkpoint.state.digests import digest
from lockstep.data.loader import BatchRequest
from lockstep.data.map_source import MapSource
from lockstep.data.streams.epochs import EpochSource

Array = Tensor | np.ndarray


class Samples:
    """A few samples: a list, or one batch if they come from a stream or from a `__getitems__` that makes batches.

    Each call of `batch` collates anew, because a loss may change what it gets. A batch that comes whole can be cut only
    if every array in it has one row for each sample.
    """

    def __init__(self, samples: Any, count: int, collate: Callable[[Any], Any] | None):
        """`collate` is None if `samples` is a collated batch."""
        self._samples = samples
        self._collate = collate
        self.count = count

        # A `__getitems__` may return neither, but a batch that the task's collate still gets.
        self.is_collated = collate is None
        self.is_list = collate is not None and isinstance(samples, list) and len(samples) == count
        self.can_be_split = self.is_list or _has_one_row_per_sample(samples, count)

    def batch(self, positions: Sequence[int] | None = None) -> Any:
        """Return a new collated batch of the samples at these positions, or of all samples."""
        chosen = self._samples

        # A list of samples is collated anew. A batch that came whole is cut row by row.
        if self.is_list:
            chosen = [self._samples[position] for position in positions or range(self.count)]
        elif positions is not None:
            chosen = tree_map(_rows(list(positions)), self._samples)

        # torch's own collate makes new tensors.
        if self._collate is default_collate:
            return default_collate(chosen)

        # A copy, because the loss may change its batch in place.
        try:
            chosen = copy.deepcopy(chosen)
        except Exception:  # some objects cannot be copied
            pass

        return chosen if self._collate is None else self._collate(chosen)

    @property
    def half(self) -> list[int]:
        """The positions of the first half of the samples."""
        return list(range((self.count + 1) // 2))

    def digests(self) -> list[str]:
        """Return one digest per sample, or a single one for a batch."""
        samples = self._samples if self.is_list else [self._samples]
        return [digest(sample) for sample in samples]

    def by_size(self) -> list[int]:
        """Return the positions of the samples, the smallest sample first."""
        # The rows of a batch have one size.
        if not self.is_list:
            return list(range(self.count))

        return sorted(range(self.count), key=lambda position: _size(self._samples[position]))


def read_stream_samples(source: EpochSource, count: int) -> Samples | None:
    """Return the first samples of this rank's first micro-batch, or None if it cannot be read.

    A stream cannot be read twice, so training uses the same micro-batch afterwards.
    """
    try:
        micro = source.first_micro_batch()
    except Exception:  # the first step will report this error
        return None

    # All of it, if it cannot be made smaller.
    whole = Samples(micro.data, micro.num_samples, None)
    if not whole.can_be_split or micro.padding:
        return whole

    count = min(count, micro.num_samples)
    return Samples(whole.batch(range(count)), count, None)


def read_samples(source: MapSource, request: BatchRequest) -> Samples | None:
    """Return the samples of a request, or None if one cannot be read. The first step will report that error."""
    try:
        return Samples(source.read_samples(*request), len(request.ids), source.collate)
    except Exception:
        return None


def _has_one_row_per_sample(batch: Any, count: int) -> bool:
    """Return whether a batch of `count` samples can be split: each of its arrays has one row per sample."""
    leaves = tree_leaves(batch)

    # A plain number might be the batch size, which would be wrong for a part.
    if any(isinstance(leaf, int | float) for leaf in leaves):
        return False

    arrays = [leaf for leaf in leaves if isinstance(leaf, Array)]
    return bool(arrays) and all(array.ndim and len(array) == count for array in arrays)


def _rows(positions: list[int]) -> Callable[[Any], Any]:
    """Return a function that takes these rows of an array, and returns other leaves as they are."""
    return lambda leaf: leaf[positions] if isinstance(leaf, Array) else leaf


def _size(sample: Any) -> int:
    """Return the number of nonzero elements and characters in a sample. Padding with zeros does not count."""
    size = 0

    # Numbers and other leaves have no size.
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor):
            size += int(leaf.count_nonzero())
        elif isinstance(leaf, np.ndarray):
            size += int(np.count_nonzero(leaf))
        elif isinstance(leaf, str | bytes):
            size += len(leaf)

    return size
