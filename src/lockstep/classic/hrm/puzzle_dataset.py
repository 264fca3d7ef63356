"""One rank's batches of a folder of puzzles, as the stream of HRM's own document.

`lockstep train` needs none of this: there the engine decides which rank reads what.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from lockstep.errors import UserError
from lockstep.recipes.hrm.data import PuzzleExamples, PuzzleGroups, collate, read_metadata, read_puzzles


@dataclass(frozen=True)
class PuzzleDatasetConfig:
    """The configuration of a `PuzzleDataset`."""

    dataset_path: str
    global_batch_size: int
    rank: int = 0
    num_replicas: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.global_batch_size % self.num_replicas:
            divisible = -(-self.global_batch_size // self.num_replicas) * self.num_replicas
            raise UserError(
                f"global_batch_size={self.global_batch_size} cannot be divided among {self.num_replicas} replicas",
                "",
                f"set global_batch_size={divisible}",
            )


class PuzzleDataset(IterableDataset):
    """One rank's batches of a split, as a stream.

    A pass over `train` visits every group once, in a new order each time, in full batches only. A pass over `test`
    visits every example once, in order, and the last batch may be shorter. All ranks agree on a global batch, and each
    takes its slice. Worker processes share the batches; they also count the passes, so keep them alive
    (`persistent_workers=True`).
    """

    def __init__(self, config: PuzzleDatasetConfig, split: str):
        self.config = config
        self.split = split
        self.rank = config.rank
        self.num_replicas = config.num_replicas

        self.local_batch_size = config.global_batch_size // self.num_replicas
        self.puzzles = read_puzzles(Path(config.dataset_path) / split)
        self.metadata = read_metadata(Path(config.dataset_path) / split)

        self.epoch = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        # A worker process takes every n-th batch.
        batches = self._iter_train() if self.split == "train" else self._iter_test()
        worker = get_worker_info()
        return batches if worker is None else islice(batches, worker.id, None, worker.num_workers)

    def _iter_train(self) -> Iterator[dict[str, Tensor]]:
        """The example of a group follows from seed, epoch and group, so every rank would draw the same one."""
        groups = PuzzleGroups(self.puzzles, most_steps=1, explore=0.0)
        seed = self.config.seed
        batch_size = self.config.global_batch_size

        epoch = self.epoch
        self.epoch += 1

        # Every rank shuffles alike, and takes its slice of every global batch.
        order = list(range(len(groups)))
        random.Random(f"{seed}/{epoch}").shuffle(order)

        # Groups that do not fill a batch at the end are left out.
        for start in range(0, len(order) - batch_size + 1, batch_size):
            samples = []
            # A sample draws from Python's generator, seeded by its group: the same on any number of ranks.
            with _keep_python_random_state():
                for group in order[self._slice(start)]:
                    random.seed(f"{seed}/{epoch}/{group}")
                    samples.append(groups[group])

            yield collate(samples)

    def _iter_test(self) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's slices of all examples, in their order."""
        examples = PuzzleExamples(self.puzzles)
        for start in range(0, len(examples), self.config.global_batch_size):
            # The last global batch may be so short that this rank has no part of it.
            indices = range(len(examples))[self._slice(start)]
            if indices:
                yield collate([examples[index] for index in indices])

    def _slice(self, start: int) -> slice:
        first = start + self.rank * self.local_batch_size
        return slice(first, first + self.local_batch_size)


@contextmanager
def _keep_python_random_state() -> Iterator[None]:
    """Restore the state of Python's generator afterwards: the loop around may draw from it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
