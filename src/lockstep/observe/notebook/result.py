"""How the result of a run shows itself: a few lines of text, or HTML with the curve of its loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.launch import records
from lockstep.launch.jsonl import EVENTS
from lockstep.observe.charts import Point
from lockstep.observe.formats import duration, escaped, figures, number
from lockstep.observe.notebook.curve import curve_svg, sparkline
from lockstep.observe.report import without_undone
from lockstep.observe.run_list import parse_lines


def result_text(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Return a line about the run, and one for each of its curves. It never raises, whatever became of the folder."""
    lines = [f"RunResult {run_dir}: {_headline(summary)}"]
    for name, points in _curves(run_dir).items():
        values = [y for _, y in points]
        lines.append(f"  {name:<10} {sparkline(values)}  {figures(values[0], 4)} to {figures(values[-1], 4)}")

    return "\n".join(lines)


def result_html(run_dir: Path, summary: Mapping[str, Any]) -> str:
    head = f"<b>{escaped(run_dir)}</b>: {escaped(_headline(summary))}"
    return f"<div>{head}<br/>{curve_svg(_curves(run_dir))}</div>"


def _headline(summary: Mapping[str, Any]) -> str:
    """Return `40 steps, loss 0.0123, eval_loss 0.0234, accuracy 0.97, 2 processes, 0:42`."""
    metrics = summary.get("eval_metrics")
    losses = {name: summary.get(name) for name in ("loss", "eval_loss")}
    numbers = {**losses, **(metrics if isinstance(metrics, Mapping) else {})}
    words = [f"{summary.get('step', '-')} steps"]
    words += [f"{name} {figures(value, 4)}" for name, value in numbers.items() if number(value) is not None]
    world = summary.get("world", 1)
    words += ["1 process" if world == 1 else f"{world} processes", duration(summary.get("seconds"))]
    return ", ".join(words)


def _curves(run_dir: Path) -> dict[str, list[Point]]:
    """Return the curves of the loss, over steps: of training, and of evaluations."""
    lines = parse_lines(records.read(run_dir / "metrics.jsonl"))
    events = parse_lines(records.read(run_dir / EVENTS))
    evaluations = [event for event in events if event.get("event") == "eval" and event.get("decides", True)]
    curves: dict[str, list[Point]] = {}
    for name, found in (("loss", lines), ("eval_loss", evaluations)):
        pairs = [(number(record.get("step")), number(record.get("loss"))) for record in without_undone(found)]
        points = [(step, loss) for step, loss in pairs if step is not None and loss is not None]
        if points:
            curves[name] = points

    return curves
