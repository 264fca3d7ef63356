"""Communication: single collectives by size, and the communication of a real step with buckets and with hooks.

The times of single collectives are fitted by latency + size / bandwidth; `projection.py` computes with that fit. A real
step shows how much of its communication hides behind computation, which no table of single collectives can say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.bench.hardware import describe
from lockstep.bench.intervals import estimate, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded, Team, rounds_of
from lockstep.bench.projection import fit, link_of_all_reduce
from lockstep.bench.results import Column, Section
from lockstep.errors import plural

SMALLEST = 1024  # bytes
NO_BANDWIDTH = 1e14  # bytes per second: more than any link has

COLUMNS = [
    Column("operation", "operation"),
    Column("backend", "backend"),
    Column("size", "size"),
    Column("milliseconds", "time", "ms"),
    Column("algorithm_gb_s", "algorithm bandwidth", "GB/s"),
    Column("bus_gb_s", "bus bandwidth", "GB/s"),
]

STEP_COLUMNS = [
    Column("what", "settings"),
    Column("step_ms", "step", "ms"),
    Column("exposed_ms", "exposed communication", "ms"),
    Column("overlap_fraction", "overlap"),
    Column("compute_fraction", "compute_fraction"),
    Column("megabytes_per_step", "sent", "MB/step"),
    Column("buckets", "collectives of a step", "MB"),
]

# The settings that a real step is measured with.
VARIANTS: dict[str, dict[str, Any]] = {
    "default buckets": {},
    "buckets of 1 MB": {"ddp.bucket_mb": 1.0},
    "one flat bucket": {"ddp.bucket_mb": 1e5},
    "hook fp16": {"ddp.hook": "fp16", "ddp.bucket_mb": 1.0},
    "hook bf16": {"ddp.hook": "bf16", "ddp.bucket_mb": 1.0},
    "hook powersgd": {"ddp.hook": "powersgd", "ddp.powersgd_start": 0, "ddp.bucket_mb": 1.0},
}


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Measure collectives on the largest number of ranks, and a step with each of VARIANTS."""
    world = max([2, *options.worlds])
    return [_collectives(world, pool, options, report), _steps(world, pool, options, report)]


# ---- single collectives ----


def sizes_up_to(megabytes: float) -> list[int]:
    """Return 1 KB and its multiples by 4, and `megabytes` itself."""
    largest = int(megabytes * 2**20)
    smaller = []
    size = SMALLEST
    while size < largest:
        smaller.append(size)
        size *= 4

    return [*smaller, largest]


def bus_factor(operation: str, world: int) -> float:
    """Return bus bandwidth / algorithm bandwidth: what each link carries for every byte of the message."""
    if operation == "all_reduce":
        return 2 * (world - 1) / world
    if operation == "send_recv":
        return 1.0
    return (world - 1) / world


def _collectives(world: int, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure single collectives of all sizes, with each backend."""
    sizes = sizes_up_to(options.max_mb)
    teams: dict[str, Team] = {}
    facts: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    try:
        # A backend that does not work here must not keep the others from being measured.
        for backend in options.backends or ["auto"]:
            report(f"comm: starting {world} ranks, {backend}")
            try:
                team = pool.start("comm:measure", world, {"sizes": sizes, "backend": backend, "device": "auto"})
                facts[backend] = team.ready()[0]
                teams[backend] = team
            except RanksEnded as error:
                # Most often NCCL where ranks share a GPU, or where there is none.
                missing[backend] = error.found.partition("\n")[0]

        rounds = rounds_of(teams, options.repeats, lambda text: report(f"comm: {text}"))
    finally:
        for team in teams.values():
            team.close()

    notes = [f"{backend} was not measured: {why}." for backend, why in missing.items()]
    if not teams:
        raise RanksEnded("no collective was measured", " ".join(notes), "name a backend of this machine with --backend")

    # All backends of one table, one after the other.
    rows, fits = [], {}
    for backend, team in teams.items():
        name = facts[backend]["backend"]
        mine = _rows(name, world, rounds[backend])
        rows += mine

        # The projection to more ranks computes with the links of an all-reduce.
        reduced = [row for row in mine if row["operation"] == "all_reduce"]
        if reduced:
            fits[name] = link_of_all_reduce(world, *_times(reduced)).as_dict()

        for operation, why in facts[backend]["missing"].items():
            notes.append(f"{name} has no {operation} for these tensors: {why}.")

        place = describe(team.placed(facts[backend]["device"]), pool.cores_per_rank)
        notes.insert(0, f"{world} ranks on {facts[backend]['device'].partition(':')[0]}, {name}; {place}.")

    # How each operation's time grows with the size.
    notes += [*_fit_notes(rows), f"{plural(options.repeats, 'round')}, {spread_text(options.repeats)}."]

    # All teams have the same ranks, so the first one speaks for all.
    refusal = next(iter(teams.values())).placed(next(iter(facts.values()))["device"]).shared
    return Section(
        "comm",
        f"Collectives of {world} ranks",
        COLUMNS,
        rows,
        notes,
        extra={
            "world": world,
            "links": fits,
            "facts": next(iter(facts.values())),
            "not_measured": missing,
            "refusal": refusal,
        },
    )


def _times(rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Return sizes and seconds, for a fit."""
    return [row["bytes"] for row in rows], [row["milliseconds"]["median"] / 1e3 for row in rows]


def _rows(backend: str, world: int, rounds: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each operation and size."""
    rows = []
    for name in rounds[0][0]:
        operation, _, size = name.partition(" ")

        # A collective has ended when its slowest rank has.
        seconds = [max(rank[name] for rank in ranks) for ranks in rounds]
        algorithm = [int(size) / second / 1e9 for second in seconds]
        factor = bus_factor(operation, world)
        rows.append(
            {
                "operation": operation,
                "backend": backend,
                "bytes": int(size),
                "size": human(int(size)),
                "milliseconds": estimate([1e3 * second for second in seconds]).as_dict(),
                "algorithm_gb_s": estimate(algorithm).as_dict(),
                "bus_gb_s": estimate([factor * rate for rate in algorithm]).as_dict(),
            }
        )

    return rows


def human(size: int) -> str:
    """Return a size in bytes as text, in units of 1024."""
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size //= 1024
    return f"{size:g} GB"


def _fit_notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return, for each operation, the latency and the bandwidth that its times fit best."""
    notes = []
    for backend, operation in dict.fromkeys((row["backend"], row["operation"]) for row in rows):
        mine = [row for row in rows if (row["backend"], row["operation"]) == (backend, operation)]
        latency, bandwidth = fit(*_times(mine))

        # Times that do not grow with the size, because they are noisy or the sizes small, give no bandwidth.
        rate = f" + size / {bandwidth / 1e9:.2f} GB/s" if bandwidth < NO_BANDWIDTH else ", at all of these sizes"
        notes.append(f"{backend} {operation}: about {1e6 * latency:.0f} µs{rate} (least squares, relative errors).")

    return notes


# ---- a real step ----


def _steps(world: int, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure a real step with each of VARIANTS, in turns, and trace a block of each."""
    teams: dict[str, Team] = {}
    notes: list[str] = []
    facts: dict[str, Any] = {}
    try:
        # A variant may be refused, by a model that a hook does not suit for example: it is left out.
        for name, values in VARIANTS.items():
            report(f"comm: starting a step with {name}")
            arguments = options.arguments(mode="weak", layers=[*options.layers, ("bench", values)])
            team = pool.start("scaling:measure", world, arguments)
            try:
                facts = team.ready()[0]
                teams[name] = team
            except RanksEnded as error:
                notes.append(f"{name} was not measured: {error.found.partition(chr(10))[0]}.")

        if not teams:
            raise RanksEnded("no step was measured", " ".join(notes), "fix that, and measure again")

        # The trace disturbs the step, so it has a turn of its own, after the others.
        turns = rounds_of(teams, options.repeats, lambda text: report(f"comm: {text}"))
        traces = {name: team.ask("trace") for name, team in teams.items()}
    finally:
        for team in teams.values():
            team.close()

    rows = [_step_row(name, turns[name], traces[name], options.block) for name in teams]
    notes += [
        f"{facts.get('parameters', 0):,} parameters on {world} ranks, {facts.get('backend')}. Exposed communication is "
        "the time in which a rank communicates and computes nothing; overlap is the fraction of all communication that "
        "computation hides. Both come from the time stamps of a trace of one block. The time of a step is measured "
        f"without a trace, in {plural(options.repeats, 'round')}: {spread_text(options.repeats)}.",
    ]

    refusal = next(iter(teams.values())).placed(facts["device"]).shared
    return Section(
        "comm_step",
        f"Communication of a step of {options.target}",
        STEP_COLUMNS,
        rows,
        notes,
        extra={"facts": facts, "refusal": refusal},
    )


def _step_row(
    name: str, turns: Sequence[Sequence[dict[str, float]]], traced: Sequence[dict[str, Any]], block: int
) -> dict[str, Any]:
    """Return the row of a variant.

    Times of communication come from the trace, as averages over ranks and steps. The time of a step comes from rounds
    without a trace.
    """
    count = len(traced)
    steps = max(1, traced[0]["steps"])
    sizes = [size for _, size in traced[0]["collectives"]]
    return {
        "what": name,
        "step_ms": estimate([1e3 * max(rank["seconds"] for rank in turn) / block for turn in turns]).as_dict(),
        "exposed_ms": 1e3 * sum(rank["kinds"]["exposed communication"] for rank in traced) / count / steps,
        "communication_ms": 1e3 * sum(rank["communication"] for rank in traced) / count / steps,
        "overlap_fraction": sum(rank["overlap_fraction"] for rank in traced) / count,
        "compute_fraction": sum(rank["compute_fraction"] for rank in traced) / count,
        "megabytes_per_step": sum(sizes) / 1e6,
        "buckets": " + ".join(f"{size / 1e6:.2f}" for size in sizes[:8]) + (" + ..." if len(sizes) > 8 else ""),
        "collectives": len(sizes),
    }
