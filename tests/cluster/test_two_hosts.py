"""Two hosts for real: ranks that meet over a network of their own, which is slow, is cut, and loses a host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.hosts import HERE, gone
from cluster.jobs import exact
from faults.runs import read_events
from faults.torture import digests
from lockstep.clusters.tether import SILENCE_S
from lockstep.faults import Fault
from ports import free_port
from saved import newest_step

# Hosts end at once when their login is lost. By themselves they would do so as well, but later.
SOON_S = 0.9 * SILENCE_S

# Every micro-batch takes a while, so that there is time to disturb the run.
SLOW = Fault("slow", rank=0, phase="data", seconds=0.05, times=None)


def on_hosts(hosts, run: Path, *words: str) -> list[str]:
    """The words of `lockstep` that train on both hosts."""
    names = ",".join(hosts.names)
    return ["train", "char_lm", *words, f"run_dir={run}", "--nodes", names, "--nproc", "1", *hosts.login]


def command_lines() -> dict[int, str]:
    """Of all processes of this machine: pid -> words, with NUL between them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_text(errors="replace")
        except OSError:
            continue
    return found


def rank_pids(job) -> list[int]:
    """As the banner names them."""
    return [int(pid) for pid in re.findall(r"\brank \d (\d+)\b", job.text())]


def test_two_hosts_train_what_one_process_trains(hosts, command, tmp_path, whole):
    run = tmp_path / "run"
    job = command(*on_hosts(hosts, run, *exact()))
    secret = job.until(lambda: (run / ".secret").exists() and (run / ".secret").read_text())
    assert secret.strip() not in "\n".join(command_lines().values())
    assert job.wait() == 0, job.text()
    assert digests(run) == whole
    assert (run / ".secret").stat().st_mode & 0o777 == 0o600
    assert (run / "logs" / "rank-1.log").exists()
    assert not list(run.glob(".shared-*"))
    if hosts.lab:
        assert re.search(r"rank 0 \d+ on host1, rank 1 \d+ on host2", job.text())


def test_a_slow_network_changes_nothing(lab, hosts, command, tmp_path, whole):
    """20 ms each way and 100 Mbit/s; the ranks use this network because the meeting point is in it."""
    spaces = ["--ns1", lab.space(1), "--ns2", lab.space(2)]
    words = [sys.executable, str(HERE.with_name("delaylink.py")), *spaces, "--delay-ms", "20", "--mbit", "100"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as wire:
        try:
            assert wire.stdout is not None
            assert wire.stdout.readline() == b"up\n"
            began = time.monotonic()
            ping = "import socket; socket.create_connection(('10.78.0.2', 9), 5)"
            subprocess.run(lab.words(1, sys.executable, "-c", ping), stderr=subprocess.DEVNULL, check=False)
            assert time.monotonic() - began > 0.04  # the answer, a refusal, has made the way twice

            run = tmp_path / "run"
            job = on_hosts(hosts, run, *exact())
            job[job.index("--nodes") + 1] = "10.78.0.1,10.78.0.2"
            started = command(*job)
            assert started.wait() == 0, started.text()
            assert digests(run) == whole
        finally:
            wire.kill()


def test_when_the_link_is_cut_both_sides_say_so_and_end(lab, hosts, command, tmp_path):
    run = tmp_path / "run"
    words = ["train", "char_lm", *exact(400), f"run_dir={run}", "--nproc", "1", "--nnodes", "2"]
    words += ["--join", f"10.77.0.1:{free_port()}"]
    first = command(*words, host=1, faults=(SLOW,))
    second = command(*words, host=2, faults=(SLOW,))
    first.until(lambda: newest_step(run / "checkpoints"))
    lab.cut(2)
    try:
        assert [first.wait(), second.wait()] == [75, 75], first.text() + second.text()
    finally:
        lab.heal(2)

    assert "node 1 (host2) is lost: no heartbeat for 5 s" in first.text()
    assert "not restarted: 1 node left, and 2 needed. To resume from " in first.text()
    assert "the coordinating node host1 (10.77.0.1:" in second.text()
    assert "is lost: no heartbeat for 5 s; the ranks here were killed" in second.text()


def test_a_host_that_dies_and_returns_is_used_again(lab, hosts, command, tmp_path, whole):
    run = tmp_path / "run"
    job = command(*on_hosts(hosts, run, *exact(), "--nnodes", "1:2"), faults=(replace(SLOW, seconds=0.1),))
    job.until(lambda: newest_step(run / "checkpoints") and "2 ranks" in job.text())
    for pid in lab.processes(2):
        os.kill(pid, signal.SIGKILL)
    job.until(lambda: "trying again while the job runs" in job.text())
    job.until(lambda: "host2 is back" in job.text())
    assert job.wait() == 0, job.text()
    assert digests(run) == whole
    kinds = [event["event"] for event in read_events(run)]
    assert kinds.count("restart") == 1
    assert job.text().count("(host2) joined; 2 nodes") == 2


# What ssh is: its process is not that of the host, and can be lost alone.
RELAY = """
import os, subprocess, sys, threading
PIPE = subprocess.PIPE
there = subprocess.Popen(sys.argv[1:], stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)
def copy(source, target):
    while data := os.read(source, 65536):
        os.write(target, data)
    os.close(target)
ways = [(0, there.stdin.fileno()), (there.stdout.fileno(), 1), (there.stderr.fileno(), 2)]
threads = [threading.Thread(target=copy, args=way, daemon=True) for way in ways]
for thread in threads:
    thread.start()
for thread in threads[1:]:
    thread.join()
os._exit(there.wait())
"""


@pytest.mark.long
def test_a_login_that_breaks_takes_its_host_and_not_the_job(lab, hosts, command, tmp_path, whole):
    run, relay = tmp_path / "run", tmp_path / "relay.py"
    relay.write_text(RELAY)
    words = on_hosts(hosts, run, *exact(), "--nnodes", "1:2")
    words[words.index("--ssh") + 1] = f"{sys.executable} -S -E {relay} {lab.ssh}"
    job = command(*words, faults=(replace(SLOW, seconds=0.1),))
    job.until(lambda: newest_step(run / "checkpoints") and "2 ranks" in job.text())
    there = lab.processes(2)
    (login,) = [pid for pid, line in command_lines().items() if str(relay) in line and "\0host2\0" in line]
    os.kill(login, signal.SIGKILL)
    assert gone(there, SOON_S) == []
    job.until(lambda: "host2 is back" in job.text())
    assert job.wait() == 0, job.text()
    assert digests(run) == whole
    assert [event["event"] for event in read_events(run)].count("restart") == 1


@pytest.mark.parametrize(
    ("number", "code", "nnodes"),
    [
        pytest.param(signal.SIGINT, 130, "2", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 75, "2", marks=pytest.mark.long),
        (signal.SIGKILL, -9, "2"),
        # Each host could take the other one for what is left of the job.
        pytest.param(signal.SIGKILL, -9, "1:2", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_when_the_command_that_logged_in_ends(hosts, command, tmp_path, number, code, nnodes):
    run = tmp_path / "run"
    job = command(*on_hosts(hosts, run, *exact(400), "--nnodes", nnodes), faults=(SLOW,))
    job.until(lambda: newest_step(run / "checkpoints"))
    before = newest_step(run / "checkpoints") or 0
    processes = hosts.processes() or rank_pids(job)
    assert len(processes) >= 2
    job.process.send_signal(number)
    assert job.wait() == code, job.text()
    assert gone(processes, SOON_S) == []
    assert gone(hosts.processes(), SOON_S) == []

    # In each case the ranks have saved where they were, and said so. The killed command could not print it.
    saved = newest_step(run / "checkpoints") or 0
    assert saved > before
    assert saved in [event["step"] for event in read_events(run) if event["event"] == "preempted"]
