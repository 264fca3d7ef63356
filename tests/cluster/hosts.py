"""Hosts on one machine: each has its own network namespace, name and address, on one bridge. Needs root and iproute2.

    lab = Lab(2)                            host1 is 10.77.0.1, host2 is 10.77.0.2
    lab.words(1, "lockstep", "train", ...)  the same command, on host1
    lab.cut(2), lab.heal(2)                 host2 has no network, and has it again
    lab.close()                             kills what runs there and removes everything

As a program it is what ssh is: `hosts.py PREFIX HOST COMMAND` runs a shell command on that host.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve()
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

# In the environment of a preloaded command: the host on which it runs (tests/preloaded.py).
HOST = "LOCKSTEP_TEST_HOST"


def address(host: int) -> str:
    return f"10.77.0.{host}"


class Lab:
    """A few hosts. Several labs may exist at once: their bridges do not know of each other."""

    def __init__(self, count: int):
        self.prefix = f"lk{secrets.token_hex(2)}"
        self._bridge = f"{self.prefix}br"
        self.count = count
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for host in range(1, count + 1):
                self._add(host)
        except BaseException:
            self.close()
            raise

    def _add(self, host: int) -> None:
        name, veth = self.space(host), f"{self.prefix}v{host}"
        _ip("netns", "add", name)
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{address(number)} host{number}\n" for number in range(1, self.count + 1))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        _ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", veth, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def space(self, host: int) -> str:
        """The name of its network namespace."""
        return f"{self.prefix}h{host}"

    @property
    def ssh(self) -> str:
        """For --ssh."""
        return f"{sys.executable} -S -E {HERE} {self.prefix}"

    def environment(self, host: int) -> dict[str, str]:
        """For a preloaded command on this host."""
        return {HOST: f"{self.prefix} {host}"}

    def words(self, host: int, *command: str) -> list[str]:
        return [sys.executable, "-S", "-E", str(HERE), self.prefix, f"host{host}", "--", *command]

    def cut(self, host: int) -> None:
        _ip("link", "set", f"{self.prefix}v{host}", "down")

    def heal(self, host: int) -> None:
        _ip("link", "set", f"{self.prefix}v{host}", "up")

    def processes(self, host: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.space(host)], capture_output=True, text=True, check=False)
        return [int(word) for word in found.stdout.split()]

    def close(self) -> None:
        for host in range(1, self.count + 1):
            for pid in self.processes(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self.space(host)], stderr=subprocess.DEVNULL, check=False)
            folder = Path("/etc/netns") / self.space(host)
            for file in folder.glob("*"):
                file.unlink()
            with suppress(OSError):
                folder.rmdir()
        subprocess.run(["ip", "link", "del", self._bridge], stderr=subprocess.DEVNULL, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@cache
def why_not() -> str:
    """Why there can be no hosts on this machine; empty if there can."""
    try:
        Lab(1).close()
    except OSError as error:
        return str(error)
    return ""


# ---- on a host --------------------------------------------------------------------------------------------


def enter(prefix: str, host: int) -> None:
    """Move this process to a host: its network, its name, and the names that it knows."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = f"{prefix}h{host}"

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with open(f"/run/netns/{space}") as file:
        check(libc.setns(file.fileno(), CLONE_NEWNET))
    if os.uname().nodename == f"host{host}":
        return  # a child of a process that is there already

    check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
    check(libc.sethostname(f"host{host}".encode(), len(f"host{host}")))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    for name in ("hosts", "nsswitch.conf"):
        check(libc.mount(f"/etc/netns/{space}/{name}".encode(), f"/etc/{name}".encode(), None, MS_BIND, None))


def main(prefix: str, host: str, *command: str) -> None:
    # host2, or its address in either network.
    host_number = re.fullmatch(r"(?:host|10\.7[78]\.0\.)(\d+)", host)
    if host_number is None or not Path(f"/run/netns/{prefix}h{host_number[1]}").exists():
        print(f"ssh: Could not resolve hostname {host}: Name or service not known", file=sys.stderr)
        sys.exit(255)

    number = int(host_number[1])
    enter(prefix, number)
    os.environ[HOST] = f"{prefix} {number}"
    os.environ["SSH_CONNECTION"] = f"10.77.0.254 40000 {address(number)} 22"
    if command[0] == "--":
        os.execvp(command[1], command[1:])
    os.execvp("sh", ["sh", "-c", " ".join(command)])


def gone(pids: list[int], seconds: float) -> list[int]:
    """Wait until these processes are gone; return those that are not."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
