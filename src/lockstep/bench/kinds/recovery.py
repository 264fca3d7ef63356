"""Recovery: a rank of a run is killed again and again. How long until that is noticed, and until training goes on?

The run is `lockstep train` with its launcher, as users start it. What is timed are its own records: the event of
the failure, and the first line of metrics after it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from lockstep.bench.intervals import estimate, spread_text
from lockstep.bench.options import BenchOptions
from lockstep.bench.pool import Pool, RanksEnded
from lockstep.bench.results import Column, Section
from lockstep.errors import plural
from lockstep.files.jsonl import read_jsonl
from lockstep.run_folder.names import EVENTS, METRICS
from lockstep.runtime.environments.launcher import without_job

LIMIT_S = 60.0  # the limit of one record: longer is a hang
EVERY = 5  # steps between two checkpoints

# A run that does not end, and writes a line for every step.
SETTINGS = {
    "preset": "tiny",
    "steps": 1_000_000,
    "log.every": 1,
    "log.progress": "off",
    "checkpoint.every": EVERY,
    "evaluate.every": "null",
    "lr.schedule": "constant",
    "restart.per_hour": 100_000,
    "restart.max_in_a_row": 100_000,
}

COLUMNS = [
    Column("world", "ranks"),
    Column("start_s", "first start", "s"),
    Column("noticed_s", "failure noticed after", "s"),
    Column("again_s", "next step after", "s"),
    Column("repeated", "steps repeated"),
]


def run(pool: Pool, options: BenchOptions, report: Callable[[str], None]) -> list[Section]:
    """Kill one rank of the largest number of ranks in each round."""
    world = max(2, *options.worlds)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-recovery-") as folder:
        training = TrainProcess(Path(folder) / "run", world, pool.cores_per_rank)
        try:
            report(f"recovery: starting {world} ranks")
            start = training.wait(METRICS, 0.0)["time"] - training.began

            draw = random.Random(0)
            kills = []
            for number in range(options.repeats):
                report(f"recovery: kill {number + 1} of {options.repeats}")
                time.sleep(draw.uniform(0.1, 0.8))  # somewhere in a step, or in a save
                kills.append(training.kill_one(draw))
        finally:
            training.end()

    found = {name: estimate([kill[name] for kill in kills]) for name in kills[0]}
    notes = [
        f"{plural(options.repeats, 'kill')} of one of {world} ranks with SIGKILL, in one run of char_lm with a "
        f"checkpoint every {EVERY} steps. The times count from the kill. The first start counts from the command, "
        f"and includes importing torch. {spread_text(options.repeats).capitalize()}.",
    ]
    rows = [{"world": world, "start_s": start, **found}]
    return [
        Section(
            "recovery",
            f"Recovery of {world} ranks from a killed one",
            COLUMNS,
            rows,
            notes,
            extra={"facts": {"torch": version("torch")}},
        )
    ]


class TrainProcess:
    """A run of `lockstep train`, and its records."""

    def __init__(self, run_dir: Path, world: int, threads: int) -> None:
        self.run_dir = run_dir
        self.began = time.time()
        words = [f"{key}={value}" for key, value in SETTINGS.items()]

        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "train", "char_lm", "--nproc", str(world), *words, f"run_dir={run_dir}"],
            env=without_job() | {"OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill_one(self, draw: random.Random) -> dict[str, float]:
        """Kill a rank and wait until training goes on."""
        # The launcher's only child forks the ranks.
        ranks = [rank for child in psutil.Process(self._launcher.pid).children() for rank in child.children()]
        before = read_jsonl(self.run_dir / METRICS)[-1]["step"]
        moment = time.time()
        os.kill(draw.choice(ranks).pid, signal.SIGKILL)

        noticed = self.wait(EVENTS, moment, "failure")["time"]
        first = self.wait(METRICS, noticed)
        return {
            "noticed_s": noticed - moment,
            "again_s": first["time"] - moment,
            "repeated": before - first["step"] + 1,
        }

    def wait(self, file: str, since: float, event: str | None = None) -> dict[str, Any]:
        """Wait for the first record of a file that is younger than `since`, and is this event if one is named."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self._launcher.poll() is None:
            found = read_jsonl(self.run_dir / file) if (self.run_dir / file).exists() else []
            for record in found:
                if record["time"] > since and event in (None, record.get("event")):
                    return record

            time.sleep(0.02)

        raise self._failure(file)

    def _failure(self, file: str) -> RanksEnded:
        """Return the error for a run that has ended, or writes nothing any more."""
        code = self._launcher.poll()
        if code is None:
            return RanksEnded(
                "training did not go on", f"nothing new in {file} for {LIMIT_S:.0f} s", "report this: it is a hang"
            )

        assert self._launcher.stderr is not None
        said = self._launcher.stderr.read()[-1500:]
        return RanksEnded(f"the run ended with exit code {code}", said, "fix that, and measure again")

    def end(self) -> None:
        """End the run and its ranks. Processes that a killed launcher leaves behind exit with it."""
        self._launcher.terminate()
        try:
            self._launcher.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
