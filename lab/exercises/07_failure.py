"""Exercise 7, failure: read the first screen, and name the rank, the line and the cause.

    python lab/exercises/07_failure.py                      prints four screens of a real run on two ranks
    lockstep lab check 7 lab/exercises/07_failure.py        compares your answers with the truth

Read docs/lab/07_failure.md first. The answers below are what one writes down after a glance; most are wrong. Take
another SEED for other faults.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from lockstep.lab.patient.run import run_patient

SEED = 3

# TODO: one answer for each screen, in the order in which they came.
#   rank    the rank at fault, not the one that complains
#   line    the line of task.py where it was, as it stands there; None if the screen names no line
#   cause   "exception", "hang", "killed" or "exit"
ANSWERS = [
    {"rank": 0, "line": None, "cause": "hang"},
    {"rank": 0, "line": None, "cause": "killed"},
    {"rank": 0, "line": "sys.exit(0)", "cause": "killed"},
    {"rank": 1, "line": "x = self._normalise(x)", "cause": "exception"},
]

# TODO: the key in square brackets after "cause" that this prints. Type it in the folder that contains lab/ and src/.
#   lockstep verify src/lockstep/lab/patient/task.py:Silent task.seed=3 --worlds 1,2
SILENT = ""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for number, screen in enumerate(run_patient(Path(folder), SEED, faults=True).screens(), start=1):
            print(f"\n---- screen {number}\n{screen}")
