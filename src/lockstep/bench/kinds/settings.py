"""Settings: what a change of settings costs or saves, with the same target and batch on the same ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions, layers_of
from lockstep.bench.pool import Pool, Team, cpu_seconds, rounds_of, wall_seconds
from lockstep.bench.results import Column, Section

BASE, NOISE = "as it is", "as it is, again"

COLUMNS = [
    Column("world", "ranks"),
    Column("way", "settings"),
    Column("step_ms", "step", "ms"),
    Column("wall_ratio", "time / as it is"),
    Column("cpu_ratio", "CPU time / as it is"),
    Column("peak_mb", "GPU memory", "MB"),
]

Case = tuple[int, str]  # a number of ranks, and a way


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Measure the target as it is, with each of the other settings, and as it is once more, for the noise."""
    ways = {BASE: "", **{way: way for way in options.ways}, NOISE: ""}
    teams: dict[Case, Team] = {}
    facts: dict[Case, dict[str, Any]] = {}
    with ExitStack() as stack:
        # Each way has processes of its own: some settings, such as exact, change the whole process.
        for world, (way, words) in itertools.product(options.worlds, ways.items()):
            report(f"settings: starting {world} rank(s), {way}")
            arguments = options.arguments(mode="strong", layers=[*options.layers, *layers_of(words)])
            team = stack.enter_context(pool.start("scaling:measure", world, arguments))
            teams[world, way] = team
            facts[world, way] = team.ready()[0]

        turns = rounds_of(teams, options.repeats, lambda text: report(f"settings: {text}"))

    rows = [_row(world, way, turns, options.block) for world, way in teams]
    last = list(teams)[-1]
    placement = teams[last].placed(facts[last]["device"])
    notes = [
        f"{facts[last]['parameters']:,} parameters, a batch of {facts[last]['global_batch']} on all ranks together; "
        f"{placement}; {options.repeats} rounds of {options.block} steps in which all "
        f"rows take turns; {spread_text(options.repeats)}.",
        f"'{NOISE}' is the first row a second time: its ratio shows the noise of the measurement.",
    ]
    extra = {"facts": facts[last], "refusal": placement.shared}
    return [Section("settings", f"Settings of {options.target}", COLUMNS, rows, notes, extra=extra)]


def _row(world: int, way: str, turns: dict[Case, list[Any]], block: int) -> dict[str, Any]:
    """Return one row, with ratios to the target as it is."""
    mine, base = turns[world, way], turns[world, BASE]
    seconds = wall_seconds(mine)
    peak = max(rank["peak_bytes"] for ranks in mine for rank in ranks)
    return {
        "world": world,
        "way": way,
        "step_ms": estimate([1e3 * wall / block for wall in seconds]),
        "wall_ratio": ratio(seconds, wall_seconds(base)),
        "cpu_ratio": ratio(cpu_seconds(mine), cpu_seconds(base)),
        "peak_mb": peak / 1e6 if peak else None,
    }
