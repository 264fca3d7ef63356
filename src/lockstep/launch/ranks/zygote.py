"""The zygote: a process that imports everything once and forks a rank whenever its launcher asks.

Importing torch takes seconds and a fork takes milliseconds, so a rank that died is replaced almost at once. The zygote
runs no torch operation, never touches CUDA and starts no thread, because none of these would survive a fork.

Everything here runs in the zygote (`main`) or in a rank that it has just forked (`_become_rank`). The launcher's side
is `zygote_client.py`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch.failure import Failure, LauncherFailure, RankExit
from lockstep.launch.ranks import rank_process, rank_record
from lockstep.launch.times import FORK_S
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.runtime.parent_death import die_with_parent, signal_on_parents_death

# A request is JSON text, after a number of this size that says how many bytes follow.
LENGTH_BYTES = 4

# The zygote's first line, after its imports. Every later line is a `RankChange`.
READY = b"ready\n"

# Signals that are meant for the launcher or for a rank, never for the zygote.
_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

RunRank = Callable[..., NoReturn]  # `rank_process.main` but for the spec and the lifeline


@dataclass(frozen=True)
class RankChange:
    """A report of the zygote about a rank of an attempt: its start, or its exit, which has a code."""

    attempt: int
    rank: int
    pid: int | None  # None if the system refused its process: then it has exited before it started
    code: int | None = None

    @property
    def is_exit(self) -> bool:
        return self.code is not None

    @property
    def answers_request(self) -> bool:
        """Whether this is the first report about the rank."""
        return not self.is_exit or self.pid is None


def main(arguments: Sequence[str]) -> None:
    """Import everything, then fork ranks until the launcher closes the socket."""
    # The number of an inherited socket, MODULE:FUNCTION that a rank runs, and modules that are worth importing once.
    descriptor, entry, *preload = arguments
    control = socket.socket(fileno=int(descriptor))

    # If the launcher dies while this process is suspended, it wakes up, finds the socket closed, and cleans up.
    signal_on_parents_death(signal.SIGCONT)

    # Blocked, not ignored: a rank inherits the mask, and gets these signals when it has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)

    # Imports leave hardly any garbage, and collecting it would take a fifth of their time.
    gc.disable()

    module, _, function = entry.partition(":")
    work = getattr(importlib.import_module(module), function)
    for name in preload:
        importlib.import_module(name)

    # The user's own modules may be in the working folder, which is searched last: a file named like a module of ours
    # must not be imported in its place.
    sys.path.append(os.getcwd())

    # Frozen objects stay shared by all ranks, because no garbage collection of a rank touches them.
    gc.collect()
    frozen_files = rank_process.open_files()
    gc.freeze()
    gc.enable()

    server = Zygote(control, partial(rank_process.main, work=work, frozen_files=frozen_files))
    with contextlib.suppress(ConnectionError):
        server.serve()

    # The launcher is gone, and may have been killed, so the zygote cleans up.
    server.clean_up()
    os._exit(0)


class Zygote:
    """Forks a rank for each request that arrives on `control`, and reports there when ranks end.

    It waits for two things at once, requests and the ends of its children, and has no thread for either.
    """

    def __init__(self, control: socket.socket, run_rank: RunRank):
        self._control = control
        self._run_rank = run_rank

        # A pipe wakes `serve` when a child ends.
        self._woken, self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._children: dict[int, tuple[int, int]] = {}  # process -> its attempt and its rank

        # The folders of all attempts, and those in which the system has refused the process of a rank.
        self._folders: set[Path] = set()
        self._refused: set[Path] = set()

    def serve(self) -> NoReturn:
        """Fork ranks and report their ends. Raises ConnectionError when the launcher is gone."""
        # Python writes to the pipe only for signals that have a handler, so SIGCHLD gets a handler that does nothing.
        # The pipe may be full, because one byte in it is enough.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)

        # Unlike `select`, it takes file descriptors above 1023.
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._woken):
            poll.register(descriptor, select.POLLIN)

        self._control.sendall(READY)
        while True:
            readable = [descriptor for descriptor, _ in poll.poll()]

            # Empty the pipe first, so that a child that ends now wakes us again.
            if self._woken in readable:
                os.read(self._woken, 4096)
                self._reap()

            if self._control.fileno() in readable:
                request, fds = _next_request(self._control)
                self._answer(request, fds)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> None:
        """Fork the rank of a request, which gets its file descriptors, and report its process."""
        zygote = os.getpid()
        attempt, rank = request["attempt"], request["rank"]
        folder = Path(request["env"][ATTEMPT_FOLDER])
        self._folders.add(folder)
        try:
            pid = self._fork(folder)
        except OSError as error:
            # There are too many processes, or too little memory.
            self._refused.add(folder)
            _record_refusal(folder, int(request["env"]["RANK"]), error)
            self._report(RankChange(attempt, rank, None, code=1))
        else:
            if pid == 0:
                _become_rank(request, fds, self._run_rank, [self._control.detach(), self._woken, self._bell], zygote)

            self._children[pid] = attempt, rank
            self._report(RankChange(attempt, rank, pid))
        finally:
            close_all(fds)

    def _fork(self, folder: Path) -> int:
        """Fork; try for a while if the system refuses, unless it has refused another rank of this attempt."""
        # All ranks of an attempt are requested at once. If each waited as long as the first did, that would add up.
        give_up = time.monotonic() + (0.0 if folder in self._refused else FORK_S)

        while True:
            try:
                return os.fork()
            except OSError:
                if time.monotonic() >= give_up:
                    raise

                # A child that has ended counts until it is reaped.
                time.sleep(0.1)
                self._reap()

    def _reap(self) -> None:
        """Report the ranks that have ended to the launcher, and kill their worker processes."""
        # Only ranks are looked at: an imported module may have started a process of its own.
        for pid in list(self._children):
            # WNOWAIT: until a rank is reaped, no other process group can get its number.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue

            kill_process_group(pid)
            _, status = os.waitpid(pid, 0)
            self._report(RankChange(*self._children.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _report(self, change: RankChange) -> None:
        """Send a report to the launcher, as one line."""
        self._control.sendall(json.dumps(asdict(change)).encode() + b"\n")

    def clean_up(self) -> None:
        """Kill the ranks and remove the folders of their attempts."""
        # All are killed before the first is waited for, which may take long to die: a process inside a driver, of a GPU
        # or a network disk, ends only when that returns. A rank is reaped only after its process group is killed: until
        # then no other process gets its number.
        for pid in self._children:
            kill_process_group(pid)

        for pid in self._children:
            os.waitpid(pid, 0)

        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


def _record_refusal(folder: Path, rank: int, error: OSError) -> None:
    """Write the record of a rank that could not be forked."""
    why = f"the system refused to fork its process: {error.strerror}"
    limits = "see the limits of processes, `ulimit -u` and the cgroup's pids.max, and the free memory"

    failure = Failure.by_launcher(LauncherFailure.FORK, f"{why} ({limits})", rank)
    rank_record.write(folder, rank, RankExit(1, failure))


def _next_request(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a request and the file descriptors that come with it. Raises ConnectionError if the launcher is gone."""
    # The descriptors arrive with the first byte; the rest of the request is plain data.
    head, fds, _, _ = socket.recv_fds(control, LENGTH_BYTES, 1)
    head += _read_exactly(control, LENGTH_BYTES - len(head))

    return json.loads(_read_exactly(control, int.from_bytes(head))), fds


def _read_exactly(control: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes. Raises ConnectionError if the launcher is gone."""
    data = b""
    while len(data) < size:
        # A socket returns what has arrived, which may be less.
        received = control.recv(size - len(data))
        if not received:
            raise ConnectionResetError("the launcher is gone")

        data += received

    return data


def kill_process_group(pid: int) -> None:
    """Kill a rank with its worker processes, which are in its process group."""
    # A rank that was just forked does not lead a process group yet, so the process itself is killed as well.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- in a forked rank ----


def _become_rank(
    request: dict[str, Any], fds: list[int], run_rank: RunRank, inherited: list[int], zygote: int
) -> NoReturn:
    """Turn a forked copy of the zygote into a rank, and run it. `fds` holds the lifeline.

    The zygote's own descriptors are `inherited`, and `zygote` is its process.
    """
    try:
        # This comes first: a fork does not inherit the signal that the kernel sends when the parent dies.
        die_with_parent(zygote)
        close_all(inherited)

        # A separate process group: a signal to it reaches the rank's worker processes and no other rank.
        os.setsid()

        # Until the engine handles preemption there is nothing to save, so these signals end the process.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, rank_process.exit_at_once)

        # Exactly the environment of the request, without variables that the zygote's imports added.
        os.environ.clear()
        os.environ.update(request["env"])

        if request["log"]:
            _write_to(request["log"])

        # Written line by line, so that what a killed process has printed is complete. Rank 0 may print to a file.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)

        # `random` reseeds itself after a fork, numpy does not: all ranks would draw the same numbers.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

        # Signals that were sent in the meantime are delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)

        run_rank(request["spec"], lifeline=fds[0])
    except BaseException:
        # Whatever the error is, and even if it cannot be printed, a rank must not return into `Zygote.serve`: at its
        # end it would kill the other ranks.
        with contextlib.suppress(BaseException):
            traceback.print_exc()

    os._exit(1)


def _write_to(log: str) -> None:
    """Write this process's output to a log, after what is there."""
    # The descriptors themselves, not `sys.stdout`: NCCL and other libraries in C++ write to them as well.
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
