"""The first screen after a fault: which rank, which step, which phase, why, and what to do.

The texts are kept in `first_screens/`, with what changes from run to run masked. To write them again after a change of
wording: LOCKSTEP_GOLDEN=write pytest tests/faults/test_first_screen.py, and read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from faults.runs import TINY, masked, train
from lockstep.faults import Fault

GOLDEN = Path(__file__).parent / "first_screens"
ONCE = (*TINY, "restart.per_hour=0", "hang.least=4")
PLACE = {"rank": 1, "step": 12}

CASES = {
    "killed": (Fault("kill", phase="all-reduce", **PLACE), 1),
    "killed-while-saving": (Fault("kill", phase="write", rank=0, step=10), 1),
    "exception": (Fault("raise", phase="compute", **PLACE), 1),
    "segfault": (Fault("segfault", phase="compute", **PLACE), 1),
    "abort": (Fault("abort", phase="compute", **PLACE), 1),
    "exit": (Fault("exit", phase="compute", **PLACE), 1),
    "vanish": (Fault("vanish", phase="compute", **PLACE), 1),
    "stopped": (Fault("stop", phase="compute", **PLACE), 1),
    "hangs": (Fault("hang", phase="update", **PLACE), 1),
    "hangs-in-backward": (Fault("hang", phase="all-reduce", **PLACE), 1),
    "nan": (Fault("nan", **PLACE), 2),
    "disk-full": (Fault("disk full", rank=1, step=10), 0),
}
MORE = {"nan": ("nonfinite.policy=stop",), "killed-while-saving": ("checkpoint.asynchronous=false",)}
WHAT_MUST_BE_SAID = {
    "killed": ("rank 1", "step 12", "phase all-reduce", "SIGKILL", "To resume from the checkpoint of step"),
    "killed-while-saving": ("rank 0", "step 10", "phase snapshot", "SIGKILL", "To resume from the checkpoint of step"),
    "exception": ("rank 1", "step 12", "phase compute", "RuntimeError: injected", "To resume"),
    "segfault": ("rank 1", "step 12", "phase compute", "SIGSEGV", "_segfault", "To resume"),
    "abort": ("rank 1", "step 12", "phase compute", "SIGABRT", "_abort", "To resume"),
    "exit": ("rank 1", "step 12", "phase compute", "ended with code 3", "To resume"),
    "vanish": ("rank 1", "step 12", "phase compute", "ended with code 0 before its work was done", "To resume"),
    "stopped": ("rank 1", "step 12", "phase compute", "suspended by a signal", "To resume"),
    "hangs": ("rank 1", "step 12", "phase update", "no rank has advanced", "_hang", "To resume"),
    "hangs-in-backward": (
        "waiting for rank 1",
        "step 12",
        "phase all-reduce",
        "_hang",
        "never entered it",
        "To resume",
    ),
    "nan": ("step 13", "rank 1, micro-batch 1: loss nan", "do:"),
    "disk-full": ("STEP 10 WAS NOT WRITTEN", "rank 1: no space left", "Training continues", "step-00000005"),
}


def first_screen(output: str) -> str:
    """From the first line that is not the usual course of a run, to the next that is."""
    usual = re.compile(
        r"(char_lm|  (world|parameters|precision|batch|data|learning rate)|step|eval|checkpoint|sample|slow) "
    )
    # The launcher warns on a busy machine.
    slow = "lockstep: no rank has advanced for"
    lines = [line for line in output.splitlines() if not line.startswith(slow)]
    start = next(i for i, line in enumerate(lines) if line.startswith(("lockstep:", "warning")))
    stop = next((i for i in range(start + 1, len(lines)) if usual.match(lines[i])), len(lines))
    return "\n".join(line.rstrip() for line in lines[start:stop]) + "\n"


OFTEN = ("killed", "exception", "hangs", "nan")  # the others: `make test-long`


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_the_first_screen(tmp_path: Path, name: str) -> None:
    fault, code = CASES[name]
    words = (*ONCE, *MORE.get(name, ()))
    ended = train(tmp_path, *words, faults=(fault,))
    assert ended.code == code, ended.output
    assert not re.search(r"^(error|.*Connection (closed|reset))", ended.output.split("lockstep:")[0], re.M), (
        ended.output
    )
    screen = masked(first_screen(ended.output), tmp_path)
    # A save that runs beside the training may end before the fault, or not.
    screen = re.sub(r"(?<=To resume from the checkpoint of step )\d+", "N", screen)
    for words in WHAT_MUST_BE_SAID[name]:
        assert words in screen, f"{words!r} is not said:\n{screen}"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LOCKSTEP_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(screen)
    assert screen == path.read_text()
