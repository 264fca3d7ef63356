"""What runs on a host that `lockstep launch nodes` has logged in to: the launcher of that host, on a tether.

Standard input is the tether. It carries requests, one line of JSON each, and ends when the command that logged in has
ended, whatever ended it: then the launcher here saves and stops, and is killed if that takes too long. Answers are
lines of standard output that begin with `MARK`; all other lines are output of the job.

    {"look": ...}       what is here: versions, addresses, files; the answer holds `Facts`
    {"listen": ...}     on the first host: choose the port where the hosts meet, and listen there until the start
    {"try": ...}        on the others: can this host reach that port, and does it see the run folder of the first host
    {"start": ...}      train; the answer, when the job has ended, is its exit code
    {"signal": ...}     the job shall save and stop, as if this launcher had received the signal
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lockstep import targets
from lockstep.errors import ExitCode, UserError, printable
from lockstep.runtime.machine import addresses_of_interfaces

# No text of a job begins a line like this: U+001E is a separator of records.
MARK = "\x1elockstep "

# How long the launcher may take to save once its tether has broken. Together with the time that the kernel needs to
# end the processes this stays below ten seconds.
SAVE_S = 8.0

# How long another host may take to reach the first one, and to see a file that the first host has just written.
REACH_S = 5.0
SEE_S = 5.0

# Ports that the system gives to no outgoing connection by itself, so that a port that is free now is free later.
PORTS = range(20_000, 32_000)


@dataclass(frozen=True)
class Facts:
    """What a host says about itself."""

    name: str
    program: dict[str, str]  # versions and digests, see `targets.program_of`
    addresses: list[str]  # of its own interfaces
    resolved: dict[str, list[str]]  # the addresses of the other hosts, as this one knows their names
    reached_at: str = ""  # the address at which the login arrived, if it came over ssh
    missing: list[str] = field(default_factory=list)  # files of the job that are not here


@dataclass(frozen=True)
class Training:
    """The job of one host, in the words of `lockstep train`."""

    target: str
    overrides: list[str]
    config_files: list[str]
    arguments: list[str]
    nproc: str
    nnodes: str
    join: str
    resume: str | None
    resume_command: str
    env: dict[str, str]


# ---- requests ----


def look(target: str, hosts: Iterable[str], files: Iterable[str]) -> Facts:
    """Return what this host has and knows."""
    # The address at which sshd accepted the connection comes third: CLIENT PORT SERVER PORT.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    missing = [file for file in files if not Path(file).is_file()]
    return Facts(
        name=socket.gethostname(),
        program={} if missing else targets.program_of(target),
        addresses=[address for addresses in addresses_of_interfaces().values() for address in addresses],
        resolved={host: _addresses_of(host) for host in hosts},
        reached_at=connection[2] if len(connection) == 4 else "",
        missing=missing,
    )


def _addresses_of(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []

    return list(dict.fromkeys(str(info[4][0]) for info in found))


def listen(address: str, port: int, mark: str) -> socket.socket:
    """Write the file `mark` into the run folder, and listen at `port`, or at a free one if it is 0. Raises OSError."""
    Path(mark).parent.mkdir(parents=True, exist_ok=True)
    Path(mark).touch()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    asked = [port] if port else random.SystemRandom().sample(PORTS, 100)
    for candidate in asked[:-1]:
        try:
            return socket.create_server((address, candidate), family=family)
        except OSError:
            continue

    return socket.create_server((address, asked[-1]), family=family)


def try_out(address: str, port: int, mark: str) -> str:
    """Return what keeps this host from joining the first one, or "" if nothing does."""
    try:
        socket.create_connection((address, port), REACH_S).close()
    except OSError as error:
        return f"it cannot connect to {address} port {port}: {error.strerror or error}"

    # A network file system may take a moment to show a new file.
    deadline = time.monotonic() + SEE_S
    while not Path(mark).exists():
        if time.monotonic() > deadline:
            return f"it does not see {mark}, which the first host has written"
        time.sleep(0.1)

    return ""


def train(job: Training) -> int:
    """Run this host's launcher until the job ends. Returns its exit code."""
    from lockstep import api
    from lockstep.config import read_layers

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
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


# ---- the tether ----


class Tether:
    """The requests that arrive, while the job runs and before."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._mark: Path | None = None  # the file that this host has written for the others to see
        self._lines = os.fdopen(os.dup(0), "r", encoding="utf-8", errors="replace")

        # Nothing else reads from the tether.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def serve(self) -> int:
        """Answer until the job shall start; then train. Returns the exit code."""
        for line in self._lines:
            request = json.loads(line)
            if "start" in request:
                return self._start(Training(**request["start"]))

            try:
                answer(self._answer(request))
            except OSError as error:
                answer({"problem": error.strerror or str(error)})

        return ExitCode.RESTART  # the other side has ended before the job began

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "look" in request:
            return {"facts": asdict(look(**request["look"]))}
        if "listen" in request:
            self._mark = Path(request["listen"]["mark"])
            self._listener = listen(**request["listen"])
            return {"port": self._listener.getsockname()[1]}

        return {"tried": try_out(**request["try"])}

    def _start(self, job: Training) -> int:
        # The launcher binds this port itself. Connections that were tried do not keep it from that.
        if self._listener is not None:
            self._listener.close()
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)

        threading.Thread(target=self._watch, daemon=True, name="lockstep-tether").start()
        code = train(job)
        answer({"ended": code})
        return code

    def _watch(self) -> None:
        for line in self._lines:
            request = json.loads(line)
            if "signal" in request:
                os.kill(os.getpid(), signal.Signals[request["signal"]])

        break_off()


def break_off() -> NoReturn:
    """Have the launcher save and stop, because nobody is there any more; end it after `SAVE_S` in any case."""
    # Nobody reads what it prints, either: a broken pipe must not end it before it has saved.
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)

    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)

    # Its ranks end with it (`launch/rank_process.py`).
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def answer(values: dict[str, Any]) -> None:
    # Whoever reads it finds the mark in the middle of a line, too: the job may have printed half a line before.
    print(f"{MARK}{json.dumps(values)}", flush=True)


if __name__ == "__main__":
    sys.exit(Tether().serve())
