"""Real runs of `lockstep train`, as a user starts them, for the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
import preloaded
from lockstep.faults import Fault
from lockstep.testing import faults_environment

TINY = ("preset=tiny", "steps=40", "checkpoint.every=5", "log.every=5", "evaluate.every=20", "evaluate.at_end=false")


@dataclass
class Ended:
    code: int
    output: str
    run: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == kind]


class Started:
    """One `lockstep train`, with what it prints in a file."""

    def __init__(
        self, folder: Path, *words: str, target: str = "char_lm", faults: tuple[Fault, ...] = (), nproc: int | None = 2
    ):
        """Without `nproc` there is no launcher: the process that is started trains."""
        self.run, self._output = folder / "run", folder / f"output-{time.monotonic_ns()}"
        marks = folder / f"marks-{time.monotonic_ns()}"
        marks.mkdir(parents=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | faults_environment(marks, *faults)
        command = ["train", target, *(["--nproc", str(nproc)] if nproc else []), f"run_dir={self.run}", *words]
        with self._output.open("wb") as output:
            self.process = preloaded.start(
                *command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder
            )

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], Any], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None  # asked first: it may come to that, and end
            if condition():
                return
            assert not ended, f"it ended too early:\n{self.text()}"
            if time.monotonic() > deadline:
                preloaded.give_up(self.process, "it never came to that", self.text())
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 240.0) -> Ended:
        return Ended(preloaded.wait(self.process, seconds, self.text), self.text(), self.run)


def train(folder: Path, *words: str, **options: Any) -> Ended:
    return Started(folder, *words, **options).end()


def read_events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def masked(text: str, folder: Path) -> str:
    """Without what differs from machine to machine and from run to run."""
    text = text.replace(str(folder), "FOLDER").replace(os.uname().nodename, "HOST")
    text = text.replace(str(Path(lockstep.__file__).parent), "lockstep").replace(sysconfig.get_path("stdlib"), "PYTHON")
    text = re.sub(r"\n *[\^~]+(?=\n)", "", text)  # not every Python draws these
    text = re.sub(r"\n *\[W\S+ \S+ \w+\.cpp.*", "", text)  # torch's own: no name server answers, say
    text = re.sub(r"\d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"SIGKILL: killed.*", "SIGKILL: killed", text)  # not every kernel tells whether memory was the cause
    text = re.sub(r"(?<=[ (])\d+(\.\d+)? (MB|GB|kB|bytes|s)\b", r"N \2", text)
    text = re.sub(r"(line|collective|its last was) \d+", r"\1 N", text)
    return re.sub(r"(\.py):\d+", r"\1:N", text)
