"""Where every rank is, in Python: stacks that ranks write on a signal, even while they hang in C++ or hold the GIL.

A rank registers `faulthandler` for SIGUSR2 with the file `stacks-RANK` in the meeting folder.
"""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGUSR2
_POLL_S = 0.05
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_PACKAGE = str(Path(__file__).parent.parent) + "/"
_INTERNAL = re.compile(
    r"/(?:site|dist)-packages/torch/|^<frozen |/importlib/|/(?:runpy|threading|socketserver|contextlib)\.py$"
    r"|/lockstep/launch/zygote\.py$|/lockstep/worker\.py$"
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: str
    function: str

    @property
    def internal(self) -> bool:
        """Of no help to anybody who looks for the place in their own code."""
        return bool(_INTERNAL.search(self.file))

    @property
    def users(self) -> bool:
        ours = self.file.startswith(_PACKAGE)
        library = "-packages/" in self.file or self.file.startswith(sysconfig.get_path("stdlib"))
        return not (ours or library or self.internal)

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} {self.function}"


def collect(folder: Path, pids: dict[int, int], patience: float = 2.0) -> dict[int, str]:
    """Ask these ranks for their stacks. "" for a rank that does not answer in time, or is stopped."""
    files = {rank: folder / f"stacks-{rank}" for rank in pids}
    before = {rank: _size(path) for rank, path in files.items()}
    waiting = {rank for rank, pid in pids.items() if _ask(pid)}
    answers, deadline = dict.fromkeys(pids, ""), time.monotonic() + patience
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for rank in sorted(waiting):
            text = _read_from(files[rank], before[rank])
            if text and text == answers[rank]:  # unchanged since the last look: it is whole
                waiting.discard(rank)
            answers[rank] = text
    return answers


def group(stacks: dict[int, str]) -> list[tuple[tuple[Frame, ...], list[int]]]:
    """Ranks by where their main threads are, the smallest group first. Ranks without a stack are in no group."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for rank, text in sorted(stacks.items()):
        if frames := main_thread(text):
            groups.setdefault(frames, []).append(rank)
    return sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))


def main_thread(text: str) -> tuple[Frame, ...]:
    """The frames of the main thread, most recent first, without those of torch and of Python's own start.

    `faulthandler` writes the main thread last.
    """
    frames: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = []
        elif found := _FRAME.match(line):
            frames.append(Frame(*found.groups()))
    return tuple(frame for frame in frames if not frame.internal) or tuple(frames)


def line_of(frames: tuple[Frame, ...]) -> str:
    """The one line to look at: the user's own if there is one, or else the most recent."""
    users = [frame for frame in frames if frame.users]
    return str((users or frames)[0])


def _ask(pid: int) -> bool:
    """Whether an answer may come. A rank that does not listen yet would die of the signal; a stopped one is silent."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        if caught is None or not int(caught.group(1), 16) >> (SIGNAL - 1) & 1 or "\nState:\tT" in status:
            return False
        os.kill(pid, SIGNAL)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_from(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def _short(file: str) -> str:
    if file.startswith(_PACKAGE):
        return "lockstep/" + file.removeprefix(_PACKAGE)
    if "-packages/" in file:
        return file.rpartition("-packages/")[2]
    here = os.getcwd() + "/"
    return file.removeprefix(here)
