"""Sudokus of 4, 6 and 9 rows: a solver that counts solutions, a generator, and the symmetries of the game.

Grids are flat tuples or arrays of digits, 0 for an empty cell. In the solver the candidates of a cell are bits.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from lockstep.errors import UserError

Grid = tuple[int, ...]
Pair = tuple[np.ndarray, np.ndarray]  # puzzles and solutions, [count, cells] uint8

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box
TRIES = 300  # full grids that are generated for one puzzle before giving up

# Minimal puzzles of 9 x 9, which take minutes to make: split_by_class(9, None, 100, 200, Random(f"sudoku9/{part}")) for
# parts 0 to 9. All training puzzles come first.
SHIPPED = Path(__file__).parent / "sudoku9.npz"


# ---- the solver -----------------------------------------------------------------------------------------


@cache
def units_and_peers(n: int) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Return the rows, columns and boxes of n x n cells; and, for each cell, the cells that it shares one with."""
    height, width = BOXES[n]

    # Cells are numbered row by row.
    rows = [tuple(range(r * n, r * n + n)) for r in range(n)]
    columns = [tuple(range(c, n * n, n)) for c in range(n)]
    boxes = [
        tuple((top + r) * n + left + c for r in range(height) for c in range(width))
        for top in range(0, n, height)
        for left in range(0, n, width)
    ]
    units = [*rows, *columns, *boxes]

    peers = []
    for cell in range(n * n):
        peers.append(sorted({peer for unit in units if cell in unit for peer in unit} - {cell}))

    return units, peers


class Solver:
    """A solver that propagates naked and hidden singles, then guesses in the cell with the fewest candidates."""

    def __init__(self, n: int, rng: random.Random | None = None):
        self.units, self.peers = units_and_peers(n)
        self.every_digit = (1 << n) - 1  # the candidates of an empty cell
        self.rng = rng  # without a generator, cells and digits are tried in their order
        self.guesses = 0  # so far: a measure of the difficulty

    def solutions(self, grid: Grid, most: int = 2) -> list[Grid]:
        return list(itertools.islice(self._search(self._candidates(grid)), most))

    def other_solution(self, grid: Grid, cell: int, digit: int) -> bool:
        """Return whether `grid` can be solved with another digit than `digit` in the empty `cell`."""
        start = self._candidates(grid)
        # Without that candidate, any solution is another one.
        start[cell] &= ~(1 << (digit - 1))
        return next(self._search(start), None) is not None

    def _candidates(self, grid: Grid) -> list[int]:
        return [1 << (digit - 1) if digit else self.every_digit for digit in grid]

    def _search(self, candidates: list[int]) -> Iterator[Grid]:
        if not self._propagate(candidates):
            return

        # bits & (bits - 1) is not 0 if there are two candidates or more.
        open_cells = [cell for cell, bits in enumerate(candidates) if bits & (bits - 1)]
        if not open_cells:
            yield tuple(bits.bit_length() for bits in candidates)
            return

        # With a generator, ties and digits are tried in random order.
        if self.rng:
            self.rng.shuffle(open_cells)

        cell = min(open_cells, key=lambda c: candidates[c].bit_count())
        digits = list(_bits(candidates[cell]))
        if self.rng:
            self.rng.shuffle(digits)

        # Depth first: each candidate in turn, on a copy.
        self.guesses += 1
        for bit in digits:
            branch = list(candidates)
            branch[cell] = bit
            yield from self._search(branch)

    def _propagate(self, candidates: list[int]) -> bool:
        """Remove impossible candidates in place. Return False if a cell or a digit has no possibility left."""
        done = [False] * len(candidates)
        while True:
            # Naked singles: a cell with one candidate takes it from its peers, which may then be single as well.
            fresh = [cell for cell, bits in enumerate(candidates) if not done[cell] and not bits & (bits - 1)]
            while fresh:
                cell = fresh.pop()
                bit = candidates[cell]
                if not bit:
                    return False

                done[cell] = True

                # A peer is listed when it becomes single, and again when nothing is left of it.
                for peer in self.peers[cell]:
                    if candidates[peer] & bit:
                        candidates[peer] ^= bit
                        if not candidates[peer] & (candidates[peer] - 1):
                            fresh.append(peer)

            # Hidden singles give new naked ones, so both are repeated until nothing changes.
            hidden = self._fix_hidden_singles(candidates)
            if hidden is None:
                return False
            if not hidden:
                return True

    def _fix_hidden_singles(self, candidates: list[int]) -> int | None:
        """Fix the digits that fit only one cell of a unit.

        Return how many were fixed, or None if a digit fits no cell of some unit.
        """
        fixed = 0
        for unit in self.units:
            once = twice = 0  # digits that are candidates of at least one cell, and of at least two
            for cell in unit:
                twice |= once & candidates[cell]
                once |= candidates[cell]

            # Some digit fits no cell.
            if once != self.every_digit:
                return None

            for bit in _bits(once & ~twice):
                cell = next((c for c in unit if candidates[c] & bit), None)
                if cell is None:  # two digits fit only this one cell
                    return None

                if candidates[cell] != bit:
                    candidates[cell] = bit
                    fixed += 1

        return fixed


def _bits(value: int) -> Iterator[int]:
    while value:
        bit = value & -value  # the lowest
        yield bit
        value ^= bit


# ---- generating puzzles ---------------------------------------------------------------------------------


def full_grid(n: int, rng: random.Random) -> Grid:
    """Draw a full grid by randomised search: shuffling one grid would only reach its symmetries."""
    return Solver(n, rng).solutions((0,) * (n * n), most=1)[0]


def puzzle(n: int, holes: int | None, rng: random.Random) -> tuple[Grid, Grid]:
    """Return (puzzle, solution).

    Clues are removed in random order as long as the solution stays unique: `holes` of them, or until no more can go.
    """
    for _ in range(TRIES):
        solution = full_grid(n, rng)

        # A clue can go if no other digit is possible in its cell.
        clues = list(solution)
        empty = 0

        for cell in rng.sample(range(n * n), n * n):
            if empty == holes:
                break

            clues[cell] = 0
            if Solver(n).other_solution(tuple(clues), cell, solution[cell]):
                clues[cell] = solution[cell]
            else:
                empty += 1

        if holes is None or empty == holes:
            return tuple(clues), solution

    raise UserError(
        f"no Sudoku of {n} x {n} with {holes} empty cells and one solution was found",
        f"{TRIES} tries",
        "set a smaller task.holes, or leave it out: then clues go until none can",
    )


def difficulty(grid: Grid, n: int, rng: random.Random, orders: int = 5) -> float:
    """Return the mean number of guesses that the solver needs, over random orders."""
    solver = Solver(n, rng)
    for _ in range(orders):
        solver.solutions(grid, most=1)

    return solver.guesses / orders


def split_by_class(
    n: int, holes: int | None, train: int, test: int, rng: random.Random, least_guesses: float = 0.0
) -> tuple[Pair, Pair]:
    """Generate puzzles for training and testing.

    The canonical form of a puzzle decides its split, so no test puzzle is a symmetric image of a training puzzle.
    """
    wanted = (train, test)
    # Dicts from puzzle to solution, because a puzzle may be drawn twice.
    splits: tuple[dict[Grid, Grid], dict[Grid, Grid]] = {}, {}
    hardest = 0.0

    for tries in itertools.count(1):
        # A share of the classes that corresponds to the sizes is for testing.
        grid, solution = puzzle(n, holes, rng)
        digest = hashlib.blake2b(canonical(grid, n), digest_size=2).digest()
        split = int(int.from_bytes(digest, "little") < 2**16 * test / (train + test))

        # Measuring the difficulty draws from `rng`, so it is left out if it does not matter.
        guesses = difficulty(grid, n, rng) if least_guesses else 0.0
        hardest = max(hardest, guesses)
        if guesses >= least_guesses and len(splits[split]) < wanted[split]:
            splits[split][grid] = solution

        # Small grids have few classes: the search may never end.
        if tries > 100 * (train + test):
            kind = f"{n} x {n} Sudokus" + (f" with {holes} holes" if holes is not None else "")
            reached = f"{len(splits[0])} + {len(splits[1])} after {tries} tries"
            raise _too_few(f"{train} + {test} different {kind}", reached, least_guesses, hardest)

        if len(splits[0]) == train and len(splits[1]) == test:
            break

    return _as_arrays(splits[0]), _as_arrays(splits[1])


def _as_arrays(pairs: dict[Grid, Grid]) -> Pair:
    return np.array(list(pairs), dtype=np.uint8), np.array(list(pairs.values()), dtype=np.uint8)


def _too_few(wanted: str, reached: str, least_guesses: float, hardest: float) -> UserError:
    """Say why there are not enough puzzles: all are easy, or there are no more of them."""
    smaller = "a smaller task.train_size and task.test_size"
    if not least_guesses:
        return UserError(f"{wanted} could not be generated", reached, f"set {smaller}")

    problem = f"{wanted} could not be generated with task.least_guesses={least_guesses:g}"
    if hardest >= least_guesses:
        return UserError(problem, reached, f"set a smaller task.least_guesses; or {smaller}")

    fix = f"set task.least_guesses={hardest:g} or less" if hardest else "leave task.least_guesses out"
    return UserError(problem, f"{reached}: the hardest took {hardest:g} guesses", fix)


def load_shipped(train: int, test: int) -> tuple[Pair, Pair]:
    with np.load(SHIPPED, allow_pickle=False) as file:
        puzzles = file["puzzles"]
        solutions = file["solutions"]

    if train + test > len(puzzles):
        raise UserError(
            f"only {len(puzzles)} Sudokus of 9 x 9 come with the recipe, not {train} + {test}",
            "",
            f"set a task.train_size and task.test_size of {len(puzzles)} together; or task.holes=50, or your own "
            "task.data_path",
        )

    return (puzzles[:train], solutions[:train]), (puzzles[-test:], solutions[-test:])


# ---- symmetries -----------------------------------------------------------------------------------------


def canonical(grid: Grid, n: int) -> bytes:
    """Return the same bytes for puzzles that differ only by relabelled digits and a set of moves.

    The moves are all symmetries of the game for 4, and the orders of bands and stacks for larger grids: all symmetries
    of 9 would be three million.
    """
    return min(_relabelled(moved) for moved in np.asarray(grid, dtype=np.uint8)[_moves(n)].tolist())


@cache
def _moves(n: int) -> np.ndarray:
    """Return [moves, cells]: cell i of a moved grid is cell moves[i] of the original one."""
    height, width = BOXES[n]
    all_symmetries = n == 4

    # Every order of the rows with every order of the columns.
    rows = list(_orders(n, height, all_symmetries))
    columns = list(_orders(n, width, all_symmetries))
    cells = np.arange(n * n).reshape(n, n)
    moves = [cells[np.ix_(r, c)] for r in rows for c in columns]

    # Transposed, boxes stay boxes because they are square.
    if all_symmetries:
        moves += [grid.T for grid in moves]

    return np.stack([grid.reshape(-1) for grid in moves])


def _orders(n: int, size: int, inside: bool) -> Iterator[list[int]]:
    """Yield the orders of n lines that keep bands of `size` together; with `inside` also those within a band."""
    bands = [list(range(start, start + size)) for start in range(0, n, size)]
    for order in itertools.permutations(bands):
        within = [list(itertools.permutations(band)) if inside else [tuple(band)] for band in order]
        for lines in itertools.product(*within):
            yield [line for band in lines for line in band]


def _relabelled(cells: list[int]) -> bytes:
    """Number the digits in the order of their first occurrence."""
    names = {0: 0}
    return bytes(names.setdefault(digit, len(names)) for digit in cells)


def random_symmetry(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a symmetry from Python's generator.

    Return the source of each cell [cells], and the new digit of each digit [n + 1], where 0 stays 0.
    """
    height, width = BOXES[n]
    # The order of these draws is part of what a seed means.
    rows = np.array(_random_lines(n, height))
    columns = np.array(_random_lines(n, width))
    cells = n * rows[:, None] + columns

    # Only square boxes stay boxes in a transposed grid.
    if height == width and random.random() < 0.5:
        cells = cells.T

    return cells.reshape(-1), np.array([0, *_random_order(list(range(1, n + 1)))], dtype=np.uint8)


def _random_lines(n: int, size: int) -> list[int]:
    """Draw an order of n lines that keeps bands of `size` together."""
    starts = _random_order(list(range(0, n, size)))
    return [start + line for start in starts for line in _random_order(list(range(size)))]


def _random_order(left: list[int]) -> list[int]:
    """Draw what `random.sample(left, len(left))` draws for up to 21 items, but faster. It uses up `left`.

    Every puzzle of every batch takes nine such orders.
    """
    draw = random.getrandbits
    order = []
    while count := len(left):
        # As random.sample does it: draw bits until they are less than the count, then move the last item into the gap.
        bits = count.bit_length()
        while (chosen := draw(bits)) >= count:
            pass

        order.append(left[chosen])
        left[chosen] = left[-1]
        left.pop()

    return order
