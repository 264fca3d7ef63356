"""Data: the samples per second of the loader, alone, against what the model needs."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, Team
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
    rounds: dict[int, list[dict[str, float]]] = {}
    facts = {}
    try:
        for workers in WORKERS:
            report(f"data: starting, {workers} workers")
            arguments = {
                "target": options.target,
                "layers": options.layers,
                "batch": options.batch,
                "block": options.block,
                "threads": pool.cores_per_rank,
                "workers": workers,
            }
            # Not pinned: worker processes need cores of their own.
            teams[workers] = pool.start("data:measure", 1, arguments, pin=False)
            facts = teams[workers].ready()[0]
            rounds[workers] = []
        for number in range(options.repeats):
            for workers, team in teams.items():
                report(f"data: round {number + 1} of {options.repeats}, {workers} workers")
                rounds[workers].append(team.ask()[0])
    finally:
        for team in teams.values():
            team.close()

    rows = []
    samples = facts["batch"]
    for workers, turns in rounds.items():
        plain = [turn["torch"] for turn in turns if turn["torch"] is not None]
        need = [samples / turn["train"] for turn in turns]
        ours = [samples / turn["ours"] for turn in turns]
        rows.append(
            {
                "workers": workers,
                "loader": estimate(ours).as_dict(),
                "torch_loader": estimate([samples / seconds for seconds in plain]).as_dict() if plain else None,
                "need": estimate(need).as_dict(),
                "headroom": ratio(ours, need).as_dict(),
            }
        )
    notes = [
        "'model takes' is the rate of training on one rank with a batch that is already there. A loader whose rate is "
        "not well above it makes the model wait: use more workers (data.workers), or cheaper transforms.",
        "What worker processes have read ahead is taken before the clock starts, and at least five times as many "
        f"batches are timed as their queues hold. {plural(options.repeats, 'round')}, {spread_text(options.repeats)}.",
    ]
    return [Section("data", f"Loading the data of {options.target}", COLUMNS, rows, notes, extra={"facts": facts})]
