"""The process that forks ranks, with a function of the standard library in place of the training."""

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch.failure import Failure
from lockstep.launch.ranks import rank_record, zygote, zygote_client
from lockstep.launch.ranks.zygote import RankChange, Zygote
from lockstep.launch.ranks.zygote_client import ZygoteClient
from lockstep.launch.wire.sockets import wait_readable

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

    monkeypatch.setattr(zygote_client.socket, "socketpair", high_pair)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def forked(
    ranks: int, folder: Path, preload: tuple[str, ...] = (), **env: str
) -> tuple[list[RankChange], Failure | None]:
    """Fork ranks that do nothing. Return what their zygote reports until all have ended, and the first record."""
    client = ZygoteClient("json:dumps", preload, os.environ | env)
    lifeline, end = os.pipe()
    for rank in range(ranks):
        own = {"RANK": str(rank), zygote.ATTEMPT_FOLDER: str(folder)}
        client.fork(rank, client.env | own, {}, folder / f"log-{rank}", lifeline)
    changes: list[RankChange] = []
    until = time.monotonic() + 60
    while client.alive and sum(change.is_exit for change in changes) < ranks and time.monotonic() < until:
        changes += client.poll()
        time.sleep(0.01)
    alive = client.alive
    failure = rank_record.root_failure(folder)
    client.close()
    os.close(lifeline)
    os.close(end)
    assert alive
    return changes, failure


def test_a_zygote_serves_a_socket_with_a_high_number(high_descriptors, tmp_path):
    changes, _ = forked(1, tmp_path)
    assert [change.code for change in changes] == [None, 0]


# A module whose import makes the system refuse as many forks as REFUSED says, and notes when it was asked.
REFUSES = """
import errno, os, time
left, fork = int(os.environ["REFUSED"]), os.fork

def refuse():
    global left
    left -= 1
    with open(os.environ["ASKED"], "a") as file:
        print(time.monotonic(), file=file)
    if left >= 0:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = refuse
"""


@pytest.fixture
def refuses(tmp_path):
    (tmp_path / "refuses_forks.py").write_text(REFUSES)
    folder = tmp_path / "attempt"
    folder.mkdir()
    env = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "ASKED": str(tmp_path / "asked")}
    return {"folder": folder, "preload": ("refuses_forks",), **env}


def test_a_fork_that_the_system_refuses_for_a_moment_is_tried_again(refuses):
    changes, failure = forked(1, **refuses, REFUSED="2")
    assert [change.code for change in changes] == [None, 0]
    assert failure is None


def test_a_rank_that_the_system_refuses_has_a_record_and_its_zygote_lives(refuses):
    changes, failure = forked(3, **refuses, REFUSED="1000")
    assert changes == [RankChange(0, rank, None, 1) for rank in range(3)]
    # It waits for the first rank only: the last try for that one, and one for each of the others.
    asked = [float(line) for line in Path(refuses["ASKED"]).read_text().split()]
    assert len(asked) > 3
    assert sum(when > asked[0] + zygote.FORK_S for when in asked) <= 3
    assert failure is not None
    assert (failure.rank, failure.kind, failure.origin) == (0, "fork", "launcher")
    assert "refused to fork its process: Resource temporarily unavailable (see the limits" in failure.message


def test_all_ranks_are_killed_before_the_first_is_waited_for(monkeypatch):
    """One that cannot die must not keep the others alive."""
    calls = []
    monkeypatch.setattr(zygote, "kill_process_group", lambda pid: calls.append(("kill", pid)))
    monkeypatch.setattr(zygote.os, "waitpid", lambda pid, options: calls.append(("wait", pid)))
    here, there = socket.socketpair()
    with here, there:
        server = Zygote(there, dict)
        server._children = {11: (0, 0), 12: (0, 1)}
        server.clean_up()
    assert calls == [("kill", 11), ("kill", 12), ("wait", 11), ("wait", 12)]
    os.close(server._woken)
    os.close(server._bell)


def test_a_process_that_is_no_rank_is_left_alone():
    """An imported module may start one, and its end must not end the zygote."""
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    rank = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"], start_new_session=True)
    for process in (other, rank):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    here, there = socket.socketpair()
    with here, there:
        server = Zygote(there, dict)
        server._children[rank.pid] = 2, 7
        server._reap()
        told = here.recv(4096).decode()
    assert server._children == {}
    assert '"attempt": 2, "rank": 7' in told
    assert '"code": 5' in told
    assert other.wait() == 3  # its own status was not taken
    rank.returncode = 5  # reaped above
    os.close(server._woken)
    os.close(server._bell)


CLOSED_TERMINAL = """
import os
from lockstep.launch.ranks import zygote

reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
lifeline, end = os.pipe()
parent = os.getpid()
pid = os.fork()
if pid == 0:
    request = {"env": {}, "log": None, "spec": {}}  # without a rank
    try:
        zygote._become_rank(request, [lifeline], print, [], parent)
    finally:
        os._exit(77)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_rank_whose_error_cannot_be_printed_does_not_become_a_second_zygote():
    """It returned into the loop of the zygote, whose end kills all other ranks."""
    result = subprocess.run([sys.executable, "-c", CLOSED_TERMINAL], capture_output=True, text=True, check=False)
    assert result.stdout == "1\n"


# ---- a zygote that the system refuses, or that is slow ----


@pytest.fixture
def refused(monkeypatch):
    """The system refuses processes as long as the list that this returns is not empty."""
    refuses, start = ["for now"], subprocess.Popen

    def popen(*arguments, **options):
        if refuses:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*arguments, **options)

    monkeypatch.setattr(zygote_client.subprocess, "Popen", popen)
    monkeypatch.setattr(zygote_client, "START_RETRY_S", 0.01)
    return refuses


def test_a_zygote_that_the_system_refuses_is_tried_again_and_requests_wait(refused, tmp_path):
    client = ZygoteClient("json:dumps", (), os.environ, patience=60.0)
    lifeline, end = os.pipe()
    client.fork(0, client.env | {"RANK": "0", zygote.ATTEMPT_FOLDER: str(tmp_path)}, {}, tmp_path / "log", lifeline)
    assert client.poll() == []
    assert (client.alive, client.pid, client.sockets) == (True, None, [])

    refused.clear()
    changes: list[RankChange] = []
    until = time.monotonic() + 60
    while not any(change.is_exit for change in changes) and time.monotonic() < until:
        changes += client.poll()
        time.sleep(0.01)
    client.close()
    os.close(lifeline)
    os.close(end)
    assert [change.code for change in changes] == [None, 0]


def test_a_zygote_that_the_system_refuses_for_long_has_ended(refused):
    client = ZygoteClient("json:dumps", (), {}, patience=0.05)
    time.sleep(0.1)
    assert client.poll() == []
    client.close()
    assert (client.alive, client.cannot_import) == (False, False)
    assert client.how_it_ended == "could not be started within 0 s: Resource temporarily unavailable"


def test_without_patience_the_refusal_is_raised(refused):
    with pytest.raises(BlockingIOError):
        ZygoteClient("json:dumps", (), {})


def test_a_zygote_that_answers_slowly_is_not_killed_for_it(refuses, monkeypatch):
    """Only the time without any answer counts, not that since the first of many requests."""
    monkeypatch.setattr(zygote_client, "ANSWER_S", 1.0)
    (Path(refuses["PYTHONPATH"].split(":")[0]) / "slow_forks.py").write_text(SLOW)
    refuses["preload"] = ("slow_forks",)
    changes, _ = forked(5, **refuses)
    assert len(changes) == 10


# A module whose import makes each fork take a while.
SLOW = """
import os, time
fork = os.fork

def slowly():
    time.sleep(0.4)
    return fork()

os.fork = slowly
"""


def test_a_zygote_that_has_answered_a_halted_launcher_is_not_killed(tmp_path):
    """Both were suspended for longer than an answer may take: the answer had come, and the zygote was killed."""
    client = ZygoteClient("json:dumps", (), os.environ)
    lifeline, end = os.pipe()
    until = time.monotonic() + 60
    while not client.ready and time.monotonic() < until:
        client.poll()
        time.sleep(0.01)
    client.fork(0, client.env | {"RANK": "0", zygote.ATTEMPT_FOLDER: str(tmp_path)}, {}, tmp_path / "log", lifeline)
    assert wait_readable(client.sockets, 60.0)
    client._since -= zygote_client.ANSWER_S + 1.0  # in which the launcher was halted
    changes = client.poll()
    alive = client.alive
    client.close()
    os.close(lifeline)
    os.close(end)
    assert (alive, [change.rank for change in changes][:1]) == (True, [0])


def test_a_suspended_zygote_that_takes_no_requests_is_given_up_in_time(monkeypatch, tmp_path):
    monkeypatch.setattr(zygote_client, "HELD_UP_S", 0.1)
    client = ZygoteClient("json:dumps", (), os.environ)
    until = time.monotonic() + 60
    while not client.ready and time.monotonic() < until:
        client.poll()
        time.sleep(0.01)
    os.kill(client.pid, signal.SIGSTOP)
    lifeline, end = os.pipe()
    began = time.monotonic()
    while client.alive and time.monotonic() < began + 60:
        client.fork(0, {"RANK": "0", zygote.ATTEMPT_FOLDER: str(tmp_path)}, {"long": "x" * 100_000}, None, lifeline)
    assert time.monotonic() - began < 10
    assert not client.alive
    client.close()
    assert client.how_it_ended == "did not take a request within 0 s"
    os.close(lifeline)
    os.close(end)


@pytest.fixture
def ready():
    """A zygote whose imports are done."""
    client = ZygoteClient("json:dumps", (), os.environ)
    until = time.monotonic() + 60
    while not client.ready and time.monotonic() < until:
        client.poll()
        time.sleep(0.01)
    yield client
    client.close()


def test_a_zygote_that_answers_no_request_did_not_die_by_itself(ready, monkeypatch, tmp_path):
    """Its own launcher had killed it, and announced that it had died."""
    monkeypatch.setattr(zygote_client, "ANSWER_S", 0.1)
    os.kill(ready.pid, signal.SIGSTOP)
    lifeline, end = os.pipe()
    ready.fork(0, {"RANK": "0", zygote.ATTEMPT_FOLDER: str(tmp_path)}, {}, None, lifeline)
    time.sleep(0.2)
    ready.poll()
    os.close(lifeline)
    os.close(end)
    assert not ready.alive
    ready.close()
    assert ready.how_it_ended == "did not answer a request within 0 s"


def test_a_zygote_that_is_killed_is_announced_with_its_signal(ready):
    os.kill(ready.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while ready.alive and time.monotonic() < until:
        ready.poll()
        time.sleep(0.01)
    ready.close()
    assert ready.how_it_ended == "was killed by SIGKILL"
