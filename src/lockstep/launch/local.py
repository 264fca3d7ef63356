"""Start the ranks of one machine, wait for them, and say clearly which one failed first."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch import failure
from lockstep.machine import available_cores, visible_gpus

LIFELINE = "LOCKSTEP_LIFELINE"  # a pipe that closes when the launcher dies, whatever killed it
FAILURES = "LOCKSTEP_FAILURES"  # the folder for failure records
POLL_S = 0.02
OTHERS_S = 1.0  # how long to wait, after a failure, for the other ranks' own records
STOP_S = 10.0  # from SIGTERM to SIGKILL


def new_run_dir(name: str) -> Path:
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def choose_nproc(asked: str | int | None) -> int:
    """`auto`: one process per GPU; without a GPU two, so that what you try is distributed, or one on a single core."""
    if asked is None:
        return 1
    if asked == "auto":
        return visible_gpus() or min(2, available_cores())
    try:
        count = int(asked)
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"--nproc {asked}", "neither a count nor auto", "type --nproc 2, or --nproc auto")
    return count


def run(
    command: Sequence[str], nproc: int, log_dir: Path, env: Mapping[str, str] = os.environ
) -> failure.Failure | None:
    """Run `command` as `nproc` ranks: rank 0 has the terminal, the others write to their logs.

    Returns the first failure, which has been printed, or None.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as failures, _listener() as listener:
        alive, lifeline = os.pipe()
        shared = _shared_environment(env, nproc, listener.getsockname()[1], alive, failures)
        ranks = []
        try:
            with _termination_as_interrupt():
                for rank in range(nproc):
                    ranks.append(_start(command, rank, shared, listener.fileno(), alive, log_dir))
                return _wait(ranks, Path(failures), log_dir)
        finally:
            _stop(ranks)
            os.close(alive)
            os.close(lifeline)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the launcher the way Ctrl-C does: the ranks are stopped and temporary files removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listener() -> socket.socket:
    """The meeting point, bound before any rank starts: no port is guessed, none can be taken in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def _shared_environment(env: Mapping[str, str], nproc: int, port: int, alive: int, failures: str) -> dict[str, str]:
    shared = dict(env)
    cores = available_cores()
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))  # or every rank takes every core
    shared |= {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1"}
    return shared | {"MASTER_PORT": str(port), LIFELINE: str(alive), FAILURES: failures}


def _start(
    command: Sequence[str], rank: int, shared: dict[str, str], listen_fd: int, alive: int, log_dir: Path
) -> subprocess.Popen[bytes]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    passed = [alive]
    if rank == 0:
        own["LOCKSTEP_LISTEN_FD"] = str(listen_fd)
        passed.append(listen_fd)
    with (log_dir / f"rank-{rank}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env=shared | own,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else log,
            stderr=None if rank == 0 else log,
            start_new_session=True,  # a signal to one rank's group takes its loader processes along, and nobody else
        )


def _wait(ranks: list[subprocess.Popen[bytes]], failures: Path, log_dir: Path) -> failure.Failure | None:
    ended: dict[int, failure.Exit] = {}
    deadline = math.inf
    while len(ended) < len(ranks) and time.monotonic() < deadline:
        for rank, process in enumerate(ranks):
            if rank not in ended and (code := process.poll()) is not None:
                ended[rank] = failure.Exit(code, time.time())
        if deadline == math.inf and any(end.code for end in ended.values()):
            deadline = time.monotonic() + OTHERS_S
        time.sleep(POLL_S)
    if not any(end.code for end in ended.values()):
        return None
    culprit = failure.first(failures, ended)
    assert culprit is not None
    if sys.stdout.isatty():  # a killed rank 0 could not put the display away
        print("\x1b[?25h", flush=True)
    print(culprit.text(log_dir / f"rank-{culprit.rank}.log"), file=sys.stderr)
    if not culprit.for_user and len(ranks) > 1:
        print(f"{len(ranks) - 1} other rank(s) stopped because of it", file=sys.stderr)
    return culprit


def _stop(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Whatever still runs, with its children."""
    for process in ranks:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    for process in ranks:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        _signal_group(process, signal.SIGKILL)  # also for loader processes that outlived their rank
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
