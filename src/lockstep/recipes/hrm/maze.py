"""Mazes: walls, a start, a goal, and the shortest way between them."""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from lockstep.errors import UserError

WALL, FREE, START, GOAL, WAY = 1, 2, 3, 4, 5  # 0 is padding
SYMBOLS = 6
STEPS = ((-1, 0), (0, -1), (0, 1), (1, 0))
TRIES = 2000  # grids for one maze


def maze(n: int, longer_than: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """(cells, labels), flat: the label is the maze with its way drawn in."""
    for _ in range(TRIES):
        grid = _carved(n, rng)
        free = [(row, column) for row, column in np.argwhere(grid == FREE).tolist()]
        start, goal = rng.sample(free, 2)
        way = shortest_way(grid, start, goal)
        if way is not None and len(way) > longer_than:
            break
    else:
        raise UserError(
            f"mazes of {n} x {n} whose only shortest way has more than {longer_than} cells",
            f"none in {TRIES} tries",
            "type a smaller task.maze_longer_than, or a larger task.maze_size",
        )
    grid[start], grid[goal] = START, GOAL
    labels = grid.copy()
    for cell in way[1:-1]:
        labels[cell] = WAY
    return grid.reshape(-1), labels.reshape(-1)


def _carved(n: int, rng: random.Random) -> np.ndarray:
    """A tree of corridors by depth-first search, and a few openings more, so that ways differ in length."""
    grid = np.full((n, n), WALL, dtype=np.uint8)
    stack = [(0, 0)]
    grid[0, 0] = FREE
    while stack:
        row, column = stack[-1]
        ways = [
            (row + 2 * dr, column + 2 * dc, row + dr, column + dc)
            for dr, dc in STEPS
            if 0 <= row + 2 * dr < n and 0 <= column + 2 * dc < n and grid[row + 2 * dr, column + 2 * dc] == WALL
        ]
        if not ways:
            stack.pop()
            continue
        to_row, to_column, wall_row, wall_column = rng.choice(ways)
        grid[wall_row, wall_column] = grid[to_row, to_column] = FREE
        stack.append((to_row, to_column))
    walls = np.argwhere(grid == WALL).tolist()
    for row, column in rng.sample(walls, len(walls) // 12):
        grid[row, column] = FREE
    return grid


def shortest_way(grid: np.ndarray, start: tuple[int, int], goal: tuple[int, int]) -> list[tuple[int, int]] | None:
    """Both ends included. None if there is no way, or a second one as short: a turned maze must have the turned way."""
    n = len(grid)
    came_from: dict[tuple[int, int], list[tuple[int, int]]] = {start: []}
    distance = {start: 0}
    queue = deque([start])
    while queue:
        row, column = here = queue.popleft()
        for dr, dc in STEPS:
            cell = (row + dr, column + dc)
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
    way = [goal]
    while way[-1] != start:
        if len(came_from[way[-1]]) > 1:
            return None
        way.append(came_from[way[-1]][0])
    return way[::-1]
