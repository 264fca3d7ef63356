"""Runs the patient on two ranks under `lockstep train`, and returns what was on the screen."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.files.jsonl import read_jsonl
from lockstep.lab.patient.faults import TASK


@dataclass(frozen=True)
class PatientRun:
    """A finished run: its exit code, what it printed, and its folder."""

    code: int
    output: str
    folder: Path

    def screens(self) -> list[str]:
        """Return the first screen of each failure: from the line that names the rank to what follows next."""
        # A screen is the line that names the rank, and the indented lines below it.
        found: list[list[str]] = []
        inside = False
        for line in self.output.splitlines():
            if line.startswith("lockstep: rank "):
                found.append([])
                inside = True
            elif inside and not line.startswith("  "):
                inside = False

            if inside:
                found[-1].append(line)

        return ["\n".join(lines) for lines in found]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind, from events.jsonl."""
        return [event for event in read_jsonl(self.folder / "events.jsonl") if event["event"] == kind]


def run_patient(folder: Path, seed: int, *, faults: bool) -> PatientRun:
    """Train the patient on two ranks, with the faults of a seed or without any."""
    marks = folder / "marks"
    marks.mkdir(parents=True, exist_ok=True)

    # Limits for hangs are short: one of the faults is a hang, and a learner waits for the end of the run.
    words = [f"task.seed={seed}", f"run_dir={folder / 'run'}", "hang.least=4", "hang.first=60", "log.progress=plain"]
    if faults:
        words.append(f"task.marks={marks}")

    command = [sys.executable, "-m", "lockstep", "train", f"{TASK}:Patient", "--nproc", "2", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return PatientRun(done.returncode, done.stdout, folder / "run")
