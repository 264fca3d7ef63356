"""`python -m lockstep.recipes.hrm.build out=FOLDER puzzle=sudoku9 ...` writes puzzles to disk in the published layout.

A training puzzle and its `augmentations` symmetric variants are one group. With `train_csv=FILE test_csv=FILE` (columns
`question` and `answer`, a point or a 0 for an empty cell) the Sudokus come from files instead of the generator.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.errors import UserError
from lockstep.recipes.hrm.arguments import overrides
from lockstep.recipes.hrm.data import Augment, Puzzles, write_puzzles
from lockstep.recipes.hrm.puzzles import SUDOKUS, IdGrids, PuzzleOptions, make_splits, move_sudoku
from lockstep.recipes.hrm.task import OF_PUZZLES
from lockstep.recipes.options import OnlyWith, warn_unused


@dataclass
class Build:
    out: str  # the folder
    puzzle: str = "sudoku9"  # as the options of the task
    train_size: int = 1000
    test_size: int = 2000
    holes: int | None = None
    least_guesses: float = 0.0
    maze_size: int = 20
    augmentations: int = 0  # variants of each training puzzle
    seed: int = 0
    train_csv: str = ""  # Sudokus of a file instead of generated ones
    test_csv: str = ""


RULES = (
    OnlyWith(
        ("puzzle", "holes", "least_guesses", "maze_size"),
        "train_csv",
        ("",),
        found="files with puzzles, which are Sudokus of 9 x 9",
    ),
    *OF_PUZZLES,
    OnlyWith(("augmentations",), "puzzle", (*SUDOKUS, "maze"), found="grids that are drawn again every time"),
)


def build(request: Build) -> None:
    warn_unused(Build, RULES, vars(request), prefix="", stacklevel=3)
    if bool(request.train_csv) != bool(request.test_csv):
        typed, missing = ("train_csv", "test_csv") if request.train_csv else ("test_csv", "train_csv")
        raise UserError(f"{typed} is given without {missing}", "", f"set {missing}=FILE as well")

    training, test, symmetry = _splits(request)

    # Variants draw from Python's generator, which the seed makes repeatable.
    if request.augmentations and symmetry is not None:
        random.seed(request.seed)
        training = with_variants(training, symmetry, request.augmentations)

    write_puzzles(Path(request.out) / "train", training)
    write_puzzles(Path(request.out) / "test", test)


def _splits(request: Build) -> tuple[Puzzles, Puzzles, Augment | None]:
    """Return the puzzles for training and testing, and the symmetry that makes variants of them."""
    if request.train_csv:
        training = read_csv(Path(request.train_csv), request.train_size, request.seed)
        test = read_csv(Path(request.test_csv), request.test_size, request.seed)
        return training, test, partial(move_sudoku, 9)

    training, test = make_splits(
        PuzzleOptions(
            puzzle=request.puzzle,
            train_size=request.train_size,
            test_size=request.test_size,
            data_seed=request.seed,
            holes=request.holes,
            least_guesses=request.least_guesses,
            maze_size=request.maze_size,
        )
    )
    if not isinstance(training, IdGrids):
        return training, test, training.augment

    # Id grids are drawn when they are read, so there is nothing to vary. Fix as many of them as an epoch has.
    random.seed(request.seed)
    cells, labels, ids = zip(*(training.draw(i) for i in range(len(training))), strict=True)
    drawn = Puzzles.single(np.array(cells), np.array(labels), training.symbols, np.array(ids), training.ids)
    return drawn, test, None


def with_variants(puzzles: Puzzles, symmetry: Augment, count: int) -> Puzzles:
    """Return every puzzle followed by `count` symmetric variants, as one group."""
    pairs = []
    for pair in zip(puzzles.inputs, puzzles.labels, strict=True):
        pairs += [pair, *(symmetry(*pair) for _ in range(count))]

    cells, labels = zip(*pairs, strict=True)
    return replace(
        puzzles,
        inputs=np.stack(cells),
        labels=np.stack(labels),
        puzzle_identifiers=np.repeat(puzzles.puzzle_identifiers, count + 1),
        puzzle_indices=np.arange(len(pairs) + 1),
        group_indices=np.arange(0, len(pairs) + 1, count + 1),
    )


def read_csv(path: Path, most: int, seed: int) -> Puzzles:
    """Draw up to `most` Sudokus of a file at random."""
    with path.open(newline="") as file:
        rows = [(row["question"], row["answer"]) for row in csv.DictReader(file)]

    rows = random.Random(seed).sample(rows, min(most, len(rows)))

    grids = _digits([question for question, _ in rows])
    solutions = _digits([answer for _, answer in rows])
    return Puzzles.single(grids + 1, solutions + 1, symbols=11)


def _digits(texts: list[str]) -> np.ndarray:
    """Return the digits of `texts` [count, 81]; a point is an empty cell."""
    return np.array([[int(digit) for digit in text.replace(".", "0")] for text in texts], dtype=np.uint8)


def main(arguments: Sequence[str]) -> None:
    known = [field.name for field in fields(Build)]
    try:
        values = overrides(arguments)
        if unknown := sorted(values.keys() - known):
            raise UserError(f"{unknown[0]}={values[unknown[0]]} is not known", "", f"use one of {', '.join(known)}")
        if "out" not in values:
            raise UserError("build needs out=FOLDER, the folder to write to", "", "set out=FOLDER")

        build(Build(**values))
    except UserError as error:
        print(f"build: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
