"""Puzzles in arrays, in memory and on disk in the published layout.

On disk each split (`train`, `test`) is a folder with `dataset.json` and, for each of its sets, five files:
`SET__inputs.npy` and `SET__labels.npy` [examples, cells] uint8, `SET__puzzle_identifiers.npy`,
`SET__puzzle_indices.npy` (where the examples of a puzzle begin) and `SET__group_indices.npy` (where the puzzles of a
group begin). A group is one base puzzle with all its variants: an epoch visits each group once and draws one of its
examples.
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
from torch.utils.data import Dataset

from lockstep.errors import UserError

Array = np.ndarray
Augment = Callable[[Array, Array], tuple[Array, Array]]  # (cells, labels) -> an equivalent puzzle and its labels
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
IGNORED = 0  # the padding symbol: a cell with this label has no answer, and no loss


@dataclass
class PuzzleDatasetMetadata:
    """The content of `dataset.json`."""

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
    """The puzzles of one split."""

    inputs: Array  # [examples, cells] uint8
    labels: Array  # [examples, cells] uint8; IGNORED where a cell has no answer
    puzzle_identifiers: Array  # [puzzles]
    puzzle_indices: Array  # [puzzles + 1]: puzzle i has the examples from entry i up to entry i + 1
    group_indices: Array  # [groups + 1]: likewise the puzzles of group i
    symbols: int
    ids: int
    augment: Augment | None = None

    @staticmethod
    def single(inputs: Array, labels: Array, symbols: int, ids: Array | None = None, id_count: int = 1) -> Puzzles:
        """Make every example a puzzle and a group of its own. Without `ids` all have the same rule, number 0."""
        if ids is None:
            ids = np.zeros(len(inputs), dtype=np.int64)

        edges = np.arange(len(inputs) + 1)
        return Puzzles(inputs.astype(np.uint8), labels.astype(np.uint8), ids, edges, edges, symbols, id_count)

    @property
    def cells(self) -> int:
        return self.inputs.shape[1]

    def __len__(self) -> int:
        return len(self.group_indices) - 1  # groups

    def draw(self, group: int) -> tuple[Array, Array, int]:
        """Draw one puzzle of a group and one of its examples: (cells, labels, puzzle id)."""
        puzzle = random.randrange(self.group_indices[group], self.group_indices[group + 1])
        example = random.randrange(self.puzzle_indices[puzzle], self.puzzle_indices[puzzle + 1])
        pair: tuple[Array, Array] = self.inputs[example], self.labels[example]
        if self.augment is not None:
            pair = self.augment(*pair)

        return *pair, int(self.puzzle_identifiers[puzzle])


@dataclass(eq=False)
class PuzzleGroups(Dataset):
    """Training samples: group i gives one of its examples, and the fewest segments that it must run.

    Everything random is drawn from Python's generator, which Lockstep seeds by (seed, epoch, sample): every rank that
    reads a group draws the same example.
    """

    puzzles: Any  # anything with a length and `draw`
    most_steps: int
    explore: float

    def __len__(self) -> int:
        return len(self.puzzles)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cells, labels, puzzle_id = self.puzzles.draw(index)

        # Usually one segment. Sometimes more, so that the model can learn what continuing is worth.
        explores = self.most_steps > 1 and random.random() < self.explore
        least = random.randint(2, self.most_steps) if explores else 1
        return {"inputs": cells, "labels": labels, "ids": puzzle_id, "least": least}


class PuzzleExamples(Dataset):
    """Evaluation samples: every example as it is stored."""

    def __init__(self, puzzles: Puzzles):
        self.puzzles = puzzles
        self.ids = np.repeat(puzzles.puzzle_identifiers, np.diff(puzzles.puzzle_indices))  # [examples]

    def __len__(self) -> int:
        return len(self.puzzles.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "inputs": self.puzzles.inputs[index],
            "labels": self.puzzles.labels[index],
            "ids": int(self.ids[index]),
            "least": 1,
        }


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples as arrays, then make tensors: stacking small tensors would take ten times as long."""
    return {key: torch.from_numpy(np.stack([s[key] for s in samples])) for key in samples[0]}


def read_metadata(folder: Path) -> PuzzleDatasetMetadata:
    with _reading(folder):
        return PuzzleDatasetMetadata(**json.loads((folder / "dataset.json").read_text()))


def read_puzzles(folder: Path) -> Puzzles:
    """Read a split from disk. Its sets are joined one after another."""
    metadata = read_metadata(folder)
    with _reading(folder):
        sets = [
            {array: np.load(folder / f"{name}__{array}.npy", allow_pickle=False) for array in ARRAYS}
            for name in metadata.sets
        ]

    inputs, labels, ids = (np.concatenate([arrays[name] for arrays in sets]) for name in ARRAYS[:3])
    # Published files may ignore a different label.
    if metadata.ignore_label_id not in (None, IGNORED):
        labels = np.where(labels == metadata.ignore_label_id, IGNORED, labels)

    return Puzzles(
        inputs.astype(np.uint8),
        labels.astype(np.uint8),
        ids.astype(np.int64),
        _join_offsets([arrays["puzzle_indices"] for arrays in sets]),
        _join_offsets([arrays["group_indices"] for arrays in sets]),
        metadata.vocab_size,
        metadata.num_puzzle_identifiers,
    )


def write_puzzles(folder: Path, puzzles: Puzzles, name: str = "all") -> None:
    """Write a split that consists of one set called `name`."""
    metadata = PuzzleDatasetMetadata(
        seq_len=puzzles.cells,
        vocab_size=puzzles.symbols,
        num_puzzle_identifiers=puzzles.ids,
        total_groups=len(puzzles),
        mean_puzzle_examples=len(puzzles.inputs) / (len(puzzles.puzzle_indices) - 1),
        sets=[name],
    )

    folder.mkdir(parents=True, exist_ok=True)
    for array in ARRAYS:
        dtype = np.uint8 if array in ("inputs", "labels") else np.int32
        np.save(folder / f"{name}__{array}.npy", getattr(puzzles, array).astype(dtype))

    (folder / "dataset.json").write_text(json.dumps(asdict(metadata), indent=2))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"the puzzles in {folder} cannot be read",
            f"{type(error).__name__}: {error}",
            "set a data_path with train/ and test/; python -m lockstep.recipes.hrm.build makes one",
        ) from error


def _join_offsets(offsets: list[Array]) -> Array:
    """Join the offsets of several sets into one list: each continues where the previous one ended."""
    joined = [np.zeros(1, dtype=np.int64)]
    for edges in offsets:
        joined.append(edges[1:].astype(np.int64) + joined[-1][-1])

    return np.concatenate(joined)
