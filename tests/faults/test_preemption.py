"""SIGTERM at any moment: all ranks save at one step and stop, and the resumed run ends with the same bits."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from faults.runs import TINY, Started, train
from faults.torture import digests
from lockstep.faults import Fault

SLOW_EVAL = Fault("slow", rank=1, phase="evaluate", seconds=0.5, times=None)
SLOW_WRITE = Fault("slow", rank=0, phase="write", seconds=1.0, times=None)
# From step 10 on there is time for a signal: a run that ended first could not receive it. If the signal is late, since
# this process has to wait for a core, the run waits longer for it.
LINGER = tuple(
    Fault("slow", rank=0, step=step, phase="compute", seconds=0.3 if step % 10 < 5 else 5.0, times=None)
    for step in range(10, 40)
)


def metrics_lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


MOMENTS = {
    "train": (LINGER, lambda run: metrics_lines(run) >= 2),
    "eval": ((SLOW_EVAL, *LINGER[10:]), lambda run: metrics_lines(run) >= 4),  # evaluation follows the line of step 20
    "save": ((SLOW_WRITE,), lambda run: list(run.glob("checkpoints/*.tmp-*/rank-*.safetensors"))),
}


# Whichever signal the launcher gets, its ranks get SIGTERM: each once says what all pairs do; LOCKSTEP_ALL_PAIRS=1 runs
# those.
PAIRS = [("train", signal.SIGTERM), ("eval", signal.SIGUSR1)]
ALL = [(moment, number) for moment in MOMENTS for number in (signal.SIGTERM, signal.SIGUSR1)]


@pytest.mark.parametrize(("moment", "number"), ALL if os.environ.get("LOCKSTEP_ALL_PAIRS") else PAIRS)
def test_a_stop_request(tmp_path: Path, undisturbed: dict[str, str], moment: str, number: signal.Signals) -> None:
    faults, reached = MOMENTS[moment]
    started = Started(tmp_path, *TINY, faults=faults)
    started.wait_until(lambda: reached(started.run))
    started.send(number)
    stopped = started.end()
    assert stopped.code == 75, stopped.output
    (event,) = stopped.events("preempted")[-1:]
    saved = sorted(path.name for path in (stopped.run / "checkpoints").glob("step-????????"))
    assert saved, stopped.output
    step = int(saved[-1][5:])
    *_, how_to_resume, exit_code = stopped.output.splitlines()
    assert f"step {step}" in how_to_resume, stopped.output
    assert f"run_dir={stopped.run}" in how_to_resume
    assert "--resume auto" in how_to_resume
    assert exit_code == "lockstep: exit code 75 (restart): it was preempted by a signal"
    assert event["event"] == "preempted"
    ended = train(tmp_path, *TINY, "--resume", "auto")
    assert ended.code == 0, ended.output
    assert f"at step {step} from" in ended.output
    assert digests(ended.run) == undisturbed
    assert [e["step"] for e in ended.events("eval")] == [20, 40]


def test_a_signal_to_every_process_does_not_stop_loader_processes(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    """Schedulers signal every process of a job. A worker process that obeyed would take its rank down."""
    started = Started(tmp_path, *TINY, "data.workers=2", faults=LINGER)
    started.wait_until(lambda: metrics_lines(started.run) >= 2)
    launcher = psutil.Process(started.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    stopped = started.end()
    assert stopped.code == 75, stopped.output
    ended = train(tmp_path, *TINY, "--resume", "auto")
    assert ended.code == 0, ended.output
    assert digests(ended.run) == undisturbed


def test_control_c_saves_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    started = Started(tmp_path, *TINY, faults=LINGER)
    started.wait_until(lambda: metrics_lines(started.run) >= 1)
    started.send(signal.SIGINT)
    stopped = started.end()
    assert stopped.code == 130, stopped.output
    assert "--resume" in stopped.output
    slow = Started(
        tmp_path / "slow", *TINY, faults=(Fault("slow", step=8, phase="compute", seconds=600.0, times=None),)
    )
    slow.wait_until(lambda: metrics_lines(slow.run) >= 1)  # before a step has ended there is nothing to save
    slow.send(signal.SIGINT)
    slow.wait_until(lambda: "asking 2 ranks to save" in slow.text())  # signals that come together are one
    slow.send(signal.SIGINT)
    stopped = slow.end()
    assert stopped.code == 130, stopped.output
    assert "second Ctrl-C: killing the ranks" in stopped.output


@pytest.mark.parametrize("nproc", [1, None])
def test_a_single_process_saves_and_stops_too(tmp_path: Path, nproc: int | None) -> None:
    started = Started(tmp_path, *TINY, nproc=nproc, faults=LINGER)
    started.wait_until(lambda: metrics_lines(started.run) >= 1)
    started.send(signal.SIGTERM)
    assert started.end().code == 75
