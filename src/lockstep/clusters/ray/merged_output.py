"""The output of several actors as that of one job."""

from __future__ import annotations

import sys
from typing import Any

from lockstep.errors import printable
from lockstep.launch.terminal import write


class MergedOutput:
    """Prints the output of all actors. A line that each of them says, because the job says it to all, appears once."""

    def __init__(self) -> None:
        # Line -> when it was printed, and which actors have said it then.
        self._printed: dict[str, list[tuple[float, set[Any]]]] = {}

    def add(self, actor: Any, lines: list[str], now: float) -> None:
        self._forget_old_lines(now)
        for line in lines:
            # If other actors have said this line and this one has not, it is the same message to all.
            times = self._printed.setdefault(line, [])
            others = [actors for _, actors in times if actor not in actors]
            if others:
                others[0].add(actor)
            else:
                times.append((now, {actor}))
                write(f"{printable(line)}\n", sys.stdout)

    def _forget_old_lines(self, now: float) -> None:
        # A node may say a little later what the job says to all of them. After five seconds it says the same for
        # itself, after a takeover.
        for line, times in list(self._printed.items()):
            recent = [(when, actors) for when, actors in times if now - when < 5.0]
            if recent:
                self._printed[line] = recent
            else:
                del self._printed[line]
