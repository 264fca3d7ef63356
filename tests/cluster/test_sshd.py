"""A real ssh: a server of the test's own on this machine, which two hosts of ssh's configuration mean."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.hosts import gone
from cluster.jobs import exact
from cluster.test_two_hosts import SLOW, SOON_S, rank_pids
from faults.torture import digests
from ports import free_port
from saved import newest_step

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """What --ssh gets, and the process of the server."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no ssh server on this machine; on Debian: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)

    port = free_port()
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "server").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile {folder}/pid\n"
    )
    (folder / "client").write_text(
        f"Host alpha beta\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/user\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "server", "-E", folder / "log"])
    yield f"ssh -F {folder}/client", server.pid
    server.kill()
    server.wait()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_hosts_over_ssh_leave_nothing_and_resume(ssh, hosts, command, tmp_path, whole):
    login, server = ssh
    run = tmp_path / "run"
    words = ["train", "char_lm", *exact(), f"run_dir={run}", "--nodes", "alpha,beta", "--nproc", "1"]
    words += ["--ssh", login, "--python", hosts.python, "--env", "OMP_NUM_THREADS=1"]
    job = command(*words, faults=(SLOW,))
    job.until(lambda: newest_step(run / "checkpoints"))
    pids = rank_pids(job)
    assert len(pids) == 2
    assert len(children_of(server)) == 2

    # SIGKILL: the command can say nothing to anybody.
    job.process.send_signal(signal.SIGKILL)
    assert job.wait() == -9
    assert gone([*pids, *children_of(server)], SOON_S) == []

    again = command(*words, "--resume", "auto")
    assert again.wait() == 0, again.text()
    assert "resumed " in again.text()
    assert digests(run) == whole
