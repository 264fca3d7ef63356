"""Memory of a rank by category, number of ranks and accumulation, and whether it grows over many steps.

What a rank holds is counted from live tensors, not from a formula: an unintended copy is seen. The leak check
trains for hundreds of steps and looks at what grows after the first quarter of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from lockstep.bench.intervals import estimate, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, Team, rounds_of, wall_seconds
from lockstep.bench.results import Column, Section, Verdict
from lockstep.errors import plural

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
ROWS = 16  # rows of the leak check

# What may grow after the first quarter of the steps. Allocators keep freed memory, so the process may grow a little.
LIMITS_MB = {"live tensors": 0.25, "resident memory": 8.0, "device memory": 1.0}
NEW_TENSORS = 0.1  # live tensors per step

COLUMNS = [
    Column("world", "ranks"),
    Column("accumulation", "micro-batches"),
    *(Column(f"{name}_mb", name, "MB") for name in CATEGORIES),
    Column("peak_mb", "peak", "MB"),
    Column("resident_mb", "process", "MB"),
    Column("step_ms", "step", "ms"),
    Column("ms_per_micro_batch", "micro-batch", "ms"),
]
LEAK_COLUMNS = [
    Column("step", "step"),
    Column("tensors", "live tensors"),
    Column("tensor_mb", "live tensors", "MB"),
    Column("resident_mb", "process", "MB"),
    Column("device_mb", "device", "MB"),
]


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Measure the memory of each number of ranks, and check for leaks on the largest number."""
    teams: dict[tuple[int, int], Team] = {}
    held: dict[tuple[int, int], list[dict[str, Any]]] = {}

    # All teams exist at once, so that their rounds can alternate.
    with ExitStack() as stack:
        for world, parts in itertools.product(options.worlds, options.accumulation):
            report(f"memory: {world} rank(s), {parts} micro-batch(es)")
            team = stack.enter_context(pool.start("memory:measure", world, options.arguments(accumulation=parts)))
            teams[world, parts] = team
            held[world, parts] = team.ready()

        turns = rounds_of(teams, options.repeats, lambda text: report(f"memory: {text}"))

    # The facts are the same for all teams; whether ranks share cores is judged for the largest.
    rows = [_row(world, parts, held[world, parts], turns[world, parts], options.block) for world, parts in teams]
    facts = {key: next(iter(held.values()))[0][key] for key in ("torch", "strategy", "device")}
    refusal = list(teams.values())[-1].placed(facts["device"]).shared
    notes = [
        f"Of the rank that holds most; strategy {facts['strategy']}. Activations are what autograd saves in the "
        "forward of one micro-batch. The peak is torch's count on a GPU; on a CPU it is the sum of the categories. "
        "'process' is how much the process has grown since before the model was built.",
        "Accumulation costs no memory if rows with the same number of ranks are equal, and no time if a micro-batch "
        f"takes no longer. {plural(options.repeats, 'round')} in which all rows take turns, "
        f"{spread_text(options.repeats)}.",
    ]

    extra = {"facts": facts, "refusal": refusal}
    first = Section("memory", f"Memory of a rank of {options.target}", COLUMNS, rows, notes, extra=extra)
    return [first, leak_check(pool, options, report)]


def _row(
    world: int, accumulation: int, ranks: list[dict[str, Any]], turns: list[list[dict[str, float]]], block: int
) -> dict[str, Any]:
    """Return the memory of the rank that holds most, and how long a step takes."""
    largest = max(ranks, key=lambda rank: sum(rank[name] for name in CATEGORIES))
    seconds = [second / block for second in wall_seconds(turns)]
    return {
        "world": world,
        "accumulation": accumulation,
        **{f"{name}_mb": largest[name] / 1e6 for name in CATEGORIES},
        "peak_mb": (largest["device_peak"] or sum(largest[name] for name in CATEGORIES)) / 1e6,
        "resident_mb": max(rank["resident"] for rank in ranks) / 1e6,
        "step_ms": estimate([1e3 * second for second in seconds]),
        "ms_per_micro_batch": estimate([1e3 * second / accumulation for second in seconds]),
    }


# ---- leaks ----


def leak_check(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Train `options.steps` on the largest number of ranks and judge whether the memory of any of them grows."""
    world = max(options.worlds)
    block = max(1, options.steps // ROWS)

    # A row for each block of steps.
    with pool.start("memory:measure", world, options.arguments(accumulation=1, block=block)) as team:
        team.ready()
        found = []
        for number in range(max(4, options.steps // block)):
            report(f"memory: leak check, step {number * block} of {options.steps}")
            found.append(team.ask("leak"))

    by_rank = [[_leak_row(ranks[rank]) for ranks in found] for rank in range(world)]
    rank = worst_rank(by_rank)

    notes = [
        f"The rows are those of rank {rank}, which grows most of {world}; every target is judged by the rank in which "
        "that grows most. Growth is the median of the last quarter of the rows minus that of the second quarter.",
    ]
    title = f"Leak check of {options.target}: {options.steps} steps, {plural(world, 'rank')}"
    return Section("leak", title, LEAK_COLUMNS, by_rank[rank], notes, judge_ranks(by_rank))


def _leak_row(row: dict[str, float]) -> dict[str, float]:
    """Return the memory of a rank after a block, in MB."""
    return {
        "step": row["step"],
        "tensors": row["tensors"],
        "tensor_mb": row["tensor_bytes"] / 1e6,
        "resident_mb": row["resident"] / 1e6,
        "device_mb": row["device"] / 1e6,
    }


def worst_rank(by_rank: Sequence[Sequence[dict[str, float]]]) -> int:
    """Return the rank that comes closest to one of the limits, or goes farthest beyond it."""
    grown = [max(verdict.value / verdict.limit for verdict in judge(rows)) for rows in by_rank]
    return grown.index(max(grown))


def judge_ranks(by_rank: Sequence[Sequence[dict[str, float]]]) -> list[Verdict]:
    """Return, for each thing that must not grow, the verdict on the rank in which it grows most."""
    by_thing = zip(*map(judge, by_rank), strict=True)
    return [max(verdicts, key=lambda verdict: verdict.value) for verdicts in by_thing]


def judge(rows: Sequence[dict[str, float]]) -> list[Verdict]:
    """Return a verdict for each thing that must not grow in a rank. Hardware makes no difference to these."""
    columns = {"live tensors": "tensor_mb", "resident memory": "resident_mb", "device memory": "device_mb"}
    verdicts = [
        Verdict(f"growth of {name} <= {LIMITS_MB[name]:g} MB", growth(rows, key), LIMITS_MB[name], False)
        for name, key in columns.items()
    ]

    # The number of tensors is judged per step: a leak adds at least one in each.
    per_step = growth(rows, "tensors") / max(1, growth(rows, "step"))
    return [Verdict(f"new live tensors per step <= {NEW_TENSORS:g}", per_step, NEW_TENSORS, False), *verdicts]


def growth(rows: Sequence[dict[str, float]], key: str) -> float:
    """Return how much a column grows: from its second quarter, when everything is warm, to its last."""
    quarter = max(1, len(rows) // 4)
    values = [row[key] for row in rows]
    early, late = values[quarter : 2 * quarter], values[-quarter:]
    return statistics.median(late) - statistics.median(early)
