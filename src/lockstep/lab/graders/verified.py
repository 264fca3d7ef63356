"""Runs `lockstep verify` on a class of a learner's file, and turns its report into a finding."""

from __future__ import annotations

from pathlib import Path

from lockstep.lab.grading import Finding
from lockstep.verify.command import VerifyReport, verify
from lockstep.verify.trials import VerifyOptions


def verify_task(path: Path, name: str, *, exact: bool) -> Finding:
    """Return whether the task NAME of a file trains the same model on one process and on two."""
    report = verify(f"{path}:{name}", [], VerifyOptions(worlds=(1, 2), steps=2, exact=exact))
    bits = ", to the last bit" if exact else ""
    return Finding(
        f"lockstep verify: {name} trains the same model on 1 and 2 processes{bits}",
        report.passed,
        cause_of(report),
        _explain(report),
    )


def cause_of(report: VerifyReport) -> str:
    """Return the key of the cause that verify names, or PASS."""
    if report.passed:
        return "PASS"
    return report.causes[0].key if report.causes else "FAIL"


def _explain(report: VerifyReport) -> str:
    if not report.causes:
        return f"type `lockstep verify {report.target}` to see the table"

    cause = report.causes[0]
    evidence = f" ({cause.evidence})" if cause.evidence else ""
    return f"{cause.title}{evidence}. To fix it: {cause.fix}"
