"""The zygote: a process that imports everything once and forks a rank whenever its launcher asks.

Importing torch takes seconds and a fork takes milliseconds, so a rank that died is replaced almost at once. The zygote
runs no torch operation, never touches CUDA and starts no thread, because none of these would survive a fork.

`Zygote` is the launcher's side. The rest of the file runs in the zygote (`main`) and in the ranks that it forks.
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
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.launch import rank_process
from lockstep.launch.failure import PREEMPTED
from lockstep.launch.wire.lines import LineReader
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.runtime.parent_death import die_with_parent, signal_on_parents_death

# How long the zygote's imports may take, from a slow shared disk, and how long a fork may take.
READY_S = 600.0
ANSWER_S = 15.0

# A request is JSON text, after a number of this size that says how many bytes follow.
_LENGTH_BYTES = 4

# The zygote's first line, after its imports. Every later line is a `RankChange`.
READY = b"ready\n"

# Signals that are meant for the launcher or for a rank, never for the zygote.
_BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

Work = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RankChange:
    """What the zygote reports about a rank: its start, or its end, which has an exit code."""

    rank: int
    pid: int
    code: int | None = None

    @property
    def is_end(self) -> bool:
        return self.code is not None


class Zygote:
    """The zygote process, as its launcher sees it."""

    def __init__(self, entry: str, preload: Sequence[str], env: Mapping[str, str]):
        self.env = dict(env)
        self.alive = True

        # Whether its imports are done. Until then requests wait here, with their file descriptors.
        self.ready = False
        self._waiting: list[tuple[bytes, list[int]]] = []

        # The number of requests without an answer, and since when: a zygote that does not answer in time is killed.
        self._unanswered = 0
        self._since = time.monotonic()

        # The timeout is for writing a request, because a suspended zygote reads nothing.
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(3.0)
        self._lines = LineReader(self._socket)

        with theirs:
            self._process = subprocess.Popen(
                # -P: a file in the working folder must not replace a standard module of the same name.
                [sys.executable, "-P", "-m", "lockstep.launch.zygote", str(theirs.fileno()), entry, *preload],
                env=self.env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C at the terminal reaches only the launcher
            )

        self.pid = self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, rank: int, env: Mapping[str, str], spec: dict[str, Any], log: Path | None, lifeline: int) -> None:
        """Ask for a rank. Its `lifeline` closes when the launcher dies."""
        request = json.dumps({"rank": rank, "env": dict(env), "spec": spec, "log": str(log) if log else None})
        self._waiting.append((request.encode(), [os.dup(lifeline)]))
        if not self._unanswered:
            self._since = time.monotonic()

        self._unanswered += 1
        self._send()

    def forget(self) -> None:
        """Drop the requests that have not been sent yet."""
        for _, fds in self._waiting:
            _close(fds)

        self._unanswered -= len(self._waiting)
        self._waiting.clear()

    def poll(self) -> list[RankChange]:
        """Return the ranks that have started or ended since the last call."""
        # A zygote that is suspended, or stuck in an import, answers no request.
        timeout = ANSWER_S if self.ready else READY_S
        if self.alive and self._unanswered and time.monotonic() - self._since > timeout:
            self.kill()

        # If nothing more will arrive, the process has ended.
        lines = self._lines.read() if self.alive else []
        self.alive = self.alive and not self._lines.ended

        # Its first line only says that the imports are done; requests can be sent from now on.
        if not self.ready and lines:
            del lines[0]
            self.ready = True
            self._since = time.monotonic()
            self._send()

        changes = [RankChange(**json.loads(line)) for line in lines]
        self._unanswered -= sum(not change.is_end for change in changes)

        return changes

    def kill(self) -> None:
        self._process.kill()
        self.alive = False

    def _send(self) -> None:
        while self.ready and self.alive and self._waiting:
            request, fds = self._waiting.pop(0)
            try:
                socket.send_fds(self._socket, [len(request).to_bytes(_LENGTH_BYTES)], fds)
                self._socket.sendall(request)
            except OSError:
                self.alive = False
            finally:
                _close(fds)

    def close(self) -> None:
        """End the zygote and with it the ranks that it forked."""
        self.alive = False
        self.forget()
        self._socket.close()

        # While it imports, it does not notice that the socket is closed.
        try:
            self._process.wait(timeout=2.0 if self.ready else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# ---- in the zygote ----


def main(arguments: Sequence[str]) -> None:
    """Import everything, then fork ranks until the launcher closes the socket."""
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

    # The user's own modules may be in the working folder, which is searched last.
    sys.path.append(os.getcwd())

    # Frozen objects stay shared by all ranks, because no garbage collection of a rank touches them.
    gc.collect()
    gc.freeze()
    gc.enable()
    _serve(control, work)


def _serve(control: socket.socket, work: Work) -> NoReturn:
    """Fork ranks and report their ends, until the launcher is gone."""
    # A pipe wakes `poll` when a child ends. Unlike `select`, it takes file descriptors above 1023.
    woken, bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)

    poll = select.poll()
    for descriptor in (control.fileno(), woken):
        poll.register(descriptor, select.POLLIN)

    children: dict[int, int] = {}  # process -> rank
    folders: set[str] = set()

    with contextlib.suppress(ConnectionError):
        control.sendall(READY)
        while True:
            readable = [descriptor for descriptor, _ in poll.poll()]

            if woken in readable:
                os.read(woken, 4096)
                _reap(control, children)

            if control.fileno() in readable:
                request, fds = _next_request(control)
                pid = _fork(control, [woken, bell], request, fds, work)
                children[pid] = request["rank"]
                folders.add(request["env"][ATTEMPT_FOLDER])
                _report(control, RankChange(request["rank"], pid))

    # The launcher is gone, and may have been killed, so the zygote cleans up.
    for pid in children:
        kill_rank(pid)
        os.waitpid(pid, 0)

    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

    os._exit(0)


def _fork(control: socket.socket, wakeup: list[int], request: dict[str, Any], fds: list[int], work: Work) -> int:
    """Fork the rank of a request, with its file descriptors, and return its process."""
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        # The rank inherits none of the zygote's descriptors.
        _close([control.detach(), *wakeup])
        die_with_parent(zygote)
        _become(request, fds, work)

    _close(fds)
    return pid


def _report(control: socket.socket, change: RankChange) -> None:
    control.sendall(json.dumps(asdict(change)).encode() + b"\n")


def _next_request(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    # The files come with the first byte; the rest of the request is plain data.
    head, fds, _, _ = socket.recv_fds(control, _LENGTH_BYTES, 1)
    head += _read_exactly(control, _LENGTH_BYTES - len(head))

    return json.loads(_read_exactly(control, int.from_bytes(head))), fds


def _read_exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = control.recv(size - len(data))
        if not received:
            raise ConnectionResetError("the launcher is gone")

        data += received

    return data


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    """Report the ranks that have ended to the launcher, and kill their worker processes."""
    # Only ranks are looked at: an imported module may have started a process of its own.
    for pid in list(children):
        # WNOWAIT: until a rank is reaped, no other process group can get its number.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue

        kill_rank(pid)
        _, status = os.waitpid(pid, 0)
        _report(control, RankChange(children.pop(pid), pid, os.waitstatus_to_exitcode(status)))


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def kill_rank(pid: int) -> None:
    """Kill a rank and its worker processes, which are in its process group."""
    # A rank that was just forked does not lead a process group yet, so the process itself is killed as well.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


# ---- in a forked rank ----


def _become(request: dict[str, Any], fds: list[int], work: Work) -> NoReturn:
    try:
        # A separate process group: a signal to it reaches the rank's worker processes and no other rank.
        os.setsid()

        # Until the engine handles preemption there is nothing to save, so these signals end the process.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: os._exit(PREEMPTED))

        # Exactly the environment of the request, without variables that the zygote's imports added.
        os.environ.clear()
        os.environ.update(request["env"])

        if request["log"]:
            _write_to(request["log"])

        # `random` reseeds itself after a fork, numpy does not: all ranks would draw the same numbers.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

        # Signals that were sent in the meantime are delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
        rank_process.main(request["spec"], work, lifeline=fds[0])
    except BaseException:
        # Whatever it is: a rank must not return into the loop of the zygote.
        traceback.print_exc()

    os._exit(1)


def _write_to(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)

    # Written line by line, so that the log of a killed process is complete.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


if __name__ == "__main__":
    main(sys.argv[1:])
