"""`exact: true` through the real launcher: a run that is killed, shrinks and grows ends with the bits of one that had
one process all along, and has logged the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faults.runs import Ended, train
from faults.torture import digests
from lockstep.faults import Fault

WORDS = ("preset=tiny", "steps=15", "exact=true", "checkpoint.every=4", "log.every=3", "evaluate.at_end=false")
WORDS += ("evaluate.every=null", "clip.norm=0.5")


def logged(run: Path) -> dict[int, list[Any]]:
    """Of every step its last line: what was killed has been done again."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: [line["loss"], line["weight"], line["grad_norm"], line["metrics"]] for line in lines}


@pytest.mark.long
def test_eight_three_five_one(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", *WORDS, nproc=1)
    assert undisturbed.code == 0, undisturbed.output
    assert "1 to 8 ranks" in undisturbed.output
    folder = tmp_path / "elastic"
    stopped: Ended | None = None
    for nproc, stops_after, kill in (
        (8, 4, None),
        (3, 9, Fault("kill", rank=1, step=7, phase="all-reduce")),
        (5, 12, None),
    ):
        faults = (Fault("term", rank=0, step=stops_after, phase="compute"), *([kill] if kill else []))
        stopped = train(folder, *WORDS, "--resume", "auto", nproc=nproc, faults=faults)
        assert stopped.code == 75, stopped.output
        assert ("SIGKILL" in stopped.output) == (kill is not None)
    assert stopped is not None
    ended = train(folder, *WORDS, "--resume", "auto", nproc=1)
    assert ended.code == 0, ended.output
    assert "written by 5 ranks" in ended.output
    assert digests(ended.run) == digests(undisturbed.run)
    assert logged(ended.run) == logged(undisturbed.run)
    assert sorted(logged(ended.run)) == list(range(3, 16, 3))
