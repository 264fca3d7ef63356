"""What runs on a host that `lockstep launch nodes` has logged in to: the launcher of that host, on a tether.

Standard input is the tether. It carries requests, one line of JSON each. It is broken when it ends, because the command
that logged in has ended, or when nothing has come for `SILENCE_S`, because a machine or the network is lost: then the
launcher here saves and stops, and is killed if that takes too long. If enough other hosts are left for the job, it is
killed at once, and the job goes on without it. Answers are lines of standard output that begin with `ANSWER_PREFIX`;
all other lines are output of the job. `tether_messages.py` lists the requests and the answers.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lockstep import targets
from lockstep.clusters.tether_messages import (
    ANSWER_PREFIX,
    Answer,
    Beat,
    Ended,
    HostFacts,
    HostProblem,
    Listen,
    Listening,
    Look,
    PassSignal,
    Request,
    StartTraining,
    Tried,
    TryOut,
    decode_request,
    encode,
)
from lockstep.errors import ExitCode, Preempted, UserError, printable
from lockstep.launch.wire.sockets import LineReader, wait_readable
from lockstep.runtime.host.network import address_family, addresses_of_interfaces
from lockstep.runtime.preemption import PREEMPT_SIGNALS, signal_handler

# How often the command that logged in says that it lives, and the silence after which a tether counts as broken.
BEAT_S = 5.0
SILENCE_S = 20.0

# How long the launcher may take to save once its tether has broken. Together with the time that the kernel needs to
# end the processes this stays below ten seconds.
SAVE_S = 8.0

# How long a tether that has broken looks whether those of other hosts have broken as well.
OTHERS_S = 2.0

# How long a new login waits for the launcher of an older one, which may not have noticed yet that its tether is broken.
PREDECESSOR_S = SILENCE_S + SAVE_S + 7.0

# Ports that the system gives to no outgoing connection by itself, so that a port that is free now is free later.
PORTS = range(20_000, 32_000)


# ---- requests ----


def look(request: Look) -> HostFacts:
    """Return what this host has and knows."""
    # The address at which sshd accepted the connection comes third: CLIENT PORT SERVER PORT.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    missing = [file for file in request.files if not Path(file).is_file()]
    return HostFacts(
        name=socket.gethostname(),
        program={} if missing else targets.program_of(request.target),
        addresses=[address for addresses in addresses_of_interfaces().values() for address in addresses],
        resolved={host: _addresses_of(host) for host in request.hosts},
        reached_at=connection[2] if len(connection) == 4 else "",
        missing=missing,
    )


def _addresses_of(host: str) -> list[str]:
    """Return the addresses of a host as this machine knows it; none if it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []

    return list(dict.fromkeys(str(info[4][0]) for info in found))


def listen(request: Listen) -> socket.socket:
    """Write the file for the other hosts, and listen where they are to meet. Raises OSError."""
    Path(request.mark).parent.mkdir(parents=True, exist_ok=True)
    Path(request.mark).touch()

    address, family = request.address, address_family(request.address)
    asked = [request.port] if request.port else random.SystemRandom().sample(PORTS, 100)

    # A random port may be taken. The error of the last one is raised.
    for candidate in asked[:-1]:
        try:
            return socket.create_server((address, candidate), family=family)
        except OSError:
            continue

    return socket.create_server((address, asked[-1]), family=family)


def try_out(request: TryOut) -> str:
    """Return what keeps this host from joining the first one, or "" if nothing does."""
    try:
        socket.create_connection((request.address, request.port), 5.0).close()
    except OSError as error:
        return f"it cannot connect to {request.address} port {request.port}: {error.strerror or error}"

    # A network file system may take a moment to show a new file.
    deadline = time.monotonic() + 5.0
    while not Path(request.mark).exists():
        if time.monotonic() > deadline:
            return f"it does not see {request.mark}, which the first host has written"

        time.sleep(0.1)

    return ""


def train(job: StartTraining) -> int:
    """Run this host's launcher until the job ends. Return its exit code."""
    from lockstep import api
    from lockstep.config import read_layers

    # Variables of the machine on which the command was typed.
    os.environ.update(job.env)
    try:
        layers = read_layers(job.config_files, job.overrides)
        if job.resume is not None:
            layers.append(("--resume", {"resume": job.resume}))

        return api.train(
            job.target, layers, lambda run_dir: job.resume_command, job.nproc, job.nnodes, job.join, job.arguments
        )
    except UserError as error:
        print(printable(f"lockstep: {error}"), file=sys.stderr)
        return error.exit_code
    except Preempted as stopped:
        print(f"lockstep: {stopped.signal}: ended before the job had begun", file=sys.stderr)
        return Preempted.code_of(stopped.signal)


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal that arrives while the launcher, which handles signals in its own way, is not there yet."""
    raise Preempted(0, signal.Signals(number).name, None)


# ---- one launcher on each host ----


class Presence:
    """A file in the run folder for each host: locked by its launcher, with a word in it when it leaves the job.

    Hosts whose tethers break at the same time must find out whether enough others stay. They have no connection to each
    other, but they see the same run folder.
    """

    def __init__(self, job: StartTraining):
        self._job = job
        self._file = -1

    def _path(self, place: int) -> Path:
        """Return the file of a host."""
        return Path(self._job.run_dir) / f".tether-{place}"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait until no older launcher of this host is left. Raises a UserError if one stays."""
        path = self._path(self._job.place)
        path.parent.mkdir(parents=True, exist_ok=True)

        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + PREDECESSOR_S

        try:
            while not self._lock():
                if time.monotonic() > deadline:
                    raise UserError(
                        f"a launcher of an earlier command still runs on {socket.gethostname()}",
                        f"it holds {path}",
                        "end it, or use another run_dir",
                    )

                time.sleep(0.1)

            os.ftruncate(self._file, 0)
            try:
                yield
            finally:
                self.say("ended")
        finally:
            os.close(self._file)

    def _lock(self) -> bool:
        """Try to lock this host's file. The kernel frees the lock when the launcher ends, however it ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False

        return True

    def say(self, word: str) -> None:
        """Write a word that says why this host leaves. Other hosts read it, so it must reach the disk."""
        # If it cannot be written, the others take this for a host that stays.
        with suppress(OSError):
            os.write(self._file, f"{word}\n".encode())
            os.fsync(self._file)

    def leaves(self, place: int) -> bool:
        """Return whether a host has said that it leaves the job."""
        # The file is opened each time, because a network file system looks for news only then.
        try:
            return self._path(place).read_bytes() != b""
        except OSError:
            return False


# ---- the tether ----


class Tether:
    """The other end of a login: answers requests until the job starts, and then runs this host's launcher.

    Requests come on standard input. When it ends, or is silent for SILENCE_S, the tether is broken.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._shared_file: Path | None = None  # the file that this host has written for the others to see
        self._made_folder = False  # whether the run folder was made for that file
        self._connected: list[int] = []  # the hosts to which the other side has logins

        self._input = os.dup(0)
        self._requests = self._read()

        # Nothing else reads from the tether.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def _read(self) -> Iterator[Request]:
        """Yield the requests, without the beats, until the tether is broken."""
        # An error is the end as well, of a terminal for example.
        lines = LineReader(self._input)
        while not lines.ended and wait_readable([self._input], SILENCE_S):
            for line in lines.read():
                request = decode_request(line)
                if isinstance(request, Beat):
                    self._connected = request.connected
                else:
                    yield request

    def serve(self) -> int:
        """Answer requests until one of them starts the job; then train. Return the exit code."""
        try:
            for request in self._requests:
                if isinstance(request, StartTraining):
                    self._stop_listening()
                    return self._start(request)

                try:
                    answer(self._answer(request))
                except OSError as error:
                    answer(HostProblem(error.strerror or str(error)))
        finally:
            self._stop_listening()

        # The other side has ended before the job began.
        if self._made_folder and self._shared_file is not None:
            with suppress(OSError):  # it is not empty
                self._shared_file.parent.rmdir()

        return ExitCode.RESTART

    def _answer(self, request: Request) -> Answer:
        """Carry out a request that comes before the start, and return the answer to send."""
        match request:
            case Look():
                return look(request)

            case Listen():
                self._shared_file = Path(request.mark)
                self._made_folder = not self._shared_file.parent.exists()
                self._listener = listen(request)
                return Listening(self._listener.getsockname()[1])

            case TryOut():
                return Tried(try_out(request))

            case _:
                return HostProblem(f"{type(request).__name__} before the start of the job")

    def _stop_listening(self) -> None:
        """Close the listener, and remove the file that other hosts looked for."""
        # The launcher binds this port itself. Connections that were tried do not keep it from that.
        if self._listener is not None:
            self._listener.close()

        if self._shared_file is not None:
            with suppress(OSError):
                self._shared_file.unlink(missing_ok=True)

    def _start(self, job: StartTraining) -> int:
        """Run the launcher of this host, while a thread watches the tether. Return an exit code."""
        presence = Presence(job)
        try:
            with presence.hold(), signal_handler(_stop, PREEMPT_SIGNALS):
                threading.Thread(target=self._watch, args=[presence, job], daemon=True, name="lockstep-tether").start()
                code = train(job)
                answer(Ended(code))
                return code
        except UserError as error:
            print(printable(f"lockstep: {error}"), file=sys.stderr)
        except OSError as error:
            print(printable(f"lockstep: {job.run_dir} cannot be used: {error}"), file=sys.stderr)

        # Another login, later, may find the older launcher gone.
        if not job.again:
            answer(Ended(ExitCode.REFUSED))

        return ExitCode.RESTART

    def _watch(self, presence: Presence, job: StartTraining) -> None:
        """Pass signals on to the launcher; when the tether breaks, leave the job. Runs in a thread."""
        for request in self._requests:
            if isinstance(request, PassSignal):
                os.kill(os.getpid(), signal.Signals[request.name])

        break_off(presence, job, self._connected)


def break_off(presence: Presence, job: StartTraining, connected: list[int]) -> NoReturn:
    """End the launcher, because the login is gone: after `SAVE_S` in any case.

    If too few hosts are left for the job, or none because the command that logged in is gone, the job saves and stops.
    Otherwise only this host leaves it, as if the machine were lost: a launcher that stops in order stops all of them.
    """
    # Its ranks end with it (`launch/ranks/rank_process.py`). The file system may be as silent as the tether, so this
    # does not wait for it.
    end = threading.Timer(SAVE_S, os.kill, [os.getpid(), signal.SIGKILL])
    end.daemon = True
    end.start()

    # What it prints is lost, too: a broken pipe must not end it before it has saved.
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)

    if others_go_on(presence, job, connected):
        os.kill(os.getpid(), signal.SIGKILL)

    os.kill(os.getpid(), signal.SIGTERM)
    end.join()
    raise AssertionError("killed")


def others_go_on(presence: Presence, job: StartTraining, connected: list[int]) -> bool:
    """Return whether enough hosts stay in the job, once all have had time to notice that their tethers are broken."""
    presence.say("broken")
    deadline = time.monotonic() + OTHERS_S
    others = [place for place in connected if place != job.place]

    while len([place for place in others if not presence.leaves(place)]) >= job.least:
        if time.monotonic() > deadline:
            return True

        time.sleep(0.05)

    return False


def answer(message: Answer) -> None:
    """Send an answer to the other side of the login."""
    # The reader looks for the mark inside lines as well: the job may have printed half a line before.
    print(f"{ANSWER_PREFIX}{encode(message)}", flush=True)


if __name__ == "__main__":
    sys.exit(Tether().serve())
