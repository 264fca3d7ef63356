"""Puzzles as a stream of one rank's batches, for a loop of plain PyTorch, by the names of HRM's own document.

`lockstep train` does not need it: there the engine says who reads what.
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
from lockstep.recipes.hrm import data


@dataclass(frozen=True)
class PuzzleDatasetConfig:
    dataset_path: str
    global_batch_size: int
    rank: int = 0
    num_replicas: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.global_batch_size % self.num_replicas:
            whole = -(-self.global_batch_size // self.num_replicas) * self.num_replicas
            raise UserError(
                f"global_batch_size={self.global_batch_size} on {self.num_replicas} replicas",
                "local batches of different size",
                f"type global_batch_size={whole}",
            )


class PuzzleDataset(IterableDataset):
    """A pass over the split `train` (every group once, in a new order each time, whole batches only) or `test` (every
    example once, in its place, the last batch shorter). All ranks agree on a global batch; each takes its slice. Loader
    processes share the batches; let them live on (`persistent_workers=True`), as it is they who count the passes."""

    def __init__(self, config: PuzzleDatasetConfig, split: str):
        self.config, self.split = config, split
        self.rank, self.num_replicas = config.rank, config.num_replicas
        self.local_batch_size = config.global_batch_size // self.num_replicas
        self.puzzles = data.read_puzzles(Path(config.dataset_path) / split)
        self.metadata = data.read_metadata(Path(config.dataset_path) / split)
        self.epoch = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches = self._iter_train() if self.split == "train" else self._iter_test()
        worker = get_worker_info()
        return batches if worker is None else islice(batches, worker.id, None, worker.num_workers)

    def _iter_train(self) -> Iterator[dict[str, Tensor]]:
        """Which example of a group is taken follows from seed, epoch and group, so whoever reads it takes the same."""
        groups = data.PuzzleDataset(self.puzzles, most_steps=1, explore=0.0)
        order, epoch = list(range(len(groups))), self.epoch
        self.epoch += 1
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        for start in range(0, len(order) - self.config.global_batch_size + 1, self.config.global_batch_size):
            drawn = []
            with _python_random_kept():
                for group in order[self._slice(start)]:
                    random.seed(f"{self.config.seed}/{epoch}/{group}")
                    drawn.append(groups[group])
            yield data.collate(drawn)

    def _iter_test(self) -> Iterator[dict[str, Tensor]]:
        examples = data.PuzzleExamples(self.puzzles)
        for start in range(0, len(examples), self.config.global_batch_size):
            mine = range(len(examples))[self._slice(start)]
            if mine:
                yield data.collate([examples[index] for index in mine])

    def _slice(self, start: int) -> slice:
        first = start + self.rank * self.local_batch_size
        return slice(first, first + self.local_batch_size)


@contextmanager
def _python_random_kept() -> Iterator[None]:
    """The loop around may draw from the same generator."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
