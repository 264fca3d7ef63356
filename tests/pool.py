"""Worker processes that the multi-process tests share: importing torch costs seconds, a job hardly anything.

    results = pool.run(function, *args, world=3)    # function(world, store, *args) in 3 workers; by rank

Run as a script, this file is one worker. Functions travel by name (workers see the session's `sys.path`),
lambdas and local functions by value. A worker that hangs or dies fails the job's test, never the session.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

SIZE = 4  # workers started at once; a larger world starts the ones it lacks
LIMIT = timedelta(seconds=120)  # for one job, on a busy machine
START_LIMIT = timedelta(seconds=120)  # for importing torch, on a busy machine
DUMP = signal.SIGUSR2  # makes a worker write the stacks of all its threads
DUMP_TIME = timedelta(seconds=10)  # at most, for writing them
IMPORTED = (  # once, for all jobs
    "torch._dynamo",
    "torch.distributed.nn",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "safetensors.torch",
    "numpy.ctypeslib",
    "lockstep.engine.own_loop",
    "lockstep.parallel.pipeline",
)
ORPHAN_TIME = timedelta(seconds=30)  # past its limit a worker whose session has died ends by itself


class WorkerLost(RuntimeError):
    """A worker hung or died. Not an AssertionError: no test may take it for a failed check."""


@dataclass(frozen=True)
class Job:
    number: int
    rank: int
    world: int
    limit: timedelta
    payload: bytes  # (function, args): unpickled where an import error can be reported


@dataclass(frozen=True)
class Failure:
    """What a worker's job raised."""

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


class Worker:
    """One process, and the session's end of the line to it."""

    def __init__(self, folder: Path, index: int, store_port: int):
        self.log = folder / f"worker-{index}.log"
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), str(store_port)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        with self.log.open("ab") as log, theirs:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def wait_until_ready(self) -> None:
        if not self.connection.poll(START_LIMIT.total_seconds()):
            raise WorkerLost(f"a worker did not start in {START_LIMIT}:\n{self.log.read_text()}")
        try:
            self.connection.recv_bytes()
        except EOFError:
            raise WorkerLost(f"a worker died while starting:\n{self.log.read_text()}") from None

    def log_size(self) -> int:
        return self.log.stat().st_size

    def dump_stacks(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, DUMP)  # the job's own process is a child of the worker's

    def kill(self) -> None:
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its session: the data loaders it started, too
        except ProcessLookupError:
            pass
        self.process.wait()


class Pool:
    """Starts when the first job comes, and again after a worker was lost."""

    def __init__(self, size: int = SIZE) -> None:
        from torch.distributed import TCPStore

        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-pool-")
        # One meeting point for the whole session; every job has its own prefix in it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[Worker] = []
        self._jobs = 0

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
        self._grow(max(world, self._size))
        self._jobs += 1
        members = self._workers[:world]
        for rank, worker in enumerate(members):
            job = Job(self._jobs, rank, world, limit, payload)
            worker.connection.send_bytes(cloudpickle.dumps(job))
        return self._collect(members, limit)

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _grow(self, size: int) -> None:
        new = range(len(self._workers), size)
        workers = [Worker(Path(self._folder.name), index, self._store.port) for index in new]
        self._workers += workers
        for worker in workers:
            worker.wait_until_ready()

    def _stop(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _collect(self, members: list[Worker], limit: timedelta) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(members)}
        deadline = time.monotonic() + limit.total_seconds()
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._lost(members, sorted(waiting.values()), f"still running after {limit}")
            for connection in ready:
                rank = waiting.pop(connection)  # pyrefly: ignore[bad-argument-type]
                try:
                    results[rank] = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise self._lost(members, [rank], "died") from None
        return [results[rank] for rank in range(len(members))]

    def _lost(self, members: list[Worker], ranks: list[int], what: str) -> WorkerLost:
        """Note where everybody stands, then end them all: a half-finished exchange cannot be cleaned up."""
        before = {worker: worker.log_size() for worker in members if worker.process.poll() is None}
        for worker in before:
            worker.dump_stacks()
        _wait_for_more(before)
        logs = [f"--- rank {rank}\n{_tail(worker.log)}" for rank, worker in enumerate(members)]
        self._stop()
        return WorkerLost(f"ranks {ranks} of {len(members)} {what}\n" + "\n".join(logs))


def _wait_for_more(before: dict[Worker, int]) -> None:
    """Until every log has grown, and for as long as more comes."""
    last, deadline = before, time.monotonic() + DUMP_TIME.total_seconds()
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = {worker: worker.log_size() for worker in before}
        if now == last and all(now[worker] > before[worker] for worker in before):
            return
        last = now


def _tail(path: Path, characters: int = 6000) -> str:
    return path.read_text(errors="replace")[-characters:]


# ---- in the worker --------------------------------------------------------------------------------------


def main() -> None:
    """Every job runs in a process of its own, forked from this one, which has imported everything and done nothing:
    what a job leaves behind (process groups, meshes, threads) dies with it."""
    connection, store_port = Connection(int(sys.argv[1])), int(sys.argv[2])
    faulthandler.enable()
    signal.signal(DUMP, signal.SIG_IGN)
    for name in IMPORTED:
        importlib.import_module(name)
    connection.send_bytes(b"ready")
    while True:
        try:
            job: Job = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        work = _unpacked(job)  # here, so that what it imports is imported once
        child = os.fork()
        if child == 0:
            _run(job, work, connection, store_port)
        _, status = os.waitpid(child, 0)
        if status:  # it died without an answer: so do we, and the session hears of it
            sys.exit(1)


def _unpacked(job: Job) -> Any:
    try:
        return cloudpickle.loads(job.payload)
    except BaseException as error:
        return _failure(job.rank, error)


def _run(job: Job, work: Any, connection: Connection, store_port: int) -> NoReturn:
    from torch.distributed import PrefixStore, TCPStore

    faulthandler.register(DUMP, all_threads=True)
    faulthandler.dump_traceback_later((job.limit + ORPHAN_TIME).total_seconds(), exit=True)
    store = PrefixStore(f"job-{job.number}", TCPStore("127.0.0.1", store_port, is_master=False))
    result = work if isinstance(work, Failure) else _attempt(job, work, store)
    try:
        answer = cloudpickle.dumps(result)
    except Exception as error:  # whatever a result's own pickling raises
        answer = cloudpickle.dumps(_failure(job.rank, TypeError(f"the result cannot travel: {error}")))
    connection.send_bytes(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _attempt(job: Job, work: Any, store: Any) -> Any:
    from lockstep.runtime.world import World

    try:
        function, args = work
        return function(World(job.rank, job.world, job.rank, job.world), store, *args)
    except BaseException as error:
        return _failure(job.rank, error)


def _failure(rank: int, error: BaseException) -> Failure:
    trace, now = traceback.format_exc(), time.time()
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
