"""The process that forks ranks, with a function of the standard library in place of the training."""

import fcntl
import os
import resource
import socket
import subprocess
import sys
import time

import pytest

from lockstep.launch import zygote as module
from lockstep.launch.zygote import Zygote

HIGH = 1100  # `select.select` takes no descriptor above 1023


@pytest.fixture
def high_descriptors(monkeypatch):
    """Sockets of the zygote get a high number, as in a launcher with many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * HIGH) if hard > 0 else 2 * HIGH, hard))
    pair = socket.socketpair

    def high_pair():
        here, there = pair()
        with there:
            return here, socket.socket(fileno=fcntl.fcntl(there, fcntl.F_DUPFD_CLOEXEC, HIGH))

    monkeypatch.setattr(module.socket, "socketpair", high_pair)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_zygote_serves_a_socket_with_a_high_number(high_descriptors, tmp_path):
    made = Zygote("json:dumps", [], os.environ)
    lifeline, end = os.pipe()
    env = {**os.environ, "RANK": "0", module.ATTEMPT_FOLDER: str(tmp_path)}
    made.fork(0, env, {}, tmp_path / "log", lifeline)
    changes: list[module.RankChange] = []
    until = time.monotonic() + 60
    while made.alive and len(changes) < 2 and time.monotonic() < until:
        changes += made.poll()
        time.sleep(0.01)
    made.close()
    os.close(lifeline)
    os.close(end)
    assert [change.code for change in changes] == [None, 0]


def test_a_process_that_is_no_rank_is_left_alone():
    """An imported module may start one, and its end must not end the zygote."""
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    rank = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"], start_new_session=True)
    for process in (other, rank):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    here, there = socket.socketpair()
    with here, there:
        children = {rank.pid: 7}
        module._reap(there, children)
        told = here.recv(4096).decode()
    assert children == {}
    assert '"rank": 7' in told
    assert '"code": 5' in told
    assert other.wait() == 3  # its own status was not taken
    rank.returncode = 5  # reaped above
