"""The families of puzzles, generated from a seed: nothing is downloaded.

`make_splits(options)` gives the splits for training and testing. Symbol 0 is padding in all families.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from lockstep.errors import UserError
from lockstep.recipes.hrm import sudoku
from lockstep.recipes.hrm.data import Array, Puzzles, read_puzzles

KINDS = ("sudoku4", "sudoku6", "sudoku9", "maze", "idgrid")
SUDOKUS = KINDS[:3]

WALL, FREE, START, GOAL, WAY = 1, 2, 3, 4, 5  # symbols of a maze
DIRECTIONS = ((-1, 0), (0, -1), (0, 1), (1, 0))
MAZE_TRIES = 2000  # grids that are generated for one maze before giving up

COLOURS = 6  # the number of colours of an id grid
ID_CELLS = 16

Cell = tuple[int, int]  # row and column


@dataclass(frozen=True, kw_only=True)
class PuzzleOptions:
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


def make_splits(options: PuzzleOptions) -> tuple[Puzzles | IdGrids, Puzzles]:
    """Return (training, test). The training split is stored, or drawn when it is read."""
    if options.data_path:
        folder = Path(options.data_path)
        return read_puzzles(folder / "train"), read_puzzles(folder / "test")

    if options.puzzle in SUDOKUS:
        return _sudoku_splits(options)
    return _maze_splits(options) if options.puzzle == "maze" else _id_grid_splits(options)


# ---- Sudoku ---------------------------------------------------------------------------------------------


@cache
def _sudoku_splits(options: PuzzleOptions) -> tuple[Puzzles, Puzzles]:
    n = int(options.puzzle.removeprefix("sudoku"))
    if options.shipped:
        pairs = sudoku.load_shipped(options.train_size, options.test_size)
    else:
        # The splits share a generator: a puzzle's class decides which of them it belongs to.
        rng = random.Random(options.data_seed)
        pairs = sudoku.split_by_class(
            n, options.holes, options.train_size, options.test_size, rng, options.least_guesses
        )

    training, test = (Puzzles.single(grids + 1, solutions + 1, symbols=n + 2) for grids, solutions in pairs)
    if options.augment:
        training.augment = partial(move_sudoku, n)

    return training, test


def move_sudoku(n: int, cells: Array, labels: Array) -> tuple[Array, Array]:
    """Apply a random symmetry of the game: permute digits, rows, columns and bands, and perhaps transpose the grid."""
    sources, digits = sudoku.random_symmetry(n)
    symbols = np.concatenate((np.zeros(1, dtype=np.uint8), digits + 1))  # padding and the empty cell stay
    return symbols[cells[sources]], symbols[labels[sources]]


# ---- mazes ----------------------------------------------------------------------------------------------


@cache
def _maze_splits(options: PuzzleOptions) -> tuple[Puzzles, Puzzles]:
    splits = []
    for count, split in ((options.train_size, "train"), (options.test_size, "test")):
        # A generator for each split: the size of one does not change the other.
        rng = random.Random(f"{options.data_seed}/{split}")
        mazes = np.stack([make_maze(options.maze_size, options.maze_longer_than, rng) for _ in range(count)])
        splits.append(Puzzles.single(mazes[:, 0], mazes[:, 1], symbols=WAY + 1))

    training, test = splits
    if options.augment:
        training.augment = turn_randomly

    return training, test


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
            "set a smaller task.maze_longer_than, or a larger task.maze_size",
        )

    grid[start] = START
    grid[goal] = GOAL

    # The labels keep both ends and draw the way between them.
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
        cell = queue.popleft()
        for dr, dc in DIRECTIONS:
            near = (cell[0] + dr, cell[1] + dc)
            if not (0 <= near[0] < n and 0 <= near[1] < n) or grid[near] == WALL:
                continue

            if near not in distance:
                distance[near] = distance[cell] + 1
                queue.append(near)
                came_from[near] = []

            if distance[near] == distance[cell] + 1:
                came_from[near].append(cell)

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
    return (grid.T if move >= 4 else grid).reshape(-1)


def turn_randomly(cells: Array, labels: Array) -> tuple[Array, Array]:
    move = random.randrange(8)
    return turn(move, cells), turn(move, labels)


# ---- id grids -------------------------------------------------------------------------------------------


class IdGrids:
    """Training grids that are drawn when they are read, so that none is seen twice. An epoch has `length` of them.

    Rule k permutes the colours, and may turn the grid. Only the id says which rule applies, not the grid.
    """

    symbols = COLOURS + 1
    cells = ID_CELLS

    def __init__(self, rules: int, moves: bool, seed: int, length: int = 0):
        self.length = length
        self.ids = rules + 1  # id 0 is the blank one

        # The rules follow from the seed alone, so training and test grids obey the same ones.
        rng = random.Random(f"{seed}/rules")
        orders = [rng.sample(range(COLOURS), COLOURS) for _ in range(-(-rules // COLOURS))]

        # Six rules that differ by a shift map a colour to every colour once, so without the id no guess beats another.
        shifts = [[(colour + shift) % COLOURS for colour in order] for order in orders for shift in range(COLOURS)]
        self.recolour = np.array(shifts[:rules], dtype=np.uint8)
        self.move = [rng.randrange(8) if moves else 0 for _ in range(rules)]

    def __len__(self) -> int:
        return self.length

    def apply(self, rule: int, grid: Array) -> Array:
        return turn(self.move[rule], self.recolour[rule][grid])

    def draw(self, index: int) -> tuple[Array, Array, int]:
        """Draw a rule and a grid: (cells, labels, puzzle id)."""
        rule = random.randrange(self.ids - 1)
        grid = np.array(random.choices(range(COLOURS), k=self.cells), dtype=np.uint8)
        return grid + 1, self.apply(rule, grid) + 1, rule + 1


def _id_grid_splits(options: PuzzleOptions) -> tuple[IdGrids, Puzzles]:
    training = IdGrids(options.rules, options.rule_moves, options.data_seed, options.train_size)

    # Training draws from Python's generator, the test split from numpy's.
    rng = np.random.default_rng(options.data_seed)
    rules = rng.integers(options.rules, size=options.test_size)
    grids = rng.integers(COLOURS, size=(options.test_size, ID_CELLS), dtype=np.uint8)
    labels = np.stack([training.apply(rule, grid) for rule, grid in zip(rules, grids, strict=True)])
    return training, Puzzles.single(grids + 1, labels + 1, training.symbols, rules + 1, training.ids)
