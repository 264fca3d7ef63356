"""The output of several agents as that of one job."""

from __future__ import annotations

from typing import Any

from lockstep.errors import printable

# How much later a node may say what the job says to all of them. Later it says the same for itself, after a takeover.
SAME_S = 5.0


class MergedOutput:
    """Prints the output of all agents. A line that each of them says, because the job says it to all, appears once."""

    def __init__(self) -> None:
        # Line -> when it was printed, and which agents have said it then.
        self._printed: dict[str, list[tuple[float, set[Any]]]] = {}

    def add(self, agent: Any, lines: list[str], now: float) -> None:
        self._printed = {
            line: recent
            for line, times in self._printed.items()
            if (recent := [(when, agents) for when, agents in times if now - when < SAME_S])
        }
        for line in lines:
            others = next((agents for _, agents in self._printed.get(line, []) if agent not in agents), None)
            if others is not None:
                others.add(agent)
            else:
                self._printed.setdefault(line, []).append((now, {agent}))
                print(printable(line), flush=True)
