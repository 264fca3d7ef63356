"""The families of puzzles, generated from a seed: nothing is downloaded.

`make_splits(options)` gives the splits for training and testing. Symbol 0 is padding in all families.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.hrm import sudoku
from lockstep.recipes.hrm.data import Array, Puzzles, read_puzzles, sample

KINDS = ("sudoku4", "sudoku6", "sudoku9", "maze", "idgrid")
SUDOKUS = KINDS[:3]

WALL, FREE, START, GOAL, WAY = 1, 2, 3, 4, 5  # symbols of a maze
MAZE_SYMBOLS = 6
DIRECTIONS = ((-1, 0), (0, -1), (0, 1), (1, 0))
MAZE_TRIES = 2000  # grids that are generated for one maze before giving up

COLOURS = 6  # of an id grid

Cell = tuple[int, int]  # row and column


@dataclass(frozen=True, kw_only=True)
class PuzzleOptions:
    """Which puzzles to train on."""

    # The family to generate: one of KINDS.
    puzzle: str = "sudoku4"
    # A folder with puzzles in the published layout, instead of generated ones.
    data_path: str = ""
    # The number of puzzles for training and for evaluation, and the seed that they are generated from.
    train_size: int = 2400
    test_size: int = 600
    data_seed: int = 0
    # Empty cells of a Sudoku. None: remove clues until no more can go.
    holes: int | None = None
    # Keep only Sudokus for which a solver needs at least this many guesses, on average.
    least_guesses: float = 0.0
    # Cells of a side of a maze, and a number of cells that its way must exceed.
    maze_size: int = 20
    maze_longer_than: int = 0
    # The number of rules of idgrid, and whether rules also turn and mirror the grid.
    rules: int = 16
    rule_moves: bool = False
    # Vary training puzzles by their symmetries.
    augment: bool = True

    @property
    def shipped(self) -> bool:
        """Whether the puzzles come with the recipe: minimal 9 x 9 Sudokus take too long to generate."""
        return self.puzzle == "sudoku9" and self.holes is None and not self.least_guesses


def make_splits(options: PuzzleOptions) -> tuple[Any, Puzzles]:
    """Return (training, test). The training split is `Puzzles`, or a dataset that draws its own puzzles."""
    if options.data_path:
        folder = Path(options.data_path)
        return read_puzzles(folder / "train"), read_puzzles(folder / "test")
    if options.puzzle in SUDOKUS:
        return _sudoku_splits(options)
    if options.puzzle == "maze":
        return _maze_splits(options)
    return _id_grid_splits(options)


# ---- Sudoku ---------------------------------------------------------------------------------------------


@cache
def _sudoku_splits(options: PuzzleOptions) -> tuple[Puzzles, Puzzles]:
    n = int(options.puzzle.removeprefix("sudoku"))
    if options.shipped:
        pairs = sudoku.load_shipped(options.train_size, options.test_size)
    else:
        rng = random.Random(options.data_seed)
        pairs = sudoku.split_by_class(
            n, options.holes, options.train_size, options.test_size, rng, options.least_guesses
        )

    splits = []
    for grids, solutions in pairs:
        same_id = np.zeros(len(grids), dtype=np.int64)  # all Sudokus have the same rule
        splits.append(Puzzles.single(grids + 1, solutions + 1, same_id, symbols=n + 2, id_count=1))
    if options.augment:
        splits[0].augment = SudokuSymmetry(n)
    return splits[0], splits[1]


@dataclass
class SudokuSymmetry:
    """A random symmetry of the game: it permutes digits, rows, columns and bands, and may transpose the grid."""

    n: int

    def __call__(self, cells: Array, labels: Array) -> tuple[Array, Array]:
        sources, digits = sudoku.random_symmetry(self.n)
        symbols = np.concatenate((np.zeros(1, dtype=np.uint8), digits + 1))  # padding and the empty cell stay
        return symbols[cells[sources]], symbols[labels[sources]]


# ---- mazes ----------------------------------------------------------------------------------------------


@cache
def _maze_splits(options: PuzzleOptions) -> tuple[Puzzles, Puzzles]:
    splits = []
    for count, split in ((options.train_size, "train"), (options.test_size, "test")):
        # A generator for each split: the size of one does not change the other.
        rng = random.Random(f"{options.data_seed}/{split}")
        pairs = [make_maze(options.maze_size, options.maze_longer_than, rng) for _ in range(count)]
        cells = np.stack([pair[0] for pair in pairs])
        labels = np.stack([pair[1] for pair in pairs])
        splits.append(Puzzles.single(cells, labels, np.zeros(count, dtype=np.int64), MAZE_SYMBOLS, id_count=1))
    # Test puzzles stay as they are.
    if options.augment:
        splits[0].augment = turn_randomly
    return splits[0], splits[1]


def make_maze(n: int, longer_than: int, rng: random.Random) -> tuple[Array, Array]:
    """Return a maze of n x n cells and its labels, the same maze with the shortest way drawn in. Both are flat."""
    for _ in range(MAZE_TRIES):
        grid = _carve(n, rng)
        free = [(row, column) for row, column in np.argwhere(grid == FREE).tolist()]

        # Try again if there is no way, a second one as short, or only a short one.
        start, goal = rng.sample(free, 2)
        way = shortest_way(grid, start, goal)
        if way is not None and len(way) > longer_than:
            break
    else:
        raise UserError(
            f"no maze of {n} x {n} was found whose only shortest way has more than {longer_than} cells",
            f"{MAZE_TRIES} tries",
            "type a smaller task.maze_longer_than, or a larger task.maze_size",
        )

    grid[start] = START
    grid[goal] = GOAL
    labels = grid.copy()
    for cell in way[1:-1]:
        labels[cell] = WAY
    return grid.reshape(-1), labels.reshape(-1)


def _carve(n: int, rng: random.Random) -> Array:
    """Carve a tree of corridors by depth-first search, and a few more openings so that ways differ in length."""
    grid = np.full((n, n), WALL, dtype=np.uint8)
    grid[0, 0] = FREE
    stack = [(0, 0)]
    while stack:
        row, column = stack[-1]
        # Corridors lie on every second row and column: (cell beyond the wall, the wall itself).
        steps = [
            ((row + 2 * dr, column + 2 * dc), (row + dr, column + dc))
            for dr, dc in DIRECTIONS
            if 0 <= row + 2 * dr < n and 0 <= column + 2 * dc < n and grid[row + 2 * dr, column + 2 * dc] == WALL
        ]
        if not steps:
            stack.pop()
            continue
        target, wall = rng.choice(steps)
        grid[wall] = grid[target] = FREE
        stack.append(target)

    # In a tree every way would be the only one.
    walls = np.argwhere(grid == WALL).tolist()
    for row, column in rng.sample(walls, len(walls) // 12):
        grid[row, column] = FREE
    return grid


def shortest_way(grid: Array, start: Cell, goal: Cell) -> list[Cell] | None:
    """Return the cells of the shortest way, both ends included.

    The result is None if there is no way, or a second one as short: a turned maze must have the turned way.
    """
    n = len(grid)
    came_from: dict[Cell, list[Cell]] = {start: []}
    distance = {start: 0}
    queue = deque([start])

    # Breadth-first search that keeps every predecessor on a shortest way.
    while queue:
        here = queue.popleft()
        for dr, dc in DIRECTIONS:
            cell = (here[0] + dr, here[1] + dc)
            if not (0 <= cell[0] < n and 0 <= cell[1] < n) or grid[cell] == WALL:
                continue
            if cell not in distance:
                distance[cell] = distance[here] + 1
                queue.append(cell)
                came_from[cell] = []
            if distance[cell] == distance[here] + 1:
                came_from[cell].append(here)

    if goal not in distance:
        return None

    # Backwards from the goal. A cell with two predecessors has two shortest ways.
    way = [goal]
    while way[-1] != start:
        if len(came_from[way[-1]]) > 1:
            return None
        way.append(came_from[way[-1]][0])
    return way[::-1]


def turn(move: int, cells: Array) -> Array:
    """Apply one of the 8 symmetries of a square to a flat grid."""
    side = round(len(cells) ** 0.5)
    grid = np.rot90(cells.reshape(side, side), move % 4)
    if move >= 4:
        grid = grid.T
    return grid.reshape(-1)


def turn_randomly(cells: Array, labels: Array) -> tuple[Array, Array]:
    move = random.randrange(8)
    return turn(move, cells), turn(move, labels)


# ---- id grids -------------------------------------------------------------------------------------------


class IdRules:
    """Rule k permutes the colours, and may turn the grid. Only the id says which rule applies, not the grid."""

    cells = 16

    def __init__(self, count: int, moves: bool, seed: int):
        rng = random.Random(f"{seed}/rules")
        orders = [rng.sample(range(COLOURS), COLOURS) for _ in range(-(-count // COLOURS))]

        # Six rules that differ by a shift map a colour to every colour once, so without the id no guess beats another.
        shifts = [[(colour + shift) % COLOURS for colour in order] for order in orders for shift in range(COLOURS)]
        self.recolour = np.array(shifts[:count], dtype=np.uint8)
        self.move = [rng.randrange(8) if moves else 0 for _ in range(count)]

    def apply(self, rule: int, grid: Array) -> Array:
        return turn(self.move[rule], self.recolour[rule][grid])


class IdGrid(Dataset):
    """Training grids that are drawn when they are read, so that none is seen twice. An epoch has `length` of them."""

    symbols = COLOURS + 1
    cells = IdRules.cells

    def __init__(self, rules: IdRules, length: int):
        self.rules = rules
        self.length = length
        self.ids = len(rules.recolour) + 1  # id 0 is the blank one
        # The task replaces it: how long to think is an option of the task.
        self.draw_least: Callable[[], int] = lambda: 1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        rule = random.randrange(self.ids - 1)
        grid = np.array(random.choices(range(COLOURS), k=self.cells), dtype=np.uint8)
        return sample(grid + 1, self.rules.apply(rule, grid) + 1, rule + 1, self.draw_least())


def _id_grid_splits(options: PuzzleOptions) -> tuple[IdGrid, Puzzles]:
    rules = IdRules(options.rules, options.rule_moves, options.data_seed)
    training = IdGrid(rules, options.train_size)

    # Training draws from Python's generator, the test split from numpy's.
    rng = np.random.default_rng(options.data_seed)
    drawn_rules = rng.integers(options.rules, size=options.test_size)
    grids = rng.integers(COLOURS, size=(options.test_size, IdRules.cells), dtype=np.uint8)
    labels = np.stack([rules.apply(rule, grid) for rule, grid in zip(drawn_rules, grids, strict=True)])
    test = Puzzles.single(grids + 1, labels + 1, drawn_rules + 1, training.symbols, training.ids)
    return training, test
