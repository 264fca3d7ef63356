"""The command `lockstep runs`: the runs in a folder, one line each, as far as their files tell.

Any file of a run may be missing, damaged or half written, and the folder may hold other things. Nothing is written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from rich.filesize import decimal as size_text

from lockstep import files
from lockstep.errors import UserError
from lockstep.files import typed_json
from lockstep.observe.formats import columns, figures, flat, number, one_line
from lockstep.observe.report import last_event, without_undone
from lockstep.run_folder.locks import is_running
from lockstep.run_folder.names import CONFIG, EVENTS, METRICS, PLAN, SOURCES
from lockstep.run_folder.paths import is_run
from lockstep.run_folder.run_dir import read_mapping

State = Literal["running", "finished", "preempted", "failed", "killed"]

# The last event of one of these kinds says how a run ended, if it ended.
STATES: dict[str, State] = {
    "start": "killed",
    "end": "finished",
    "error": "failed",
    "preempted": "preempted",
}

# The last lines of the metrics are in this many bytes.
TAIL = 2**16

# Where locks do not work, a run that has written within this time counts as running.
RECENT_S = 600.0


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that its folder holds."""

    path: str
    state: State
    step: int | None  # steps that have ended
    steps: int | None  # steps of the whole run
    loss: float | None  # the loss in the last line of the metrics
    best: float | None  # the best evaluation, by `best_metric`
    best_metric: str  # checkpoint.best, or else stop.metric or eval_loss
    best_step: int | None
    bytes: int
    written: float  # when the run last wrote, in seconds since 1970


def runs(folder: Path, as_json: bool) -> str:
    """Return the runs in `folder`, or the run that it is: a table, the newest first, or JSON."""
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder} with runs", "", "name the folder that holds them: lockstep runs DIR"
        )

    found = sorted(map(facts_of, find_runs(folder)), key=lambda run: run.written, reverse=True)
    if as_json:
        return json.dumps([asdict(run) for run in found], indent=2)

    return columns([HEADS, *map(_row, found)]) if found else f"no runs in {folder}"


def find_runs(folder: Path) -> list[Path]:
    if is_run(folder):
        return [folder]

    # A link to a run would show it twice.
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink() and is_run(path)]


def facts_of(run: Path) -> RunFacts:
    # Read all events, which are few, but only the end of the metrics.
    events = parse_lines(files.read(run / EVENTS))
    lines = parse_lines(files.read(run / METRICS, most=TAIL))
    newest = lines[-1] if lines else {}

    start = last_event(events, ("start",))
    metric, best = best_evaluation(events, _settings(run))
    size, written = _size_and_time(run)

    # A run that ended or was preempted between two lines of the metrics has its last step in an event. Before the last
    # start there may be higher steps, which a resume has undone.
    attempt = takewhile(lambda event: event.get("event") != "start", reversed(events))
    reached = [number(record.get("step")) for record in (newest, *attempt)]
    plan = _mapping(run / PLAN)
    return RunFacts(
        path=str(run),
        state=_state(run, events, written),
        step=_whole(max((step for step in reached if step is not None), default=None)),
        steps=_whole(number(start.get("steps", plan.get("steps")))),
        loss=number(newest.get("loss")),
        best=number(best.get(metric)),
        best_metric=metric,
        best_step=_whole(number(best.get("step"))),
        bytes=size,
        written=written,
    )


def parse_lines(text: str) -> list[dict[str, Any]]:
    """Return the records of a JSON lines file. Lines that are no record, or only the end of one, are left out."""
    found = []

    for line in text.splitlines():
        try:
            record = typed_json.load_json(line)
        except ValueError:
            continue

        if isinstance(record, dict):
            found.append(record)

    return found


def best_evaluation(events: Sequence[dict[str, Any]], config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the metric that evaluations are compared by, and the best evaluation, or {}."""
    # `checkpoint.best` comes first, then early stopping, then the loss.
    settings = flat(config)
    stops = settings.get("stop.patience") is not None
    kept = settings.get("checkpoint.best")

    metric = str(kept or (settings.get("stop.metric") if stops else None) or "eval_loss")
    mode = settings.get("checkpoint.best_mode" if kept else "stop.mode")

    # `clean/accuracy` is a metric of the set `clean`. Without a set, the evaluation that is monitored is meant.
    of_set, _, name = metric.rpartition("/")
    key = "loss" if name in ("eval_loss", "loss") else f"metrics.{name}"
    evals = [event for event in events if event.get("event") == "eval"]
    compared = [event for event in evals if (event.get("set") == of_set if of_set else event.get("monitor", True))]

    scores: list[dict[str, Any]] = []
    for event in without_undone(map(flat, compared)):
        value = number(event.get(key))
        if value is not None:
            scores.append({"step": event["step"], metric: value})

    choose = max if mode == "max" else min
    return metric, choose(scores, key=lambda score: score[metric], default={})


def _state(run: Path, events: Sequence[dict[str, Any]], written: float) -> State:
    state = STATES.get(str(last_event(events, STATES).get("event")), "killed")

    # The lock says whether a process holds the run. Where that cannot be known, the time of the last record decides.
    held = is_running(run)
    if held is None:
        held = state == "killed" and time.time() - written < RECENT_S

    return "running" if held else state


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run, or {} if `best_evaluation` needs only defaults."""
    # YAML takes 20 ms to read, for each of perhaps a thousand runs. Where a setting came from is in a JSON file.
    sources = _mapping(run / SOURCES)
    if all(sources.get(key) == "default" for key in ("checkpoint.best", "stop.patience")):
        return {}

    return _mapping(run / CONFIG)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        return read_mapping(path)
    except (OSError, ValueError):
        return {}


def _size_and_time(run: Path) -> tuple[int, float]:
    """Return the bytes of all files of a run, and when its records last changed."""
    size = 0
    for file in files_in(run):
        # A running run deletes old checkpoints.
        try:
            size += file.lstat().st_size
        except OSError:
            continue

    times = [_modified(run / name) for name in (METRICS, EVENTS, CONFIG)]
    return size, max(times) or _modified(run)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def files_in(folder: Path) -> Iterable[Path]:
    """Yield all files below `folder`. Links are files here: they are not followed."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        yield from (Path(parent) / name for name in (*names, *links))


# ---- the table ----

HEADS = ("run", "state", "step", "loss", "best", "size", "written")


def _row(run: RunFacts) -> tuple[str, ...]:
    of_steps = f"{'-' if run.step is None else run.step}/{'-' if run.steps is None else run.steps}"
    best = "-"
    if run.best is not None:
        best = f"{one_line(run.best_metric, 30)} {figures(run.best, 4)} at {run.best_step}"

    return (
        run.path,
        run.state,
        of_steps,
        figures(run.loss, 4),
        best,
        size_text(run.bytes),
        f"{age(time.time() - run.written)} ago",
    )


def age(seconds: float) -> str:
    """Return a time in its largest unit: `5 s`, `12 min`, `3 h`, `2 days`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"

    return f"{max(0.0, seconds):.0f} s"
