"""Faults happen where, when and as often as was asked: a fault that does not happen makes the test that asked for it
pass for nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lockstep import faults
from lockstep.errors import UserError
from lockstep.runtime.heartbeat import PHASES, Heartbeat
from lockstep.testing import Fault, fail_at, faults_environment

WALK = """
import sys, os
from lockstep import faults
from lockstep.runtime.heartbeat import Heartbeat
heartbeat = Heartbeat()
faults.install(heartbeat)
for step in range(1, 4):
    for phase in ("data", "compute", "all-reduce"):
        print(step, phase, flush=True)
        heartbeat.beat(phase, step)
print("end")
"""


def walk(env, rank=0):
    env = os.environ | env | {"RANK": str(rank)}
    return subprocess.Popen([sys.executable, "-c", WALK], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("how", "code"), [("kill", -signal.SIGKILL), ("exit", 3), ("segfault", -signal.SIGSEGV), ("term", -signal.SIGTERM)]
)
def test_a_rank_ends_at_the_chosen_moment(tmp_path, how, code):
    process = walk(faults_environment(tmp_path / "marks", Fault(how, step=2, phase="compute")))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert out.decode().splitlines()[-1] == "2 compute"


def test_times_are_counted_over_restarts_and_ranks(tmp_path):
    env = faults_environment(tmp_path / "marks", Fault("exit", step=2, phase="data", times=2))
    codes = []
    for rank in (0, 1, 0, 1):
        process = walk(env, rank)
        process.communicate(timeout=60)
        codes.append(process.returncode)
    assert codes == [3, 3, 0, 0]


def test_only_the_rank_that_was_named(tmp_path):
    env = faults_environment(tmp_path / "marks", Fault("exit", rank=1))
    for rank, code in ((0, 0), (1, 3)):
        process = walk(env, rank)
        process.communicate(timeout=60)
        assert process.returncode == code


def test_stopped_and_hanging_ranks_stay_where_they_are(tmp_path):
    stopped = walk(faults_environment(tmp_path / "stop", Fault("stop", phase="all-reduce")))
    hanging = walk(faults_environment(tmp_path / "hang", Fault("hang", phase="compute")))
    try:
        _, status = os.waitpid(stopped.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        lines = [hanging.stdout.readline().decode().strip() for _ in range(2)]
        assert lines == ["1 data", "1 compute"]
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(timeout=0.5)
    finally:
        for process in (stopped, hanging):
            process.kill()
            process.communicate()


def test_faults_nest_and_are_gone_afterwards():
    heartbeat = Heartbeat()
    with fail_at(how="raise", step=1, phase="data"):
        outer = os.environ[faults.VARIABLE]
        with fail_at(how="raise", step=2, phase="update"):
            faults.install(heartbeat)
            for phase, step in (("data", 1), ("update", 2)):
                with pytest.raises(RuntimeError, match="injected"):
                    heartbeat.beat(phase, step)
            heartbeat.beat("data", 1)
            heartbeat.beat("update", 2)
        assert os.environ[faults.VARIABLE] == outer
        assert len(faults.planned()) == 1
    marks = json.loads(outer)[0]["marks"]
    assert not os.path.exists(marks)
    assert faults.VARIABLE not in os.environ
    assert faults.planned() == []


def test_without_faults_a_heartbeat_has_no_hook():
    heartbeat = Heartbeat()
    faults.install(heartbeat)
    assert heartbeat.hook is None


def fired(phase: str, step: int) -> str | None:
    """Return what `fire` returned, or "disk full" if it raised that."""
    try:
        return faults.fire(phase, step)
    except OSError as error:
        return "disk full" if error.errno == errno.ENOSPC else str(error)


@pytest.mark.parametrize(("how", "place"), faults.ONLY_AT.items())
def test_what_can_happen_at_one_place_only_happens_there(how, place):
    with fail_at(how=how, step=3):
        elsewhere = [phase for phase in (*PHASES, *faults.PLACES) if phase != place]
        assert {fired(phase, 3) for phase in elsewhere} == {None}
        assert [fired(place, step) for step in (2, 3, 3)] == [None, how, None]


def test_slow_is_slow_every_time_and_times_none_never_ends():
    with fail_at(how="slow", phase="data", seconds=0.02):
        begin = time.monotonic()
        for step in range(3):
            faults.fire("data", step)
        assert time.monotonic() - begin >= 0.06
    with fail_at(how="nan", times=None):
        assert [faults.fire("loss", step) for step in range(4)] == ["nan"] * 4


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"how": "explode"}, "segfault"),
        ({"how": "kill", "phase": "dta"}, "all-reduce"),
        ({"how": "kill", "seconds": 1.0}, "slow"),
        ({"how": "slow"}, "seconds"),
        ({"how": "inf", "phase": "data"}, "loss"),
        ({"how": "kill", "times": 0}, "times=None"),
    ],
)
def test_errors_for_wrong_arguments_name_the_right_ones(wrong, named):
    with pytest.raises(UserError) as error, fail_at(**wrong):
        pass
    assert named in error.value.fix
    assert faults.VARIABLE not in os.environ


@pytest.mark.parametrize("text", ["{", '[{"rank": 1}]', '[{"how": "kill", "stpe": 5}]', "[3]", "3"])
def test_a_variable_written_by_hand_is_checked(monkeypatch, text):
    monkeypatch.setenv(faults.VARIABLE, text)
    faults.reset()
    with pytest.raises(UserError, match=faults.VARIABLE):
        faults.fire("data", 1)
    monkeypatch.undo()
    faults.reset()


def test_a_phase_written_by_hand_is_checked(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, '[{"how": "kill", "phase": "exhange"}]')
    faults.reset()
    with pytest.raises(UserError, match="exhange"):
        faults.install(Heartbeat())
    monkeypatch.undo()
    faults.reset()
