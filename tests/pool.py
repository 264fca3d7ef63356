"""Processes that the multi-process tests share: importing torch costs seconds, a job hardly anything.

    results = pool.run(function, *args, world=3)    # function(world, store, *args) on 3 ranks; by rank

Run as a script, this file is a zygote, forked from a process that has torch (preloaded.py): it imports what else is
needed once, and every rank of every job is forked from it.
Functions travel by name (a zygote sees the session's `sys.path`), lambdas and local functions by value. A rank that
hangs or dies fails the job's test, never the session.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

import preloaded
from lockstep.runtime.parent_death import die_with_parent

ZYGOTES = preloaded.SERVERS  # so that ranks differ in what differs between processes: the order of a set, say
LIMIT = timedelta(seconds=240)  # for one job, on a busy machine
START_LIMIT = timedelta(seconds=240)  # for importing, on a busy machine
DUMP = signal.SIGUSR2  # makes a rank write the stacks of all its threads
DUMP_TIME = timedelta(seconds=10)  # at most, for writing them
IMPORTED = (  # once, for all jobs, on top of what the process has that it is forked from
    "lockstep.parallel.pipeline.build",
    "lockstep.parallel.pipeline.driver",
    "zoo",
)
# What torch.compile imports with its first graph, nearly a second each time: for `preload`, in the files that compile.
COMPILER = ("torch._inductor.lowering", "torch._dynamo.repro.after_aot", "torch.export._trace", "sympy.tensor.tensor")
ORPHAN_TIME = timedelta(seconds=30)  # past its limit a rank whose session has died ends by itself


class WorkerLost(RuntimeError):
    """A rank hung or died. Not an AssertionError: no test may take it for a failed check."""


@dataclass(frozen=True)
class Job:
    """What one zygote is told: the ranks that it shall fork."""

    number: int
    ranks: list[int]
    world: int
    limit: timedelta
    modules: tuple[str, ...]  # to import before it forks
    payload: bytes  # (function, args): unpickled where an import error can be reported


@dataclass(frozen=True)
class Rank:
    """One process of one job, as the session sees it."""

    number: int
    line: Connection  # on which its answer comes
    pid: int
    log: Path

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)  # its group: the data loaders it started, too
        except ProcessLookupError:
            pass


@dataclass(frozen=True)
class Failure:
    """What a job raised on one rank."""

    rank: int
    error: BaseException
    trace: str
    time: float  # by the machine's clock

    @property
    def blame(self) -> tuple[bool, float]:
        """Sorts the cause before its consequences: whoever only lost a peer says so in gloo's words."""
        return isinstance(self.error, RuntimeError) and "/gloo/" in str(self.error), self.time

    def as_error(self) -> BaseException:
        self.error.add_note(f"on rank {self.rank}:\n{self.trace}")
        return self.error


class Zygote:
    """One process with everything imported, and the session's end of the line to it."""

    def __init__(self, number: int, folder: Path, store_port: int):
        self.number, self._folder, self._log = number, folder, folder / "zygote.log"
        ours, theirs = socket.socketpair()
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with self._log.open("ab") as log, theirs:
            self.process = preloaded.Command(
                __file__,
                str(theirs.fileno()),
                str(store_port),
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                number=number,
                spares=0,
            )
        self._connection = Connection(ours.detach())

    def hear(self) -> Any:
        """What it says next: that it is ready, or the process ids of the ranks it has forked."""
        try:
            if self._connection.poll(START_LIMIT.total_seconds()):
                return cloudpickle.loads(self._connection.recv_bytes())
            why = f"said nothing for {START_LIMIT}"
        except (EOFError, ConnectionResetError):
            why = "died"
        self.kill()  # the next job gets another one
        raise WorkerLost(f"a zygote {why}:\n{_tail(self._log)}")

    def start(self, job: Job) -> list[Rank]:
        self._connection.send_bytes(cloudpickle.dumps(job))
        lines = [Connection(self._hand_over().detach()) for _ in job.ranks]
        logs = [self._folder / log_name(rank) for rank in job.ranks]
        return [Rank(*told) for told in zip(job.ranks, lines, self.hear(), logs, strict=True)]

    def _hand_over(self) -> socket.socket:
        """Our end of a line whose other end it has been given."""
        ours, theirs = socket.socketpair()
        with theirs:
            send_handle(self._connection, theirs.fileno(), self.process.pid)
        return ours

    def kill(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()


class Pool:
    """Starts when the first job comes. Its jobs run in a folder of its own, in `place` if that is given."""

    def __init__(self, place: Path | None = None) -> None:
        from torch.distributed import TCPStore

        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-pool-", dir=place)
        # One meeting point for the whole session; every job has its own prefix in it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._zygotes: list[Zygote] = []
        self._modules: dict[str, None] = {}
        self._jobs = 0

    def preload(self, *modules: str) -> None:
        """Import these once, not in every rank of the jobs to come: what takes seconds, and few tests need."""
        self._modules |= dict.fromkeys(modules)

    def run(self, function: Callable[..., Any], *args: Any, world: int, limit: timedelta = LIMIT) -> list[Any]:
        """`function(world, store, *args)` on every rank; its results by rank. The first failure is raised."""
        found = self.outcomes(function, *args, world=world, limit=limit)
        failures = [result for result in found if isinstance(result, Failure)]
        if failures:
            raise min(failures, key=lambda failure: failure.blame).as_error()
        return found

    def errors(
        self, function: Callable[..., Any], *args: Any, world: int, limit: timedelta = LIMIT
    ) -> list[BaseException | None]:
        """What every rank raised, None where it raised nothing. For tests of what users see."""
        found = self.outcomes(function, *args, world=world, limit=limit)
        return [result.as_error() if isinstance(result, Failure) else None for result in found]

    def outcomes(self, function: Callable[..., Any], *args: Any, world: int, limit: timedelta = LIMIT) -> list[Any]:
        """Results by rank, with a Failure where a rank raised."""
        payload = cloudpickle.dumps((function, args))
        self._grow(min(world, ZYGOTES))
        self._jobs += 1
        members: list[Rank] = []
        try:
            for index, zygote in enumerate(self._zygotes[:world]):
                ranks = list(range(index, world, len(self._zygotes)))
                members += zygote.start(Job(self._jobs, ranks, world, limit, tuple(self._modules), payload))
        except BaseException:
            for rank in members:  # or the next job would wait until they have ended
                rank.signal(signal.SIGKILL)
            raise
        return self._collect(sorted(members, key=lambda rank: rank.number), limit)

    def close(self) -> None:
        for zygote in self._zygotes:
            zygote.kill()
        self._folder.cleanup()

    def _grow(self, size: int) -> None:
        self._zygotes = [zygote for zygote in self._zygotes if zygote.process.poll() is None]
        missing = sorted(set(range(size)) - {zygote.number for zygote in self._zygotes})
        new = [Zygote(number, Path(self._folder.name), self._store.port) for number in missing]
        self._zygotes += new
        for zygote in new:
            zygote.hear()

    def _collect(self, members: list[Rank], limit: timedelta) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {rank.line: rank for rank in members}
        deadline = time.monotonic() + limit.total_seconds()
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                lost = sorted(rank.number for rank in waiting.values())
                raise self._lost(
                    members, list(waiting.values()), f"ranks {lost} of {len(members)} still running after {limit}"
                )
            for line in ready:
                rank = waiting.pop(line)  # pyrefly: ignore[bad-argument-type]
                try:
                    results[rank.number] = cloudpickle.loads(rank.line.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise self._lost(
                        members, list(waiting.values()), f"ranks [{rank.number}] of {len(members)} died"
                    ) from None
                rank.line.close()
        return [results[rank.number] for rank in members]

    def _lost(self, members: list[Rank], alive: list[Rank], what: str) -> WorkerLost:
        """Note where everybody stands, then end them all: a half-finished exchange cannot be cleaned up."""
        before = {rank.log: _size(rank.log) for rank in alive}
        for rank in alive:
            rank.signal(DUMP)
        _wait_for_more(before)
        logs = [f"--- rank {rank.number}\n{_tail(rank.log)}" for rank in members]
        for rank in alive:
            rank.signal(signal.SIGKILL)
        return WorkerLost(f"{what}\n" + "\n".join(logs))


def log_name(rank: int) -> str:
    return f"rank-{rank}.log"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _wait_for_more(before: dict[Path, int]) -> None:
    """Until every log has grown, and for as long as more comes."""
    last, deadline = before, time.monotonic() + DUMP_TIME.total_seconds()
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = {log: _size(log) for log in before}
        if now == last and all(now[log] > before[log] for log in before):
            return
        last = now


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""


# ---- in the zygote --------------------------------------------------------------------------------------


def main() -> None:
    """Every rank of every job is a process of its own, forked from this one, which has imported everything and done
    nothing: what a job leaves behind (process groups, meshes, threads) dies with it."""
    connection, store_port = Connection(int(sys.argv[1])), int(sys.argv[2])
    faulthandler.enable()
    signal.signal(DUMP, signal.SIG_IGN)
    gc.disable()  # as in `lockstep.launch.ranks.zygote`
    for name in IMPORTED:
        importlib.import_module(name)
    preloaded.put_names_together()
    gc.collect()
    gc.freeze()
    gc.enable()
    preloaded.use_large_pages()  # importing has written to those of the server
    connection.send_bytes(cloudpickle.dumps("ready"))
    while True:
        try:
            job: Job = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        lines = [Connection(recv_handle(connection)) for _ in job.ranks]
        work = _unpacked(job)  # here, so that what it imports is imported once
        pids = [_fork(job, index, work, lines, store_port) for index in range(len(lines))]
        for line in lines:
            line.close()
        connection.send_bytes(cloudpickle.dumps(pids))
        for pid in pids:
            _bury(pid)


def _unpacked(job: Job) -> Any:
    try:
        for name in job.modules:
            importlib.import_module(name)
        return cloudpickle.loads(job.payload)
    except BaseException as error:
        return _failure(0, error)


def _fork(job: Job, index: int, work: Any, lines: list[Connection], store_port: int) -> int:
    """The process id of a new rank, which leads a group: whatever it starts ends with it."""
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    os.setpgid(0, 0)
    die_with_parent(zygote)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or ranks of one zygote would draw the same
    for number, line in enumerate(lines):
        if number != index:
            line.close()  # or nobody would notice that its rank has died
    _run(job, job.ranks[index], work, lines[index], store_port)


def _bury(pid: int) -> None:
    """And end what it has left running, while its number cannot mean another process."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _run(job: Job, rank: int, work: Any, line: Connection, store_port: int) -> NoReturn:
    from torch.distributed import PrefixStore, TCPStore

    log = os.open(log_name(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(DUMP, all_threads=True)
    faulthandler.dump_traceback_later((job.limit + ORPHAN_TIME).total_seconds(), exit=True)
    store = PrefixStore(f"job-{job.number}", TCPStore("127.0.0.1", store_port, is_master=False))
    result = replace(work, rank=rank) if isinstance(work, Failure) else _attempt(job, rank, work, store)
    try:
        answer = cloudpickle.dumps(result)
    except Exception as error:  # whatever a result's own pickling raises
        answer = cloudpickle.dumps(_failure(rank, TypeError(f"the result cannot travel: {error}")))
    line.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _attempt(job: Job, rank: int, work: Any, store: Any) -> Any:
    from lockstep.runtime.world import World

    try:
        function, args = work
        return function(World(rank, job.world, rank, job.world), store, *args)
    except BaseException as error:
        return _failure(rank, error)


_KEPT_ALIVE: list[object] = []


def _failure(rank: int, error: BaseException) -> Failure:
    trace, now = traceback.format_exc(), time.time()
    # The process is about to end: what the frames hold must not be torn down under gloo's threads, which hangs now and
    # then (pytorch#179291). A rank of the launcher leaves in the same way.
    _KEPT_ALIVE.append((error.__traceback__, error.__context__, error.__cause__))
    error.__traceback__ = error.__context__ = error.__cause__ = None
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # an exception class that cannot be rebuilt from its arguments
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(rank, error, trace, now)


if __name__ == "__main__":
    # Under its importable name: pickled objects must be the same classes on both sides.
    import pool

    pool.main()
