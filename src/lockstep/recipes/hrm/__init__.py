"""A model that thinks in segments (HRM, TRM) and solves Sudokus, mazes and grids whose rule only an id tells."""

from lockstep.recipes.hrm.task import HRM

TASK = HRM
