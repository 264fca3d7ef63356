"""`report.html`: one page that shows a run, made from the run folder alone.

The page is self-contained: inline SVG, one small style sheet, no script, no network (its own content policy
forbids both). Everything that comes out of a file is untrusted and passes through `text()`.
A file that is missing or damaged costs its part of the page, never the page.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import UserError
from lockstep.observe.progress import compact, duration, figures, megabytes, number, printable
from lockstep.observe.sinks import read_jsonl

Record = dict[str, Any]

MOST_POINTS = 600  # per drawn line; more than the pixels of a chart only costs bytes
MOST_HOVERS = 150  # per series; each is an invisible circle that carries a tooltip
MOST_MARKS = 100  # per series, on the x axis
MOST_EVENTS = 400
MOST_METRICS = 8
TROUBLE = {"skip": "warn", "warning": "warn", "error": "bad", "failure": "bad"}


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Make `report.html` in a run folder and return its path."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(
            f"a report of {folder}", "no such folder", "name a run's folder, such as runs/NAME-TIME"
        )
    path, draft = folder / "report.html", folder / "report.html.tmp"
    draft.write_text(page(read_run(folder)), encoding="utf-8")
    draft.replace(path)  # a browser never loads half a page
    return path


# ---- the run folder ----


@dataclass
class Run:
    """What was found in the folder; `notes` says for each file why it is not here."""

    name: str
    metrics: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    config: Record = field(default_factory=dict)
    sources: Record = field(default_factory=dict)
    plan: Record = field(default_factory=dict)
    summary: Record = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return str(self.fact("unit") or "sample")

    @property
    def last(self) -> Record:
        return self.metrics[-1] if self.metrics else {}

    @property
    def evals(self) -> list[Record]:
        return without_undone(self.events_of("eval"))

    def events_of(self, kind: str) -> list[Record]:
        return [event for event in self.events if event.get("event") == kind]

    def last_event(self, kind: str) -> Record:
        return next((event for event in reversed(self.events) if event.get("event") == kind), {})

    def fact(self, *keys: str) -> Any:
        """The first of these keys that the summary, the end, the start or the plan knows."""
        start = self.last_event("start")
        facts = start.get("facts")
        more = facts if isinstance(facts, dict) else {}
        places = [self.summary, self.last_event("end"), start, more, self.plan]
        return _first(*(place.get(key) for place in places for key in keys))


def read_run(folder: Path) -> Run:
    run = Run(name=folder.resolve().name)
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "metrics": ("metrics.jsonl", read_jsonl),
        "events": ("events.jsonl", read_jsonl),
        "config": ("config.yaml", _read_yaml),
        "sources": ("config.sources.json", _read_json),
        "plan": ("plan.json", _read_json),
        "summary": ("summary.json", _read_json),
    }
    for part, (file, reader) in readers.items():
        try:
            setattr(run, part, reader(folder / file))
        except FileNotFoundError:
            run.notes[file] = f"{file} is not there"
        except (OSError, ValueError, UserError) as error:
            run.notes[file] = f"{file} could not be read: {error}"
    run.metrics = without_undone(run.metrics)
    return run


def without_undone(records: Iterable[Record]) -> list[Record]:
    """One record per step, the newest: a resumed run repeats the steps after its checkpoint."""
    kept: list[tuple[float, Record]] = []
    for record in records:
        step = number(record.get("step"))
        if step is None:
            continue
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, record))
    return [record for _, record in kept]


def _read_json(path: Path) -> Record:
    return _mapping(json.loads(path.read_text(encoding="utf-8")))


def _read_yaml(path: Path) -> Record:
    import yaml

    try:
        return _mapping(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _mapping(value: Any) -> Record:
    if isinstance(value, dict):
        return value
    raise ValueError(f"a mapping was expected, a {type(value).__name__} was found")


# ---- the page ----


def page(run: Run) -> str:
    task = str(run.fact("task") or run.name)
    sections = [charts(run), sample(run), config_table(run), plan_table(run), events_table(run)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{text(task)} - {text(run.name)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{header(run, task)}
{"".join(sections)}
{footer(run)}
</main>
</body>
</html>
"""


def text(value: Any) -> str:
    """Escaped, and free of what neither HTML nor UTF-8 can carry (control characters, lone surrogates)."""
    return html.escape(printable(value))


def header(run: Run, task: str) -> str:
    state, label, reason = outcome(run)
    began = number(run.last_event("start").get("time"))
    where = [run.name] + ([f"started {_clock(began)}"] if began is not None else [])
    cards = "".join(
        f'<div class="card"><dt>{text(name)}</dt><dd>{text(value)}<small>{text(aside)}</small></dd></div>'
        for name, value, aside in key_numbers(run)
    )
    why = f'<p class="reason {state}">{text(reason)}</p>' if reason else ""
    return f"""<header>
<h1>{text(task)} <span class="badge {state}">{text(label)}</span></h1>
<p class="where">{text(" · ".join(where))}</p>
{why}
<dl class="cards">{cards}</dl>
</header>"""


def footer(run: Run) -> str:
    missing = f"<br/>{text(' · '.join(run.notes.values()))}" if run.notes else ""
    return f"<footer>Written by Lockstep on {_clock(datetime.now(UTC).timestamp())}{missing}</footer>"


def outcome(run: Run) -> tuple[str, str, str]:
    """(style, label, reason): how the run ended, as far as the folder tells."""
    starts = [index for index, event in enumerate(run.events) if event.get("event") == "start"]
    attempt = run.events[starts[-1] :] if starts else run.events  # a resumed run has outlived earlier errors
    failures = [event for event in attempt if event.get("event") in ("error", "failure")]
    ends = [event for event in attempt if event.get("event") == "end"]
    status = str(run.summary.get("status") or "").lower()
    error = _first(run.summary.get("error") or None, *(end.get("error") for end in ends), *failures[-1:])
    if error is not None or status in ("failed", "error", "crashed"):
        return "bad", "failed", _reason(error)
    if run.summary or ends:
        return "good", status or "finished", ""
    return "idle", "no end recorded", "The run is still going, or its process was killed."


def _reason(error: Any) -> str:
    if isinstance(error, Mapping):
        worded = _first(*(error.get(key) for key in ("error", "message", "reason", "text")))
        error = worded or _details(error)
    return str(error or "No reason was recorded.")


def key_numbers(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, aside) for the cards of the header; `-` for what the folder does not tell."""
    evals = run.evals
    finite = [event for event in evals if number(event.get("loss")) is not None]
    best = min(finite, key=lambda event: event["loss"]) if finite else {"loss": run.fact("best_eval_loss")}
    latest = evals[-1] if evals else {"loss": run.fact("eval_loss")}
    peak = max((value for value in column(run.metrics, "memory_mb") if math.isfinite(value)), default=None)
    world = run.fact("world")
    return [
        ("Final loss", figures(_first(run.fact("loss", "final_loss"), run.last.get("loss")), 4), ""),
        ("Best eval loss", figures(best.get("loss"), 4), _at_step(best)),
        ("Last eval loss", figures(latest.get("loss"), 4), _at_step(latest)),
        ("Steps", *_steps(run)),
        ("Samples", compact(total(run, "samples")), _weight(run)),
        ("Wall time", duration(wall_seconds(run)), ""),
        ("Mean rate", *_rates(run)),
        ("Peak memory", megabytes(peak), "the largest logged" if peak is not None else ""),
        ("World", _plain(world), "" if world is None else "rank" if world == 1 else "ranks"),
        ("Device", _plain(run.fact("device")), ""),
        ("Precision", _plain(run.fact("precision")), ""),
        ("Parameters", compact(run.fact("parameters")), _trainable(run)),
    ]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _at_step(event: Mapping[str, Any]) -> str:
    return f"step {event['step']}" if "step" in event else ""


def _steps(run: Run) -> tuple[str, str]:
    step, total = _first(run.fact("step"), run.last.get("step")), run.fact("steps")
    applied, skipped = run.fact("applied"), _first(run.fact("skipped"), run.last.get("skipped"))
    counts = [f"{n} {word}" for n, word in ((applied, "applied"), (skipped, "skipped")) if n is not None]
    return _plain(step) + (f" / {total}" if total is not None else ""), " · ".join(counts)


def _weight(run: Run) -> str:
    weight = total(run, "weight")
    return f"{compact(weight)} {run.unit}" if weight is not None and run.unit != "sample" else ""


def total(run: Run, key: str) -> float | None:
    """All of a quantity that the records count interval by interval."""
    found = [value for value in column(run.metrics, key) if math.isfinite(value)]
    return math.fsum(found) if found else None


def _trainable(run: Run) -> str:
    trainable = number(run.fact("trainable"))
    return f"{compact(trainable)} trainable" if trainable is not None else ""


def wall_seconds(run: Run) -> float | None:
    seconds = number(run.fact("seconds"))
    if seconds is not None:
        return seconds
    times = [at for record in [*run.events, *run.metrics] if (at := number(record.get("time"))) is not None]
    return max(times) - min(times) if len(times) > 1 else None


def _rates(run: Run) -> tuple[str, str]:
    records = run.metrics[1:] or run.metrics  # the first record holds compilation and warm-up
    rate = mean_rate(records, "weight_per_s")
    if rate is None:
        return "-", ""
    samples = f" · {compact(mean_rate(records, 'samples_per_s'))} sample/s" if run.unit != "sample" else ""
    return compact(rate), f"{run.unit}/s{samples}"


def mean_rate(records: Sequence[Record], key: str) -> float | None:
    """Work over time: the rate of a record counts for as long as its steps took."""
    work = seconds = 0.0
    for record in records:
        rate, step_s = number(record.get(key)), number(record.get("step_s"))
        if rate is not None:
            spent = step_s if step_s is not None and step_s > 0 else 1.0
            work, seconds = work + rate * spent, seconds + spent
    return work / seconds if seconds else None


# ---- the curves of the run ----


def charts(run: Run) -> str:
    if not run.metrics:
        return section("Curves", note(run.notes.get("metrics.jsonl", "metrics.jsonl holds no record yet")))
    steps = column(run.metrics, "step")

    def curve(key: str, name: str) -> Series:
        return Series(name, steps, column(run.metrics, key))

    drawn = [
        loss_chart(run, steps),
        line_chart(smoothed(curve("weight_per_s", "rate")), "Throughput", f"{run.unit}/s", zero=True),
        line_chart([curve("lr", "learning rate")], "Learning rate", "", zero=True),
        line_chart(smoothed(curve("grad_norm", "norm")), "Gradient norm", "", log="auto"),
        line_chart([curve("memory_mb", "memory")], "Memory", "MB", zero=True),
    ]
    if any(math.isfinite(scale) for scale in column(run.metrics, "scale")):
        drawn.append(line_chart([curve("scale", "scale")], "Loss scale (fp16)", "", log="two"))
    drawn += metric_charts(run, steps)
    return section("Curves", f'<div class="grid">{"".join(drawn)}</div>')


def loss_chart(run: Run, steps: list[float]) -> str:
    evals = run.evals
    series = [
        *smoothed(Series("train", steps, column(run.metrics, "loss"))),
        Series("eval", column(evals, "step"), column(evals, "loss"), "points"),
        Series("skipped step", column(run.events_of("skip"), "step"), [], "ticks"),
    ]
    return line_chart([one for one in series if one.xs], "Loss", "", log="auto", width=1040, height=340)


def metric_charts(run: Run, steps: list[float]) -> list[str]:
    """One chart for each of the task's own metrics, training and evaluation together."""
    evals = run.evals
    trained, tested = _metrics_of(run.metrics), _metrics_of(evals)
    names = dict.fromkeys(name for metrics in [*trained, *tested] for name in metrics)
    drawn = []
    for name in itertools.islice(names, MOST_METRICS):
        series = [
            *smoothed(Series("train", steps, column(trained, name))),
            Series("eval", column(evals, "step"), column(tested, name), "points"),
        ]
        drawn.append(line_chart([one for one in series if _points(one)], str(name), ""))
    return drawn


def _metrics_of(records: Iterable[Record]) -> list[Record]:
    found = (record.get("metrics") for record in records)
    return [metrics if isinstance(metrics, dict) else {} for metrics in found]


def column(records: Iterable[Record], key: str) -> list[float]:
    """One value per record; NaN where the record has none."""
    return [math.nan if (value := number(record.get(key))) is None else value for record in records]


def smoothed(series: Series) -> list[Series]:
    """The faint raw line with a lightly smoothed one over it; the line alone where points are few."""
    half = min(25, len(series.ys) // 60)
    if half < 1:
        return [series]
    return [
        Series("", series.xs, series.ys, "raw"),
        Series(series.name, series.xs, moving_average(series.ys, half), "main", told=series.ys),
    ]


def moving_average(values: Sequence[float], half: int) -> list[float]:
    """Mean of the finite values among up to `half` neighbours on each side; a gap stays a gap.

    The window grows evenly from the first value on, because a curve that starts steeply must not be flattened
    there; at the far end it just runs out of right-hand neighbours.
    """
    averages = []
    for index, value in enumerate(values):
        near = min(half, index)
        window = [other for other in values[index - near : index + near + 1] if math.isfinite(other)]
        averages.append(math.fsum(window) / len(window) if math.isfinite(value) else math.nan)
    return averages


# ---- a line chart ----


@dataclass
class Series:
    """Points of one colour.

    `main` and `raw` are lines, `points` are dots joined by a dashed line, `ticks` are marks on the x axis
    that need no y. `told` are the values for the tooltips, where they are not `ys`.
    Values beyond 1e290 count as infinite and those below 1e-290 as zero, so that no axis can overflow.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["main", "raw", "points", "ticks"] = "main"
    told: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self.ys = [math.inf if abs(y) > 1e290 else 0.0 if abs(y) < 1e-290 else y for y in self.ys]


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels, and knows where round numbers lie."""

    low: float
    high: float
    start: float  # pixel of `low`
    end: float  # pixel of `high`
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def line_chart(
    series: Sequence[Series],
    title: str,
    unit: str,
    *,
    zero: bool = False,
    log: Literal["no", "auto", "two"] = "no",
    width: int = 510,
    height: int = 240,
) -> str:
    """An SVG of these series over steps.

    `zero` starts the y axis at 0. `log="auto"` makes it logarithmic when the values are positive and span
    more than two decades; `log="two"` counts in powers of two.
    """
    ys = [y for one in series for _, y in _points(one)]
    if not ys:
        words = f'<text class="empty" x="{width / 2}" y="{height / 2}">no values</text>'
        return _frame(title, unit, words, width, height)
    logarithmic = min(ys) > 0 and (log == "two" or (log == "auto" and max(ys) / min(ys) > 100))
    bottom, top = height - 30, 44
    if logarithmic:
        y_axis = _log_axis(ys, bottom, top, base=2 if log == "two" else 10)
    else:
        y_axis = _linear_axis(ys, bottom, top, zero)
    left = 12 + 7 * max(4, *(len(label) for label in y_axis.labels))
    x_axis = _step_axis([x for one in series for x in one.xs if math.isfinite(x)], left, width - 14)
    curves = "".join(_draw(one, x_axis, y_axis, unit) for one in series)
    aside = ", ".join(word for word in (unit, "log scale" if logarithmic else "") if word)
    return _frame(title, aside, _grid(x_axis, y_axis) + curves + _legend(series, width), width, height)


def _frame(title: str, aside: str, body: str, width: int, height: int) -> str:
    unit = f'<tspan class="unit" dx="7">{text(aside)}</tspan>' if aside else ""
    return (
        f'<svg class="chart{" wide" if width > 600 else ""}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{text(title)}">'
        f'<text class="title" x="4" y="18">{text(title)}{unit}</text>{body}</svg>'
    )


def _points(series: Series) -> list[tuple[float, float]]:
    """The points that can be drawn."""
    pairs = zip(series.xs, series.ys, strict=False)  # ticks have no ys
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    left, right, base = x_axis.start, x_axis.end, y_axis.start
    parts = []
    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = y_axis(tick)
        parts.append(f'<line class="rule" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y tick" x="{left - 7:.1f}" y="{y + 4:.1f}">{label}</text>')
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{base:.1f}" y2="{base:.1f}"/>')
    parts.append(f'<text class="y" x="{left - 10:.1f}" y="{base + 20:.1f}">step</text>')
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:.1f}" y2="{base + 4:.1f}"/>')
        inside = min(x, right + 10 - 3.4 * len(label))  # the last label must not leave the picture
        parts.append(f'<text class="x tick" x="{inside:.1f}" y="{base + 20:.1f}">{label}</text>')
    return "".join(parts)


def _draw(series: Series, x_axis: Axis, y_axis: Axis, unit: str) -> str:
    if series.style == "ticks":
        return _marks(series.xs, x_axis, y_axis, series.name)
    path = f'<path class="{series.style}" d="{_path(series, x_axis, y_axis)}"/>'
    if series.style == "raw":
        return path
    missing = [x for x, y in zip(series.xs, series.ys, strict=True) if not math.isfinite(y)]
    marks = _marks(missing, x_axis, y_axis, f"{series.name} is not a number at step")
    return path + marks + _hovers(series, x_axis, y_axis, unit)


def _path(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    """One stroke per stretch of finite values; a lone value is a stroke of no length, seen as a round dot."""
    strokes: list[str] = []
    pen_down = False
    for x, y in thinned(series.xs, series.ys, MOST_POINTS):
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
            continue
        at = f"{x_axis(x):.1f} {y_axis(y):.1f}"
        strokes.append(f"L{at}" if pen_down else f"M{at}l0 0")
        pen_down = True
    return "".join(strokes)


def thinned(xs: Sequence[float], ys: Sequence[float], most: int) -> list[tuple[float, float]]:
    """About `most` points that keep every peak and gap: of each bucket the lowest, the highest, a gap."""
    pairs = list(zip(xs, ys, strict=True))
    if len(pairs) <= most:
        return pairs
    size = math.ceil(2 * len(pairs) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(pairs), size):
        finite = [index for index in range(start, min(start + size, len(pairs))) if math.isfinite(ys[index])]
        gap = [index for index in range(start, min(start + size, len(pairs))) if not math.isfinite(ys[index])]
        ends = [min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)] if finite else []
        kept += [pairs[index] for index in sorted({*ends, *gap[:1]})]
    return kept


def _hovers(series: Series, x_axis: Axis, y_axis: Axis, unit: str) -> str:
    told = series.ys if series.told is None else series.told
    rows = [row for row in zip(series.xs, series.ys, told, strict=True) if all(map(math.isfinite, row))]
    shown = _spread(rows, MOST_HOVERS)
    kind, radius = ("dot", 4) if series.style == "points" else ("hover", 7)
    suffix = f" {text(unit)}" if unit else ""
    return "".join(
        f'<circle class="{kind}" cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="{radius}">'
        f"<title>step {x:.0f}: {text(series.name)} {value:.4g}{suffix}</title></circle>"
        for x, y, value in shown
    )


def _spread(rows: list[Any], most: int) -> list[Any]:
    """Evenly chosen rows, the last one among them."""
    every = math.ceil(len(rows) / most) or 1
    return rows[::-1][::every][::-1]


def _marks(xs: Sequence[float], x_axis: Axis, y_axis: Axis, what: str) -> str:
    """Small triangles that stand on the x axis: steps that have no place on the curve."""
    shown = _spread([x for x in xs if math.isfinite(x)], MOST_MARKS)
    return "".join(
        f'<path class="mark" d="M{x_axis(x):.1f} {y_axis.start:.1f}l-4 -8h8z">'
        f"<title>{text(what)} {x:.0f}</title></path>"
        for x in shown
    )


def _legend(series: Sequence[Series], width: int) -> str:
    named = [one for one in series if one.name]
    if len(named) < 2:
        return ""
    parts, x = [], float(width - 14)
    for one in reversed(named):
        x -= 6.6 * len(one.name)
        parts.append(f'<text x="{x:.1f}" y="18">{text(one.name)}</text>')
        x -= 10
        if one.style == "ticks":
            parts.append(f'<path class="mark" d="M{x:.1f} 18l-4 -8h8z"/>')
        else:
            parts.append(f'<circle class="swatch {one.style}" cx="{x:.1f}" cy="14" r="4"/>')
        x -= 18
    return "".join(parts)


# ---- axes ----


def _step_axis(xs: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(xs), max(xs)
    if low == high:
        low, high = low - 1, high + 1
    elif 0 < low <= 0.05 * high:
        low = 0.0
    ticks = round_ticks(low, high, 8 if end > 600 else 5)
    ticks = tuple(tick for tick in ticks if tick == round(tick)) or ticks  # there is no step 1.5
    return Axis(low, high, start, end, ticks, tick_labels(ticks))


def _linear_axis(ys: Sequence[float], start: float, end: float, zero: bool) -> Axis:
    low, high = min(ys), max(ys)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant: half its own size above and below
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room
    ticks = round_ticks(low, high, 5)
    gap = ticks[1] - ticks[0]
    # Where the curve goes well beyond the last tick, add one: it should have a labelled line on either side.
    if high - ticks[-1] > 0.4 * gap:
        ticks = (*ticks, ticks[-1] + gap)
    if ticks[0] - low > 0.4 * gap:
        ticks = (ticks[0] - gap, *ticks)
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks, tick_labels(ticks))


def _log_axis(ys: Sequence[float], start: float, end: float, base: int) -> Axis:
    low = math.floor(math.log(min(ys), base) + 1e-9)
    high = math.ceil(math.log(max(ys), base) - 1e-9)
    if low == high:
        low, high = low - 1, high + 1
    powers = range(low, high + 1, math.ceil((high - low) / 6))
    ticks = tuple(float(base) ** power for power in powers)
    labels = tuple(map(power_of_two, powers) if base == 2 else (tick_labels([tick])[0] for tick in ticks))
    return Axis(float(base) ** low, float(base) ** high, start, end, ticks, labels, log=True)


def round_ticks(low: float, high: float, about: int) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], from two of them to `about` and one."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next((size * power for size in (1, 2, 5) if span / (size * power) <= about), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def tick_labels(ticks: Sequence[float]) -> tuple[str, ...]:
    """Just enough digits to tell the ticks of an axis apart, and one unit for all of them."""
    size = max(map(abs, ticks))
    gap = min((b - a for a, b in itertools.pairwise(ticks)), default=size)
    unit, suffix = _tick_unit(size)
    decimals = min(12, max(0, -math.floor(math.log10(gap / unit) + 1e-9)))
    return tuple(f"{tick / unit:.{decimals}f}{suffix}" if tick else "0" for tick in ticks)


def _tick_unit(size: float) -> tuple[float, str]:
    if not 1e-3 <= size < 1e15:
        exponent = math.floor(math.log10(size) + 1e-9)
        return 10.0**exponent, f"e{exponent}"
    units = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))
    return next((unit, suffix) for least, unit, suffix in units if size >= least)


def power_of_two(power: int) -> str:
    return "2" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# ---- text and tables ----


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>\n"


def note(message: str) -> str:
    return f'<p class="note">{text(message)}</p>'


def sample(run: Run) -> str:
    samples = run.events_of("sample")
    return section("Sample", f"<pre>{text(samples[-1].get('text', ''))}</pre>") if samples else ""


def config_table(run: Run) -> str:
    """Every value with its source; what somebody chose comes before the defaults."""
    if not run.config:
        return section("Configuration", note(run.notes.get("config.yaml", "config.yaml is empty")))
    rows = [(key, value, source_of(key, run.sources)) for key, value in flat(run.config)]
    chosen = [row for row in rows if row[2] != "default"]
    defaults = [row for row in rows if row[2] == "default"]
    parts = [note(run.notes["config.sources.json"])] if "config.sources.json" in run.notes else []
    if chosen:
        parts.append(table(("Key", "Value", "Source"), chosen))
    if defaults:
        rest = table(("Key", "Value", "Source"), defaults)
        parts.append(
            f"<details><summary>{len(defaults)} values left at their default</summary>{rest}</details>"
        )
    return section("Configuration", "".join(parts))


def flat(values: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as (dotted key, value)."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        rows += flat(value, f"{dotted}.") if isinstance(value, Mapping) else [(dotted, value)]
    return rows


def source_of(key: str, sources: Mapping[str, Any]) -> str:
    """The source of a key, or of the nearest section around it that has one."""
    while key:
        if key in sources:
            return str(sources[key])
        key = key.rpartition(".")[0]
    return "-"


def plan_table(run: Run) -> str:
    """What was said at the start, then the derived values with the reasons that the plan gives for them."""
    facts = run.last_event("start").get("facts")
    lead = table(("Fact", ""), flat(facts)) if isinstance(facts, dict) and facts else ""
    if not run.plan:
        return section("Plan", lead + note(run.notes.get("plan.json", "plan.json is empty")))
    reasons = run.plan.get("reasons")
    reasons = reasons if isinstance(reasons, dict) else {}
    values = flat({key: value for key, value in run.plan.items() if key != "reasons"})
    rows = [(key, value, reasons.get(key, "")) for key, value in values]
    return section("Plan", lead + table(("Derived value", "Value", "Reason"), rows))


def events_table(run: Run) -> str:
    if not run.events:
        return section("Events", note(run.notes.get("events.jsonl", "events.jsonl holds no record yet")))
    began = number(run.events[0].get("time"))
    shown = run.events[-MOST_EVENTS:]
    rows = [(_since(event, began), event.get("event"), event.get("step"), _details(event)) for event in shown]
    styles = [TROUBLE.get(str(event.get("event")), "") for event in shown]
    left_out = len(run.events) - len(shown)
    lead = note(f"The first {left_out} events are in events.jsonl.") if left_out else ""
    return section("Events", lead + table(("Time", "Event", "Step", "Details"), rows, styles))


def _since(event: Record, began: float | None) -> str:
    at = number(event.get("time"))
    return "-" if at is None or began is None else duration(at - began)


def _details(record: Mapping[str, Any]) -> str:
    told = ("time", "event", "step", "facts")  # elsewhere on the page
    rest = {key: value for key, value in record.items() if key not in told}
    words = [(key, " ".join(_plain(value).split())) for key, value in flat(rest)]
    return " · ".join(f"{key} {shown if len(shown) <= 120 else shown[:119] + '…'}" for key, shown in words)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], styles: Iterable[str] = ()) -> str:
    head = "".join(f"<th>{text(name)}</th>" for name in heads)
    body = ""
    for row, style in zip(rows, itertools.chain(styles, itertools.repeat("")), strict=False):
        cells = "".join(f"<td>{text(_plain(cell))}</td>" for cell in row)
        body += f'<tr class="{style}">{cells}</tr>' if style else f"<tr>{cells}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return "-"


STYLE = """
:root { color-scheme: light dark;
  --paper: #fafaf8; --card: #ffffff; --ink: #23272e; --soft: #69707b; --line: #e5e6e2;
  --train: #2f6fb3; --raw: #2f6fb34d; --eval: #c76d1e; --good: #2f855a; --warn: #a86b00; --bad: #c0392b;
  --warn-bg: #fdf5e2; --bad-bg: #fcecea; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #15171b; --card: #1c1f24; --ink: #e3e5e8; --soft: #969da8; --line: #2e3239;
  --train: #6fb0ee; --raw: #6fb0ee59; --eval: #f0a35e; --good: #6cc495; --warn: #e5b454; --bad: #f08a7d;
  --warn-bg: #312a19; --bad-bg: #382220; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 20px 48px; }
h1 { font-size: 28px; font-weight: 650; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 600; margin: 36px 0 12px; }
.where { color: var(--soft); margin: 4px 0 0; overflow-wrap: anywhere; }
.badge { font-size: 13px; font-weight: 600; letter-spacing: 0; padding: 2px 10px; border-radius: 99px;
  border: 1px solid; vertical-align: 5px; white-space: nowrap; }
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); } .badge.idle { color: var(--soft); }
.reason { margin: 14px 0 0; padding: 10px 14px; border-radius: 8px; border: 1px solid var(--line);
  background: var(--card); color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
.reason.bad { background: var(--bad-bg); border-color: var(--bad); color: var(--ink); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 10px;
  margin: 22px 0 0; }
.card, .chart, .scroll, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 9px 14px 7px; }
.card dt { color: var(--soft); font-size: 13px; }
.card dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.card small { display: block; min-height: 19px; color: var(--soft); font-size: 12.5px; font-weight: 400; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px; }
.chart { display: block; width: 100%; height: auto; padding: 8px; font: 12px system-ui, sans-serif; }
.chart.wide { grid-column: 1 / -1; }
.chart text { fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart .title { fill: var(--ink); font-size: 13px; font-weight: 600; }
.chart .unit { fill: var(--soft); font-weight: 400; }
.chart .y { text-anchor: end; } .chart .x, .chart .empty { text-anchor: middle; }
.chart .rule { stroke: var(--line); } .chart .axis { stroke: var(--soft); stroke-opacity: .6; }
.chart path { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.chart .raw { stroke: var(--raw); stroke-width: 1; } .chart .main { stroke: var(--train); stroke-width: 1.8; }
.chart .points { stroke: var(--eval); stroke-width: 1.25; stroke-dasharray: 3 4; }
.chart .dot { fill: var(--eval); stroke: var(--card); stroke-width: 1.5; }
.chart .hover { fill: var(--train); fill-opacity: 0; } .chart .hover:hover { fill-opacity: .35; }
.chart .mark { fill: var(--bad); stroke: none; }
.chart .swatch { stroke: none; fill: var(--train); } .chart .swatch.points { fill: var(--eval); }
pre { margin: 0; padding: 14px 16px; max-height: 420px; overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, monospace; }
.scroll { overflow-x: auto; } .scroll + .scroll, .scroll + .note { margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; }
th, td:first-child { white-space: nowrap; }
td:last-child { width: 60%; overflow-wrap: anywhere; }
tr.warn { background: var(--warn-bg); } tr.warn td:nth-child(2) { color: var(--warn); font-weight: 600; }
tr.bad { background: var(--bad-bg); } tr.bad td:nth-child(2) { color: var(--bad); font-weight: 600; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); padding: 4px 2px; }
details .scroll { margin-top: 6px; }
.note { color: var(--soft); margin: 0 0 10px; }
footer { color: var(--soft); font-size: 12.5px; margin-top: 44px; overflow-wrap: anywhere; }
"""
