"""`report.html` of a benchmark: one page that holds everything, its pictures too, and can be sent as it is.

It looks like the report of a run, and takes over its style sheet. Section by section: figure, verdicts, table, notes on
how it was measured, and why it may not be a fair test.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.bench import plots
from lockstep.bench.intervals import ENOUGH
from lockstep.bench.results import Result, Section, cell, is_estimate
from lockstep.observe import report
from lockstep.observe.formats import escaped

MOST_ROWS = 20  # a longer table is folded away


def write_pictures_and_page(result: Result, folder: Path) -> Path:
    """Write the plots, if matplotlib is installed, and report.html. Returns the path of the page."""
    pictures = plots.write(result, folder)
    page = folder / "report.html"
    files.write(page, page_of(result, pictures))
    return page


def page_of(result: Result, pictures: dict[str, Path]) -> str:
    """Return the page. It loads nothing: style and pictures are part of it, and its policy forbids the rest."""
    # The style sheet of the report of a run, which lies beside its module.
    style = Path(report.__file__).with_name("report.css").read_text(encoding="utf-8")
    sections = "\n".join(_section(section, pictures.get(section.name)) for section in result.sections)
    note = ""
    if not pictures:
        note = _note("There are no plots: matplotlib is not installed. `lockstep bench report` adds them.")

    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Benchmark - {escaped(result.hardware["text"])}</title>
<style>{style}
.figure {{ width: 100%; height: auto; border: 1px solid var(--line); border-radius: 8px; background: #fff; }}
.verdict {{ margin: 10px 0; padding: 8px 14px; border-radius: 8px; border: 1px solid var(--line); }}
.verdict.good {{ color: var(--good); }} .verdict.bad {{ color: var(--bad); }} .verdict.idle {{ color: var(--soft); }}
td:last-child {{ width: auto; }} td:not(.words) {{ white-space: nowrap; }} td small {{ color: var(--soft); }}
th, td {{ padding: 5px 9px; }} th {{ white-space: normal; vertical-align: bottom; }}
td + td, th + th {{ text-align: right; }} td.words {{ text-align: left; }}
</style>
</head>
<body>
<main>
<header>
<h1>Benchmark <span class="badge {_state(result)}">{_label(result)}</span></h1>
<p class="where">{escaped(result.hardware["text"])} </p>
<dl class="cards">{_cards(result)}</dl>
</header>
{note}
{sections}
<footer>Made with <code>{escaped(result.command)}</code>, Lockstep {escaped(result.version)}. Values are medians.
± is half of the 95 % confidence interval; "a to b" is the range of fewer than {ENOUGH} rounds. results.json and the
CSV files beside this page hold all numbers.</footer>
</main>
</body>
</html>
"""


def _verdicts(result: Result) -> list[bool | None]:
    return [verdict.passed for section in result.sections for verdict in section.verdicts]


def _state(result: Result) -> str:
    """Return the CSS class of the badge: one missed target is enough for "bad"."""
    found = _verdicts(result)
    if False in found:
        return "bad"
    return "good" if True in found else "idle"


def _label(result: Result) -> str:
    """Return how many targets were met, and how many could not be judged on this hardware."""
    found = _verdicts(result)
    judged = [passed for passed in found if passed is not None]

    parts = []
    if judged:
        parts.append(f"{sum(judged)} of {len(judged)} targets met")
    if len(judged) < len(found):
        parts.append(f"{len(found) - len(judged)} not judged or undecided")
    return ", ".join(parts) or "no targets"


def _cards(result: Result) -> str:
    """Return the facts of the machine, as cards."""
    hardware = result.hardware
    known = {
        "CPU": f"{hardware['cpus']} of {hardware['hardware_threads']} hardware threads",
        "GPU": ", ".join(hardware["gpus"]) or "none",
        "Memory": f"{hardware['memory_gb']:.0f} GB",
        "System": hardware["system"],
        "torch": result.facts.get("torch", "-"),
        "Load before": str(hardware["load"]),
    }
    return "".join(
        f'<div class="card"><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>' for name, text in known.items()
    )


def _section(section: Section, picture: Path | None) -> str:
    """Return one section: its figure, its verdicts, its table, and notes on how it was measured."""
    image = ""
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img class="figure" alt="{escaped(section.title)}" src="data:image/png;base64,{data}"/>'

    verdicts = ""
    for verdict in section.verdicts:
        style = {True: "good", False: "bad", None: "idle"}[verdict.passed]
        verdicts += f'<p class="verdict {style}">{escaped(str(verdict))}</p>'

    notes = "".join(_note(note) for note in section.notes)
    if refusal := section.extra.get("refusal"):
        notes += _note(f"Not a fair test: {refusal}.")

    # Sections of one folder may come from different commands.
    if stamp := section.stamp:
        notes += _note(f"Measured {stamp['time']} with Lockstep {stamp['version']}: {stamp['command']}")

    return report.section(section.title, f"{image}{verdicts}{_table(section)}{notes}")


def _note(text: str) -> str:
    return f'<p class="note">{escaped(text)}</p>'


def _table(section: Section) -> str:
    """Return the rows as a table. One with many rows is folded away: its figure says enough."""
    heads = [f"{column.title} ({column.unit})" if column.unit else column.title for column in section.columns]
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)

    body = ""
    for row in section.rows:
        cells = [row.get(column.key) for column in section.columns]
        body += "<tr>" + "".join(_cell(value) for value in cells) + "</tr>"

    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    if len(section.rows) > MOST_ROWS:
        return f"<details><summary>{len(section.rows)} rows</summary>{table}</details>"
    return table


def _cell(value: Any) -> str:
    """Return a cell. Numbers are flush right, as the style says for all cells except cells of words."""
    number = value is None or isinstance(value, int | float) or is_estimate(value)
    style = "" if number else ' class="words"'

    # The range of few rounds stands below its median, or the table would be too wide for a page.
    text = cell(value)
    spread = ""
    if number:
        text, _, spread = text.partition(" (")

    below = f"<br/><small>{escaped(spread.rstrip(')'))}</small>" if spread else ""
    return f"<td{style}>{escaped(text)}{below}</td>"
