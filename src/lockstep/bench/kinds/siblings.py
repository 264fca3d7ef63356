"""Siblings: which CPUs are hardware threads of one core, measured, because a virtual machine may not say it.

Two siblings compute at half the rate of one. So a few sets of CPUs are kept busy at once, and what a CPU computes in
each of them is compared with what it computes alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

from lockstep.bench.cores import ADJACENT, HALVES, MEASURE, Cores, allowed_cpus, find_cores, judge_probe, probe_sets
from lockstep.bench.intervals import Estimate, estimate, spread_text
from lockstep.bench.pool import Pool, Team
from lockstep.bench.results import Column, Section
from lockstep.errors import plural

ROUNDS = 6  # less than 2 s each
SECONDS = 0.1  # the time of one set
ALONE = 8  # CPUs that are measured alone, to know the usual rate

COLUMNS = [
    Column("case", "busy at once"),
    Column("count", "CPUs"),
    Column("rate", "a CPU computes / alone"),
]


def cores_of(siblings: str, report: Callable[[str], None]) -> tuple[Cores, list[Section]]:
    """Return the cores by --siblings, and a section about them if they are measured."""
    cpus = allowed_cpus()
    if siblings != MEASURE or len(cpus) == 1:
        return find_cores(siblings), []

    total = os.cpu_count() or 1
    sets = {**probe_sets(cpus, total), "all": cpus}
    rates = _measure(cpus, sets, report)
    cores = judge_probe(cpus, {name: rate["median"] for name, rate in rates.items()}, total)

    names = {ADJACENT: "pairs of 2i and 2i + 1", HALVES: "pairs of i and i + half", "all": "all"}
    rows = [{"case": names[name], "count": len(sets[name]), "rate": rates[name]} for name in sets]
    notes = [
        f"{cores}.",
        f"Products of small matrices, one thread on each CPU, {ROUNDS} rounds; {spread_text(ROUNDS)}. Two hardware "
        "threads of one core compute about half as much each. In the first two rows only one kind of pairs is busy.",
    ]
    return cores, [Section("siblings", "Which CPUs share a core", COLUMNS, rows, notes, extra={"cores": cores.cpus})]


def _measure(cpus: list[int], sets: dict[str, list[int]], report: Callable[[str], None]) -> dict[str, Estimate]:
    """Return what a CPU computes in each set, against alone: the median of its CPUs, round by round."""
    # A rank on each CPU; ranks that a command does not name sleep.
    rank_of = {cpu: rank for rank, cpu in enumerate(cpus)}
    single = cpus[:: max(1, len(cpus) // ALONE)][:ALONE]
    ratios: dict[str, list[float]] = {name: [] for name in sets}

    each = Cores([[cpu] for cpu in cpus], "")
    with Pool(1, each) as pool, pool.start("siblings:measure", len(cpus), {"seconds": SECONDS}) as team:
        team.ready()
        for number in range(ROUNDS):
            report(f"which of {plural(len(cpus), 'CPU')} share a core: round {number + 1} of {ROUNDS}")
            alone = statistics.median(_rate(team, [rank_of[cpu]]) for cpu in single)
            for name, busy in sets.items():
                ratios[name].append(_rate(team, [rank_of[cpu] for cpu in busy]) / alone)

    return {name: estimate(values) for name, values in ratios.items()}


def _rate(team: Team, ranks: list[int]) -> float:
    """Return the products per second of the median of some ranks, which are busy at once."""
    rates = team.ask(",".join(map(str, ranks)))
    return statistics.median(rate for rate in rates if rate is not None)
