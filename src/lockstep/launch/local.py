"""Start the ranks of one machine, wait for them, and say clearly which one failed first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch import failure

LIFELINE = "LOCKSTEP_LIFELINE"  # a pipe that closes when the launcher dies, whatever killed it
FAILURES = "LOCKSTEP_FAILURES"  # the folder for failure records
POLL_S = 0.05
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
        return visible_gpus() or min(2, len(os.sched_getaffinity(0)))
    try:
        count = int(asked)
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"--nproc {asked}", "neither a count nor auto", "type --nproc 2, or --nproc auto")
    return count


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Counted without torch, which takes seconds to import."""
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() and part.strip() != "-1"])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


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
            for rank in range(nproc):
                ranks.append(_start(command, rank, shared, listener.fileno(), alive, log_dir))
            return _wait(ranks, Path(failures), log_dir)
        finally:
            _stop(ranks)
            os.close(alive)
            os.close(lifeline)


def _listener() -> socket.socket:
    """The meeting point, bound before any rank starts: no port is guessed, none can be taken in between."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def _shared_environment(env: Mapping[str, str], nproc: int, port: int, alive: int, failures: str) -> dict[str, str]:
    shared = dict(env)
    cores = len(os.sched_getaffinity(0))
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
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(ranks)}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if any(ended.values()):
            break
        if len(ended) == len(ranks):
            return None
        time.sleep(POLL_S)
    deadline = time.monotonic() + OTHERS_S
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        time.sleep(POLL_S)
    codes = {rank: code for rank, process in enumerate(ranks) if (code := process.poll()) is not None}
    culprit = failure.first(failures, codes)
    assert culprit is not None
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
