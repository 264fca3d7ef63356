"""The history of a run, read back from its folder: what `RunResult.history` returns and prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import plural
from lockstep.launch.jsonl import EVENTS, read_jsonl
from lockstep.observe.formats import figures
from lockstep.observe.report import without_undone

# The fields of an evaluation that are neither its loss nor a metric.
NOT_RESULTS = ("time", "event", "step", "samples", "weight", "seconds", "metrics")

CURVE = "▁▂▃▄▅▆▇█"
WIDTH = 40  # characters of a printed curve, at most


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return one record per log line or evaluation, by step. Steps that a resume repeated appear once."""
    lines = without_undone(_read(run_dir / "metrics.jsonl"))
    events = [event for event in _read(run_dir / EVENTS) if event.get("event") == "eval"]
    by_step = {line["step"]: {**line, "eval": None} for line in lines}
    for event in without_undone(events):
        results = {key: value for key, value in event.items() if key not in NOT_RESULTS}
        record = by_step.setdefault(event["step"], {"step": event["step"]})
        record["eval"] = {**results, **event.get("metrics", {})}

    return [by_step[step] for step in sorted(by_step)]


def describe_result(run_dir: Path, summary: dict[str, Any], history: Sequence[dict[str, Any]]) -> str:
    """Return a few lines about a finished run: steps, the curve of the loss, the last evaluation, the folder."""
    lines = [f"{plural(summary.get('step', 0), 'step')} on {plural(summary.get('world', 1), 'process', 'processes')}"]
    if summary.get("stopped"):
        lines[0] += f", stopped: {summary['stopped']}"

    losses = [record["loss"] for record in history if record.get("loss") is not None]
    if losses:
        lines.append(f"loss     {figures(losses[0], 4)} {curve(losses)} {figures(losses[-1], 4)}")

    evaluations = [record["eval"] for record in history if record.get("eval")]
    if evaluations:
        lines.append("eval     " + "  ".join(f"{name} {figures(value, 4)}" for name, value in evaluations[-1].items()))

    return "\n".join([*lines, f"run      {run_dir}"])


def curve(values: Sequence[float]) -> str:
    """Return a small curve: one character per value, or per equally wide range of them."""
    finite = [value for value in values if value - value == 0]  # neither NaN nor infinite
    if not finite:
        return ""

    count = min(WIDTH, len(finite))
    picked = [finite[index * len(finite) // count] for index in range(count)]
    low, high = min(picked), max(picked)
    heights = [0 if high == low else int((value - low) / (high - low) * (len(CURVE) - 1)) for value in picked]
    return "".join(CURVE[height] for height in heights)


def _read(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.exists() else []
