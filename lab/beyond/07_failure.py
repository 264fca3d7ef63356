"""Lab 7, failure: read the first screen, and name the rank, the line and the cause.

    python lab/beyond/07_failure.py                      run, show the screens, compare the answers below with the truth
    lockstep lab check 7 lab/beyond/07_failure.py        grade this file

When one rank of a job fails, all of them complain, and the loudest is rarely the one at fault. Here a small task on two
ranks gets four planted faults; they depend on SEED. The run survives them all and ends with the same weights as a run
without faults, to the bit. A fifth mistake shows no screen at all: `lockstep verify` names it.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from lockstep.lab import plots, predictions
from lockstep.lab.checks import Checks
from lockstep.lab.patient.faults import TASK, plan, silent_mistake
from lockstep.lab.patient.run import PatientRun, run_patient
from lockstep.lab.predictions import Question
from lockstep.lab.ranks import LIMIT, run_ranks

SEED = 7

# What the screens said, one answer for each, in the order in which they came.
#   rank    the rank at fault, not the one that complains
#   line    the line of task.py where it was, as it stands there; None if the screen names no line
#   cause   "exception", "hang", "killed" or "exit"
ANSWERS = [
    {"rank": 1, "line": None, "cause": "killed"},
    {"rank": 0, "line": "return x / scale[:, None]", "cause": "exception"},
    {"rank": 0, "line": "time.sleep(0.05)", "cause": "hang"},
    {"rank": 0, "line": "sys.exit(0)", "cause": "exit"},
]

# The key in brackets that `lockstep verify .../task.py:Silent task.seed=SEED` prints beside the cause.
SILENT = "not-synchronised"

QUESTIONS = [
    Question("hang", "After how many seconds is the rank that hangs found?", "s", "hang.least + the launcher's second"),
    Question("restart", "How long from a kill until the ranks train again?", "s", "fork + rendezvous"),
]


# ---- part 1: what plain torch says --------------------------------------------------------------------------


def plain() -> None:
    """Let rank 1 die in a loop of all-reduces. Rank 0 prints all that it is told."""
    dist.init_process_group("gloo", timeout=LIMIT)
    gradient = torch.ones(1000)
    for step in range(6):
        if step == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            # An address and a port. Which rank is that? At which step was it, in which line, and why is it gone?
            print(f"  rank 0 of plain torch: {str(error).splitlines()[0]}", flush=True)
            return


# ---- part 2: what Lockstep says -----------------------------------------------------------------------------


def show(run: PatientRun) -> None:
    """Print the first screen of each failure."""
    for number, screen in enumerate(run.screens(), start=1):
        print(f"\n---- screen {number} " + "-" * 60)
        print(screen)


def main() -> None:
    """Run the patient with its faults and without, and compare answers, weights and times."""
    checks = Checks("Lab 7: failure")
    with tempfile.TemporaryDirectory() as folder:
        run = run_patient(Path(folder) / "faults", SEED, faults=True)
        healthy = run_patient(Path(folder) / "healthy", SEED, faults=False)
        show(run)

        truth = plan(SEED)
        checks.equal("screens", len(run.screens()), len(truth))
        for number, (answer, fault) in enumerate(zip(ANSWERS, truth, strict=True), start=1):
            right = {"rank": fault.rank, "line": fault.line, "cause": fault.cause}
            checks.equal(f"screen {number}", answer, right)
        checks.equal("the mistake without a screen", SILENT, silent_mistake(SEED))

        weights, expected = (load_file(done.folder / "model.safetensors") for done in (run, healthy))
        same = sum(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        checks.equal("tensors with the same bits as without any fault", same, len(expected))
        reveal(run)
        draw(run)
    checks.finish()


def reveal(run: PatientRun) -> None:
    """Compare the guesses with what the run's events say."""
    failures, restarts, starts = run.events("failure"), run.events("restart"), run.events("start")
    found = next(event["message"] for event in failures if event["kind"] == "hang")
    waited = float(found.partition("advanced for ")[2].partition(" s")[0])
    predictions.reveal("7", QUESTIONS[0], computed=4 + 1, measured=waited)

    # From the failure of a killed rank to the `start` of the next attempt.
    kill = next(number for number, event in enumerate(failures) if event["kind"] == "SIGKILL")
    back = next(event["time"] for event in starts if event["time"] > restarts[kill]["time"])
    predictions.reveal("7", QUESTIONS[1], computed=0.2, measured=back - failures[kill]["time"])


def draw(run: PatientRun) -> None:
    """Draw the steps of the run over time, with its failures."""
    made = plots.figure(9, 3.4)
    if made is None:
        return
    picture, axes = made
    saved, failures = run.events("checkpoint"), run.events("failure")
    begin = run.events("start")[0]["time"]
    axes.plot([event["time"] - begin for event in saved], [event["step"] for event in saved], "o", markersize=4)
    for number, event in enumerate(failures, start=1):
        at = event["time"] - begin
        axes.axvline(at, color="#d1495b", linewidth=1)
        axes.text(
            at, 20.6, f"{number}: {event['kind']}, rank {event['rank']}", rotation=25, fontsize=8, color="#d1495b"
        )
    axes.set_xlabel("seconds since the first start")
    axes.set_ylabel("steps saved")
    axes.set_ylim(0, 28)
    axes.set_title("One run, four faults: every failure costs at most the steps since the last checkpoint")
    plots.save(picture, "07_failure")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Name rank, line and cause of planted faults from the first screen.")
    parser.add_argument("--full", action="store_true", help="also print everything that the run printed")
    options = parser.parse_args()
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)  # under torchrun, rank 0 alone starts the runs: they have ranks of their own
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"):
        os.environ.pop(name, None)
    predictions.ask("7", QUESTIONS)
    print(f"the faults are in {TASK.relative_to(Path.cwd()) if TASK.is_relative_to(Path.cwd()) else TASK}")
    try:
        run_ranks(plain, nproc=2)
    except SystemExit:
        pass  # one of its ranks was killed
    main()
