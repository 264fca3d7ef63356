"""The samples that the check calls the loss with: read once, and collated in parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.checkpoint.state_tree import digest
from lockstep.data.loader import Request
from lockstep.data.sources import MapSource
from lockstep.data.streams import StreamSource

Array = Tensor | np.ndarray


class Samples:
    """A few samples of a dataset: as a list, or as one batch if its `__getitems__` makes batches, or of a stream."""

    def __init__(self, read: Any, count: int, collate: Callable[[Any], Any] | None):
        """`collate` is None if `read` is a finished batch."""
        self._read = read
        self.finished = collate is None
        self._collate = collate
        self.count = count

        # A batch that was made at once can be taken apart if each of its arrays has a row for every sample. A number in
        # it may be how many there are.
        leaves = tree_leaves(read)
        arrays = [leaf for leaf in leaves if isinstance(leaf, Array)]
        counts = any(isinstance(leaf, int | float) for leaf in leaves)
        self.is_list = collate is not None and isinstance(read, list) and len(read) == count
        self.can_be_split = self.is_list or (
            bool(arrays) and not counts and all(a.ndim and len(a) == count for a in arrays)
        )

    def batch(self, positions: Sequence[int] | None = None) -> Any:
        """Return the collated batch of the samples at these positions, or of all; a new one in every call."""
        if self.is_list:
            chosen = [self._read[position] for position in positions or range(self.count)]
        else:
            chosen = self._read if positions is None else tree_map(_rows(list(positions)), self._read)
        try:
            chosen = copy.deepcopy(chosen)
        except Exception:  # what cannot be copied is passed as it is
            pass
        return chosen if self._collate is None else self._collate(chosen)

    @property
    def half(self) -> list[int]:
        """Return the positions of half of the samples."""
        return list(range((self.count + 1) // 2))

    def digests(self) -> list[str]:
        """Return a digest of every sample, or one of a batch that was made at once."""
        return [digest(sample) for sample in self._read] if self.is_list else [digest(self._read)]

    def by_size(self) -> list[int]:
        """Return the positions of the samples, from the one that holds least."""
        if not self.is_list:
            return list(range(self.count))
        return sorted(range(self.count), key=lambda position: _size(self._read[position]))


def first_of_stream(source: StreamSource, most: int) -> Samples | None:
    """Return the first samples of this rank's first micro-batch, which is trained on afterwards; None: as in `read`.

    A stream cannot be read twice, and has made a batch of them.
    """
    try:
        micro = source.first_micro_batch()
    except Exception:
        return None
    whole = Samples(micro.data, micro.samples, None)
    if not whole.can_be_split or micro.padding:
        return whole
    count = min(most, micro.samples)
    return Samples(whole.batch(range(count)), count, None)


def read(source: MapSource, request: Request) -> Samples | None:
    """Return the samples of a request; None if one cannot be read, which the first step will report in its place."""
    try:
        with source.reading_here():
            return Samples(source.reader.samples(request), len(request.ids), source.reader.collate)
    except Exception:
        return None


def _rows(positions: list[int]) -> Callable[[Any], Any]:
    return lambda leaf: leaf[positions] if isinstance(leaf, Array) else leaf


def _size(sample: Any) -> int:
    """Return how much a sample holds: elements that are not zero, and the lengths of texts."""
    size = 0
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor):
            size += int(leaf.count_nonzero())
        elif isinstance(leaf, np.ndarray):
            size += int(np.count_nonzero(leaf))
        elif isinstance(leaf, str | bytes):
            size += len(leaf)
    return size
