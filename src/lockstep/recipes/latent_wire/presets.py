"""Named sets of settings.

`tiny` is for tests; `cpu` and `topics` take minutes on two cores; `gpu` and `gpu-topics` are for one large GPU, where
training the readers and then the wire takes less than eight minutes.
"""

from typing import Any

# A wire that carries another sample's context must be no better than no context.
CONTROLS = ["a_other_above_none <= 0.05", "b_other_above_none <= 0.05"]
GPU: dict[str, Any] = {
    "precision": "bf16",
    "global_batch": 256,
    "data": {"workers": 4},
    "checkpoint": {"minutes": 1},
}
GPU_WIRE: dict[str, Any] = {
    "vectors": 8, "width": 256, "layers": 6, "heads": 8, "near": 8, "spread": True, "latent_adapter": [0, 1, 2, 3],
    "size": 4_000_000, "eval_size": 2048,
    "readers": [["words", 256, 6, 8, 4], ["bytes", 384, 4, 8, 16]], "reader_batch": 512, "reader_rate": 1e-3,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 20,
        "global_batch": 16,
        "lr": {"peak": 2e-3, "warmup": 5},
        "evaluate": {"every": 20, "batch": 32},
        "task": {
            "size": 512, "eval_size": 64, "width": 32,
            "readers": [["words", 32, 1, 2], ["pieces", 48, 1, 2]], "reader_accuracy": 0.5,
        },
    },
    # One fact, two vectors.
    "cpu": {
        "steps": 400,
        "global_batch": 64,
        "lr": {"peak": 1e-3, "warmup": 50},
        "evaluate": {"every": 100, "batch": 128},
        "goals": [
            "a_exact >= 0.90", "b_exact >= 0.90", "a_text >= 0.98", "b_text >= 0.98", "a_none <= 0.25",
            "b_none <= 0.25", *CONTROLS,
        ],
        "task": {},
    },
    # The topic of a sentence, eight vectors.
    "topics": {
        "steps": 900,
        "global_batch": 64,
        "lr": {"peak": 3e-3, "warmup": 50},
        "evaluate": {"every": 300, "batch": 128},
        "goals": ["a_exact >= 0.90", "b_exact >= 0.90", "a_none <= 0.25", "b_none <= 0.25", *CONTROLS],
        "task": {"world": "topics", "vectors": 8, "near": 8},
    },
    # Four facts, eight vectors. Readers learn late to find one fact among several, so they get more steps.
    "gpu": {
        **GPU,
        "steps": 2000,
        "lr": {"peak": 1e-3, "warmup": 250},
        "evaluate": {"every": 500, "batch": 512},
        "goals": ["a_of_text >= 0.6", "b_of_text >= 0.6", "a_text >= 0.98", "b_text >= 0.98", *CONTROLS],
        "task": {**GPU_WIRE, "facts": 4, "questions": 4, "reader_questions": 8, "reader_steps": 8000},
    },
    "gpu-topics": {
        **GPU,
        "steps": 2000,
        "lr": {"peak": 1e-3, "warmup": 100},
        "evaluate": {"every": 500, "batch": 512},
        "goals": ["a_exact >= 0.90", "b_exact >= 0.90", *CONTROLS],
        "task": {**GPU_WIRE, "world": "topics", "reader_steps": 4000},
    },
}  # fmt: skip
