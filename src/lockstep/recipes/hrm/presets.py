"""Named sets of settings. `tiny` is for tests; the `cpu` presets reach their goals in minutes on two cores."""

from typing import Any

TINY_MODEL: dict[str, Any] = {
    "width": 32, "heads": 2, "layers": 1, "positions": "learned", "halt_max_steps": 2, "loss": "softmax",
    "weight_decay": 0.1,
}  # fmt: skip
SMALL_MODEL: dict[str, Any] = {
    "width": 256, "heads": 4, "layers": 2, "lr": 5e-4, "puzzle_emb_lr": 5e-4, "weight_decay": 0.1,
    "puzzle_emb_weight_decay": 0.1,
}  # fmt: skip

# A worker process makes 19,000 puzzles a second, and a small model takes 40,000. Each line of the log makes the host
# wait for the device, so there are few.
GPU: dict[str, Any] = {
    "precision": "bf16", "global_batch": 384, "data": {"workers": 8}, "log": {"every": 100},
    "checkpoint": {"minutes": 4},
}  # fmt: skip
SUDOKU9: dict[str, Any] = {"puzzle": "sudoku9", "train_size": 1000, "test_size": 2000}

ID_GRID: dict[str, Any] = {
    "steps": 600, "global_batch": 64, "micro_batch": 32, "evaluate": {"every": 100, "batch": 100},
}  # fmt: skip
ID_GRID_TASK: dict[str, Any] = {
    **TINY_MODEL, "puzzle": "idgrid", "width": 64, "heads": 4, "halt_max_steps": 4, "lr": 1e-3,
    # Most grids are solved after one segment: without more exploration the model would never see the later ones.
    "halt_exploration": 0.4, "train_size": 6400,
}  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    # Takes seconds: the model learns which digits there are.
    "tiny": {
        "steps": 30,
        "global_batch": 24,
        "micro_batch": 4,
        "lr": {"warmup": 4},
        "evaluate": {"batch": 32},
        "task": {
            **TINY_MODEL, "holes": 6, "lr": 5e-3, "puzzle_emb_lr": 5e-3, "puzzle_emb_weight_decay": 0.1,
            "train_size": 96, "test_size": 32,
        },
    },
    # Sudoku 4 x 4 with 9 of 16 cells empty.
    "cpu": {
        "steps": 1000,
        "global_batch": 96,
        "micro_batch": 48,
        "evaluate": {"every": 200, "batch": 100},
        "goals": ["exact >= 0.8"],
        "task": {
            **TINY_MODEL, "width": 96, "heads": 4, "halt_max_steps": 8, "holes": 9, "lr": 1e-3, "puzzle_emb_lr": 1e-3,
            "puzzle_emb_weight_decay": 0.1,
        },
    },
    # Grids whose rule follows from the puzzle id alone.
    "cpu-idgrid": {
        **ID_GRID,
        "goals": ["exact >= 0.9"],
        "task": {**ID_GRID_TASK, "puzzle_emb_lr": 3e-3, "puzzle_emb_weight_decay": 0.1},
    },
    # The control: with a table that stays zero nothing can be learned.
    "cpu-control": {
        **ID_GRID,
        "goals": ["exact <= 0.01", "cell <= 0.25"],
        "task": {**ID_GRID_TASK, "puzzle_emb_frozen": True},
    },
    # Sudoku 9 x 9 with a small model, in less than ten minutes.
    "gpu-short": {
        **GPU,
        "steps": 18_000,
        "lr": {"warmup": 500},
        "evaluate": {"every": 1000, "batch": 500},
        "goals": ["exact >= 0.5", "cell >= 0.9"],
        # The average covers the weights but not the table, and all Sudokus share one row of it: if that row learns
        # slowly, it still fits the averaged weights.
        "task": {**SUDOKU9, **SMALL_MODEL, "puzzle_emb_lr": 1e-4, "loss": "softmax", "ema": 0.999},
    },
    # The published size and schedule (27 million parameters), for a run in several parts.
    "gpu": {
        **GPU,
        "steps": 52_080,
        "lr": {"warmup": 2000, "schedule": "constant"},
        "evaluate": {"every": 5000, "batch": 500},
        "task": {**SUDOKU9, "lr": 7e-5, "puzzle_emb_lr": 7e-5},
    },
    "gpu-maze": {
        **GPU,
        "steps": 10_000,
        "lr": {"warmup": 200},
        "evaluate": {"every": 2000, "batch": 250},
        "goals": ["exact >= 0.5"],
        "task": {**SMALL_MODEL, "puzzle": "maze", "maze_longer_than": 40, "train_size": 1000, "test_size": 500},
    },
}  # fmt: skip
