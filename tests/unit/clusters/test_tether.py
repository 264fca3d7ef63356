"""The tether of a host, and the command at its other end: silence, signals, lost logins, and how they end."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import lockstep
from lockstep.clusters import logins, nodes
from lockstep.clusters.hosts import Event, Host, Login
from lockstep.clusters.logins import _JobWatch
from lockstep.clusters.tether_messages import (
    ANSWER_PREFIX,
    Beat,
    Ended,
    HostFacts,
    HostProblem,
    PassSignal,
    StartTraining,
    encode,
)
from lockstep.errors import ExitCode, UserError

# A tether that is less patient, and a job that lasts. `begun` appears when the job has begun.
SERVE = """
import sys, time
from pathlib import Path
from lockstep import api
from lockstep.clusters import tether
tether.SILENCE_S, tether.OTHERS_S, tether.PREDECESSOR_S = float(sys.argv[1]), 0.3, 0.3
def train(*words):
    Path("begun").touch()
    time.sleep(600)
api.train = train
sys.exit(tether.Tether().serve())
"""


def training(run: Path, **values) -> StartTraining:
    job = {"overrides": [], "config_files": [], "arguments": [], "nproc": "1", "nnodes": "1:2", "join": "", "env": {}}
    job |= {"target": "char_lm", "resume": None, "resume_command": "", "run_dir": str(run), "place": 0, "least": 1}
    return StartTraining(**(job | values))


@pytest.fixture
def tether(tmp_path):
    """Starts a tether that ends after some seconds of silence, with these requests."""
    started = []

    def start(silence: float, *requests) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(silence)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(lockstep.__file__).parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write("".join(f"{encode(request)}\n" for request in requests))
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def begun(folder: Path, process: subprocess.Popen) -> None:
    while not (folder / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)


# ---- on a host ----


@pytest.mark.slow
def test_silence_ends_a_host_before_the_job_and_within_it(tether, tmp_path):
    """The other end is open: no machine says any more that it is there."""
    before = tether(0.5)
    within = tether(2.0, Beat([0, 1]), training(tmp_path, least=2))
    assert before.wait(120) == ExitCode.RESTART
    assert within.wait(120) == ExitCode.RESTART


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", ExitCode.RESTART), ("SIGINT", ExitCode.INTERRUPTED)])
def test_a_signal_before_the_launcher_handles_signals_has_an_answer(tether, tmp_path, name, code):
    process = tether(600.0, training(tmp_path))
    begun(tmp_path, process)
    process.stdin.write(encode(PassSignal(name)) + "\n")
    process.stdin.flush()
    assert process.wait(120) == code
    assert f"{ANSWER_PREFIX}{encode(Ended(code))}" in process.stdout.read()
    assert f"{name}: ended before the job had begun" in process.stderr.read()


@pytest.mark.parametrize(
    ("least", "other", "code", "said"),
    [
        (1, "", -signal.SIGKILL, "broken\n"),
        (1, "broken\n", ExitCode.RESTART, "broken\nended\n"),
        (1, "ended\n", ExitCode.RESTART, "broken\nended\n"),
        (2, "", ExitCode.RESTART, "broken\nended\n"),
    ],
)
def test_a_broken_login_stops_the_job_only_if_too_few_hosts_are_left(tether, tmp_path, least, other, code, said):
    """A host that leaves is killed: the job goes on. A launcher that gets SIGTERM stops all hosts."""
    (tmp_path / ".tether-1").write_text(other)
    process = tether(600.0, Beat([0, 1]), training(tmp_path, least=least))
    begun(tmp_path, process)
    process.stdin.close()
    assert process.wait(120) == code
    assert (tmp_path / ".tether-0").read_text() == said


@pytest.mark.parametrize("again", [True, False])
def test_a_host_has_one_launcher_at_a_time(tether, tmp_path, again):
    with (tmp_path / ".tether-0").open("w") as older:
        fcntl.flock(older, fcntl.LOCK_EX)
        process = tether(600.0, training(tmp_path, again=again))
        out, err = process.communicate(timeout=120)
    assert "a launcher of an earlier command still runs" in err
    assert process.returncode == ExitCode.RESTART
    assert not (tmp_path / "begun").exists()
    # A host that is logged in to again is tried again; a new job is refused.
    assert out == ("" if again else f"{ANSWER_PREFIX}{encode(Ended(ExitCode.REFUSED))}\n")


# ---- the command ----


class FakeLogins:
    """Two hosts from which these events come; a text is a signal of this process."""

    def __init__(self, *events: Event | str | None):
        self.hosts = [Host("a"), Host("b")]
        self.events = list(events)
        self.signals: list[str] = []
        self.sent: list[tuple[int, str]] = []
        self.again: list[int] = []

    def next_event(self, seconds: float) -> Event | None:
        event = self.events.pop(0) if self.events else None
        if isinstance(event, str):
            self.signals.append(event)
            return None
        return event

    def send(self, place: int, request: object) -> None:
        self.sent.append((place, type(request).__name__))

    def log_in_again(self, place: int) -> None:
        self.again.append(place)

    def note(self, place: int, connected: bool) -> None: ...

    def hang_up(self, *places: int) -> None: ...

    def watch(self, least: int) -> int:
        jobs = [training(Path("run"), place=place, least=least) for place in (0, 1)]
        watch = _JobWatch(self, jobs, least, self.signals)  # pyrefly: ignore[bad-argument-type]
        with patch.object(logins, "LAST_LINES_S", 0.0):  # there are none
            return watch.run()


def lost(place: int, code: int = 255) -> Event:
    return Event(place, 1, code=code)


def ended(place: int, code: int) -> Event:
    return Event(place, 1, answer=Ended(code))


FACTS = Event(1, 2, answer=HostFacts("b", {}, [], {}))


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([lost(0), lost(1)], ExitCode.RESTART),
        ([lost(0), lost(1, code=1)], ExitCode.FAILED),  # a crash of ours
        (["SIGINT", lost(0), lost(1)], ExitCode.INTERRUPTED),
        (["SIGTERM", lost(0), lost(1)], ExitCode.RESTART),
        ([lost(0), ended(1, 0)], ExitCode.FINISHED),
        ([ended(0, 1), ended(1, 1)], ExitCode.FAILED),
    ],
)
def test_the_exit_code_when_logins_are_lost(events, code):
    assert FakeLogins(*events).watch(least=2) == code


def test_a_signal_that_comes_with_the_last_end_has_nobody_to_go_to():
    class LateSignal(FakeLogins):
        def next_event(self, seconds: float) -> Event | None:
            event = super().next_event(seconds)
            self.signals += [] if self.events else ["SIGTERM"]
            return event

    assert LateSignal(ended(0, 0), ended(1, 0)).watch(least=2) == ExitCode.FINISHED


def test_a_signal_that_is_lost_with_its_host_goes_to_another_one():
    """The job trained on without the host, for hours, and its user waited for it to save."""
    hosts = FakeLogins("SIGINT", lost(0), ended(1, ExitCode.RESTART))
    assert hosts.watch(least=1) == ExitCode.INTERRUPTED
    assert [place for place, request in hosts.sent if request == "PassSignal"] == [0, 1]


def test_the_job_goes_on_if_nobody_reads_what_its_hosts_say(monkeypatch):
    """`lockstep train --nodes ... 2>&1 | tee log`: when tee died, the command ended, and stopped the job everywhere."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr("sys.stdout", broken)
        monkeypatch.setattr("sys.stderr", broken)
        events = [Event(0, 1, "step 1"), Event(1, 1, "a warning", is_error=True), lost(1)]
        assert FakeLogins(*events, ended(0, 0), ended(1, 0)).watch(least=1) == ExitCode.FINISHED


@pytest.mark.parametrize("end", ["SIGTERM", ended(0, 0)])
def test_a_job_that_ends_is_not_joined_again(monkeypatch, end):
    monkeypatch.setattr(logins, "RETRY_S", 0.0)

    # Lost after the end has begun: not logged in to.
    hosts = FakeLogins(end, lost(1), FACTS, ended(0, 0))
    hosts.watch(least=1)
    assert hosts.again == []
    assert [request for place, request in hosts.sent if place == 1] == ["StartTraining"]

    # Lost before, and back after: not started.
    hosts = FakeLogins(lost(1), end, FACTS, ended(0, 0))
    hosts.watch(least=1)
    assert hosts.again == [1]
    assert [request for place, request in hosts.sent if place == 1] == ["StartTraining", "Look"]


def test_a_login_that_cannot_be_started_does_not_end_the_job_of_the_other_hosts(monkeypatch):
    """The command gave up, and the hosts that trained were stopped."""
    monkeypatch.setattr(logins, "RETRY_S", 0.0)

    class NoProcessLeft(FakeLogins):
        def log_in_again(self, place: int) -> None:
            super().log_in_again(place)
            if len(self.again) == 1:
                raise UserError("ssh cannot be started, to log in to b", "Resource temporarily unavailable", "")

    hosts = NoProcessLeft(lost(1), None, FACTS, ended(0, 0), ended(1, 0))
    assert hosts.watch(least=1) == ExitCode.FINISHED
    assert hosts.again == [1, 1]
    assert [request for place, request in hosts.sent if place == 1] == ["StartTraining", "Look", "StartTraining"]


def test_hosts_that_do_not_notice_a_hang_up_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(logins, "SAVE_S", -2.0)
    assert FakeLogins("SIGINT", "SIGINT", "SIGINT").watch(least=2) == ExitCode.INTERRUPTED


def test_a_login_can_be_hung_up_and_written_to():
    login = Login(Host("a"), 0, 1, ["cat"], Queue())
    login.hang_up()
    login.send(PassSignal("SIGTERM"))
    assert login.process.wait(120) == 0


def test_a_host_that_cannot_read_its_files_is_named():
    hosts = SimpleNamespace(hosts=[Host("a")], ask=lambda *request: [HostProblem("Permission denied")])
    request = SimpleNamespace(target="task.py:Task", config_files=())
    with pytest.raises(UserError, match="a cannot read the files of the job") as error:
        nodes._look(hosts, request)  # pyrefly: ignore[bad-argument-type]
    assert error.value.found == "Permission denied"
