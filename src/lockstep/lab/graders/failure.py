"""Grades lab 7: the learner's answers against the planted faults, in a run that happens now.

The learner reads screens of failures and names rank, cause and line of each. The faults depend on a seed, so answers
cannot be copied from another learner.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from lockstep.lab.graders.verified import cause_of
from lockstep.lab.grading import Finding
from lockstep.lab.learner import Learner
from lockstep.lab.patient.faults import CAUSES, SILENT, TASK, PlantedFault, plan, silent_mistake
from lockstep.lab.patient.run import PatientRun, run_patient
from lockstep.verify.command import verify
from lockstep.verify.trials import VerifyOptions

FUNCTIONS = ()
ERRORS: dict[str, str] = {}


def grade(learner: Learner) -> Iterator[Finding]:
    """Run the patient with its faults and without; compare answers with the truth, weights to the bit."""
    seed, answers, silent = learner.run(_read, world=1, group=False)[0]

    with tempfile.TemporaryDirectory() as folder:
        run = run_patient(Path(folder) / "faults", seed, faults=True)
        healthy = run_patient(Path(folder) / "healthy", seed, faults=False)

        truth = plan(seed)
        if len(run.screens()) != len(truth) or healthy.code:
            yield Finding("the run shows a screen for every fault", False, run.output + healthy.output)
            return

        for number, fault in enumerate(truth, start=1):
            answer = answers[number - 1] if number <= len(answers) else {}
            yield from _judge(number, answer, fault, run.screens()[number - 1])

        yield _same_bits(run, healthy)

    yield _judge_silent(seed, silent)


def _read(module: ModuleType) -> tuple[int, list[dict[str, Any]], str]:
    """Return the learner's answers, which are the whole file."""
    return module.SEED, module.ANSWERS, module.SILENT


def _judge(number: int, answer: dict[str, Any], fault: PlantedFault, screen: str) -> Iterator[Finding]:
    """Judge the answers about one screen."""
    headline = screen.splitlines()[0]
    rank, line, cause = answer.get("rank"), answer.get("line"), answer.get("cause")
    yield Finding(
        f"screen {number}: the rank at fault",
        rank == fault.rank,
        str(rank),
        f"read the first line to its end: {headline}. The other rank was stopped, or only waited",
    )
    yield Finding(
        f"screen {number}: the cause",
        cause == fault.cause,
        str(cause),
        f"{_about(fault.cause)}. The causes are {', '.join(sorted(CAUSES))}",
    )
    yield Finding(
        f"screen {number}: the line",
        (line or "").strip() == (fault.line or ""),
        str(line),
        _about_line(fault, line),
    )


def _about(cause: str) -> str:
    """Return what a cause looks like."""
    texts = {
        "killed": "SIGKILL comes from outside, most often from the kernel when memory is short; it leaves no stack",
        "hang": "no rank advanced: the rank at fault is the one that never entered the collective in which others wait",
        "exception": "the traceback ends with the exception that this rank raised itself",
        "exit": "the process ended itself, with an exit code and without an exception: look for sys.exit and os._exit",
    }
    return texts[cause]


def _about_line(fault: PlantedFault, line: str | None) -> str:
    """Return what to say about a wrong line."""
    if fault.line is None:
        return "a killed process shows no stack, so there is no line to name: look at memory, and at who may kill"
    if line is None:
        return f"the screen names a line of {TASK.name}: open the file there, and copy the line"
    return "that is a caller. The innermost line of task.py is the one: last in a traceback, first in a stack"


def _same_bits(run: PatientRun, healthy: PatientRun) -> Finding:
    """Judge that recovery was exact: four kills and restarts must leave no trace in the weights."""
    weights, expected = (load_file(done.folder / "model.safetensors") for done in (run, healthy))
    same = sum(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    return Finding(
        "the run with four faults ends with the same bits as one without",
        same == len(expected),
        f"{same} of {len(expected)} tensors",
        "this is a promise of Lockstep, not of your file: please report it, with the output of the run",
    )


def _judge_silent(seed: int, answer: str) -> Finding:
    """Judge the mistake without a screen. `verify` must find it as well: the question has an answer."""
    report = verify(
        f"{TASK}:Silent", [("seed of the exercise", {"task": {"seed": seed}})], VerifyOptions(worlds=(1, 2), steps=2)
    )

    named = cause_of(report)
    assert named == silent_mistake(seed), f"verify names {named}, planted is {silent_mistake(seed)}"
    return Finding(
        "the mistake without a screen, as lockstep verify names it",
        answer == named,
        answer or "no answer",
        f"type lockstep verify {TASK}:Silent task.seed={seed} --worlds 1,2 and look for [{SILENT[0]}] or the like",
    )
