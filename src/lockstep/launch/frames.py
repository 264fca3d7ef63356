"""The frames of Python stacks and tracebacks, and which of them a user wants to see."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lockstep.errors import plural

# The folder of this package.
_PACKAGE = str(Path(__file__).parents[1]) + "/"

# A frame in the traceback of an exception.
_TRACEBACK_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$')

# Frames that every stack has and that never explain a hang.
_INTERNAL = re.compile(
    r"/(?:site|dist)-packages/torch/|^<frozen |/importlib/|/(?:runpy|threading|socketserver|contextlib)\.py$"
    r"|/lockstep/launch/ranks/(?:zygote|rank_process)\.py$"
)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: str  # text, because faulthandler writes ??? for a line that it does not know
    function: str

    @property
    def internal(self) -> bool:
        """Whether the frame is one that every stack has (torch, imports, the launcher): it does not explain a hang."""
        return bool(_INTERNAL.search(self.file))

    @property
    def in_user_code(self) -> bool:
        """Whether the frame is in neither a library, nor Python's own modules, nor this package."""
        library = "-packages/" in self.file or self.file.startswith((_PACKAGE, sysconfig.get_path("stdlib")))
        return not (library or self.internal)

    def __str__(self) -> str:
        # Relative to this package, to site-packages, or to the working directory.
        file = self.file
        if file.startswith(_PACKAGE):
            file = "lockstep/" + file.removeprefix(_PACKAGE)
        elif "-packages/" in file:
            file = file.rpartition("-packages/")[2]
        else:
            with contextlib.suppress(FileNotFoundError):  # the working directory may have been deleted
                file = file.removeprefix(os.getcwd() + "/")

        return f"{file}:{self.line} {self.function}"


def line_of(frames: tuple[Frame, ...]) -> str:
    """Return the line to look at: the user's most recent frame if there is one, or else the most recent frame."""
    # Deep inside a library the most recent frame says little; the user's line says what the rank was doing.
    users_own = [frame for frame in frames if frame.in_user_code]
    return str((users_own or frames)[0])


def describe(frames: tuple[Frame, ...], prefix: str = "") -> list[str]:
    """Return `prefix` with the line to look at, then all frames, most recent first; nothing if there are none."""
    if not frames:
        return []

    return [f"{prefix}at: {line_of(frames)}", *(f"  {frame}" for frame in frames)]


def fold(traceback: str, recorded: bool = True) -> list[str]:
    """Return an exception's traceback without the frames of Lockstep and of libraries, if there are other frames.

    The last frame of each traceback always stays, because the exception was raised there. `recorded`: whether the
    whole traceback is in the events of the run.
    """
    all_lines = traceback.rstrip().splitlines()
    blocks = list(_frame_blocks(all_lines))

    # Lines that are not frames stay, and so does the last frame before such a line, or before the end.
    shown = [
        frame is None or frame.in_user_code or following is None
        for (frame, _), (following, _) in pairwise([*blocks, (None, [])])
    ]

    # Without a frame of the user, the other frames are all there is to see.
    has_user_code = any(frame is not None and frame.in_user_code for frame, _ in blocks)
    if not has_user_code or all(shown):
        return all_lines

    lines = [line for (_, text), show in zip(blocks, shown, strict=True) if show for line in text]
    where = ": see events.jsonl" if recorded else ""
    return [*lines, f"(without {plural(shown.count(False), 'frame')} of Lockstep and of libraries{where})"]


def _frame_blocks(lines: list[str]) -> Iterator[tuple[Frame | None, list[str]]]:
    """Yield each frame with its lines, and every other line with None."""
    frame: Frame | None = None
    block: list[str] = []
    for line in lines:
        head = _TRACEBACK_FRAME.match(line)

        # The code, and marks under it, are indented further.
        if frame is not None and head is None and line.startswith(("    ", "  [Previous line")):
            block.append(line)
            continue

        if block:
            yield frame, block

        frame = Frame(*head.groups()) if head else None
        block = [line]

    if block:
        yield frame, block
