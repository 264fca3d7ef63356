"""Start: how long from the command to the first finished step, against torchrun with a script written by hand.

Both commands train the same model on the same number of ranks, and take turns. Nothing is kept between two commands but
the caches of the system, which one round fills before the others are timed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lockstep.bench import ranks
from lockstep.bench.intervals import estimate, ratio, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded
from lockstep.bench.results import Column, Section
from lockstep.errors import plural
from lockstep.runtime.environments.launcher import without_job

SCRIPT = Path(ranks.__file__).with_name("first_step.py")
BASE, OURS = "torchrun", "lockstep train"
LIMIT_S = 300.0  # the limit of one command

COLUMNS = [
    Column("way", "command"),
    Column("world", "ranks"),
    Column("first_s", "first step after", "s"),
    Column("first_ratio", "/ torchrun"),
    Column("end_s", "command ends after", "s"),
    Column("end_ratio", "/ torchrun"),
]


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Start the largest number of ranks with both commands, in turns, after one round to warm up."""
    world = max(options.worlds)
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in (BASE, OURS)}

    with tempfile.TemporaryDirectory(prefix="lockstep-bench-start-") as folder:
        shutil.copy(SCRIPT, folder)
        for number in range(options.repeats + 1):
            report(f"start: round {number} of {options.repeats}")
            for way in list(taken)[:: -1 if number % 2 else 1]:
                found = first_step(way, world, Path(folder), pool.cores_per_rank)
                if number:
                    taken[way].append(found)

    rows = [_row(way, world, taken) for way in taken]
    notes = [
        f"A small model on {plural(world, 'rank')}, gloo, CPU. The first step is done when its weights have changed. "
        f"{OURS} also checks the start of the training, and writes a run folder. "
        f"{plural(options.repeats, 'round')}, {spread_text(options.repeats)}.",
    ]
    return [
        Section(
            "start",
            f"From the command to the first step on {plural(world, 'rank')}",
            COLUMNS,
            rows,
            notes,
            extra={"facts": {"torch": version("torch")}},
        )
    ]


def first_step(way: str, world: int, folder: Path, threads: int) -> tuple[float, float]:
    """Run one command in `folder`. Returns the seconds until its first step was done, and until it ended."""
    stamp = folder / "stamp"
    stamp.unlink(missing_ok=True)

    # A command is a new job, also if this process belongs to one.
    env = without_job() | {"BENCH_WAY": way, "BENCH_STAMP": str(stamp), "OMP_NUM_THREADS": str(threads)}
    began = time.time()
    try:
        done = subprocess.run(
            _command(way, world), cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RanksEnded(f"{way} did not end", f"for {LIMIT_S:.0f} s", "look at the load of the machine") from None

    ended = time.time() - began

    if done.returncode or not stamp.exists():
        raise RanksEnded(
            f"{way} failed with exit code {done.returncode}", done.stderr[-1500:], "fix that, and measure again"
        )

    return float(stamp.read_text()) - began, ended


def _command(way: str, world: int) -> list[str]:
    """Return the command that starts SCRIPT on `world` ranks of this machine."""
    if way == BASE:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world), SCRIPT.name]
    else:
        launcher = ["lockstep", "train", SCRIPT.name, "--nproc", str(world)]

    return [sys.executable, "-m", *launcher]


def _row(way: str, world: int, taken: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return the times of one command, and their ratios to torchrun's of the same round."""
    row: dict[str, Any] = {"way": way, "world": world}
    for index, name in enumerate(("first", "end")):
        these, those = ([found[index] for found in taken[each]] for each in (way, BASE))
        row[f"{name}_s"] = estimate(these)
        row[f"{name}_ratio"] = ratio(these, those)

    return row
