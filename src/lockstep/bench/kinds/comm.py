"""Communication: single collectives by size, and the communication of a real step with buckets and with hooks.

The times of single collectives are fitted by latency + size / bandwidth; `projection.py` computes with that fit. A real
step shows how much of its communication hides behind computation, which no table of single collectives can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.bench.intervals import estimate, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded, Team, rounds_of, wall_seconds
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


@dataclass
class _Started:
    """The teams that could be started, the facts of their rank 0, and the reasons why others are missing, by name."""

    teams: dict[str, Team] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        return [f"{name} was not measured: {why}." for name, why in self.missing.items()]

    def judged_by_first(self) -> dict[str, Any]:
        """Return the facts of the first team, and whether its ranks share anything: all teams have the same ranks."""
        name, team = next(iter(self.teams.items()))
        return {"facts": self.facts[name], "refusal": team.placed(self.facts[name]["device"]).shared}


def _start_all(
    measure: str,
    world: int,
    arguments: Mapping[str, Mapping[str, Any]],
    pool: Pool,
    stack: ExitStack,
    report: Callable[[str], None],
) -> _Started:
    """Start a team for each of the named `arguments`. One that fails must not keep the others from being measured."""
    started = _Started()
    for name, given in arguments.items():
        report(f"comm: starting {world} ranks, {name}")
        team = pool.start(measure, world, given)
        try:
            started.facts[name] = team.ready()[0]
            started.teams[name] = stack.enter_context(team)
        except RanksEnded as error:
            # Most often NCCL where ranks share a GPU or have none, or a model that a hook does not suit.
            started.missing[name] = error.found.partition("\n")[0]

    return started


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
    """Return bus bandwidth / algorithm bandwidth: the bytes that each link carries for every byte of the message."""
    if operation == "all_reduce":
        return 2 * (world - 1) / world
    if operation == "send_recv":
        return 1.0
    return (world - 1) / world


def _collectives(world: int, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure single collectives of all sizes, with each backend."""
    sizes = sizes_up_to(options.max_mb)
    backends = {name: {"sizes": sizes, "backend": name, "device": "auto"} for name in options.backends or ["auto"]}
    with ExitStack() as stack:
        started = _start_all("comm:measure", world, backends, pool, stack, report)
        if not started.teams:
            why = " ".join(started.notes)
            raise RanksEnded("no collective was measured", why, "name a backend of this machine with --backend")

        rounds = rounds_of(started.teams, options.repeats, lambda text: report(f"comm: {text}"))

    # All backends of one table, one after the other.
    rows, links = [], {}
    places, gaps = [], []
    for backend, team in started.teams.items():
        facts = started.facts[backend]
        name = facts["backend"]
        mine = _rows(name, world, rounds[backend])
        rows += mine

        # The projection to more ranks computes with the links of an all-reduce.
        reduced = [row for row in mine if row["operation"] == "all_reduce"]
        if reduced:
            links[name] = asdict(link_of_all_reduce(world, *_times(reduced)))

        place = team.placed(facts["device"])
        places.append(f"{world} ranks on {facts['device'].partition(':')[0]}, {name}; {place}.")
        gaps += [f"{name} has no {operation} for these tensors: {why}." for operation, why in facts["missing"].items()]

    # Where it was measured, what was not, and how each operation's time grows with the size.
    rounds_text = f"{plural(options.repeats, 'round')}, {spread_text(options.repeats)}."
    notes = [*places, *started.notes, *gaps, _fit_note(rows), rounds_text]
    extra = {"world": world, "links": links, "not_measured": started.missing, **started.judged_by_first()}
    return Section("comm", f"Collectives of {world} ranks", COLUMNS, rows, notes, extra=extra)


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
                "milliseconds": estimate([1e3 * second for second in seconds]),
                "algorithm_gb_s": estimate(algorithm),
                "bus_gb_s": estimate([factor * rate for rate in algorithm]),
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


def _fit_note(rows: Sequence[dict[str, Any]]) -> str:
    """Return a note: for each operation, the latency and the bandwidth that its times fit best."""
    fits = []
    for backend, operation in dict.fromkeys((row["backend"], row["operation"]) for row in rows):
        mine = [row for row in rows if (row["backend"], row["operation"]) == (backend, operation)]
        latency, bandwidth = fit(*_times(mine))

        # Times that do not grow with the size, because they are noisy or the sizes small, give no bandwidth.
        rate = f" + size / {bandwidth / 1e9:.2f} GB/s" if bandwidth < NO_BANDWIDTH else ", at all of these sizes"
        fits.append(f"{backend} {operation} {1e6 * latency:.0f} µs{rate}")

    return f"Times are about (least squares of relative errors): {'; '.join(fits)}."


# ---- a real step ----


def _steps(world: int, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure a real step with each of VARIANTS, in turns, and trace a block of each."""
    variants = {}
    for name, values in VARIANTS.items():
        variants[name] = options.arguments(mode="weak", layers=[*options.layers, ("bench", values)])

    with ExitStack() as stack:
        started = _start_all("scaling:measure", world, variants, pool, stack, report)
        if not started.teams:
            raise RanksEnded("no step was measured", " ".join(started.notes), "fix that, and measure again")

        # The trace disturbs the step, so it has a turn of its own, after the others.
        turns = rounds_of(started.teams, options.repeats, lambda text: report(f"comm: {text}"))
        traces = {name: team.ask("trace") for name, team in started.teams.items()}

    rows = [_step_row(name, turns[name], traces[name], options.block) for name in started.teams]
    extra = started.judged_by_first()
    facts = extra["facts"]
    notes = [
        *started.notes,
        f"{facts['parameters']:,} parameters on {world} ranks, {facts['backend']}. Exposed communication is "
        "the time in which a rank communicates and computes nothing; overlap is the fraction of all communication that "
        "computation hides. Both come from the time stamps of a trace of one block. The time of a step is measured "
        f"without a trace, in {plural(options.repeats, 'round')}: {spread_text(options.repeats)}.",
    ]
    title = f"Communication of a step of {options.target}"
    return Section("comm_step", title, STEP_COLUMNS, rows, notes, extra=extra)


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
        "step_ms": estimate([1e3 * seconds / block for seconds in wall_seconds(turns)]),
        "exposed_ms": 1e3 * sum(rank["kinds"]["exposed communication"] for rank in traced) / count / steps,
        "communication_ms": 1e3 * sum(rank["communication"] for rank in traced) / count / steps,
        "overlap_fraction": sum(rank["overlap_fraction"] for rank in traced) / count,
        "compute_fraction": sum(rank["compute_fraction"] for rank in traced) / count,
        "megabytes_per_step": sum(sizes) / 1e6,
        "buckets": " + ".join(f"{size / 1e6:.2f}" for size in sizes[:8]) + (" + ..." if len(sizes) > 8 else ""),
        "collectives": len(sizes),
    }
