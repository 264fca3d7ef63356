"""Run folders for tests, as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

START = {"event": "start", "task": "line", "steps": 40, "time": 1.0}


def event(kind: str, **values: Any) -> dict[str, Any]:
    return {"event": kind, "time": 2.0, **values}


def make_run(folder: Path, *events: dict[str, Any], config: str = "steps: 40\n") -> Path:
    """Make a run of 40 steps that has logged 10 of them, saved one checkpoint, and then had these events."""
    for part in ("logs", "checkpoints/step-00000010"):
        (folder / part).mkdir(parents=True)
    (folder / ".lock").touch()
    (folder / "logs" / "rank-0.log").write_text("hello\n")
    (folder / "checkpoints" / "step-00000010" / "rank-00000.safetensors").write_bytes(bytes(1000))
    (folder / "config.yaml").write_text(config)
    (folder / "config.sources.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 10, "loss": 0.5}) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (START, *events)))
    return folder
