"""The families of puzzles, made from a seed: nothing is downloaded.

`family(kind, ...)` gives the splits for training and testing. Symbol 0 is padding in all of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.hrm import maze, sudoku
from lockstep.recipes.hrm.data import Array, Puzzles, sample

SUDOKU9 = Path(__file__).parent / "sudoku9.npz"  # made by make_sudoku9: it takes minutes
SUDOKU9_PARTS, SUDOKU9_TRAIN, SUDOKU9_TEST = 10, 100, 200  # each part has a generator of its own
COLOURS = 6  # of IdGrid


@dataclass(frozen=True)
class Asked:
    """What the task's options say about its data."""

    kind: str
    train_size: int
    test_size: int
    seed: int
    holes: int | None = None  # sudoku: empty cells; None: until no clue can go
    least_guesses: float = 0.0  # sudoku: how hard it must be
    size: int = 20  # maze: cells of a side
    longer_than: int = 0  # maze: the way has more cells than this
    rules: int = 16  # idgrid
    moves: bool = False  # idgrid: rules also turn and mirror
    augment: bool = True


def family(asked: Asked) -> tuple[Any, Puzzles]:
    """(for training: Puzzles, or a dataset that draws for itself; for testing: Puzzles)."""
    if asked.kind.startswith("sudoku"):
        return _sudoku(asked)
    return {"maze": _maze, "idgrid": _id_grid}[asked.kind](asked)


# ---- Sudoku ---------------------------------------------------------------------------------------------


@cache
def _sudoku(asked: Asked) -> tuple[Puzzles, Puzzles]:
    n = int(asked.kind.removeprefix("sudoku"))
    if n == 9 and asked.holes is None and not asked.least_guesses:
        train, test = _shipped(asked.train_size, asked.test_size)
    else:
        rng = random.Random(asked.seed)
        train, test = split_by_class(n, asked.holes, asked.train_size, asked.test_size, rng, asked.least_guesses)
    splits = []
    for grids, solutions in (train, test):
        none = np.zeros(len(grids), dtype=np.int64)  # every Sudoku has the same rule, so the same id
        splits.append(Puzzles.single(grids + 1, solutions + 1, none, symbols=n + 2, id_count=1))
    if asked.augment:
        splits[0].augment = SudokuMoves(n)
    return splits[0], splits[1]


Pair = tuple[Array, Array]  # puzzles and solutions, [count, cells] uint8


def split_by_class(
    n: int, holes: int | None, train: int, test: int, rng: random.Random, least_guesses: float = 0.0
) -> tuple[Pair, Pair]:
    """Which side a puzzle goes to follows from its canonical form: no test puzzle is a training puzzle in disguise."""
    sides: tuple[dict, dict] = {}, {}
    tries, hardest = 0, 0.0
    while len(sides[0]) < train or len(sides[1]) < test:
        grid, solution = sudoku.puzzle(n, holes, rng)
        share = hashlib.blake2b(sudoku.canonical(grid, n), digest_size=2).digest()
        side = int(int.from_bytes(share, "little") < 2**16 * test / (train + test))
        guesses = sudoku.difficulty(grid, n, rng) if least_guesses else 0.0
        hardest = max(hardest, guesses)
        if guesses >= least_guesses and len(sides[side]) < (train, test)[side]:
            sides[side][grid] = solution
        tries += 1
        if tries > 100 * (train + test):
            kind = f"{n} x {n} Sudokus" + (f" with {holes} holes" if holes is not None else "")
            asked = f"{train} + {test} different {kind}"
            found = f"{len(sides[0])} + {len(sides[1])} after {tries} tries"
            raise _too_few(asked, found, least_guesses, hardest)
    first, second = (
        (np.array(list(side), dtype=np.uint8), np.array(list(side.values()), dtype=np.uint8)) for side in sides
    )
    return first, second


def _too_few(asked: str, found: str, least_guesses: float, hardest: float) -> UserError:
    """Because they are all easy, or because there are no more of them."""
    fix = "type a smaller task.train_size and task.test_size"
    if not least_guesses:
        return UserError(asked, found, fix)
    asked = f"{asked}, of task.least_guesses={least_guesses:g}"
    if hardest < least_guesses:
        fix = f"type task.least_guesses={hardest:g} or less" if hardest else "leave task.least_guesses out"
        return UserError(asked, f"{found}: the hardest took {hardest:g} guesses", fix)
    return UserError(asked, found, f"type a smaller task.least_guesses; or {fix.removeprefix('type ')}")


def _shipped(train: int, test: int) -> tuple[Pair, Pair]:
    with np.load(SUDOKU9, allow_pickle=False) as file:
        puzzles, solutions = file["puzzles"], file["solutions"]
    if train + test > len(puzzles):
        raise UserError(
            f"{train} + {test} Sudokus of 9 x 9",
            f"{len(puzzles)} that come with the recipe",
            f"type a task.train_size and task.test_size of {len(puzzles)} together; or task.holes=50, or your own "
            "task.data_path",
        )
    return (puzzles[:train], solutions[:train]), (puzzles[-test:], solutions[-test:])


def sudoku9_part(part: int) -> tuple[Pair, Pair]:
    return split_by_class(9, None, SUDOKU9_TRAIN, SUDOKU9_TEST, random.Random(f"sudoku9/{part}"))


def make_sudoku9(path: Path, parts: list[tuple[Pair, Pair]]) -> None:
    """The file that comes with the recipe, from all parts: minimal puzzles, those for training first."""
    pairs = [part[side] for side in (0, 1) for part in parts]
    puzzles, solutions = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    np.savez_compressed(path, puzzles=puzzles, solutions=solutions)


@dataclass
class SudokuMoves:
    """Digits, lines, bands and sides of the grid exchanged at random."""

    n: int

    def __call__(self, cells: Array, labels: Array) -> Pair:
        places, digits = sudoku.shuffled(self.n)
        symbols = np.concatenate((np.zeros(1, dtype=np.uint8), digits + 1))  # padding and the empty cell stay
        return symbols[cells[places]], symbols[labels[places]]


# ---- mazes ----------------------------------------------------------------------------------------------


@cache
def _maze(asked: Asked) -> tuple[Puzzles, Puzzles]:
    splits = []
    for count, split in ((asked.train_size, "train"), (asked.test_size, "test")):
        rng = random.Random(f"{asked.seed}/{split}")
        pairs = [maze.maze(asked.size, asked.longer_than, rng) for _ in range(count)]
        cells, labels = (np.stack([pair[i] for pair in pairs]) for i in (0, 1))
        splits.append(Puzzles.single(cells, labels, np.zeros(count, dtype=np.int64), maze.SYMBOLS, id_count=1))
    if asked.augment:
        splits[0].augment = turned_alike
    return splits[0], splits[1]


def turned(move: int, cells: Array) -> Array:
    """One of the 8 symmetries of a square."""
    side = round(len(cells) ** 0.5)
    grid = np.rot90(cells.reshape(side, side), move % 4)
    return (grid.T if move >= 4 else grid).reshape(-1)


def turned_alike(cells: Array, labels: Array) -> Pair:
    move = random.randrange(8)
    return turned(move, cells), turned(move, labels)


# ---- IdGrid ---------------------------------------------------------------------------------------------


class IdRules:
    """Rule k exchanges colours, and may turn the grid. Nothing in a grid tells which rule: only the id does."""

    cells = 16

    def __init__(self, count: int, moves: bool, seed: int):
        rng = random.Random(f"{seed}/rules")
        orders = [rng.sample(range(COLOURS), COLOURS) for _ in range(-(-count // COLOURS))]
        # Six rules that differ by a shift send a colour to every colour once: no guess is better than another.
        shifts = [[(colour + shift) % COLOURS for colour in order] for order in orders for shift in range(COLOURS)]
        self.recolour = np.array(shifts[:count], dtype=np.uint8)
        self.move = [rng.randrange(8) if moves else 0 for _ in range(count)]

    def apply(self, rule: int, grid: Array) -> Array:
        return turned(self.move[rule], self.recolour[rule][grid])


class IdGrid(Dataset):
    """Grids drawn when they are asked for, so that none is seen twice. An epoch is `length` of them."""

    symbols = COLOURS + 1
    cells = IdRules.cells

    def __init__(self, rules: IdRules, length: int):
        self.rules, self.length = rules, length
        self.ids = len(rules.recolour) + 1  # 0 is the blank one
        self.draw_least: Callable[[], int] = lambda: 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        rule = random.randrange(self.ids - 1)
        grid = np.array(random.choices(range(COLOURS), k=self.cells), dtype=np.uint8)
        return sample(grid + 1, self.rules.apply(rule, grid) + 1, rule + 1, self.draw_least())


def _id_grid(asked: Asked) -> tuple[IdGrid, Puzzles]:
    rules = IdRules(asked.rules, asked.moves, asked.seed)
    drawn = np.random.default_rng(asked.seed)  # another generator than training draws from
    which = drawn.integers(asked.rules, size=asked.test_size)
    grids = drawn.integers(COLOURS, size=(asked.test_size, IdRules.cells), dtype=np.uint8)
    labels = np.stack([rules.apply(rule, grid) for rule, grid in zip(which, grids, strict=True)])
    training = IdGrid(rules, asked.train_size)
    test = Puzzles.single(grids + 1, labels + 1, which + 1, training.symbols, training.ids)
    return training, test
