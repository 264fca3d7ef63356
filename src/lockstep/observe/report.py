"""`report.html`: one page that shows a run, made from the run folder alone.

The page is self-contained: inline SVG, one small style sheet, no script, no network (its content policy forbids both).
Everything that is read from a file is untrusted and passes through `escaped()`. If a file is missing or damaged, only
its part of the page is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.errors import UserError
from lockstep.observe.charts import Point, Series, Style, line_chart
from lockstep.observe.formats import (
    SAMPLE,
    compact,
    duration,
    escaped,
    event_words,
    figures,
    flat,
    megabytes,
    number,
    ranks,
    rate,
    rate_key,
)
from lockstep.observe.profile.merge import mean_kinds, mean_over_ranks, warnings
from lockstep.observe.sinks import read_jsonl
from lockstep.run_folder.names import CONFIG, EVENTS, METRICS, PLAN, PROFILE, REPORT, SOURCES, SUMMARY
from lockstep.run_folder.run_dir import read_mapping

Record = dict[str, Any]

# The newest events are shown, and the first of the task's own metrics.
MAX_EVENTS = 400
MAX_METRICS = 8

# Fields that the table of events leaves out: some have a column, and others only matter to the launcher.
NOT_IN_TABLE = ("time", "event", "step", "facts", "traceback", "for_user", "lost_peer", "origin", "cause")

# The style of events that are bad news.
TROUBLE = {"skip": "warn", "warning": "warn", "failure": "bad", "error": "bad"}


def write_report(run_dir: str | os.PathLike[str], config: Record | None = None) -> Path:
    """Make `report.html` in a run folder and return its path. `config` is read from there if the caller has none."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} to report on", "", "name a run's folder, such as runs/NAME-TIME")

    # A browser never loads half a page.
    files.write(folder / REPORT, page(read_run(folder, config)))
    return folder / REPORT


# ---- the run folder, read back ----


@dataclass
class RunRecord:
    name: str
    metrics: list[Record]  # flat: the task's own metrics are `metrics.NAME`
    events: list[Record]
    config: Record
    sources: Record
    plan: Record
    summary: Record
    profile: Record  # the breakdowns of all ranks, with --profile
    notes: dict[str, str]  # file -> why it could not be read

    @cached_property
    def evals(self) -> list[Record]:
        """The evaluations that decide, flat, one per step."""
        return next((records for records in self.evals_by_set.values() if records[-1].get("monitor", True)), [])

    @cached_property
    def evals_by_set(self) -> dict[str, list[Record]]:
        """The evaluations of each set, flat, one per step. The name of a task's only set is empty."""
        evals = [flat(event) for event in self.events if event.get("event") == "eval"]
        names = dict.fromkeys(str(record.get("set", "")) for record in evals)
        return {
            name: without_undone(record for record in evals if str(record.get("set", "")) == name) for name in names
        }

    @cached_property
    def about(self) -> Record:
        """Everything known about the run as a whole. Later records override earlier ones."""
        about: Record = {}
        for record in (self.plan, self.last_event("start"), self.last_event("end"), self.summary):
            about |= {key: value for key, value in record.items() if value is not None}

        return about

    @property
    def unit(self) -> str:
        """The thing that a loss weight of 1 counts, such as one token."""
        return str(self.about.get("unit", SAMPLE))

    def last_event(self, *kinds: str) -> Record:
        return last_event(self.events, kinds)


def read_run(folder: Path, config: Record | None = None) -> RunRecord:
    """Read a run folder. A missing or damaged file leads to a note, not to an error. `config`: see `write_report`."""
    notes: dict[str, str] = {}

    def read(file: str, reader: Callable[[Path], Any], otherwise: Any) -> Any:
        try:
            return reader(folder / file)
        except FileNotFoundError:
            notes[file] = f"{file} is not there"
        except (OSError, ValueError, UserError) as error:
            notes[file] = f"{file} could not be read: {error}"

        return otherwise

    return RunRecord(
        name=folder.resolve().name,
        metrics=without_undone(map(flat, read(METRICS, read_jsonl, []))),
        events=read(EVENTS, read_jsonl, []),
        config=read(CONFIG, read_mapping, {}) if config is None else config,
        sources=read(SOURCES, read_mapping, {}),
        plan=read(PLAN, read_mapping, {}),
        summary=read(SUMMARY, read_mapping, {}),
        # Only a run with --profile has it, so that it is not missed.
        profile=read(f"{PROFILE}/breakdown.json", read_mapping, {}) if (folder / PROFILE).is_dir() else {},
        notes=notes,
    )


def last_event(events: Sequence[Record], kinds: Container[Any]) -> Record:
    """Return the last event of one of these kinds; {} if there is none."""
    return next((event for event in reversed(events) if event.get("event") in kinds), {})


def without_undone(records: Iterable[Record]) -> list[Record]:
    """Return one record per step, the newest: a resumed run repeats the steps after its checkpoint."""
    newest: list[Record] = []

    for record in records:
        step = number(record.get("step"))

        if step is None:
            continue

        # A repeated step undoes everything after it.
        while newest and newest[-1]["step"] >= step:
            newest.pop()

        newest.append(record)

    return newest


# ---- the page ----


def page(run: RunRecord) -> str:
    task = str(run.about.get("task", run.name))
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escaped(task)} - {escaped(run.name)}</title>
<style>{style}</style>
</head>
<body>
<main>
{header(run, task)}
{section("Curves", curves(run) if run.metrics else nothing_in(run, METRICS))}
{profile_of(run)}
{sample(run)}
{section("Configuration", config_table(run) if run.config else nothing_in(run, CONFIG))}
{section("Plan", plan_table(run))}
{section("Events", events_table(run) if run.events else nothing_in(run, EVENTS))}
<footer>Written by Lockstep on {_clock(datetime.now(UTC).timestamp())}<br/>
{escaped(" · ".join(run.notes.values()))}</footer>
</main>
</body>
</html>
"""


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}\n</section>"


def nothing_in(run: RunRecord, file: str) -> str:
    return f'<p class="note">{escaped(run.notes.get(file, f"{file} is empty"))}</p>'


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], styles: Sequence[str] = ()) -> str:
    """Return a table; `styles` has a class for each row, or is empty."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    body = ""

    for row, style in zip_longest(rows, styles, fillvalue=""):
        cells = "".join(f"<td>{escaped(_plain(cell))}</td>" for cell in row)
        body += f'<tr class="{style}">{cells}</tr>'

    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(value: Any) -> str:
    """Return a value as a user would type it in a configuration."""
    if value is None:
        return "-"

    if isinstance(value, bool):
        return str(value).lower()

    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _clock(seconds: Any) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (TypeError, OverflowError, OSError, ValueError):
        return "-"


# ---- how it ended, and its numbers ----


def header(run: RunRecord, task: str) -> str:
    state, label, reason = outcome(run)
    why = f'<p class="reason {state}">{escaped(reason)}</p>' if reason else ""
    cards = "".join(
        f'<div class="card"><dt>{escaped(name)}</dt><dd>{escaped(value)}<small>{escaped(aside)}</small></dd></div>'
        for name, value, aside in key_numbers(run)
    )
    return f"""<header>
<h1>{escaped(task)} <span class="badge {state}">{label}</span></h1>
<p class="where">{escaped(run.name)} · started {_clock(run.last_event("start").get("time"))}</p>
{why}
<dl class="cards">{cards}</dl>
</header>"""


def outcome(run: RunRecord) -> tuple[str, str, str]:
    """Return (style, label, reason) of the end of the run, as far as it is known."""
    # Events before the last start belong to an earlier attempt.
    last = run.last_event("start", "end", "error")
    if last.get("event") == "error":
        return "bad", "failed", str(last.get("message") or last.get("error") or "No reason was recorded.")

    # Without readable events the summary decides: it is only written at the end.
    if last.get("event") == "end" or (run.summary and not run.events):
        return "good", "finished", ""

    return "idle", "no end recorded", "The run is still going, or its process was killed."


def key_numbers(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return (name, value, aside) for the cards of the header, with `-` for unknown values."""
    about = run.about
    unit = run.unit

    # Without a summary, the last record has the newest numbers.
    known = {**(run.metrics[-1] if run.metrics else {}), **about}

    latest = run.evals[-1] if run.evals else {"loss": about.get("eval_loss")}
    finite = [evaluation for evaluation in run.evals if number(evaluation.get("loss")) is not None]
    best = min(finite, key=lambda evaluation: evaluation["loss"], default=latest)

    # A run that has not ended may not know all of these.
    of_steps = [_plain(known[key]) for key in ("step", "steps") if key in known]
    counts = [f"{known[key]} {key}" for key in ("applied", "skipped") if key in known]
    trainable = f"{compact(about['trainable'])} trainable" if "trainable" in about else ""

    # A task with its own unit, such as tokens, has two counts and two rates.
    tokens = f"{compact(total(run.metrics, 'weight'))} {unit}" if unit != SAMPLE else ""
    samples_per_s = rate(mean_rate(run.metrics, "samples"), SAMPLE) if unit != SAMPLE else ""
    counted = "samples" if unit == SAMPLE else "weight"

    return [
        ("Final loss", figures(known.get("loss"), 4), ""),
        ("Best eval loss", figures(best.get("loss"), 4), f"step {best['step']}" if "step" in best else ""),
        *_best_checkpoint(about.get("best")),
        ("Last eval loss", figures(latest.get("loss"), 4), f"step {latest['step']}" if "step" in latest else ""),
        ("Steps", " / ".join(of_steps) or "-", " · ".join(counts)),
        ("Samples", compact(total(run.metrics, "samples")), tokens),
        ("Wall time", duration(wall_seconds(run)), ""),
        ("Mean rate", rate(mean_rate(run.metrics, counted), unit), samples_per_s),
        ("Peak memory", megabytes(max(amounts(run.metrics, "memory_mb"), default=None)), ""),
        ("World", ranks(about.get("world")), ""),
        ("Device", _plain(about.get("device")), ""),
        ("Precision", _plain(about.get("precision")), ""),
        ("Parameters", compact(about.get("parameters")), trainable),
    ]


def _best_checkpoint(best: Any) -> list[tuple[str, str, str]]:
    """Return the card of the best checkpoint, if the run kept one."""
    if not isinstance(best, Mapping):
        return []

    return [
        ("Best checkpoint", f"step {_plain(best.get('step'))}", f"{best.get('metric')} {figures(best.get('value'), 4)}")
    ]


def amounts(records: Sequence[Record], key: str) -> list[float]:
    return [amount for record in records if (amount := number(record.get(key))) is not None]


def total(records: Sequence[Record], key: str) -> float | None:
    counts = amounts(records, key)
    return math.fsum(counts) if counts else None


def mean_rate(records: Sequence[Record], key: str) -> float | None:
    """Return work / time, without the first record, which includes compilation and warm-up."""
    work = seconds = 0.0

    # A record with a rate but no amount, or the other way round, says nothing about the mean.
    for record in records[1:] or records:
        amount = number(record.get(key))
        per_second = number(record.get(f"{key}_per_s"))

        if amount and per_second:
            work += amount
            seconds += amount / per_second

    return work / seconds if seconds else None


def wall_seconds(run: RunRecord) -> float | None:
    """Return how long the run took, or the time that its records span so far."""
    if "seconds" in run.about:
        return number(run.about["seconds"])

    times = amounts([*run.events, *run.metrics], "time")
    return max(times) - min(times) if len(times) > 1 else None


# ---- curves ----


def curves(run: RunRecord) -> str:
    def series(key: str, name: str, style: Style = "line") -> list[Series]:
        return [Series(name, curve(run.metrics, key), style)]

    skips = curve((event for event in run.events if event.get("event") == "skip"), "step")
    loss = [*train_and_eval(run, "loss"), Series("skipped step", [(step, math.nan) for step, _ in skips], "marks")]
    charts = [
        # The same chart for wide and for narrow screens; the style sheet shows one of them.
        line_chart(loss, "Loss", log=10, wide=True),
        line_chart(loss, "Loss", log=10),
        line_chart(series(rate_key(run.unit), "rate", "smooth"), "Throughput", f"{run.unit}/s", zero=True),
        line_chart(series("lr", "learning rate"), "Learning rate", zero=True),
        line_chart(series("grad_norm", "norm", "smooth"), "Gradient norm", log=10),
        line_chart(series("memory_mb", "memory"), "Memory", "MB", zero=True),
    ]
    if any("scale" in record for record in run.metrics):
        charts.append(line_chart(series("scale", "scale"), "Loss scale (fp16)", log=2))

    # A dict keeps the order in which metrics appeared.
    evals = [record for records in run.evals_by_set.values() for record in records]
    own = dict.fromkeys(key for record in run.metrics + evals for key in record if key.startswith("metrics."))
    charts += [line_chart(train_and_eval(run, key), key.removeprefix("metrics.")) for key in list(own)[:MAX_METRICS]]
    return f'<div class="grid">{"".join(charts)}</div>'


def train_and_eval(run: RunRecord, key: str) -> list[Series]:
    evals = [
        Series(f"eval {name}".strip(), curve(records, key), "points") for name, records in run.evals_by_set.items()
    ]
    return [Series("train", curve(run.metrics, key), "smooth"), *(evals or [Series("eval", [], "points")])]


def curve(records: Iterable[Record], key: str) -> list[Point]:
    """Return (step, value) of the records that have this key; NaN for a value that is not a finite number."""
    points = [(number(record.get("step")), number(record[key])) for record in records if key in record]
    return [(step, math.nan if value is None else value) for step, value in points if step is not None]


# ---- where the time goes ----


def profile_of(run: RunRecord) -> str:
    """Return the breakdown of the traced steps, if there were any."""
    ranks = [rank for rank in run.profile.get("ranks", []) if isinstance(rank, dict)]
    if not ranks:
        return ""

    kinds = mean_kinds(ranks)
    step = sum(kinds.values()) or 1.0
    rows = []

    for kind, seconds in kinds.items():
        if seconds > 0:
            own = [1e3 * rank["kinds"].get(kind, 0.0) / max(1, rank["steps"]) for rank in ranks]
            rows.append((kind, f"{1e3 * seconds:.3f}", f"{seconds / step:.1%}", f"{min(own):.3f} to {max(own):.3f}"))

    # The numbers that need no table.
    facts = [f"{run.profile.get('steps')} traced steps of {1e3 * step:.3f} ms"]
    facts.append(f"{mean_over_ranks(ranks, 'overlap_fraction'):.0%} of the communication is hidden by computation")

    if all(rank.get("mfu") for rank in ranks):
        peak = mean_over_ranks(ranks, "peak_flops")
        facts.append(
            f"MFU {mean_over_ranks(ranks, 'mfu'):.1%} of {compact(peak)} FLOP/s, measured with a large matrix product"
        )

    if all(rank.get("busy") is not None for rank in ranks):
        facts.append(f"the GPU is busy for {mean_over_ranks(ranks, 'busy'):.0%} of the time")

    heads = ("Part of a step", "ms", "Share", "ms, fastest to slowest rank")
    text = "; ".join(facts) + ". Open profile/trace.json.gz in ui.perfetto.dev or chrome://tracing for the timeline."
    alerts = "".join(f'<p class="reason bad">{escaped(reason)}</p>' for reason in warnings(ranks))
    return section("Where the time goes", f'<p class="note">{escaped(text)}</p>{alerts}{table(heads, rows)}')


# ---- text and tables ----


def sample(run: RunRecord) -> str:
    text = run.last_event("sample").get("text")
    return section("Sample", f"<pre>{escaped(text)}</pre>") if text else ""


def config_table(run: RunRecord) -> str:
    heads = ("Key", "Value", "Source")
    rows = [(key, value, source_of(key, run.sources)) for key, value in flat(run.config).items()]
    chosen = [row for row in rows if row[2] != "default"]
    defaults = [row for row in rows if row[2] == "default"]
    # Most settings are defaults: they are folded away.
    rest = f"<summary>{len(defaults)} values left at their default</summary>{table(heads, defaults)}"
    return f"{table(heads, chosen)}<details>{rest}</details>"


def source_of(key: str, sources: Record) -> str:
    """Return the source of a key, or of the nearest section around it that has one."""
    while key and key not in sources:
        key = key.rpartition(".")[0]

    return str(sources.get(key, "-"))


def plan_table(run: RunRecord) -> str:
    facts = run.last_event("start").get("facts")
    lead = table(("Fact", ""), flat(facts).items()) if isinstance(facts, dict) and facts else ""

    values = flat(run.plan)
    if not values:
        return lead + nothing_in(run, PLAN)

    rows = [(key, value, values.get(f"reasons.{key}", "")) for key, value in values.items()]
    derived = [row for row in rows if not row[0].startswith("reasons.")]
    return lead + table(("Derived value", "Value", "Reason"), derived)


def events_table(run: RunRecord) -> str:
    began = number(run.events[0].get("time"))
    shown = run.events[-MAX_EVENTS:]
    rows = []

    for event in shown:
        at = number(event.get("time"))
        since = "-" if at is None or began is None else duration(at - began)
        details = event_words(event, leave_out=NOT_IN_TABLE)
        rows.append((since, event.get("event"), event.get("step"), " · ".join(details)))

    styles = [TROUBLE.get(str(event.get("event")), "") for event in shown]
    left_out = len(run.events) - len(shown)
    lead = f'<p class="note">The first {left_out} events are in events.jsonl.</p>' if left_out else ""
    return lead + table(("Time", "Event", "Step", "Details"), rows, styles)
