"""`python -m lockstep.recipes.hrm.build out=FOLDER puzzle=sudoku9 ...`: puzzles on disk, in the published layout.

A training puzzle and its `augmentations` symmetries are one group. With `train_csv=FILE test_csv=FILE` (columns
`question` and `answer`, a point or a 0 for an empty cell) Sudokus of files are taken in place of generated ones.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from lockstep.errors import UserError
from lockstep.recipes.hrm.data import Augment, Puzzles, write_puzzles
from lockstep.recipes.hrm.pretrain import overrides
from lockstep.recipes.hrm.puzzles import Asked, IdGrid, SudokuMoves, family
from lockstep.recipes.hrm.task import OF_PUZZLES, SUDOKUS
from lockstep.recipes.options import OnlyWith, warn_unused


@dataclass
class Build:
    out: str
    puzzle: str = "sudoku9"
    train_size: int = 1000
    test_size: int = 2000
    holes: int | None = None
    least_guesses: float = 0.0
    maze_size: int = 20
    augmentations: int = 0
    seed: int = 0
    train_csv: str = ""
    test_csv: str = ""


OF_GENERATED = ("puzzle", "holes", "least_guesses", "maze_size")
RULES = (
    OnlyWith(OF_GENERATED, "train_csv", ("",), found="files with puzzles, which are Sudokus of 9 x 9"),
    *OF_PUZZLES,
    OnlyWith(("augmentations",), "puzzle", (*SUDOKUS, "maze"), found="grids that are drawn anew"),
)


def build(asked: Build) -> None:
    warn_unused(Build, RULES, vars(asked), prefix="")
    if bool(asked.train_csv) != bool(asked.test_csv):
        raise UserError("Sudokus from files", "one of train_csv and test_csv", "give both")
    if asked.train_csv:
        training, test = (
            read_csv(Path(path), most, asked.seed)
            for path, most in ((asked.train_csv, asked.train_size), (asked.test_csv, asked.test_size))
        )
        move: Augment | None = SudokuMoves(9)
    else:
        options = Asked(
            kind=asked.puzzle,
            train_size=asked.train_size,
            test_size=asked.test_size,
            seed=asked.seed,
            holes=asked.holes,
            least_guesses=asked.least_guesses,
            size=asked.maze_size,
        )
        training, test = family(options)
        move = None if isinstance(training, IdGrid) else training.augment
    if isinstance(training, IdGrid):
        training = _drawn(training, asked.seed)
    if asked.augmentations and move is not None:
        random.seed(asked.seed)
        training = with_variants(training, move, asked.augmentations)
    write_puzzles(Path(asked.out) / "train", training)
    write_puzzles(Path(asked.out) / "test", test)


def with_variants(puzzles: Puzzles, move: Augment, count: int) -> Puzzles:
    """Every puzzle, followed by `count` of its symmetries, as one group."""
    cells, labels = [], []
    for pair in zip(puzzles.inputs, puzzles.labels, strict=True):
        for variant in (pair, *(move(*pair) for _ in range(count))):
            cells.append(variant[0])
            labels.append(variant[1])
    return replace(
        puzzles,
        inputs=np.stack(cells),
        labels=np.stack(labels),
        puzzle_identifiers=np.repeat(puzzles.puzzle_identifiers, count + 1),
        puzzle_indices=np.arange(len(cells) + 1),
        group_indices=np.arange(0, len(cells) + 1, count + 1),
    )


def read_csv(path: Path, most: int, seed: int) -> Puzzles:
    """Up to `most` Sudokus of a file, drawn at random."""
    with path.open(newline="") as file:
        rows = [(row["question"], row["answer"]) for row in csv.DictReader(file)]
    rows = random.Random(seed).sample(rows, min(most, len(rows)))
    grids, solutions = (
        np.array([[int(digit) for digit in row[i].replace(".", "0")] for row in rows], dtype=np.uint8) for i in (0, 1)
    )
    none = np.zeros(len(rows), dtype=np.int64)
    return Puzzles.single(grids + 1, solutions + 1, none, symbols=11, id_count=1)


def _drawn(training: IdGrid, seed: int) -> Puzzles:
    """As many grids as an epoch has, fixed."""
    random.seed(seed)
    samples = [training[i] for i in range(len(training))]
    cells, labels, ids = (np.array([s[key] for s in samples]) for key in ("inputs", "labels", "ids"))
    return Puzzles.single(cells, labels, ids, training.symbols, training.ids)


def main(words: Sequence[str]) -> None:
    try:
        build(_asked(words))
    except UserError as error:
        print(f"build: {error}", file=sys.stderr)
        sys.exit(2)


def _asked(words: Sequence[str]) -> Build:
    values, known = overrides(words), [each.name for each in fields(Build)]
    if wrong := sorted(values.keys() - known):
        raise UserError(f"{wrong[0]}={values[wrong[0]]}", "no such key", f"type one of {', '.join(known)}")
    if "out" not in values:
        raise UserError("a folder to write to", "no out", "type out=FOLDER")
    return Build(**values)


if __name__ == "__main__":
    main(sys.argv[1:])
