"""Checkpoints: how long training waits, how fast they are written and read, against torch.save and plain DCP.

The ranks compute while a save is written, as they do in training. Two times matter: how long training waits, and after
how long the checkpoint is safe. A way that copies to memory and writes later is good at the first, and may be bad at
the second.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool
from lockstep.bench.results import Column, Section
from lockstep.errors import plural

BASE = "torch.save"

COLUMNS = [
    Column("way", "way"),
    Column("world", "ranks"),
    Column("stall_s", "training waits", "s"),
    Column("stall_ratio", "/ torch.save"),
    Column("written_s", "written after", "s"),
    Column("write_mb_s", "write rate", "MB/s"),
    Column("load_s", "loaded in", "s"),
    Column("load_mb_s", "load rate", "MB/s"),
]

Rounds = list[list[dict[str, Any]]]  # by round and rank: {"save": way -> (stall, written), "load": way -> seconds}


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Measure on the largest number of ranks, after one round to warm up."""
    world = max(options.worlds)
    report(f"checkpoint: {options.megabytes} MB on {world} rank(s)")

    # Beside the result, on the disk that was asked for, and removed by this process: ranks may be killed.
    disk = tempfile.TemporaryDirectory(prefix="checkpoints-of-bench-", dir=options.out.parent if options.out else None)
    with disk as root:
        return [_measure(Path(root).resolve(), world, pool, options, report)]


def _measure(root: Path, world: int, pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> Section:
    """Measure all ways in one team, which takes them in turns."""
    arguments = {"megabytes": options.megabytes, "threads": pool.cores_per_rank, "root": str(root)}
    with pool.start("checkpoint:measure", world, arguments) as team:
        facts = team.ready()[0]
        team.ask()  # to warm up

        rounds = []
        for number in range(options.repeats):
            report(f"checkpoint: round {number + 1} of {options.repeats}")
            rounds.append(team.ask())

    size = facts["bytes"] / 1e6
    rows = [{"way": way, "world": world, **_times(way, rounds, size)} for way in rounds[0][0]["save"]]

    placement = team.placed("cpu")
    notes = [
        f"{size:.0f} MB of weights and AdamW moments, {world} ranks that compute meanwhile; "
        f"{placement}; file system {file_system(root)}. torch.save is written by rank "
        "0 while the others wait, and without fsync it is only a copy to memory. Lockstep's load checks every digest; "
        "the others check nothing. Every rank loads the whole state, from the page cache. 'written after' is the time "
        "from the call until a rank knows that the save is complete. "
        f"{plural(options.repeats, 'round')}, {spread_text(options.repeats)}.",
    ]
    title = f"Checkpoints of {size:.0f} MB on {plural(world, 'rank')}"
    return Section("checkpoint", title, COLUMNS, rows, notes, extra={"facts": facts, "refusal": placement.shared})


def _times(way: str, rounds: Rounds, size: float) -> dict[str, Any]:
    """Return how long one way saves and loads `size` megabytes. Training waits for the slowest rank."""
    stalls = [max(rank["save"][way][0] for rank in ranks) for ranks in rounds]
    written = [max(rank["save"][way][1] for rank in ranks) for ranks in rounds]
    base = [max(rank["save"][BASE][0] for rank in ranks) for ranks in rounds]

    found: dict[str, Any] = {
        "stall_s": estimate(stalls),
        "stall_ratio": ratio(stalls, base),
        "written_s": estimate(written),
        "write_mb_s": estimate([size / seconds for seconds in written]),
    }

    # Ways that differ only in how they write load alike, and are loaded once.
    if way in rounds[0][0]["load"]:
        loads = [max(rank["load"][way] for rank in ranks) for ranks in rounds]
        found["load_s"] = estimate(loads)
        found["load_mb_s"] = estimate([size / seconds for seconds in loads])

    return found


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the file system that holds `path`, such as "ext4"."""
    if not mounts.exists():
        return "unknown"

    # The longest mount point wins, and of two the later one: it lies on top.
    longest, found = -1, "unknown"
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        if path.is_relative_to(point) and len(point) >= longest:
            longest, found = len(point), kind

    return found
