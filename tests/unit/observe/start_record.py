"""The first line of events.jsonl, as a run writes it."""

from typing import Any

START: dict[str, Any] = {
    "time": 1763179400.0,
    "event": "start",
    "task": "char_lm",
    "world": 2,
    "device": "cpu",
    "precision": "fp32",
    "parameters": 10_812_000,
    "unit": "token",
    "steps": 400,
}
