"""The entry point of a rank: runs a generator, one step for each command of the pool."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.pool import STOP


def work(spec: dict[str, Any]) -> None:
    """Run the generator that `spec` names until the pool stops it."""
    # A target may be a module of the folder where `lockstep bench` was started; its own arguments are not for it.
    rank = spec["rank"]
    sys.path += [folder for folder in spec["path"] if folder not in sys.path]
    sys.argv = ["lockstep-bench"]

    # Threads that are started from here on inherit these CPUs.
    if spec["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec["cpus"])
        torch.set_num_threads(spec["threads"])

    # "comm:measure" is the function `measure` of comm.py beside this file.
    module, _, function = spec["measure"].partition(":")
    measure = getattr(importlib.import_module(f"lockstep.bench.ranks.{module}"), function)

    # Opened for as long as the rank lives: one line is a command, one line its answer.
    folder = Path(spec["folder"])
    with (folder / f"command-{rank}").open() as commands, (folder / f"answer-{rank}").open("w") as answers:
        # The first value says that the rank is set up.
        generator = measure(spec["arguments"])
        value = next(generator)

        while True:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

            # The pool has gone if nothing comes.
            command = commands.readline().strip()
            if command in ("", STOP):
                break

            value = generator.send(command)

        # Its `with` and `finally` blocks leave the process group and stop workers.
        generator.close()
