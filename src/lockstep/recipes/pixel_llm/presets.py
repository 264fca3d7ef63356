"""Sizes that were tried: seconds for tests, minutes on two cores, one large GPU, and a large model to measure with."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 40,
        "global_batch": 16,
        "lr": {"peak": 3e-3, "warmup": 4},
        "evaluate": {"batch": 32},
        "task": {
            "scenes": "few", "image": 16, "width": 32, "heads": 2, "vision_layers": 1, "text_layers": 1,
            "train_size": 301,  # no multiple of the batch: the last step of an epoch is short
            "eval_size": 32,
        },
    },
    "cpu": {
        "steps": 900,
        "global_batch": 64,
        "lr": {"peak": 1e-3, "warmup": 50},
        "evaluate": {"every": 150, "batch": 100},
    },
}  # fmt: skip
