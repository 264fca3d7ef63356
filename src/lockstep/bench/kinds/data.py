"""Data: the samples per second of the loader, alone, against what the model needs.

A loader that is not well above the model makes the model wait. The comparison with torch's DataLoader shows what the
exact order, the resumable position and the error reports cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, Team, rounds_of
from lockstep.bench.results import Column, Section
from lockstep.errors import plural

WORKERS = (0, 1, 2)

COLUMNS = [
    Column("workers", "worker processes"),
    Column("loader", "loader alone", "samples/s"),
    Column("torch_loader", "torch DataLoader alone", "samples/s"),
    Column("need", "model takes", "samples/s"),
    Column("headroom", "loader / model"),
]


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Measure one rank with different numbers of worker processes, which take turns."""
    teams: dict[int, Team] = {}
    facts = {}
    with ExitStack() as stack:
        for workers in WORKERS:
            report(f"data: starting, {workers} workers")

            # The ranks are not pinned, because worker processes need cores of their own.
            team = pool.start("data:measure", 1, options.arguments(workers=workers), pin=False)
            teams[workers] = stack.enter_context(team)
            facts = team.ready()[0]

        rounds = rounds_of(teams, options.repeats, lambda text: report(f"data: {text} workers"))

    rows = [_row(workers, [turn for (turn,) in turns], facts["batch"]) for workers, turns in rounds.items()]
    notes = [
        "'model takes' is the rate of training on one rank with a batch that is already there. A loader whose rate is "
        "not well above it makes the model wait: use more workers (data.workers), or cheaper transforms.",
        "What worker processes have prefetched is taken before the clock starts, and at least five times as many "
        f"batches are timed as their queues hold. {plural(options.repeats, 'round')}, {spread_text(options.repeats)}.",
    ]
    return [Section("data", f"Loading the data of {options.target}", COLUMNS, rows, notes, extra={"facts": facts})]


def _row(workers: int, turns: Sequence[dict[str, Any]], samples: int) -> dict[str, Any]:
    """Return the rates of one number of workers. torch has none for a dataset without a length."""
    # A rate for each turn, in samples per second.
    plain = [samples / turn["torch"] for turn in turns if turn["torch"] is not None]
    need = [samples / turn["train"] for turn in turns]
    ours = [samples / turn["ours"] for turn in turns]
    return {
        "workers": workers,
        "loader": estimate(ours),
        "torch_loader": estimate(plain) if plain else None,
        "need": estimate(need),
        "headroom": ratio(ours, need),
    }
