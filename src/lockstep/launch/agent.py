"""One node's ranks: start them, watch them, ask them to leave, stop them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.launch import failure, flight_recorder, watchdog
from lockstep.launch.job import Job
from lockstep.launch.protocol import (
    AskStacks,
    Beat,
    Broke,
    Exited,
    Leave,
    Message,
    Prepare,
    Stacks,
    Start,
    Stop,
    Stopped,
)
from lockstep.launch.zygote import Zygote
from lockstep.runtime.heartbeat import FOLDER
from lockstep.runtime.machine import available_cores

ATTEMPT = "LOCKSTEP_ATTEMPT"
STOP_S = 5.0  # for killed ranks to be gone
STACKS_S = 2.0  # how long ranks have to write their stacks
COLLECTIVES_S = 2.0  # both together stay below the silence after which a node counts as lost
ENTRIES = 100  # of the flight recorder, from each rank


@dataclass
class Rank:
    scene: failure.Scene
    pid: int | None = None  # None until it is started
    ended: bool = False


class Round:
    """The ranks of one attempt on this node, with the folder where they and their launcher meet."""

    def __init__(self, start: Start):
        self.attempt = start.attempt
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-"))  # readable by this user alone
        self.alive, self._lifeline = os.pipe()  # its end is the end of every rank of this attempt
        self.ranks: dict[int, Rank] = {}
        self.leaving = self.told = False
        self.stopping: float | None = None  # since when

    @property
    def living(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if not rank.ended]

    def cut(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def close(self) -> None:
        self.cut()
        os.close(self.alive)
        shutil.rmtree(self.folder, ignore_errors=True)


class Agent:
    def __init__(self, job: Job, name: str):
        self._job, self._name = job, name
        self._count = job.nproc.first
        self._zygote = self._new_zygote(self._count)
        self._next: Zygote | None = None  # for another number of ranks, while the present ones still run
        self._round: Round | None = None
        self._hopeless = False
        self._events: list[Message] = []

    # What the coordinator wants

    def do(self, message: Message, listener: socket.socket | None = None) -> None:
        """`listener`: the meeting point, on the node of rank 0. What belongs to a past attempt is left alone."""
        if isinstance(message, Start):
            self._start(message, listener)
        elif isinstance(message, Prepare):
            self._prepare(message.count)
        elif self._round is not None and getattr(message, "attempt", None) == self._round.attempt:
            if isinstance(message, Leave):
                self._leave(self._round)
            elif isinstance(message, Stop):
                self._stop(self._round)
            elif isinstance(message, AskStacks):
                self._events.append(_look_inside(self._round))
        elif isinstance(message, Stop):
            self._events.append(Stopped(message.attempt))

    def _start(self, start: Start, listener: socket.socket | None) -> None:
        self._end_round()
        self._prepare(start.count)
        if self._next is not None:
            self._zygote.close()
            self._zygote, self._next = self._next, None
        self._round = Round(start)
        logs = self._job.run_dir / "logs"
        _make(logs)
        shared = self._environment(start, self._round.folder)
        oom_kills = failure.oom_kills()
        for local in range(start.count):
            rank = start.base + local
            log = logs / f"rank-{rank}.log" if rank else None  # rank 0 has the terminal
            began = log.stat().st_size if log and log.exists() else 0
            scene = failure.Scene(rank, self._name, self._round.folder, log, began, oom_kills)
            self._round.ranks[rank] = Rank(scene)
            fds = [self._round.alive] + ([listener.fileno()] if listener and rank == 0 else [])
            own = {"RANK": str(rank), "LOCAL_RANK": str(local)}
            self._zygote.fork(rank, shared | own, self._job.spec, log, fds)

    def _environment(self, start: Start, folder: Path) -> dict[str, str]:
        return (
            flight_recorder.environment(folder)
            | self._zygote.env
            | {
                "WORLD_SIZE": str(start.world),
                "LOCAL_WORLD_SIZE": str(start.count),
                "GROUP_RANK": str(start.group),
                "MASTER_ADDR": start.address,
                "MASTER_PORT": str(start.port),
                FOLDER: str(folder),
                ATTEMPT: str(start.attempt),
            }
        )

    def _prepare(self, count: int) -> None:
        """torch reads the number of threads when it is imported: another number needs another process."""
        self._count = count
        current = self._next or self._zygote
        if current.alive and current.env == _environment_for(count):
            return
        if self._next is not None:
            self._next.close()
        self._next = self._new_zygote(count)

    def _new_zygote(self, count: int) -> Zygote:
        return Zygote(self._job.worker, self._job.preload, _environment_for(count))

    def _leave(self, current: Round) -> None:
        """Only the ranks themselves: their loader processes must live until they have left."""
        current.leaving = True
        if not self._zygote.ready:  # nothing has begun
            self._zygote.forget()
            for number, rank in current.ranks.items():
                rank.ended = True
                self._events.append(Exited(current.attempt, number, failure.LEFT, time.time(), None))
        for rank in current.living:
            if rank.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGTERM)

    def _stop(self, current: Round) -> None:
        """State on disk is consistent at any moment, so there is nothing to wait for."""
        current.stopping = time.monotonic()
        self._zygote.forget()
        if not self._zygote.ready:
            for rank in current.ranks.values():
                rank.ended = True
        current.cut()
        for rank in current.living:
            _kill(rank)

    # What happens

    def poll(self) -> list[Message]:
        current = self._round
        for report in self._zygote.poll():
            if current is not None and report["rank"] in current.ranks:
                self._note(current, current.ranks[report["rank"]], report)
        if current and current.stopping and current.living and time.monotonic() - current.stopping > STOP_S:
            self._zygote.kill()  # it does not tell how they ended
        if not self._zygote.alive and not self._hopeless:
            self._replace_zygote()
        if current is not None and current.stopping and not current.living and not current.told:
            current.told = True
            self._events.append(Stopped(current.attempt))
        events, self._events = self._events, []
        return events

    def _note(self, current: Round, rank: Rank, report: Mapping[str, int]) -> None:
        if "code" not in report:
            rank.pid = report["pid"]
            if current.stopping is not None:
                _kill(rank)
            elif current.leaving:
                os.kill(rank.pid, signal.SIGTERM)
        elif rank.pid == report["pid"]:
            self._events.append(self.beat())  # with the settings, which may be as young as the rank was
            rank.ended = True
            end = failure.examine(rank.scene, report["code"], time.time())
            told = end.failure.to_json() if end.failure else None
            self._events.append(Exited(current.attempt, rank.scene.rank, end.code, end.seen, told))

    def _replace_zygote(self) -> None:
        """Its ranks have lost their parent: nobody would learn how they end."""
        pid, began = self._zygote.pid, self._zygote.ready
        self._hopeless = not began
        self._zygote.close()
        attempt = self._round.attempt if self._round else -1
        if self._round is not None:
            for rank in self._round.living:
                _kill(rank)
                rank.ended = True
            self._round.cut()
        why = "died" if began else "ended before it was ready: what it said is above, or in the terminal of that node"
        self._events.append(Broke(attempt, f"the process {pid} that starts the ranks on {self._name} {why}", not began))
        if began:
            self._zygote = self._new_zygote(self._count)

    def beat(self) -> Beat:
        """Signs of life of all ranks here, and the settings that rank 0 has left."""
        current = self._round
        if current is None:
            return Beat()
        seen = [
            watchdog.view_of(number, self._name, rank.pid, current.folder)
            for number, rank in current.ranks.items()
            if rank.pid and not rank.ended
        ]
        return Beat([view.to_json() for view in seen if view is not None], _settings(current.folder))

    def sockets(self) -> list[Any]:
        return [self._zygote] if self._zygote.alive else []

    def _end_round(self) -> None:
        if self._round is not None:
            for rank in self._round.living:
                _kill(rank)
            self._round.close()
            self._round = None

    def close(self) -> None:
        self._end_round()
        self._zygote.close()
        if self._next is not None:
            self._next.close()


def _environment_for(count: int) -> dict[str, str]:
    """Or every rank takes every core."""
    return {"OMP_NUM_THREADS": str(max(1, available_cores() // count))} | dict(os.environ)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run_dir={folder.parent}",
            f"{error.strerror}: {error.filename}",
            "type run_dir=FOLDER, one that you may write to",
        ) from None


def _look_inside(current: Round) -> Stacks:
    """Where each living rank is; those that do not answer in time are left out."""
    pids = {number: rank.pid for number, rank in current.ranks.items() if rank.pid and not rank.ended}
    stacks = watchdog.collect(current.folder, pids, STACKS_S)
    answering = [rank for rank, text in stacks.items() if text]
    recorded = flight_recorder.collect(current.folder, answering, COLLECTIVES_S)
    return Stacks(
        current.attempt,
        {str(rank): text for rank, text in stacks.items()},
        {str(rank): entries[-ENTRIES:] for rank, entries in recorded.items()},
    )


def _kill(rank: Rank) -> None:
    if rank.pid is not None:
        for kill in (os.killpg, os.kill):  # in its first moment it leads no group yet
            with suppress(ProcessLookupError):
                kill(rank.pid, signal.SIGKILL)


def _settings(folder: Path) -> dict[str, Any]:
    """Empty until rank 0 has read the configuration."""
    try:
        values = json.loads((folder / "settings.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
