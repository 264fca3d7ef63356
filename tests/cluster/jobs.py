"""Commands that run on two hosts, and what they must end with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
from cluster.hosts import Lab
from faults.runs import TINY

PATIENCE_S = 240.0


class Hosts:
    """Two hosts, and commands that run there."""

    def __init__(self, folder: Path, lab: Lab | None):
        self.lab = lab
        self._folder = folder
        self.names = ["host1", "host2"] if lab else ["127.0.0.2", "127.0.0.3"]
        self.addresses = ["10.77.0.1", "10.77.0.2"] if lab else self.names
        if not preloaded.fresh():
            preloaded.shims(preloaded.server(), folder)

    @property
    def python(self) -> str:
        return sys.executable if preloaded.fresh() else str(self._folder / "python")

    @property
    def login(self) -> list[str]:
        """Options of `lockstep train --nodes`."""
        return ["--python", self.python, *(["--ssh", self.lab.ssh] if self.lab else [])]

    def environment(self, host: int) -> dict[str, str]:
        return self.lab.environment(host) if self.lab else {}

    def processes(self) -> list[int]:
        """Everything that runs on both hosts. On loopback addresses nothing tells them from others."""
        return [pid for host in (1, 2) for pid in self.lab.processes(host)] if self.lab else []


class Running:
    """A `lockstep` command, with what it prints in a file."""

    def __init__(self, folder: Path, *words: str, env: dict[str, str]):
        folder.mkdir(exist_ok=True)
        self._output = folder / f"output-{time.monotonic_ns()}"
        with self._output.open("wb") as output:
            self.process = preloaded.start(
                *words,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | env,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self.process.poll() is not None  # asked first: it may come to that, and end
            if value := condition():
                return value
            assert not ended, f"it ended too early:\n{self.text()}"
            if time.monotonic() > deadline:
                preloaded.give_up(self.process, "it never came to that", self.text())
            time.sleep(0.02)

    def wait(self) -> int:
        return preloaded.wait(self.process, PATIENCE_S, self.text)


def exact(steps: int = 20) -> tuple[str, ...]:
    """The settings of a small run whose weights do not depend on the number of ranks."""
    return (*(word for word in TINY if not word.startswith("steps=")), f"steps={steps}", "exact=true")
