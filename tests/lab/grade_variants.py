"""Grades variants of files of the lab in one process: a solution with one mistake each. Run by test_beyond.py.

`lockstep verify` and the runs of the patient take seconds, and one mistake does not change them: verify is left out
here, and the patient runs once for all variants, and for what the script of lab 7 shows. The tests of whole files leave
nothing out.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

from lockstep.lab.graders import determinism, failure, resume
from lockstep.lab.grading import Finding, grade
from lockstep.lab.learner import Learner
from lockstep.lab.patient.run import PatientRun, run_patient


def main(folder: str, script_7: str) -> None:
    """Grade the variants of variants.json, by name, and write the findings to findings.json."""
    place = Path(folder)

    @cache
    def run_once(faults: bool, seed: int) -> PatientRun:
        return run_patient(place / f"patient-{faults}", seed, faults=faults)

    left_out = Finding("lockstep verify", True, "left out")
    determinism.verify_task = resume.verify_task = lambda *_, **__: left_out
    failure.run_patient = lambda _, seed, *, faults: run_once(faults, seed)
    failure._judge_silent = lambda *_: left_out

    script = Learner(Path(script_7)).module()
    script.run_patient = lambda _, seed, *, faults: run_once(faults, seed)  # pyrefly: ignore
    with (place / "script-7.txt").open("w") as said, redirect_stdout(said):
        script.main()

    found = {}
    for name, (number, path) in json.loads((place / "variants.json").read_text()).items():
        findings = grade(number, Path(path))
        found[name] = [(finding.statement, finding.passed, finding.found, finding.why) for finding in findings]
    (place / "findings.json").write_text(json.dumps(found))


main(*sys.argv[1:])
