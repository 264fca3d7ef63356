"""The history of a run, read back from its folder: `RunResult.history`, and where the log of a resumed run stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.files.jsonl import read_jsonl
from lockstep.observe.report import without_undone
from lockstep.run_folder.names import EVENTS, METRICS


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return one record per log line or evaluation, by step. Steps that a resume repeated appear once."""
    lines = without_undone(_read(run_dir / METRICS))
    by_step: dict[int, dict[str, Any]] = {line["step"]: {**line, "eval": None} for line in lines}

    # A task may have several evaluation sets, each with its own event after a step.
    evaluations = [event for event in _read(run_dir / EVENTS) if event.get("event") == "eval"]

    for name in dict.fromkeys(event.get("set") for event in evaluations):
        prefix = f"{name}/" if name else ""
        for event in without_undone(event for event in evaluations if event.get("set") == name):
            record = by_step.setdefault(event["step"], {"step": event["step"], "eval": None})
            results = {"loss": event["loss"], **event["metrics"]}
            found = {f"{prefix}{key}": value for key, value in results.items()}

            record["eval"] = {**(record["eval"] or {}), **found}

    return [by_step[step] for step in sorted(by_step)]


def last_log_line(run_dir: Path, steps_done: int) -> dict[str, Any]:
    """Return the last record of metrics.jsonl up to this number of steps done, or {}."""
    lines = _read(run_dir / METRICS)
    return next((line for line in reversed(lines) if line["step"] <= steps_done), {})


def _read(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.exists() else []
