"""The hosts of `lockstep launch nodes`: how they are written, and a login to one of them.

A login is a process of ssh that runs `clusters/tether.py` on the other side. Requests go to its standard input, one
JSON object a line; lines and answers come back as events, from all hosts in one queue (`clusters/logins.py`).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from queue import Queue
from typing import IO

from lockstep.clusters.tether_messages import ANSWER_PREFIX, Answer, Request, decode_answer, encode
from lockstep.errors import UserError
from lockstep.runtime.host.network import addresses_of_interfaces

# Options of ssh: never ask for a password, and notice within fifteen seconds that the other side is gone.
SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")

# A line of a hostfile: HOST, HOST:4 or HOST slots=4, then other words that MPI knows.
_LINE = re.compile(r"(?P<host>[^\s:=]+|\[[0-9A-Fa-f:.]+\])(?::(?P<count>\d+))?(?P<rest>(\s+[\w-]+=\S+)*)", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A host as it was typed."""

    login: str  # HOST or USER@HOST
    slots: int | None = None  # the most processes that the hostfile allows

    @property
    def name(self) -> str:
        """The host without the user: what other hosts look up."""
        return self.login.rpartition("@")[2].strip("[]")

    @property
    def ssh_login(self) -> str:
        """What ssh gets: it takes an IPv6 address without brackets."""
        user, at, _ = self.login.rpartition("@")
        return f"{user}{at}{self.name}"

    def is_here(self) -> bool:
        """Return whether this is the machine on which this process runs."""
        # Names first: a name server may take seconds to answer, or know nothing.
        if self.name in (socket.gethostname(), socket.getfqdn()):
            return True

        own = {address for addresses in addresses_of_interfaces().values() for address in addresses}
        with suppress(OSError):
            found = [str(info[4][0]) for info in socket.getaddrinfo(self.name, 0, type=socket.SOCK_STREAM)]
            return any(address in own or ip_address(address).is_loopback for address in found)

        return False


def parse_hosts(asked: str | None, hostfile: str | None) -> list[Host]:
    """Return the hosts of `--hosts a,b`, or of a hostfile. Raises a UserError."""
    if (asked is None) == (hostfile is None):
        raise UserError(
            "the hosts of the job are not clear",
            "both a list and a hostfile" if asked else "neither a list nor a hostfile",
            "use --nodes host1,host2; or --hostfile FILE, with a host on each line",
        )

    if hostfile:
        hosts = read_hostfile(Path(hostfile))
    else:
        hosts = [Host(word.strip()) for word in (asked or "").split(",")]

    # A comma too many is not an error.
    hosts = [host for host in hosts if host.login]
    for host in hosts:
        # A login that begins with a dash would be an option of ssh.
        if host.login.startswith("-") or re.search(r"\s", host.login):
            raise UserError(f"{host.login!r} is not a host", "", "use names or addresses with commas between them")

    # A host runs one launcher, so it can be there once.
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice or not hosts:
        raise UserError(
            f"the host {twice} is named twice" if twice else "the list of hosts is empty",
            f"the hosts are {', '.join(names)}" if twice else "",
            "name each host once; --nproc is the number of processes on each of them",
        )

    return hosts


def read_hostfile(path: Path) -> list[Host]:
    """Read a file with one host on each line, as MPI's: `host1 slots=4`, comments after #."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(
            f"the hostfile {path} cannot be read", error.strerror or str(error), "use a file with a host on each line"
        ) from None

    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = _LINE.fullmatch(text)
        if text and match is None:
            raise UserError(
                f"{path}, line {number}, is not a host: {text}", "", "write a host on each line, as in: host1 slots=4"
            )

        if match is not None:
            # MPI knows more options; only the number of processes matters here.
            options = dict(word.split("=", 1) for word in match["rest"].split())
            slots = match["count"] or options.get("slots")
            if slots is not None and not (slots.isdigit() and int(slots)):
                raise UserError(f"{path}, line {number}: slots={slots} is not a number", "", "use slots=4, say")

            hosts.append(Host(match["host"], int(slots) if slots else None))

    return hosts


# ---- a login ----


@dataclass(frozen=True)
class Event:
    """Something that came from a host: a line that it printed, an answer, or the end of the login."""

    host: int  # its place in the list
    login: int  # which login, counted from 1: a host that was lost is logged in to again
    line: str | None = None
    is_error: bool = False  # a line of standard error
    answer: Answer | None = None
    code: int | None = None  # the login's exit code: nothing follows


class Login:
    """One login: a process of ssh, or of Python if the host is this machine, whose standard input is the tether.

    place    of the host in the list
    number   of this login to the host, from 1
    words    the command that starts it
    events   gets what comes from the other side
    """

    def __init__(self, host: Host, place: int, number: int, words: list[str], events: Queue[Event]):
        self.host = host
        self.number = number
        self._place = place
        self._events = events

        # The newest lines of standard error say best why a login fails.
        self.last_errors: deque[str] = deque(maxlen=3)
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the command that logs in, which passes it on in order
        )

        threading.Thread(target=self._read_all, daemon=True).start()

    def send(self, request: Request) -> None:
        """Send a request. If the other side is gone, its end is reported as an event."""
        assert self.process.stdin is not None

        # A ValueError says that `hang_up` has closed it.
        with suppress(OSError, ValueError):
            self.process.stdin.write(encode(request).encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """End the tether: the other side stops its job if it has one, and ends."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def kill(self) -> None:
        """End our side at once, with everything that ssh has started for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read_all(self) -> None:
        """Read both streams to their ends, and report the login's exit code after the last line."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None

        errors = threading.Thread(target=self._read, args=[self.process.stderr, True], daemon=True)
        errors.start()

        self._read(self.process.stdout, False)

        # The end must be the last event.
        errors.join()
        self._events.put(Event(self._place, self.number, code=self.process.wait()))

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        """Turn the lines of a stream into events. A line may hold text of the job, and then an answer."""
        for data in stream:
            line, prefix, answer = data.decode(errors="replace").rstrip("\n").partition(ANSWER_PREFIX)
            if prefix:
                self._events.put(Event(self._place, self.number, answer=decode_answer(answer)))

            # An answer alone has no text before it; an empty line of the job is a line.
            if line or not prefix:
                if is_error:
                    self.last_errors.append(line)

                self._events.put(Event(self._place, self.number, line, is_error))


def split_ssh(ssh: str) -> list[str]:
    """Return the words of --ssh. Raises a UserError."""
    try:
        words = shlex.split(ssh)
        found = "no words"
    except ValueError as error:
        words = []
        found = str(error)

    if not words:
        raise UserError(f"--ssh {ssh!r} is not a command", found, 'use --ssh "ssh -p 2222", say, or leave it out')

    return words


def login_words(host: Host, ssh: str, folder: str, python: str) -> list[str]:
    """Return the command that starts the tether on a host."""
    # -P: a folder in which the command was typed must not hide modules of Python.
    module = [python, "-P", "-m", "lockstep.clusters.tether"]
    if host.is_here():
        return module

    # Another program than ssh, such as a script around it, has options of its own.
    program = split_ssh(ssh)
    if Path(program[0]).name == "ssh":
        program += [word for option in SSH_OPTIONS for word in ("-o", option)] + ["-T"]

    # The other side's Python must find the package where this one does.
    path = os.environ.get("PYTHONPATH")
    words = ["env", f"PYTHONPATH={path}", *module] if path else module
    return [*program, host.ssh_login, f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"]
