"""Python stacks of running ranks: a rank writes its stacks on a signal, even while it hangs in C++ or holds the GIL.

`register` is the rank's side: `faulthandler` answers SIGUSR2 by writing to the file `stacks-RANK` in the attempt's
folder. The rest is the launcher's side: ask for stacks, parse them and group ranks by where they are.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path

from lockstep import files
from lockstep.launch.frames import Frame
from lockstep.runtime import attempt_folder

SIGNAL = signal.SIGUSR2

# How many worker processes of a rank are asked.
MAX_WORKERS_ASKED = 4

# Lines of faulthandler's output.
_THREAD_NUMBER = re.compile(r"(?m)(?<=^Thread )0x[0-9a-f]+|(?<=^Current thread )0x[0-9a-f]+")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')

# Around the stacks of a worker process, in an answer of `collect`.
_WORKER_END = "End of worker"
_WORKER = re.compile(rf"^Worker (\d+):$(.*?)^{_WORKER_END}$", re.MULTILINE | re.DOTALL)


def register(path: Path) -> None:
    """Let this process write its stacks to `path` on the signal, and when it crashes.

    It works while the main thread hangs in C++ and holds the GIL: faulthandler runs no Python.
    """
    # faulthandler holds a reference to the file, so it stays open.
    file = path.open("a")
    faulthandler.enable(file)
    faulthandler.register(SIGNAL, file, all_threads=True, chain=False)


def collect(folder: Path, pids: dict[int, int], timeout: float) -> dict[int, str]:
    """Ask these ranks for their stacks. The result has "" for a rank that does not answer in time or is suspended.

    The stacks of a rank's worker processes precede the rank's own, each after a line that names the process. Worker
    processes are forked from the rank, so they answer the same signal and write to the same file.
    """
    deadline = time.monotonic() + timeout
    answers = _collect(folder, pids, deadline)

    # One worker of each rank is asked at a time: two workers that write at once would mix their lines.
    worker_of = {rank: worker_pids(pid) for rank, pid in pids.items() if answers[rank]}
    for number in range(MAX_WORKERS_ASKED):
        asked = {rank: found[number] for rank, found in worker_of.items() if len(found) > number}

        for rank, text in _collect(folder, asked, deadline).items():
            if text:
                answers[rank] = f"Worker {asked[rank]}:\n{text}{_WORKER_END}\n{answers[rank]}"

    return answers


def worker_pids(pid: int) -> list[int]:
    """Return the processes that the process `pid` forked, from any of its threads."""
    children = (files.read(path) for path in sorted(Path(f"/proc/{pid}/task").glob("*/children")))
    return [int(child) for text in children for child in text.split()]


def _collect(folder: Path, pids: dict[int, int], deadline: float) -> dict[int, str]:
    """Ask each process for its stacks and return what it has written by the deadline, "" if nothing."""
    paths = {rank: attempt_folder.stacks(folder, rank) for rank in pids}

    # Answers are appended: the new answer begins where the file ends now.
    before = {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
    waiting = {rank for rank, pid in pids.items() if _ask(pid)}
    answers = dict.fromkeys(pids, "")

    while waiting and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank in sorted(waiting):
            text = files.read(paths[rank], before[rank])

            # An answer that has not grown since the last look is complete.
            if text and text == answers[rank]:
                waiting.discard(rank)

            answers[rank] = text

    return answers


def comparable(text: str) -> str:
    """Return the stacks of a process without the numbers of its threads, which differ between equal stacks."""
    return _THREAD_NUMBER.sub("0x0", text)


def group(stacks: dict[int, str]) -> list[tuple[tuple[Frame, ...], list[int]]]:
    """Group ranks by the stacks of their main threads, the smallest group first. Ranks without a stack are left out."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    parsed: dict[str, tuple[Frame, ...]] = {}  # many ranks have the same text

    for rank, text in sorted(stacks.items()):
        if text not in parsed:
            parsed[text] = main_thread(text)

        frames = parsed[text]
        if frames:
            groups.setdefault(frames, []).append(rank)

    return sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))


def workers(text: str) -> dict[int, tuple[Frame, ...]]:
    """Return the main thread's frames of each worker process in an answer of `collect`."""
    return {int(section[1]): main_thread(section[2]) for section in _WORKER.finditer(text)}


def main_thread(text: str) -> tuple[Frame, ...]:
    """Return the frames of the main thread, most recent first, without internal ones (unless there are no others)."""
    frames: list[Frame] = []
    for line in text.splitlines():
        # faulthandler writes the main thread last, so each new thread replaces the thread before it.
        if _THREAD.match(line):
            frames = []
            continue

        parts = _FRAME.match(line)
        if parts:
            frames.append(Frame(*parts.groups()))

    return tuple(frame for frame in frames if not frame.internal) or tuple(frames)


def _ask(pid: int) -> bool:
    """Send the signal. Return whether an answer can come."""
    status = files.read(Path(f"/proc/{pid}/status"))
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)

    # The signal would kill a rank that has not registered yet (bit n - 1 of the mask is signal n), and a suspended rank
    # cannot answer.
    registered = caught is not None and int(caught.group(1), 16) >> (SIGNAL - 1) & 1
    if registered and "\nState:\tT" not in status:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
            return True

    return False
