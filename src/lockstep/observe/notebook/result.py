"""The result of a run as it shows itself: a few lines of text, or HTML with the curve of its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.observe.charts import Point
from lockstep.observe.formats import duration, escaped, figures, number
from lockstep.observe.history import read_history
from lockstep.observe.notebook.curve import curve_svg, sparkline


def result_text(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Return a line about the run, and one for each of its curves. It never raises, whatever became of the folder."""
    lines = [f"RunResult {run_dir}: {_headline(summary)}"]
    for name, points in _curves(run_dir).items():
        values = [y for _, y in points]
        lines.append(f"  {name:<10} {sparkline(values)}  {figures(values[0], 4)} to {figures(values[-1], 4)}")

    return "\n".join(lines)


def result_html(run_dir: Path, summary: Mapping[str, Any]) -> str:
    """Return the headline and the picture of the curves, for a notebook."""
    head = f"<b>{escaped(run_dir)}</b>: {escaped(_headline(summary))}"
    return f"<div>{head}<br/>{curve_svg(_curves(run_dir))}</div>"


def _headline(summary: Mapping[str, Any]) -> str:
    """Return `40 steps, loss 0.0123, eval_loss 0.0234, accuracy 0.97, 2 processes, 0:42`."""
    # Numbers that are missing, or are no numbers, are left out.
    metrics = summary.get("eval_metrics")
    losses = {name: summary.get(name) for name in ("loss", "eval_loss")}
    numbers = {**losses, **(metrics if isinstance(metrics, Mapping) else {})}

    words = [f"{summary.get('step', '-')} steps"]
    words += [f"{name} {figures(value, 4)}" for name, value in numbers.items() if number(value) is not None]

    world = summary.get("world", 1)
    words += ["1 process" if world == 1 else f"{world} processes", duration(summary.get("seconds"))]
    return ", ".join(words)


def _curves(run_dir: Path) -> dict[str, list[Point]]:
    """Return the curves of the loss, over steps: of training, and of the evaluations of each set."""
    # The folder may have been changed since, and to print a result must not fail.
    with suppress(Exception):
        return _curves_of(read_history(run_dir))

    return {}


def _curves_of(history: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return the curves from the rows of a history."""
    curves: dict[str, list[Point]] = {}
    for record in history:
        # The loss of a task's only evaluation set has no other name; with several sets it is called `val/loss`.
        losses = {"loss": record.get("loss")}
        for name, value in (record["eval"] or {}).items():
            if name == "loss" or name.endswith("/loss"):
                losses["eval_loss" if name == "loss" else name] = value

        # A loss that is not a number, such as one that was never logged, has no point.
        for name, value in losses.items():
            loss = number(value)
            if loss is not None:
                curves.setdefault(name, []).append((record["step"], loss))

    return curves
