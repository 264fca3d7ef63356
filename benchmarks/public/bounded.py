"""Cases that run one after another, each in a process that is killed when its time is over.

torch.compile may take hours, and a hang must not cost the cases that are left. So a case writes every row as soon as it
is known, and what was written before a kill counts. Processes are forked, because importing takes ten seconds: this
process never touches the GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

NO_CUDA = 77  # exit code of a forked process that cannot use the GPU
PACKAGES = ("transformers", "peft", "timm", "torchvision", "torchao")  # of others; what a case lacks, it says itself


@dataclass(frozen=True)
class Rows:
    """A file with a row of JSON in each line."""

    path: Path

    def add(self, **row: Any) -> None:
        """Write a row, and print it: it is there even if the process is killed at once."""
        line = json.dumps(row)
        with self.path.open("a") as file:
            file.write(f"{line}\n")
        print(f"  row {line}", flush=True)

    def read(self) -> list[dict[str, Any]]:
        """Return all rows so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@dataclass(frozen=True)
class Bounded:
    """A case: `measure()` runs in a process of its own, for at most `limit_s` seconds."""

    name: str
    measure: Callable[[], None]
    limit_s: float
    on_gpu: bool = True  # itself, not in processes that it starts


def load(modules: Iterable[str]) -> None:
    """Import what the cases need, once for all of them, as far as it is installed."""
    # Asking for GPUs through CUDA would make it useless in a forked process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

    began = time.monotonic()
    for module in modules:
        try:
            import_module(module)
        except Exception as error:  # a package that is missing or broken fails the cases that need it, and no others
            print(f"{module} cannot be imported: {error}", flush=True)

    missing = [name for name in PACKAGES if find_spec(name) is None]
    without = f", without {', '.join(missing)}" if missing else ""
    print(f"torch {torch.__version__}, imported in {time.monotonic() - began:.1f} s{without}", flush=True)


def run_all(cases: Iterable[Bounded], rows: Rows, total_s: float, together: bool = False) -> None:
    """Run the cases within `total_s` seconds in all, one by one, or `together` if nothing is timed."""
    ends = time.monotonic() + total_s
    running: list[Child] = []
    fresh = False

    for case in cases:
        left_s = ends - time.monotonic()
        if left_s < 5:
            rows.add(case=case.name, failed=f"not begun: the {total_s:.0f} s of this part are over")
            continue

        running.append(Child(case, min(case.limit_s, left_s), rows, fresh))
        if not together and running.pop().wait() == NO_CUDA:
            print("the GPU cannot be used in a forked process: cases begin in new ones from here on", flush=True)
            fresh = True
            Child(case, min(case.limit_s, ends - time.monotonic()), rows, fresh).wait()

    for child in running:
        child.wait()


class Child:
    """A case that runs in a process and a process group of its own."""

    def __init__(self, case: Bounded, limit_s: float, rows: Rows, fresh: bool):
        """Start the case; `fresh`: in a new Python, which imports everything again."""
        print(f"{case.name}: at most {limit_s:.0f} s", flush=True)
        self.case = case
        self.limit_s = limit_s
        self.rows = rows
        self.began = time.monotonic()
        if fresh:
            only = ["--only", case.name, "--inline", "--json", str(rows.path)]
            self.group = subprocess.Popen([sys.executable, *sys.argv, *only]).pid
            return

        sys.stdout.flush()
        self.group = os.fork()
        if self.group == 0:
            inside(case)

    def wait(self) -> int:
        """Wait for the end of the case, or end it, and return its exit code. If it failed, that is a row."""
        code = None
        while code is None and time.monotonic() < self.began + self.limit_s:
            time.sleep(0.05)
            ended, status = os.waitpid(self.group, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None

        # Its own children, such as workers of a DataLoader, are in its group. They may outlive it.
        for kill in (os.killpg, os.kill) if code is None else (os.killpg,):
            with suppress(ProcessLookupError):
                kill(self.group, signal.SIGKILL)
        if code is None:
            os.waitpid(self.group, 0)

        if code is None:
            self.rows.add(case=self.case.name, failed=f"killed after {self.limit_s:.0f} s")
        elif code not in (0, NO_CUDA):
            self.rows.add(case=self.case.name, failed=f"ended with exit code {code}")
        print(f"{self.case.name}: {time.monotonic() - self.began:.1f} s", flush=True)
        return -signal.SIGKILL if code is None else code


def inside(case: Bounded) -> None:
    """Run a case in this process, which was forked for it, and end the process."""
    os.setpgrp()
    try:
        if case.on_gpu and torch.cuda.device_count():
            torch.cuda.init()
    except Exception as error:
        print(error, flush=True)
        os._exit(NO_CUDA)

    try:
        case.measure()
    except BaseException:
        print(traceback.format_exc(limit=-6), flush=True)
        os._exit(1)

    # Not through Python's own end: threads of a compiler or a loader may take seconds to stop.
    os._exit(0)
