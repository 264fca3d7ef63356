"""Run layouts: their ranks are forked from one process that has imported torch, and write a record each."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from lockstep.config import Layer
from lockstep.launch.failure import HANG, Failure
from lockstep.launch.job import PRELOAD
from lockstep.launch.zygote import Zygote
from lockstep.runtime.heartbeat import FOLDER
from lockstep.runtime.machine import available_cores, visible_gpus
from lockstep.verify.layouts import Layout
from lockstep.verify.record import Record, read_record

LIMIT = timedelta(minutes=5)  # timeout of a layout, or TIMES as long as the longest so far, if that is more
TIMES = 30
AFTER_FAILURE = timedelta(seconds=3)  # what the other ranks of a layout get to notice that one has failed
PAUSE_S = 0.2  # between two looks at the clock; reports of the zygote are taken in at once

# Settings of a run that ends after a few steps, and is only there to be compared.
SETTINGS = {
    "resume": "never",
    "compile": False,
    "threads": 1,  # the same additions in the same order, whatever the number of ranks
    "log.progress": "off",
    "log.samples": False,
    "evaluate.every": None,
    "evaluate.at_end": False,
    "checkpoint.every": None,
    "checkpoint.minutes": None,
    "checkpoint.at_end": False,
    "checks.every": 10**9,
}


@dataclass(frozen=True)
class Target:
    """What to train: a TARGET as for `lockstep train`, its settings, and how many steps."""

    name: str
    layers: Sequence[Layer]
    steps: int


@dataclass
class Trial:
    """A layout that is running."""

    layout: Layout
    folder: Path
    lifeline: tuple[int, int]  # a pipe: the ranks exit when its writing end is closed
    ranks: list[int]  # their numbers in the zygote, which counts the ranks of all layouts
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    failed: float | None = None  # when the first rank failed
    hung: bool = False

    @property
    def over(self) -> bool:
        """Whether all ranks have exited."""
        return len(self.codes) == len(self.ranks)

    def late(self, limit_s: float) -> bool:
        """Whether its ranks have run out of time."""
        now = time.monotonic()
        # The others wait for a rank that has failed, in a collective that may never notice.
        if self.failed is not None:
            return now - self.failed > AFTER_FAILURE.total_seconds()
        self.hung = self.hung or now - self.began > limit_s
        return self.hung


class Runner:
    """Runs layouts: `with Runner() as runner: records = runner.run(target, layouts)`."""

    def __init__(self, preload: Sequence[str] = (), limit: timedelta = LIMIT) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))

        # Under torchrun or our own launcher this process may be a rank itself: its ranks must not inherit that.
        env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            env.pop(name, None)

        self._zygote = Zygote("lockstep.verify.trial:work", [*PRELOAD, "lockstep.verify.trial", *preload], env)
        self._limit_s = limit.total_seconds()
        self._started = 0  # ranks so far
        self.runs = 0  # layouts so far

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks end with the zygote. Their records were read when each layout ended.
        self._zygote.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, target: Target, layouts: Sequence[Layout]) -> dict[Layout, Record]:
        """Run the layouts, side by side as far as there are cores (or GPUs) for them."""
        slots = max(available_cores(), visible_gpus())
        waiting = list(layouts)
        running: list[Trial] = []
        found: dict[Layout, Record] = {}

        while waiting or running:
            busy = sum(len(trial.ranks) for trial in running)
            while waiting and (not running or busy + waiting[0].world <= slots):
                running.append(self._start(target, waiting.pop(0)))
                busy += running[-1].layout.world

            self._watch(running)
            for trial in [trial for trial in running if trial.over]:
                running.remove(trial)
                found[trial.layout] = self._end(trial)
        return found

    # ---- one layout ----

    def _start(self, target: Target, layout: Layout) -> Trial:
        """Fork the ranks of a layout."""
        self.runs += 1
        folder = self._folder / f"{self.runs:03}"
        (folder / "attempt").mkdir(parents=True)

        # The settings of the layout are the strongest layer; `orders` is what no setting can say.
        orders = asdict(layout) | {"steps": target.steps, "folder": str(folder)}
        settings = SETTINGS | {"run_dir": str(folder / "run")}
        if layout.micro_batch:
            settings["micro_batch"] = layout.micro_batch
        if layout.strategy:
            settings["strategy"] = layout.strategy
        spec = {
            "target": target.name,
            "layers": json.loads(json.dumps([*target.layers, ("verify", settings)], default=str)),
            "path": sys.path,
            "orders": orders,
        }

        theirs, ours = os.pipe()
        numbers = list(range(self._started, self._started + layout.world))
        self._started += layout.world
        trial = Trial(layout, folder, (theirs, ours), numbers)

        # Rank 0 inherits the listening socket, so that no other process can take the port in between.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            shared = self._zygote.env | {
                "WORLD_SIZE": str(layout.world),
                "LOCAL_WORLD_SIZE": str(layout.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
                FOLDER: str(folder / "attempt"),
            }
            for rank, number in enumerate(trial.ranks):
                fds = [theirs] + ([listener.fileno()] if rank == 0 else [])
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._zygote.fork(number, shared | own, spec, folder / f"rank-{rank}.log", fds)
        return trial

    def _watch(self, running: list[Trial]) -> None:
        """Take in what the zygote reports, and end the layouts that have run out of time."""
        select.select([self._zygote.fileno()], [], [], PAUSE_S)
        for report in self._zygote.poll():
            trial = next(trial for trial in running if report["rank"] in trial.ranks)
            if "code" not in report:  # it has started
                trial.pids[report["rank"]] = report["pid"]
                continue
            trial.codes[report["rank"]] = report["code"]
            if report["code"] and trial.failed is None:
                trial.failed = time.monotonic()
        assert self._zygote.alive, "the process that forks the ranks has exited"

        for trial in running:
            if not trial.over and trial.late(self._limit_s):
                self._kill(trial)

    def _kill(self, trial: Trial) -> None:
        """Close the lifeline of a layout, which ends its ranks."""
        theirs, ours = trial.lifeline
        if ours >= 0:
            os.close(ours)
            trial.lifeline = (theirs, -1)

    def _end(self, trial: Trial) -> Record:
        """Read the record of a layout that is over."""
        self._kill(trial)
        os.close(trial.lifeline[0])

        # A slow model gets more time, measured by the layouts that went well.
        if not trial.failed:
            self._limit_s = max(self._limit_s, TIMES * (time.monotonic() - trial.began))
        return read_record(trial.folder, trial.layout, _failure(trial))


def _failure(trial: Trial) -> Failure | None:
    """Return the first failure that a rank has recorded; ranks that only lost a peer record theirs later."""
    if not any(trial.codes.values()):
        return None
    if trial.hung:
        waited = f"still running after {time.monotonic() - trial.began:.0f} s"
        return Failure(0, "localhost", time.time(), HANG, waited)

    paths = (trial.folder / "attempt").glob("rank-*.json")
    found = [Failure.read(path) for path in paths]
    if found:
        return min(found, key=lambda failure: (not failure.for_user, failure.time))

    # A rank that was killed, or called os._exit, has recorded nothing.
    rank = next(rank for rank, number in enumerate(trial.ranks) if trial.codes[number])
    log = (trial.folder / f"rank-{rank}.log").read_text(errors="replace")
    code = trial.codes[trial.ranks[rank]]
    return Failure(rank, "localhost", time.time(), "Died", f"rank {rank} ended with code {code}", log=log[-2000:])
