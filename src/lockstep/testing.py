"""Make a rank fail at a chosen moment, in your own tests, and see that your training survives it.

    with lockstep.testing.fail_at(rank=1, step=5, phase="all-reduce", how="kill"):
        lockstep.fit(task, nproc=2)

The kinds, in `how`: "kill" (SIGKILL), "stop" (SIGSTOP), "term" (SIGTERM), "raise" (RuntimeError), "hang", "slow" (give
`seconds`; happens every time), "exit" (code 3), "vanish" (code 0), "segfault", "abort"; in a loss "inf" and "nan"; in a
checkpoint "disk full", "corrupt" and "truncate". A `phase` is one of `lockstep.runtime.heartbeat.PHASES` or of
`lockstep.faults.PLACES`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lockstep import faults
from lockstep.faults import Fault
from lockstep.runtime.heartbeat import PHASES

__all__ = ["Fault", "fail_at", "faults_environment"]


@contextmanager
def fail_at(
    *,
    how: str,
    rank: int | None = None,
    step: int | None = None,
    phase: str | None = None,
    times: int | Literal["default"] | None = "default",
    seconds: float | None = None,
) -> Iterator[None]:
    """Make ranks that are started inside the block fail. Blocks may be nested, for several faults.

    A fault that never happened is an error at the end of the block: such a test would prove nothing.
    `times` counts over all ranks and all restarts: by default once, for "slow" every time, which is `times=None`.
    """
    if times == "default":
        times = None if how == "slow" else 1

    # Checked before anything is changed.
    fault = Fault(how, rank, step, phase, times, seconds)
    before = os.environ.get(faults.VARIABLE)
    earlier = faults.from_text(before or "[]")

    # Ranks are other processes: the faults reach them in the environment, and their count is kept in files.
    with tempfile.TemporaryDirectory(prefix="lockstep-faults-") as marks:
        os.environ[faults.VARIABLE] = faults.to_text([*earlier, *_marked([fault], Path(marks))])
        faults.reset()
        try:
            yield
        finally:
            if before is None:
                del os.environ[faults.VARIABLE]
            else:
                os.environ[faults.VARIABLE] = before

            faults.reset()

        if fault.times is not None and not any(Path(marks).rglob("fired-*")):
            raise AssertionError(f"the fault never happened: no rank came to {_moment(fault)}")


def faults_environment(marks: Path, *planned: Fault) -> dict[str, str]:
    """Return the faults as environment variables, for a process that you start yourself.

    `marks` is a folder in which the ranks count how often each fault happened; use a new one for every test.
    """
    return {faults.VARIABLE: faults.to_text(_marked(list(planned), marks))}


def _marked(planned: list[Fault], marks: Path) -> list[Fault]:
    """Give each fault a separate folder, in which all ranks count how often it happened."""
    faults.check_phases(planned, PHASES)
    marked = [replace(fault, marks=str(marks / str(number))) for number, fault in enumerate(planned)]
    for fault in marked:
        Path(str(fault.marks)).mkdir(parents=True)

    return marked


def _moment(fault: Fault) -> str:
    wanted = {"rank": fault.rank, "step": fault.step, "phase": fault.phase}
    parts = [f"{name} {value}" for name, value in wanted.items() if value is not None]
    return ", ".join(parts) or "any phase"
