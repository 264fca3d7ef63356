"""Runs trials: their ranks are forked from one process that has imported torch, and each writes a record.

A trial is a short training in one layout. Several run side by side if there are cores for them. One that hangs is given
up after a limit that grows with what the trials before it have taken.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from lockstep.config import ONLY_TRAINING, Layer
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import PRELOAD
from lockstep.launch.ranks import rank_record
from lockstep.launch.ranks.zygote_client import ZygoteClient
from lockstep.launch.wire.sockets import wait_readable
from lockstep.runtime.environments.launcher import variables_of_rank, without_job
from lockstep.runtime.host.resources import available_cores, visible_gpus
from lockstep.verify.record import TrialRecord, read_record
from lockstep.verify.trials import Trial

LIMIT = timedelta(minutes=5)  # timeout of a trial, or TIMES the duration of the longest so far, if that is more
TIMES = 30
AFTER_FAILURE_S = 3.0  # how long the other ranks of a trial may take to notice that one failed

# Settings of a run that ends after a few steps and is only compared.
SETTINGS = {
    **ONLY_TRAINING,
    "compile": False,
    "threads": 1,  # the same additions in the same order, whatever the number of ranks
    "log.samples": False,
    "nonfinite.policy": "skip",  # a rewind needs checkpoints
    "checks.every": 10**9,
}


@dataclass
class RunningTrial:
    trial: Trial
    folder: Path
    lifeline: BinaryIO  # the writing end of a pipe: the ranks exit when it is closed
    ranks: Sequence[int]  # their numbers in the zygote, which counts the ranks of all trials
    codes: dict[int, int] = field(default_factory=dict)  # exit codes of the ranks that have ended
    began: float = field(default_factory=time.monotonic)
    failed: float | None = None  # when the first rank failed
    hung: bool = False

    @property
    def over(self) -> bool:
        return len(self.codes) == len(self.ranks)

    def late(self, limit_s: float) -> bool:
        """Return whether its ranks have run out of time."""
        now = time.monotonic()
        # The others may wait for a rank that failed, in a collective that never notices.
        if self.failed is not None:
            return now - self.failed > AFTER_FAILURE_S

        self.hung = self.hung or now - self.began > limit_s
        return self.hung


class Runner:
    """Runs trials: `with Runner() as runner: records = runner.run(target, trials)`.

    Ranks are forked from a process that has imported torch, so that a trial of a few steps takes about as long as the
    steps.
    """

    def __init__(self, preload: Sequence[str] = (), limit: timedelta = LIMIT) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))

        # Under torchrun or our own launcher this process is a rank itself, which the ranks it forks must not inherit.
        env = without_job() | {"OMP_NUM_THREADS": "1"}

        module = "lockstep.verify.recorded_run"
        self._zygote = ZygoteClient(f"{module}:work", [*PRELOAD, module, *preload], env)

        self._limit_s = limit.total_seconds()
        self._ranks = 0  # of all trials so far
        self._trials = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks end with the zygote. Their records were read when each trial ended.
        self._zygote.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(
        self,
        target: str,
        layers: Sequence[Layer],
        steps: int,
        trials: Sequence[Trial],
        arguments: Sequence[str] = (),
    ) -> dict[Trial, TrialRecord]:
        """Run each trial for `steps`, in parallel as far as there are cores (or GPUs).

        `target`, `layers` and `arguments` say what to train, as for `lockstep train`.
        """
        slots = max(available_cores(), visible_gpus())
        waiting = list(trials)
        running: list[RunningTrial] = []
        records: dict[Trial, TrialRecord] = {}

        while waiting or running:
            # A slot is a process. A trial that needs more slots than there are runs alone.
            busy = sum(started.trial.world for started in running)

            if waiting and (not running or busy + waiting[0].world <= slots):
                running.append(self._start(target, layers, arguments, steps, waiting.pop(0)))
                continue

            self._watch(running)
            for ended in [started for started in running if started.over]:
                running.remove(ended)
                records[ended.trial] = self._end(ended)

        return records

    # ---- one trial ----

    def _start(
        self, target: str, layers: Sequence[Layer], arguments: Sequence[str], steps: int, trial: Trial
    ) -> RunningTrial:
        """Start the ranks of a trial, each forked from the zygote."""
        self._trials += 1
        folder = self._folder / f"{self._trials:03}"
        (folder / "attempt").mkdir(parents=True)

        # The settings of the trial are the strongest layer; `orders` holds what no setting can express.
        layout = {"micro_batch": trial.micro_batch, "strategy": trial.strategy}
        settings = SETTINGS | {"run_dir": str(folder / "run")} | {key: value for key, value in layout.items() if value}
        # Compiling takes longer than the trial itself, so only if the user asks for it.
        if any(values.get("compile") is True for _, values in layers):
            del settings["compile"]

        spec = {
            "target": target,
            "arguments": list(arguments),
            "layers": json.loads(json.dumps([*layers, ("verify", settings)], default=str)),
            "path": sys.path,
            "orders": asdict(trial) | {"steps": steps, "folder": str(folder)},
        }

        # The ranks hold the reading end and exit when the other end is closed.
        reading, writing = os.pipe()
        ranks = range(self._ranks, self._ranks + trial.world)
        self._ranks += trial.world

        for rank, number in enumerate(ranks):
            env = self._zygote.env | variables_of_rank(rank, trial.world, folder / "store", folder / "attempt")
            self._zygote.fork(number, env, spec, folder / f"rank-{rank}.log", reading)

        os.close(reading)
        return RunningTrial(trial, folder, os.fdopen(writing, "wb"), ranks)

    def _watch(self, running: list[RunningTrial]) -> None:
        """Note which ranks have ended and end the trials that have run out of time."""
        # A report of the zygote ends the wait at once; without one, the clock is checked again.
        wait_readable(self._zygote.sockets, 0.2)

        for change in self._zygote.poll():
            if change.code is None:
                continue  # the rank started

            started = next(started for started in running if change.rank in started.ranks)
            started.codes[change.rank] = change.code
            if change.code and started.failed is None:
                started.failed = time.monotonic()

        assert self._zygote.alive, "the process that forks the ranks has exited"

        for started in running:
            if not started.over and started.late(self._limit_s):
                started.lifeline.close()

    def _end(self, ended: RunningTrial) -> TrialRecord:
        """Close a trial that has ended, and return its record."""
        ended.lifeline.close()

        # A slow model gets more time, as measured in the trials that went well.
        if not ended.failed:
            self._limit_s = max(self._limit_s, TIMES * (time.monotonic() - ended.began))

        return read_record(ended.folder, ended.trial, _failure(ended))


def _failure(ended: RunningTrial) -> Failure | None:
    """Return the failure that explains why the trial ended; None if it did not fail."""
    if not any(ended.codes.values()):
        return None

    if ended.hung:
        text = f"still running after {time.monotonic() - ended.began:.0f} s"
        return Failure.by_launcher(LauncherFailure.HANG, text, 0, "localhost", cause="hang")

    if recorded := rank_record.root_failure(ended.folder / "attempt"):
        return recorded

    # A rank that was killed, or called os._exit, recorded nothing.
    rank, code = next((rank, ended.codes[n]) for rank, n in enumerate(ended.ranks) if ended.codes[n])
    log = (ended.folder / f"rank-{rank}.log").read_text(errors="replace")
    return Failure.by_launcher(
        LauncherFailure.EXIT, f"rank {rank} ended with code {code}", rank, "localhost", log=log[-2000:]
    )
