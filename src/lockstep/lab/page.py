"""`lockstep lab page`: guesses, formulas and measurements of all exercises laid over each other, with the pictures."""

from __future__ import annotations

import base64
import math
from html import escape
from pathlib import Path

from lockstep.lab import predictions
from lockstep.lab.course import GRADERS, passed
from lockstep.lab.predictions import Prediction

WIDTH, HEIGHT, MARGIN = 360, 36, 14

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dbe3; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid #e8ecf1; vertical-align: middle; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
img { max-width: 100%; } .done { color: #1a7f37; } .quiet { color: #667; }
code { background: #f2f4f7; padding: 0 .25em; }
.guess { fill: #d9730d; } .formula { stroke: #2563eb; stroke-width: 3; } .measured { fill: #1c2430; }
"""

_MARK = '<svg width="16" height="16" style="vertical-align:-3px">{}</svg>'
LEGEND = (
    "<p class=quiet>Your guess "
    + _MARK.format('<circle class="guess" cx="8" cy="8" r="6"/>')
    + ", what the formula says "
    + _MARK.format('<line class="formula" x1="8" x2="8" y1="1" y2="15"/>')
    + " and what was measured "
    + _MARK.format('<path class="measured" d="M8 2l5 6-5 6-5-6z"/>')
    + ". Guess first: <code>lockstep lab predict N</code></p>"
)


def write() -> Path:
    """Write lab.html, one file that needs no other, and return its path."""
    folder = predictions.folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lab.html"
    path.write_text(page(predictions.load(), sorted(folder.glob("*.svg"))), encoding="utf-8")
    return path


def page(entries: list[Prediction], pictures: list[Path]) -> str:
    """Return the page: a section for each exercise that has a guess, a measurement or a picture."""
    sections = []
    for number, exercise in GRADERS.items():
        rows = [entry for entry in entries if entry.exercise == number]
        drawn = [path for path in pictures if path.stem.startswith(_stem(number))]
        if rows or drawn:
            sections.append(_section(number, rows, drawn))
        else:
            sections.append(
                f"<h2>{number}. {escape(exercise.title)}</h2><p class=quiet>Not run yet: "
                f"<code>python {exercise.script}</code></p>"
            )

    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>My lab</title>'
        f"<style>{STYLE}</style></head><body><h1>My lab</h1>{LEGEND}{''.join(sections)}</body></html>\n"
    )


def _stem(number: str) -> str:
    """Return how the names of an exercise's pictures begin: 01_ for 1, b1_ for a bonus."""
    return f"{number.zfill(2)}_"


def _section(number: str, rows: list[Prediction], drawn: list[Path]) -> str:
    """Return the section of an exercise: its questions and answers as a table, then its pictures."""
    done = " <span class=done>passed</span>" if number in passed() else ""
    parts = [f"<h2>{number}. {escape(GRADERS[number].title)}{done}</h2>"]
    if rows:
        head = "".join(f"<th>{name}</th>" for name in ("question", "guess", "formula", "measured", ""))
        parts.append(f"<table><tr>{head}</tr>{''.join(_row(entry) for entry in rows)}</table>")

    for path in drawn:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<p><img alt="{escape(path.stem)}" src="data:image/svg+xml;base64,{data}"></p>')

    return "".join(parts)


def _row(entry: Prediction) -> str:
    """Return a row of the table: the question, three numbers, and the three as marks on an axis."""
    computed = f"{_number(entry.computed)}<br><span class=quiet>{escape(entry.formula)}</span>"

    # A number that was not measured yet is not given away by its formula.
    cells = [_number(entry.guess), computed if entry.measured is not None else "", _number(entry.measured)]
    numbers = "".join(f"<td class=number>{cell}</td>" for cell in cells)

    unit = f" <span class=quiet>[{escape(entry.unit)}]</span>" if entry.unit else ""
    return f"<tr><td>{escape(entry.text)}{unit}</td>{numbers}<td>{_strip(entry)}</td></tr>"


def _number(value: float | None) -> str:
    """Return a number with four digits, or a dash."""
    if value is None:
        return "&ndash;"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _strip(entry: Prediction) -> str:
    """Return the three numbers as marks on one axis; logarithmic if they differ by more than a factor of 20."""
    if entry.measured is None or entry.computed is None:
        return ""

    # An axis from 0 shows ratios; logarithms are for numbers that would all sit at one end of it.
    values = [value for value in (entry.guess, entry.computed, entry.measured) if value is not None]
    logarithmic = min(values) > 0 and max(values) / min(values) > 20
    scale = math.log10 if logarithmic else float
    low, high = (0.0, max(max(values), 0.0)) if not logarithmic else (scale(min(values)), scale(max(values)))
    low = min(low, *(scale(value) for value in values))

    def x(value: float) -> float:
        share = (scale(value) - low) / (high - low) if high > low else 0.5
        return MARGIN + share * (WIDTH - 2 * MARGIN)

    middle = HEIGHT / 2
    marks = [f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{middle}" y2="{middle}" stroke="#c5ccd6"/>']
    if entry.guess is not None:
        marks.append(f'<circle class="guess" cx="{x(entry.guess):.1f}" cy="{middle}" r="7"/>')

    at = x(entry.computed)
    marks.append(f'<line class="formula" x1="{at:.1f}" x2="{at:.1f}" y1="4" y2="{HEIGHT - 4}"/>')
    at = x(entry.measured)
    marks.append(f'<path class="measured" d="M{at:.1f} {middle - 7}l5 7-5 7-5-7z"/>')

    kind = "logarithmic axis" if logarithmic else "axis from 0"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><title>{kind}</title>{"".join(marks)}</svg>'
