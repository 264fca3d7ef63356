"""Puzzles in arrays, in memory and on disk in the published layout.

On disk: a folder for each split (`train`, `test`) with `dataset.json` and, for each of its sets, five files
`SET__inputs.npy`, `SET__labels.npy` [examples, cells] uint8, `SET__puzzle_identifiers.npy`, `SET__puzzle_indices.npy`
(where the examples of a puzzle begin) and `SET__group_indices.npy` (where the puzzles of a group begin). A group is one
base puzzle with all its variants: an epoch visits each group once, and draws one of its examples.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.hrm.losses import IGNORED

Array = np.ndarray
Augment = Callable[[Array, Array], tuple[Array, Array]]  # (cells, labels) -> the same puzzle, looking different
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")


@dataclass
class PuzzleDatasetMetadata:
    """`dataset.json`."""

    seq_len: int
    vocab_size: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    sets: list[str]
    pad_id: int = 0
    ignore_label_id: int | None = 0
    blank_identifier_id: int = 0


@dataclass
class Puzzles:
    """One split."""

    inputs: Array  # [examples, cells] uint8
    labels: Array  # the same; IGNORED where nothing is asked
    puzzle_identifiers: Array  # [puzzles]
    puzzle_indices: Array  # [puzzles + 1]: examples of puzzle i are [i, i + 1)
    group_indices: Array  # [groups + 1]: puzzles of group i
    symbols: int
    ids: int
    augment: Augment | None = None

    @staticmethod
    def single(inputs: Array, labels: Array, ids: Array, symbols: int, id_count: int) -> Puzzles:
        """Every example is a puzzle and a group of its own."""
        edges = np.arange(len(inputs) + 1)
        return Puzzles(inputs.astype(np.uint8), labels.astype(np.uint8), ids, edges, edges, symbols, id_count)

    @property
    def cells(self) -> int:
        return self.inputs.shape[1]

    def puzzle_of(self, example: int) -> int:
        return int(np.searchsorted(self.puzzle_indices, example, side="right")) - 1


class PuzzleDataset(Dataset):
    """For training: group i, one of its examples, and the fewest segments to think about it.

    Everything random is drawn from Python's generator, which Lockstep seeds by (seed, epoch, sample): whichever rank
    reads a group, it draws the same example.
    """

    def __init__(self, puzzles: Puzzles, most_steps: int, explore: float):
        self.puzzles, self.most_steps, self.explore = puzzles, most_steps, explore

    def __len__(self) -> int:
        return len(self.puzzles.group_indices) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        p = self.puzzles
        puzzle = random.randrange(p.group_indices[index], p.group_indices[index + 1])
        example = random.randrange(p.puzzle_indices[puzzle], p.puzzle_indices[puzzle + 1])
        cells, labels = p.inputs[example], p.labels[example]
        if p.augment is not None:
            cells, labels = p.augment(cells, labels)
        return sample(cells, labels, int(p.puzzle_identifiers[puzzle]), least_steps(self.most_steps, self.explore))


class PuzzleExamples(Dataset):
    """For evaluation: every example as it is."""

    def __init__(self, puzzles: Puzzles):
        self.puzzles = puzzles

    def __len__(self) -> int:
        return len(self.puzzles.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        p = self.puzzles
        return sample(p.inputs[index], p.labels[index], int(p.puzzle_identifiers[p.puzzle_of(index)]), 1)


def sample(cells: Array, labels: Array, puzzle_id: int, least: int) -> dict[str, Any]:
    return {"inputs": cells, "labels": labels, "ids": puzzle_id, "least": least}


def least_steps(most: int, explore: float) -> int:
    """Now and then a puzzle must be thought about for longer, so that the worth of going on can be learned."""
    return random.randint(2, most) if most > 1 and random.random() < explore else 1


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One array per key, then one tensor: a stack of small tensors costs ten times as much."""
    return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}


def read_metadata(folder: Path) -> PuzzleDatasetMetadata:
    with _told_of(folder):
        return PuzzleDatasetMetadata(**json.loads((folder / "dataset.json").read_text()))


@contextmanager
def _told_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"puzzles in {folder}",
            f"{type(error).__name__}: {error}",
            "type a data_path with train/ and test/; python -m lockstep.recipes.hrm.build makes one",
        ) from error


def read_puzzles(folder: Path) -> Puzzles:
    """A split from disk; its sets one after another."""
    metadata = read_metadata(folder)
    with _told_of(folder):
        sets = [
            {name: np.load(folder / f"{each}__{name}.npy", allow_pickle=False) for name in ARRAYS}
            for each in metadata.sets
        ]
    labels = np.concatenate([each["labels"] for each in sets])
    if metadata.ignore_label_id not in (None, IGNORED):
        labels = np.where(labels == metadata.ignore_label_id, IGNORED, labels)
    return Puzzles(
        np.concatenate([each["inputs"] for each in sets]).astype(np.uint8),
        labels.astype(np.uint8),
        np.concatenate([each["puzzle_identifiers"] for each in sets]).astype(np.int64),
        _joined([each["puzzle_indices"] for each in sets]),
        _joined([each["group_indices"] for each in sets]),
        metadata.vocab_size,
        metadata.num_puzzle_identifiers,
    )


def write_puzzles(folder: Path, puzzles: Puzzles, name: str = "all") -> PuzzleDatasetMetadata:
    """The opposite: one set of that name."""
    groups = len(puzzles.group_indices) - 1
    examples = len(puzzles.inputs) / (len(puzzles.puzzle_indices) - 1)
    metadata = PuzzleDatasetMetadata(puzzles.cells, puzzles.symbols, puzzles.ids, groups, examples, [name])
    folder.mkdir(parents=True, exist_ok=True)
    for array in ARRAYS:
        values = getattr(puzzles, array)
        np.save(folder / f"{name}__{array}.npy", values if array in ("inputs", "labels") else values.astype(np.int32))
    (folder / "dataset.json").write_text(json.dumps(asdict(metadata), indent=2))
    return metadata


def _joined(edges: list[Array]) -> Array:
    """Offsets of several sets as one list: each goes on where the one before it ended."""
    found = [np.zeros(1, dtype=np.int64)]
    for each in edges:
        found.append(each[1:].astype(np.int64) + found[-1][-1])
    return np.concatenate(found)
