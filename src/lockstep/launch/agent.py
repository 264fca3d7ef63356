"""The agent of one node: it starts the node's ranks, watches them, asks them to save and exit, and kills them.

It decides nothing. The coordinator's orders go in (`do`), and messages for the coordinator come out (`poll`,
`node_beat`). Every node has an agent, including the coordinating node.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch import failure, records
from lockstep.launch.election import TERM_FILE
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.hangs.suspicion import view_of
from lockstep.launch.job import RESUME_COMMAND, Job
from lockstep.launch.run_dir import not_writable
from lockstep.launch.wire.door import SECRET
from lockstep.launch.wire.messages import (
    CollectStacks,
    Exited,
    Kill,
    Message,
    NodeBeat,
    Preempt,
    Prepare,
    RanksGone,
    Stacks,
    Start,
    ZygoteLost,
)
from lockstep.launch.wire.store_server import store_secret
from lockstep.launch.zygote import Zygote, kill_rank
from lockstep.runtime.environments.torchrun import OF_ONE_JOB, STORE_FILE, STORE_KEY_FILE, STORE_PORT
from lockstep.runtime.heartbeat import ATTEMPT, FOLDER
from lockstep.runtime.machine import loopback_interface
from lockstep.runtime.rendezvous.proof import Secret
from lockstep.runtime.threads import share_cores

# The network interface at whose address gloo listens.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

# How long the zygote may take to report the end of killed ranks.
RANKS_KILL_S = 5.0

# How long ranks have to write their stacks, and then their collectives. The agent does nothing else meanwhile, so the
# sum must stay below the silence after which a node counts as lost.
RANKS_STACKS_S = 2.0
COLLECTIVES_S = 2.0

# How often the files that ranks share with their launcher are touched.
TOUCH_S = 3600.0


class LocalAttempt:
    """The ranks of one attempt on this node, with the folder that they share with their launcher."""

    def __init__(self, number: int):
        self.number = number

        # Heartbeats, failure records, stacks and settings. Readable by this user alone.
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        self._touched = time.monotonic()

        # A pipe that carries no data. Ranks read from `alive` and kill themselves when the other end is closed, by this
        # process or by the kernel because this process is dead.
        self.alive, write_end = os.pipe()
        self._lifeline = os.fdopen(write_end, "wb", buffering=0)

        # The ranks that have not ended, by number.
        self.ranks: dict[int, failure.LocalRank] = {}

        # Whether the ranks were asked to save and exit, and when they were killed.
        self.preempted = False
        self.killed_at: float | None = None

    @property
    def pids(self) -> dict[int, int]:
        return {number: rank.pid for number, rank in self.ranks.items() if rank.pid}

    def touch(self) -> None:
        """Touch all files now and then, because some systems remove files from /tmp that were not touched for days."""
        if time.monotonic() - self._touched > TOUCH_S:
            self._touched = time.monotonic()
            # If the folder is gone, the ranks say so.
            with suppress(OSError):
                for path in (self.folder, *self.folder.iterdir()):
                    os.utime(path)

    def kill(self) -> None:
        self._lifeline.close()
        for pid in self.pids.values():
            kill_rank(pid)

    def close(self) -> None:
        self.kill()
        os.close(self.alive)
        shutil.rmtree(self.folder, ignore_errors=True)


class Agent:
    """Runs the ranks of one node, in one attempt after another."""

    def __init__(self, job: Job, name: str, secret: Secret | None = None):
        self._job = job
        self.name = name
        self.secret = secret  # the job's secret; None on a single machine

        # How many ranks the node can run, and with how many it would join now: as many as it ran last.
        self.nproc = job.nproc

        # On the coordinating node, the path of the term file.
        self.term_file: Path | None = None

        # The first zygote starts at once: it imports torch while the nodes gather.
        self._zygote = self._new_zygote(_environment_for(job.nproc.initial))

        # A zygote for another number of ranks, which imports while the current ranks still run.
        self._next_zygote: Zygote | None = None
        self._current: LocalAttempt | None = None

        # The newest attempt whose ranks were requested from the zygote.
        self._started = -1

        # Whether a zygote died while importing; a new zygote would die as well.
        self._cannot_import = False

        # What the next `poll` returns.
        self._events: list[Message] = []

    # ---- orders of the coordinator ----

    def do(self, message: Message) -> None:
        """Carry out an order."""
        current = self._current
        match message:
            case Start():
                self._start(message)
            case Prepare():
                self._prepare(message.count)

            case Preempt() if current and current.number == message.attempt:
                self._preempt(current)
            case CollectStacks() if current and current.number == message.attempt:
                self._events.append(_collect_stacks(current))
            case Kill() if current and current.number == message.attempt:
                self._kill(current)

            case Kill():
                # The attempt has no ranks on this node, or has none any more.
                self._events.append(RanksGone(message.attempt))
            case Preempt() | CollectStacks():
                pass  # for an attempt that is over on this node

            case _:
                raise ValueError(f"{type(message).__name__} is not an order")

    def _start(self, start: Start) -> None:
        self._close_attempt()
        self._prepare(start.count)
        if self._next_zygote is not None:
            self._zygote.close()
            self._zygote, self._next_zygote = self._next_zygote, None

        self._current = current = LocalAttempt(start.attempt)
        logs = self._job.run_dir / "logs"

        # The run's folder may have been removed, or be on a disk that this node cannot write to.
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_writable(self._job.run_dir, error) from None

        # The user's own variables take precedence over the flight recorder's.
        shared = flight_recorder.environment(logs) | self._zygote.env
        shared |= {
            "WORLD_SIZE": str(start.world_size),
            "LOCAL_WORLD_SIZE": str(start.count),
            "GROUP_RANK": str(start.group_rank),
            "MASTER_ADDR": start.address,
            "MASTER_PORT": str(start.port),
            FOLDER: str(current.folder),
            ATTEMPT: str(start.attempt),
            **self._store_environment(start, current.folder),
        }

        # Counted before any rank runs: a larger number later means that the kernel killed a rank for lack of memory.
        oom_kills = failure.oom_kills()
        for local in range(start.count):
            rank = start.first_rank + local

            # Rank 0 writes to the terminal. All attempts append to the same logs, so note where this attempt begins.
            log = logs / f"rank-{rank}.log" if rank else None
            began = log.stat().st_size if log and log.exists() else 0
            current.ranks[rank] = failure.LocalRank(rank, self.name, current.folder, log, began, oom_kills)

            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(local)}

            # Rank 0 ends if its coordinator is superseded.
            if rank == 0 and self.term_file:
                env[TERM_FILE] = str(self.term_file)

            self._zygote.fork(rank, env, self._job.spec, log, current.alive)

        self._started = start.attempt
        self.nproc = replace(self._job.nproc, preferred=start.count)

    def _store_environment(self, start: Start, folder: Path) -> dict[str, str]:
        """Return the environment variables from which ranks open their store."""
        # Ranks of one machine use a file as their store, in a folder that only this user can read, and gloo listens
        # where no other machine can connect.
        if not start.store:
            _check_locks(folder)
            loopback = loopback_interface()
            gloo = {GLOO_INTERFACE: loopback} if loopback and GLOO_INTERFACE not in self._zygote.env else {}
            return {STORE_FILE: str(folder / "store"), **gloo}

        # The key is in a file, not in a variable, because programs may record their environment.
        assert self.secret is not None
        key_file = folder / "store.key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(store_secret(self.secret, start.store).key)
        return {STORE_KEY_FILE: str(key_file), STORE_PORT: str(start.store_port)}

    def _prepare(self, count: int) -> None:
        """Start a zygote for `count` ranks, unless the newest one will do.

        Torch reads the number of threads when it is imported, so another number of ranks may need another zygote.
        """
        env = _environment_for(count)
        newest = self._next_zygote or self._zygote
        if newest.alive and newest.env == env:
            return

        if self._next_zygote is not None:
            self._next_zygote.close()

        self._next_zygote = self._new_zygote(env)

    def _new_zygote(self, env: dict[str, str]) -> Zygote:
        return Zygote(self._job.entry, self._job.preload, env)

    def _preempt(self, current: LocalAttempt) -> None:
        """Ask the ranks to save and exit. Their loader processes get no signal: ranks need them until the save."""
        current.preempted = True

        # Before the zygote is ready no rank exists, so all are reported as preempted.
        if not self._zygote.ready:
            self._zygote.forget()
            self._events += [
                Exited(current.number, rank, failure.RankExit(failure.PREEMPTED)) for rank in current.ranks
            ]
            current.ranks.clear()

        for pid in current.pids.values():
            _preempt_rank(pid)

    def _kill(self, current: LocalAttempt) -> None:
        """Kill the ranks. The state on disk is consistent at any moment, so there is nothing to wait for."""
        current.killed_at = time.monotonic()
        self._zygote.forget()

        # Before the zygote is ready no rank exists, and none will be reported.
        if not self._zygote.ready:
            current.ranks.clear()

        current.kill()

    def stop(self) -> None:
        """Kill the ranks, if there are any, and wait until they are gone. No message about it is sent."""
        if self._current is not None:
            self._kill(self._current)

        # A zygote that does not report their end is killed before this deadline, and its ranks die with it.
        deadline = time.monotonic() + 2 * RANKS_KILL_S
        while self._current is not None and time.monotonic() < deadline:
            self.poll()
            records.wait_readable(self.sockets(), 0.05)

        self._close_attempt()
        self._events.clear()

    # ---- what happens on the node ----

    def poll(self) -> list[Message]:
        """Return the messages about what has happened since the last call."""
        current = self._current
        if current is not None:
            current.touch()

        for report in self._zygote.poll():
            if current is not None and report["rank"] in current.ranks:
                self._handle_report(current, current.ranks[report["rank"]], report)

        # A zygote that does not report the end of killed ranks is itself suspended or stuck.
        if current and current.killed_at and current.ranks and time.monotonic() - current.killed_at > RANKS_KILL_S:
            self._zygote.kill()

        if not self._zygote.alive and not self._cannot_import:
            self._replace_zygote()

        if current is not None and current.killed_at and not current.ranks:
            self._close_attempt()
            self._events.append(RanksGone(current.number))

        events, self._events = self._events, []

        return events

    def _handle_report(self, current: LocalAttempt, rank: failure.LocalRank, report: dict[str, int]) -> None:
        # A report without an exit code says that the rank started.
        pid = report["pid"]
        if "code" not in report:
            rank.pid = pid

            # Carry out orders that came before the rank existed.
            if current.killed_at is not None:
                kill_rank(pid)
            elif current.preempted:
                _preempt_rank(pid)
        elif rank.pid == pid:
            # The last heartbeat is sent first: it may carry settings that no earlier heartbeat had.
            self._events.append(self.node_beat())
            del current.ranks[rank.number]
            rank_exit = failure.examine(rank, report["code"], time.time())
            self._events.append(Exited(current.number, rank.number, rank_exit))

    def _replace_zygote(self) -> None:
        """Replace a zygote that died and kill the ranks that it forked, whose exit codes would be lost."""
        self._cannot_import = not self._zygote.ready
        self._zygote.close()

        if self._current is not None:
            self._current.kill()
            self._current.ranks.clear()

        attempt = self._current.number if self._current else -1
        why = "exited while importing; the error is on that node's terminal" if self._cannot_import else "died"
        text = f"the process {self._zygote.pid} that starts the ranks on {self.name} {why}"
        self._events.append(ZygoteLost(attempt, text, self._cannot_import))

        if not self._cannot_import:
            self._zygote = self._new_zygote(self._zygote.env)

    def node_beat(self) -> NodeBeat:
        current = self._current
        if current is None:
            return NodeBeat(attempt=self._started)

        # There is no view of a rank that died before its first heartbeat.
        views = [view_of(number, self.name, pid, current.folder) for number, pid in current.pids.items()]

        # Rank 0 renames the file into place once it has read the configuration.
        settings = json.loads(records.read(current.folder / "settings.json") or "{}")

        return NodeBeat([view for view in views if view is not None], settings, self._started)

    def sockets(self) -> list[Zygote]:
        return [self._zygote] if self._zygote.alive else []

    def _close_attempt(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        self._close_attempt()
        self._zygote.close()
        if self._next_zygote is not None:
            self._next_zygote.close()


def _check_locks(folder: Path) -> None:
    """Raise a UserError if files in the folder cannot be locked, as torch's FileStore does."""
    try:
        with (folder / "store").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(
            f"the ranks cannot meet in {folder.parent}: files there cannot be written and locked",
            error.strerror or str(error),
            "set TMPDIR to a folder on a local disk",
        ) from None


def _environment_for(count: int) -> dict[str, str]:
    """Return the environment of `count` ranks, which share the cores unless the user set OMP_NUM_THREADS."""
    # Ranks must not get the job's secret: programs may record their environment. Nor must they get the variables of
    # another job, one of whose ranks may have started this launcher.
    others = {SECRET, TERM_FILE, RESUME_COMMAND, *OF_ONE_JOB}
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    share_cores(inherited, count)
    return inherited


def _preempt_rank(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _collect_stacks(current: LocalAttempt) -> Stacks:
    """Return the stacks of all living ranks. A rank that does not answer in time has an empty stack, no collectives."""
    answers = stacks.collect(current.folder, current.pids, RANKS_STACKS_S)
    answering = [rank for rank, text in answers.items() if text]
    recorded = flight_recorder.collect(current.folder, answering, COLLECTIVES_S)

    # The last 100 collectives are enough to compare ranks, and keep the message small.
    return Stacks(current.number, answers, {rank: entries[-100:] for rank, entries in recorded.items()})
