"""Settings: what a change of settings costs or saves, with the same target and batch on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.bench.hardware import describe
from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions, layers_of
from lockstep.bench.pool import Pool, Team, rounds_of
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
    try:
        # Each way has processes of its own: some settings, such as exact, change the whole process.
        for world in options.worlds:
            for way, words in ways.items():
                report(f"settings: starting {world} rank(s), {way}")
                layers = [*options.layers, *layers_of(words)]
                arguments = options.arguments(mode="strong", layers=layers)
                teams[world, way] = pool.start("scaling:measure", world, arguments)
                facts[world, way] = teams[world, way].ready()[0]

        turns = rounds_of(teams, options.repeats, lambda text: report(f"settings: {text}"))
    finally:
        for team in teams.values():
            team.close()

    rows = [_row(world, way, turns, options.block) for world, way in teams]
    last = list(teams)[-1]
    placement = teams[last].placed(facts[last]["device"])
    notes = [
        f"{facts[last]['parameters']:,} parameters, a batch of {facts[last]['global_batch']} on all ranks together; "
        f"{describe(placement, pool.cores_per_rank)}; {options.repeats} rounds of {options.block} steps in which all "
        f"rows take turns; {spread_text(options.repeats)}.",
        f"'{NOISE}' is the first row a second time: its ratio shows the noise of the measurement.",
    ]
    extra = {"facts": facts[last], "refusal": placement.shared}
    return [Section("settings", f"Settings of {options.target}", COLUMNS, rows, notes, extra=extra)]


def _row(world: int, way: str, turns: dict[Case, list[Any]], block: int) -> dict[str, Any]:
    """Return one row. A step takes as long as its slowest rank."""
    seconds, base = ([max(r["seconds"] for r in turn) for turn in turns[world, each]] for each in (way, BASE))
    cpu, base_cpu = ([sum(r["cpu_seconds"] for r in turn) for turn in turns[world, each]] for each in (way, BASE))
    peak = max(rank["peak_bytes"] for turn in turns[world, way] for rank in turn)
    return {
        "world": world,
        "way": way,
        "step_ms": estimate([1e3 * wall / block for wall in seconds]).as_dict(),
        "wall_ratio": ratio(seconds, base).as_dict(),
        "cpu_ratio": ratio(cpu, base_cpu).as_dict(),
        "peak_mb": peak / 1e6 if peak else None,
    }
