"""What runs on a node of a Ray cluster: an actor, and as its child process the launcher of the node.

    python -m lockstep.clusters.ray.actor PID train ...     the child: `lockstep train ...`, which dies with process PID

The actor starts no threads but one that reads the child's output, and answers at once: the driver asks it for news.
"""

from __future__ import annotations

import errno
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.errors import UserError
from lockstep.launch import election
from lockstep.launch.election import Term
from lockstep.launch.job import parse_address
from lockstep.launch.wire.secret import SECRET
from lockstep.runtime.host.network import address_family, join_host_port
from lockstep.runtime.parent_death import die_with_parent

# Lines that wait for the driver, at most: a driver that does not ask must not fill the memory of the node.
MOST_LINES = 10_000

# Ray gives every actor this variable, from the CPUs that it asked for; Lockstep chooses the number of threads itself.
THREADS = "OMP_NUM_THREADS"

# The pause between two looks at the term file in the run folder.
TERM_S = 1.0


@dataclass(frozen=True)
class ActorReport:
    """What has happened since the last report: output of the launcher, and its exit code once it has ended."""

    lines: list[str]
    code: int | None
    coordinates: bool = False  # the launcher coordinates the job, or did so until its end
    ended_job: bool = False  # it has ended the job, as its coordinator: its exit code is the job's
    port_taken: bool = False  # it has ended, and another program listens where the nodes of the job were to meet


class TermWatch:
    """Finds out whether a launcher of this node coordinates the job, and whether it has ended it."""

    def __init__(self, run_dir: Path, pid: int):
        self._run_dir = run_dir
        self._pid = pid
        self._newest: Term | None = None
        self._held: Term | None = None  # the newest term, if it is this launcher's
        self._next_look = 0.0

    def coordinates(self) -> bool:
        """Return whether the newest term is this launcher's. Between two looks, the last answer."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + TERM_S
            with suppress(OSError, psutil.Error):
                newest = election.newest_term(self._run_dir)

                # The file is gone when the job has ended. Its coordinator still says goodbye to the others then.
                if newest is not None and newest != self._newest:
                    self._held = newest if _listens(self._pid, newest.address) else None
                    self._newest = newest

        return self._held is not None

    def ended_job(self) -> bool:
        """Return whether the launcher, which is gone now, has removed its term file: it stays if others take over."""
        if self._held is None:
            return False

        try:
            newest = election.newest_term(self._run_dir)
        except OSError:
            return False

        # A job that begins after this one counts its terms from 1 again.
        return newest is None or newest.number < self._held.number


def _listens(pid: int, address: str) -> bool:
    """Return whether a process listens at the port of this address. The nodes of a cluster may share a machine."""
    # Only port and process are compared: the term may name the node in another way than the socket does.
    _, port = parse_address(address)
    sockets = [at for at in psutil.net_connections("tcp") if at.pid == pid and at.status == psutil.CONN_LISTEN]
    return any(at.laddr[1:] == (port,) for at in sockets)


class NodeActor:
    """The actor on one node.

    `secret` is the job's, `environment` holds variables of the driver, and `folder` is the driver's working folder,
    None if Ray has brought its contents to this node. `marker` is a file in the run folder, which the driver has made.
    """

    def __init__(self, secret: str, environment: Mapping[str, str], folder: str | None, marker: str):
        # The secret is a variable, and not an option: all users of a machine can read the command line of a process.
        self._variables = {**environment, SECRET: secret, "PYTHONUNBUFFERED": "1"}
        self._folder = folder
        self._marker = Path(marker)

        # The launcher, what it has printed and not yet reported, and whether it coordinates.
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._reader: threading.Thread | None = None
        self._term: TermWatch | None = None

        # Where the nodes of the job meet, if that is on this node.
        self._join: tuple[str, int] | None = None

    def address(self, host: str) -> str:
        """Return where the nodes of the job can meet on this node: its address, and a port that is free now."""
        # The kernel chooses it, and it is free again when the socket closes. In the moment before the launcher listens
        # there, another program may get it: see `_port_taken`.
        with _bound(host, 0) as unused:
            port = unused.getsockname()[1]

        self._join = (host, port)
        return join_host_port(host, port)

    def start(self, words: Sequence[str]) -> None:
        """Start `lockstep` with these words. Raises a UserError if this node does not have what it needs."""
        self._check_folders()
        inherited = {name: value for name, value in os.environ.items() if name != THREADS}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "lockstep.clusters.ray.actor", str(os.getpid()), *words],
            cwd=self._folder,
            env=inherited | self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal of `ray start` is not meant for the job
        )

        self._term = TermWatch(self._marker.parent.parent, self._child.pid)
        self._reader = threading.Thread(target=self._read, args=(self._child,), daemon=True)
        self._reader.start()

    def _check_folders(self) -> None:
        """Refuse a node that does not see the driver's files. Raises a UserError."""
        here = socket.gethostname()
        if self._folder is not None and not os.path.isdir(self._folder):
            raise UserError(
                f"the folder {self._folder} of the driver is not on {here}",
                "Ray has not uploaded it, and it is not on a disk that both share",
                "submit with `ray job submit --working-dir .`, or start from a folder on a shared disk",
            )

        if not self._marker.exists():
            raise UserError(
                f"the run folder {self._marker.parent.parent} is not shared with {here}",
                "what the driver has written there cannot be seen here",
                "set run_dir to a folder that all nodes of the Ray cluster see: the checkpoints are there, and the "
                "file that says which node coordinates",
            )

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        """Keep the lines that the launcher prints. Runs in a thread."""
        assert child.stdout is not None
        for line in child.stdout:
            self._lines.append(line.decode(errors="replace").rstrip("\n"))

    def poll(self) -> ActorReport:
        """Return what has happened since the last call. `start` must have been called."""
        assert self._child is not None
        assert self._reader is not None
        assert self._term is not None

        # Asked before the exit code: a launcher that ends in between is seen as the coordinator that it was.
        coordinates = self._term.coordinates()
        code = self._child.poll()

        # The last lines may arrive a moment after the end. Not for ever: a process that the launcher has left behind
        # holds the pipe open.
        if code is not None:
            self._reader.join(2.0)

        # As many as there are now. The reader may append meanwhile, but it never makes the queue shorter.
        lines = [self._lines.popleft() for _ in range(len(self._lines))]

        if code is None:
            return ActorReport(lines, None, coordinates)

        return ActorReport(lines, code, coordinates, self._term.ended_job(), self._port_taken())

    def _port_taken(self) -> bool:
        """Return whether another program listens where the nodes were to meet. Only for a launcher that has ended."""
        if self._join is None:
            return False

        # The launcher does not say why it failed. That a port is taken shows when it is asked for.
        try:
            _bound(*self._join).close()
        except OSError as error:
            return error.errno == errno.EADDRINUSE

        return False

    def signal(self, name: str) -> None:
        """Send the launcher a signal. It passes it on to the whole job."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.Signals[name])


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises OSError."""
    return socket.create_server((host, port), family=address_family(host))


def main() -> None:
    """Become `lockstep`, with the rest of the words, as a process that the kernel kills with its parent."""
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))

    # Ray blocks SIGINT in its processes, and a child inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    sys.argv = ["lockstep", *words]
    runpy.run_module("lockstep", run_name="__main__")


if __name__ == "__main__":
    main()
