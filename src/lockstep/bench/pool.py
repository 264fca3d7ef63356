"""Teams of ranks that stay alive and take turns, so that noise hits all of them alike.

A team is a number of ranks that run one generator of `lockstep.bench.ranks`. The generator yields once when it is set
up; after that, each `ask` resumes it with a command and returns what every rank yields next. While a team waits, its
ranks sleep. All ranks are forked from one process that has imported torch. This module imports no torch itself.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lockstep.bench.cores import Cores, RankPlacement, find_cores, place
from lockstep.errors import UserError
from lockstep.launch.job import PRELOAD
from lockstep.launch.ranks import rank_record
from lockstep.launch.ranks.zygote_client import ZygoteClient
from lockstep.launch.wire.sockets import wait_readable
from lockstep.runtime.environments.launcher import variables_of_rank, without_job
from lockstep.runtime.host.resources import visible_gpus
from lockstep.runtime.host.threads import wait_asleep

LIMIT_S = 900.0  # the limit of one answer
END_S = 20.0  # the limit for the end of a team
STOP = "stop"  # the command that ends a generator

ENTRY = "lockstep.bench.ranks.entry"


class RanksEnded(UserError):
    """A rank of a benchmark failed."""


class Pool:
    """Starts teams: `with Pool() as pool: team = pool.start(...)`.

    All teams of a pool may be alive at the same time, so that they can take turns; those that wait use no CPU. The pool
    ends all of them with itself, and its temporary folder is removed.
    """

    def __init__(self, cores_per_rank: int = 1, cores: Cores | None = None, preload: Sequence[str] = ()) -> None:
        self.cores_per_rank = cores_per_rank
        self.cores = cores or find_cores()
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-bench-"))
        self.codes: dict[int, int] = {}  # exit codes, by the rank's number in the zygote

        # The ranks must not inherit that this process is a rank itself.
        env = without_job() | {"OMP_NUM_THREADS": str(cores_per_rank)}
        wait_asleep(env)

        # It imports torch once. A rank is a fork of it, and starts in milliseconds.
        self.zygote = ZygoteClient(f"{ENTRY}:work", [*PRELOAD, ENTRY, *preload], env)

        self._ranks = 0  # the ranks of all teams so far
        self._teams = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.zygote.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self, measure: str, world: int, arguments: Mapping[str, Any], pin: bool = True, alone: bool = False
    ) -> Team:
        """Start a team. `measure` is MODULE:FUNCTION in `lockstep.bench.ranks`, a generator of its `arguments`.

        `alone`: every rank trains by itself, as a world of one, on the cores and the GPU of its rank.
        The first answer must still be awaited with `Team.ready`.
        """
        # A folder for the files of this team: pipes, logs, the store, and the reports of failures.
        self._teams += 1
        folder = self.folder / f"{self._teams:03}"
        (folder / "attempt").mkdir(parents=True)
        placement = place(world, self.cores_per_rank, self.cores)

        # The ranks hold the reading end of the lifeline and exit when the other end is closed.
        reading, writing = os.pipe()

        # A rank has two numbers: one in its team, from 0, and one in the zygote, which no other rank ever gets.
        numbers = range(self._ranks, self._ranks + world)
        self._ranks += world
        team = Team(self, folder, numbers, os.fdopen(writing, "wb"), placement)

        for rank, number in enumerate(numbers):
            own_folder = folder / f"alone-{rank}" if alone else folder
            own_folder.mkdir(exist_ok=True)

            # Without a launcher, this process tells the ranks who they are.
            if alone:
                own = variables_of_rank(0, 1, own_folder / "store", folder / "attempt") | self._own_gpu(rank)
            else:
                own = variables_of_rank(rank, world, folder / "store", folder / "attempt")

            spec = {
                "measure": measure,
                "arguments": {**arguments, "folder": str(own_folder)},
                "cpus": placement.cpus[rank] if pin else None,
                "threads": self.cores_per_rank,
                "path": sys.path,
                "folder": str(folder),
                "rank": rank,
            }

            # Through JSON and back, to find here values that the zygote cannot send.
            plain = json.loads(json.dumps(spec))
            self.zygote.fork(number, self.zygote.env | own, plain, folder / f"rank-{rank}.log", reading)

        # Each rank has a copy of its own.
        os.close(reading)
        return team

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all teams that were closed, of the process that forks them, and of this one.

        Commands that this process has started and awaited count as well.
        """
        # The ranks are children of the zygote, which has their times once it has reaped them.
        forks = psutil.Process(self.zygote.pid).cpu_times()
        ranks = forks.children_user + forks.children_system

        # The zygote itself is no part of the children here: it is alive.
        return ranks + forks.user + forks.system + sum(os.times()[:4])

    def _own_gpu(self, rank: int) -> dict[str, str]:
        """Return the variable that shows a rank only the GPU of its rank. More ranks than GPUs share them in turn."""
        gpus = visible_gpus()
        if not gpus:
            return {}

        named = self.zygote.env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        return {"CUDA_VISIBLE_DEVICES": named.split(",")[rank % gpus]}

    def poll(self, seconds: float, *files: BinaryIO) -> None:
        """Wait for an answer or for the end of a rank, and note which ranks have ended."""
        wait_readable([*self.zygote.sockets, *files], seconds)

        # The zygote also reports what started; only ends have a code.
        for change in self.zygote.poll():
            if change.code is not None:
                self.codes[change.rank] = change.code

        assert self.zygote.alive, "the process that forks the ranks has exited"


def rounds_of(teams: Mapping[Any, Team], repeats: int, report: Callable[[str], None]) -> dict[Any, list[list[Any]]]:
    """Ask all teams for a turn, `repeats` times, and return their answers: by team, round and rank.

    The order alternates, so that a machine that gets slower or faster favours no team.
    """
    turns: dict[Any, list[list[Any]]] = {name: [] for name in teams}
    for number in range(repeats):
        order = list(teams)
        if number % 2:
            order.reverse()

        for name in order:
            report(f"round {number + 1} of {repeats}, {name}")
            turns[name].append(teams[name].ask())

    return turns


def wall_seconds(rounds: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    """Return the seconds of each round on its slowest rank, for which all others wait."""
    return [max(rank["seconds"] for rank in ranks) for ranks in rounds]


def cpu_seconds(rounds: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    """Return the CPU seconds of each round, added over ranks."""
    return [math.fsum(rank["cpu_seconds"] for rank in ranks) for ranks in rounds]


class Team:
    """Ranks that wait for commands: `with pool.start(...) as team: team.ready()`.

    Every rank has two pipes: one for commands, one for answers, a line each. `numbers` are the ranks' numbers in the
    zygote, and `lifeline` is the pipe whose end tells the ranks to exit.
    """

    def __init__(self, pool: Pool, folder: Path, numbers: range, lifeline: BinaryIO, placement: RankPlacement):
        self.placement = placement
        self._pool = pool
        self._folder = folder
        self._numbers = numbers
        self._lifeline = lifeline

        # Pipes with names, one pair for each rank. Open for both directions, so that neither end sees it closed.
        self._commands = [_pipe(folder / f"command-{rank}") for rank in range(len(numbers))]
        self._answers = [_pipe(folder / f"answer-{rank}") for rank in range(len(numbers))]
        self._texts = [b""] * len(numbers)  # the part of each rank's next answer that was read

    @property
    def world(self) -> int:
        return len(self._numbers)

    def placed(self, device: str) -> RankPlacement:
        """Return the placement of ranks that compute on `device`, as they say themselves: "cpu", or a GPU."""
        if device.startswith("cpu"):
            return place(self.world, self._pool.cores_per_rank, self._pool.cores, gpus=0)
        return self.placement

    def ready(self) -> list[Any]:
        """Wait until all ranks are set up, and return their first answers."""
        return self._collect()

    def ask(self, command: str = "turn") -> list[Any]:
        """Resume all ranks with a command and return their answers, by rank."""
        for pipe in self._commands:
            pipe.write(f"{command}\n".encode())

        return self._collect()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks, with their process groups."""
        for pipe in self._commands:
            pipe.write(f"{STOP}\n".encode())

        # The zygote reports the ends of ranks. A rank that does not end by then exits when its lifeline is closed.
        deadline = time.monotonic() + END_S
        while not self._all_ended() and time.monotonic() < deadline:
            self._pool.poll(0.2)

        self._release()

    def _all_ended(self) -> bool:
        return all(number in self._pool.codes for number in self._numbers)

    def _release(self) -> None:
        """Close all pipes. Ranks that still live exit, because their lifeline is closed."""
        self._lifeline.close()
        for pipe in (*self._commands, *self._answers):
            pipe.close()

    def _collect(self) -> list[Any]:
        """Wait for one line from every rank, and return their answers by rank."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + LIMIT_S

        while len(found) < self.world:
            # Answers come in any order, and a long one in several pieces.
            self._pool.poll(0.5, *self._answers)
            for rank in range(self.world):
                self._read_answer(rank, found)

            # Check after reading: a rank may answer and fail before the next look.
            ended = [number for number in self._numbers if self._pool.codes.get(number)]
            if ended or time.monotonic() > deadline:
                raise self._failure(bool(ended))

        return [found[rank] for rank in range(self.world)]

    def _read_answer(self, rank: int, found: dict[int, Any]) -> None:
        """Read the text that a rank has written so far. Its first whole line is its answer; the rest is kept."""
        self._texts[rank] += self._answers[rank].read() or b""
        line, newline, rest = self._texts[rank].partition(b"\n")
        if newline and rank not in found:
            found[rank] = json.loads(line)
            self._texts[rank] = rest

    def _failure(self, ended: bool) -> RanksEnded:
        """End the team, and return the error for the user. `ended`: a rank has failed; otherwise they are too slow."""
        self._lifeline.close()
        if not ended:
            return RanksEnded("a benchmark gave no answer", f"for {LIMIT_S:.0f} s", "look at the load of the machine")

        # Other ranks fail because they lost the first one; its own report may still be on its way.
        time.sleep(0.3)
        if first := rank_record.root_failure(self._folder / "attempt"):
            text = first.message if first.for_user else first.text()
            return RanksEnded(f"rank {first.rank} of {self.world} failed", text, "fix that, and measure again")

        # A killed rank reports nothing, but may have printed something.
        logs = [self._log_tail(rank) for rank in range(self.world)]
        return RanksEnded("a rank of a benchmark was killed", "\n".join(logs), "look at the free memory of the machine")

    def _log_tail(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text(errors="replace")[-1500:]


def _pipe(path: Path) -> BinaryIO:
    """Open a pipe with a name, which is made if it is not there."""
    if not path.exists():
        os.mkfifo(path, 0o600)

    # Unbuffered; reading returns None if nothing has come.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK), "r+b", buffering=0)
