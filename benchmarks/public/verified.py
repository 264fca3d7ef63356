"""`lockstep verify` with compile=true for each of the six models, on one and two processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.bench.results import table_lines
from lockstep.observe.sinks import read_jsonl
from lockstep.verify.command import text_of, verify
from lockstep.verify.runner import Runner
from lockstep.verify.trials import VerifyOptions
from public.bounded import Rows
from public.cases import CASES

STEPS = 2
GIVEN_UP = 0.6  # of a trial's limit
PRELOAD = {"vit": "timm", "diffusion": "timm", "lora": "peft"}  # what is slow to import


def measure(name: str, rows: Rows, limit_s: float, compiled: bool) -> None:
    """Train a small model of the kind in all layouts, and write the verdict.

    limit_s: seconds for one layout
    """
    target = f"{Path(__file__).with_name('cases.py')}:{CASES[name].__name__}"
    # A compilation that takes too long is given up long before its trial is: three trials follow each other.
    patience = {"hang.first": GIVEN_UP * limit_s}
    layer = {"task.tiny": True, "global_batch": 8, "steps": 1000, "compile": compiled, **patience}
    options = VerifyOptions(worlds=(1, 2), steps=STEPS)

    # All trials compile side by side: more processes for each would only wait for a core.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    # The runs' own logs are read before they are deleted: only they know what was compiled.
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        # A process that was killed while it compiled may have left half a file in the user's cache.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
        with Runner([PRELOAD.get(name, "transformers")], timedelta(seconds=limit_s)) as runner:
            report = verify(target, [("benchmark", layer)], options, runner)
            said = compilations(Path(folder))
    print(text_of(report), flush=True)

    verdicts = {row.trial.text: row.verdict for row in report.rows}
    causes = [cause.key for cause in report.causes]
    seconds = round(time.monotonic() - began, 1)
    rows.add(case=name, passed=report.passed, seconds=seconds, layouts=verdicts, causes=causes, compilations=said)


def compilations(folder: Path) -> dict[str, int]:
    """Return what the trials have compiled, or why they have not, and how many of them."""
    reasons = [
        record["reason"].partition(" in ")[0]
        for path in folder.glob("*/*/run/events.jsonl")
        for record in read_jsonl(path)
        if record.get("event") == "compile" and not record["reason"].startswith("begins")
    ]
    return dict(Counter(reasons))


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table."""
    body = [
        [
            row["case"],
            "passed" if row["passed"] else "FAILED",
            str(len(row["layouts"])),
            f"{row['seconds']:.1f}",
            "; ".join(f"{reason} ({count})" for reason, count in row["compilations"].items()),
        ]
        for row in rows
        if "passed" in row
    ]
    return table_lines(("model", "verify", "layouts", "s", "what was compiled (trials)"), body) if body else []
