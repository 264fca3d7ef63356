"""Launchers of ranks without torch, and what can be seen of them from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import preloaded

HERE = Path(__file__).parent
# For what must happen: moments on an idle machine, longer on a busy one. Ranks that only wait do so for longer still,
# so that none of them ends by itself before a test has given up.
PATIENCE_S = 240.0
MODULES = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])  # where `puppet` is found


class Launcher:
    """One node: a launcher in a process of its own, with all that it says in a file."""

    def __init__(self, run_dir: Path, code: str, name: str = "node", with_torch: bool = False, **job: Any):
        """`with_torch`: the ranks need torch, and are forked from a process that has it."""
        run_dir.mkdir(exist_ok=True)
        self.run_dir, self._output = run_dir, run_dir / f"{name}.txt"
        described = {"code": code, "run_dir": str(run_dir), **job}
        words = (str(HERE / "puppet.py"), json.dumps(described))
        env = os.environ | {"PYTHONPATH": MODULES}
        with self._output.open("ab") as output:
            if with_torch:
                files = {"stdout": output, "stderr": output}
                self.process = preloaded.start_python(*words, env=env, cwd=Path.cwd(), spares=1, **files)
            else:
                self.process = subprocess.Popen([sys.executable, *words], env=env, stdout=output, stderr=output)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)

    def zygote(self) -> int:
        """Its only child."""
        (child,) = children_of(self.process.pid)
        return child

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def pid_of(run_dir: Path, attempt: int, rank: int) -> int:
    """Of a rank that has noted that it is there."""
    path = run_dir / f"{attempt}-{rank}"
    until(path.exists)
    return int(path.read_text().split()[0])


def pids_of(run_dir: Path, attempt: int, world: int) -> list[int]:
    """Of all ranks of an attempt, once all have noted that they are there.

    A rank that has not begun when another one ends, or when all are asked to save, may end without a note.
    """
    return [pid_of(run_dir, attempt, rank) for rank in range(world)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def restarts_of(run_dir: Path) -> int:
    return [event["event"] for event in events(run_dir)].count("restart")
