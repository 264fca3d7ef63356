"""Sizes: seconds for tests, minutes on two cores, one large GPU, and a large model to measure speed and memory with."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Seconds, for tests.
    "tiny": {
        "steps": 40,
        "global_batch": 16,
        "lr": {"peak": 3e-3, "warmup": 4},
        "evaluate": {"batch": 32},
        "task": {
            "scenes": "few",
            "image": 16,
            "width": 32,
            "heads": 2,
            "vision_layers": 1,
            "text_layers": 1,
            "train_size": 301,  # no multiple of the batch: the last step of an epoch is short
            "eval_size": 32,
        },
        "goals": ["iid_place >= 0.9", "iid_colour >= 0.5"],
    },
    # Minutes on two cores.
    "cpu": {
        "steps": 900,
        "global_batch": 64,
        "lr": {"peak": 1e-3, "warmup": 50},
        "evaluate": {"every": 150, "batch": 100},
        "goals": [
            "iid_exact >= 0.9",
            "comp_exact >= 0.55",
            "comp_size >= 0.97",
            "comp_colour >= 0.97",
            "comp_place >= 0.97",
        ],
    },
    # Minutes on one large GPU.
    "gpu": {
        "steps": 6000,
        "global_batch": 512,
        "tail": "drop",  # one batch shape, one compilation
        "precision": "bf16",
        "lr": {"peak": 6e-4, "warmup": 300},
        "evaluate": {"every": 1500, "batch": 500},
        "data": {"workers": 12},
        "checkpoint": {"minutes": 3.0},
        "task": {
            "scenes": "many",
            "image": 64,
            "width": 384,
            "heads": 6,
            "vision_layers": 6,
            "text_layers": 6,
            "vocabulary": 64,
            "place_std": 0.3,
            "eval_size": 2000,
            "train_size": 3_072_000,  # no picture is seen twice
        },
        "goals": ["comp_exact_2 >= 0.95", "comp_exact_3 >= 0.8", "comp_exact_4 >= 0.8"],
    },
    # A large model, to measure speed and memory with.
    "bench": {
        "steps": 40,
        "global_batch": 64,
        "tail": "drop",
        "precision": "bf16",
        "lr": {"peak": 3e-4, "warmup": 10},
        "evaluate": {"at_end": False},
        "checkpoint": {"at_end": False, "minutes": None},
        "data": {"workers": 8},
        "task": {
            "image": 256,
            "stem": "patch",
            "patch": 16,
            "width": 768,
            "heads": 12,
            "vision_layers": 6,
            "text_layers": 12,
            "vocabulary": 50_000,
        },
    },
}
