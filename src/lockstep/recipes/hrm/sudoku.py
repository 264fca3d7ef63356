"""Sudokus of 4, 6 and 9: a solver that counts, a generator, and the symmetries of the game.

Grids are flat tuples or arrays of digits, 0 for an empty cell. In the solver the candidates of a cell are bits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from lockstep.errors import UserError

Grid = tuple[int, ...]
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box
TRIES = 300  # full grids for one puzzle


@dataclass(frozen=True)
class Rules:
    n: int
    peers: tuple[tuple[int, ...], ...]  # of each cell, those that may not hold the same digit
    units: tuple[tuple[int, ...], ...]  # rows, columns, boxes

    @property
    def every_digit(self) -> int:
        return (1 << self.n) - 1


@cache
def rules(n: int) -> Rules:
    height, width = BOXES[n]
    rows = [tuple(range(r * n, r * n + n)) for r in range(n)]
    columns = [tuple(range(c, n * n, n)) for c in range(n)]
    boxes = [
        tuple((top + r) * n + left + c for r in range(height) for c in range(width))
        for top in range(0, n, height)
        for left in range(0, n, width)
    ]
    units = (*rows, *columns, *boxes)
    peers = tuple(tuple(sorted({c for u in units if cell in u for c in u} - {cell})) for cell in range(n * n))
    return Rules(n, peers, units)


class Solver:
    """Propagates naked and hidden singles, then guesses in the cell with the fewest candidates."""

    def __init__(self, n: int, rng: random.Random | None = None):
        self.rules, self.rng = rules(n), rng
        self.guesses = 0

    def solutions(self, grid: Grid, most: int = 2) -> list[Grid]:
        """Up to `most` of them."""
        return list(itertools.islice(self._search(self._candidates(grid)), most))

    def other_solution(self, grid: Grid, cell: int, digit: int) -> bool:
        """Whether `grid` can be solved with another digit in the empty `cell`."""
        start = self._candidates(grid)
        start[cell] &= ~(1 << (digit - 1))
        return next(self._search(start), None) is not None

    def _candidates(self, grid: Grid) -> list[int]:
        found = [self.rules.every_digit] * len(grid)
        for cell, digit in enumerate(grid):
            if digit:
                found[cell] &= 1 << (digit - 1)
        return found

    def _search(self, candidates: list[int]) -> Iterator[Grid]:
        if not self._propagate(candidates):
            return
        open_cells = [cell for cell, bits in enumerate(candidates) if bits & (bits - 1)]
        if not open_cells:
            yield tuple(bits.bit_length() for bits in candidates)
            return
        if self.rng:
            self.rng.shuffle(open_cells)
        cell = min(open_cells, key=lambda c: candidates[c].bit_count())
        digits = list(_bits(candidates[cell]))
        if self.rng:
            self.rng.shuffle(digits)
        self.guesses += 1
        for bit in digits:
            branch = list(candidates)
            branch[cell] = bit
            yield from self._search(branch)

    def _propagate(self, candidates: list[int]) -> bool:
        """In place. False: some cell or digit has no place left."""
        done = [False] * len(candidates)
        while True:
            fresh = [cell for cell, bits in enumerate(candidates) if not done[cell] and not bits & (bits - 1)]
            while fresh:
                cell = fresh.pop()
                bit = candidates[cell]
                if not bit:
                    return False
                if done[cell]:
                    continue
                done[cell] = True
                for peer in self.rules.peers[cell]:
                    if candidates[peer] & bit:
                        candidates[peer] ^= bit
                        if not candidates[peer] & (candidates[peer] - 1):
                            fresh.append(peer)
            hidden = self._hidden_singles(candidates)
            if hidden is None:
                return False
            if not hidden:
                return True

    def _hidden_singles(self, candidates: list[int]) -> int | None:
        """Fixes digits that have one place in a row, column or box; how many, or None if one has no place."""
        fixed = 0
        for unit in self.rules.units:
            once = twice = 0
            for cell in unit:
                twice |= once & candidates[cell]
                once |= candidates[cell]
            if once != self.rules.every_digit:
                return None
            for bit in _bits(once & ~twice):
                cell = next((c for c in unit if candidates[c] & bit), None)
                if cell is None:  # two digits had only this one cell
                    return None
                if candidates[cell] != bit:
                    candidates[cell] = bit
                    fixed += 1
        return fixed


def _bits(value: int) -> Iterator[int]:
    while value:
        bit = value & -value
        yield bit
        value ^= bit


def full_grid(n: int, rng: random.Random) -> Grid:
    """By randomised search: shuffling one grid would stay among its symmetries."""
    return Solver(n, rng).solutions((0,) * (n * n), most=1)[0]


def puzzle(n: int, holes: int | None, rng: random.Random) -> tuple[Grid, Grid]:
    """(puzzle, solution): clues go in random order as long as the solution stays the only one; up to `holes` of them,
    or until no clue can go."""
    for _ in range(TRIES):
        solution = full_grid(n, rng)
        clues, empty = list(solution), 0
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
        f"Sudokus of {n} x {n} with {holes} empty cells and one solution",
        f"none in {TRIES} tries",
        "type a smaller task.holes, or leave it out: then clues go until none can",
    )


def difficulty(grid: Grid, n: int, rng: random.Random, orders: int = 5) -> float:
    """The mean number of guesses over random orders."""
    total = 0
    for _ in range(orders):
        solver = Solver(n, rng)
        solver.solutions(grid, most=1)
        total += solver.guesses
    return total / orders


# ---- symmetries -----------------------------------------------------------------------------------------


def canonical(grid: Grid, n: int) -> bytes:
    """The same for puzzles that are one under relabelling and a set of moves: for 4 all symmetries of the game, for
    larger ones the orders of bands and stacks (all of 9 would be three million)."""
    array = np.asarray(grid, dtype=np.uint8)
    moved = array[_moves(n)]  # [moves, cells]
    return min(_relabelled(row) for row in moved.tolist())


@cache
def _moves(n: int) -> np.ndarray:
    """Cell i of the moved grid is cell moves[i] of the old one."""
    height, width = BOXES[n]
    whole = n == 4
    rows, columns = list(_orders(n, height, whole)), list(_orders(n, width, whole))
    cells = np.arange(n * n).reshape(n, n)
    found = [cells[np.ix_(r, c)] for r in rows for c in columns]
    if whole:
        found += [grid.T for grid in found]
    return np.stack([grid.reshape(-1) for grid in found])


def _orders(n: int, size: int, inside: bool) -> Iterator[list[int]]:
    """Orders of the n lines that keep bands of `size` together, and, with `inside`, also shuffle within them."""
    bands = [list(range(start, start + size)) for start in range(0, n, size)]
    for order in itertools.permutations(bands):
        within = [list(itertools.permutations(band)) if inside else [tuple(band)] for band in order]
        for lines in itertools.product(*within):
            yield [line for band in lines for line in band]


def _relabelled(cells: list[int]) -> bytes:
    names = {0: 0}
    return bytes(names.setdefault(digit, len(names)) for digit in cells)


def shuffled(n: int) -> tuple[np.ndarray, np.ndarray]:
    """A random symmetry, from Python's generator: (where each cell comes from, what each digit becomes)."""
    height, width = BOXES[n]
    rows, columns = np.array(_random_order(n, height)), np.array(_random_order(n, width))
    cells = n * rows[:, None] + columns
    if height == width and random.random() < 0.5:
        cells = cells.T
    return cells.reshape(-1), np.array([0, *_in_random_order(list(range(1, n + 1)))], dtype=np.uint8)


def _random_order(n: int, size: int) -> list[int]:
    bands = _in_random_order(list(range(0, n, size)))
    return [start + line for start in bands for line in _in_random_order(list(range(size)))]


def _in_random_order(left: list[int]) -> list[int]:
    """What `random.sample(left, len(left))` draws, for up to 21 of them, but faster: every puzzle of every batch takes
    nine such orders. It uses up `left`."""
    draw, order = random.getrandbits, []
    while count := len(left):
        bits = count.bit_length()
        while (place := draw(bits)) >= count:
            pass
        order.append(left[place])
        left[place] = left[-1]
        left.pop()
    return order
