"""The launcher with real processes, but without torch: it must work for any command."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch import failure, local
from lockstep.machine import visible_gpus

RECORD = "import os, pathlib; from lockstep.launch import failure; F = pathlib.Path(os.environ['LOCKSTEP_FAILURES'])"


def python(code: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        f"import os, sys, time; R = int(os.environ['RANK'])\n{textwrap.dedent(code)}",
    ]


def test_every_rank_gets_its_place_and_its_log(tmp_path):
    code = (
        "print({k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT', 'OMP_NUM_THREADS')})"
    )
    assert local.run(python(code), 3, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}) is None
    seen = [eval((tmp_path / f"rank-{rank}.log").read_text()) for rank in (1, 2)]
    assert [s["RANK"] for s in seen] == ["1", "2"]
    assert {s["WORLD_SIZE"] for s in seen} == {"3"}
    assert len({s["MASTER_PORT"] for s in seen}) == 1


def test_the_first_failure_is_printed_and_the_others_are_stopped(tmp_path, capfd):
    code = f"""
    {RECORD}
    if R == 1:
        error = ValueError("the real cause")
        failure.record(F, R, error)
        os._exit(1)
    time.sleep(60)
    """
    began = time.monotonic()
    assert local.run(python(code), 3, tmp_path).exit_code == 1
    assert time.monotonic() - began < 20
    text = capfd.readouterr().err
    assert text.startswith("lockstep: rank 1 on ")
    assert "ValueError: the real cause" in text
    assert "2 other rank(s) stopped" in text


def test_a_user_error_is_shown_without_a_traceback(tmp_path, capfd):
    code = f"""
    {RECORD}
    from lockstep.errors import UserError
    failure.record(F, R, UserError("asked", "found", "type this"))
    os._exit(1)
    """
    assert local.run(python(code), 2, tmp_path).exit_code == 2
    text = capfd.readouterr().err
    assert "type this" in text
    assert "Traceback" not in text


def test_a_killed_rank_is_the_culprit_even_if_others_complained(tmp_path, capfd):
    code = f"""
    {RECORD}
    if R == 1:
        os.kill(os.getpid(), 9)
    time.sleep(0.3)
    failure.record(F, R, RuntimeError("connection reset by peer"))
    os._exit(1)
    """
    assert local.run(python(code), 2, tmp_path).exit_code == 1
    assert "rank 1" in (text := capfd.readouterr().err)
    assert "SIGKILL" in text
    assert "connection reset" not in text


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_launcher(tmp_path, how):
    """Whatever kills the launcher: no orphan goes on writing."""
    worker = (
        "import os, time; from lockstep.worker import _die_with_launcher; "
        "_die_with_launcher(int(os.environ['LOCKSTEP_LIFELINE'])); "
        f"open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    code = (
        "import pathlib, sys; from lockstep.launch import local; "
        f"local.run([sys.executable, '-c', {worker!r}], 2, pathlib.Path(r'{tmp_path}/logs'))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    files = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(f.exists() and f.read_text() for f in files))
    pids = [int(f.read_text()) for f in files]
    launcher.send_signal(how)
    launcher.wait(timeout=20)
    _until(lambda: not any(_alive(pid) for pid in pids))


def _until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_an_abort_after_a_record_is_a_consequence(tmp_path):
    failure.record(tmp_path, 1, ValueError("the real cause"))
    ended = {0: failure.Exit(-signal.SIGABRT, time.time() + 1), 1: failure.Exit(1, time.time())}
    assert failure.first(tmp_path, ended).kind == "ValueError"
    ended[0] = failure.Exit(-signal.SIGABRT, time.time() - 60)
    assert failure.first(tmp_path, ended).kind == "SIGABRT"


def test_records_survive_the_round_trip(tmp_path):
    for rank in (1, 0):
        try:
            raise KeyError(f"rank {rank}")
        except KeyError as error:
            failure.record(tmp_path, rank, error)
    found = failure.first(tmp_path, {0: failure.Exit(1, 9e9), 1: failure.Exit(1, 9e9)})
    assert found.rank == 1  # the earlier one
    assert "KeyError" in found.traceback
    assert json.loads((tmp_path / "rank-0.json").read_text())["kind"] == "KeyError"


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5"])
def test_wrong_process_counts_are_refused(asked):
    with pytest.raises(UserError, match="--nproc"):
        local.choose_nproc(asked)


def test_gpus_are_counted_without_torch():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
