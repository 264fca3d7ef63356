"""The commands of the state machine, which `Coordinator` carries out on its node."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import plural, some_names
from lockstep.launch.failure import Failure
from lockstep.launch.job import COORDINATOR
from lockstep.launch.wire.messages import Announce, JobEnd, Order

# How many lines a second all screens show about single nodes that come or go. Each line is a message to every node.
LINES_PER_SECOND = 8

# How the nodes that had no line of their own are summed up: one node, several nodes.
SUMMARIES = {
    "joined": ("more node joined", "more nodes joined"),
    "lost": ("more node was lost", "more nodes were lost"),
}


@dataclass(frozen=True)
class StartAttempt:
    """Start a new attempt, with these ranks on each node."""

    attempt_number: int
    ranks_on: dict[int, range]


@dataclass(frozen=True)
class Send:
    """Send an order to a node, which may be the coordinating one itself."""

    node: int
    order: Order


@dataclass(frozen=True)
class DismissNode:
    """Tell another node that the job is over for it: its launcher ends, and closes the connection."""

    node: int
    ending: JobEnd


@dataclass(frozen=True)
class HangUp:
    """Close the connection to a node that is lost."""

    node: int


@dataclass(frozen=True)
class RecordEvent:
    """Append an event to the run's events.jsonl."""

    event: dict[str, Any]


# The last two are messages as well: the coordinator also sends them to all other nodes.
Command = StartAttempt | Send | DismissNode | HangUp | RecordEvent | Announce | JobEnd


class Outbox:
    """A queue of commands, with a method for each kind that is issued in several places."""

    def __init__(self, logs: Path):
        self._logs = logs  # the folder of the ranks' logs
        self._commands: list[Command] = []
        self.node_news = NodeNews(self.announce)

    def take(self) -> list[Command]:
        """Return all commands so far, oldest first, and begin with an empty queue."""
        commands, self._commands = self._commands, []
        return commands

    def put(self, command: Command) -> None:
        self._commands.append(command)

    def send(self, nodes: Iterable[int], order: Order) -> None:
        """Send an order to several nodes."""
        # The coordinating node comes last: it carries out its own order at once, which may take seconds.
        last = sorted(nodes, key=lambda node: (node == COORDINATOR, node))
        self._commands += [Send(node, order) for node in last]

    def announce(self, text: str) -> None:
        """Show a line on the screens of all nodes."""
        self.put(Announce(f"lockstep: {text}"))

    def record_event(self, event: str, **fields: Any) -> None:
        self.put(RecordEvent({"event": event, **fields}))

    def record_resize(self, before: int, after: int) -> None:
        self.record_event("resize", **{"from": before, "to": after})

    def announce_failure(
        self, failure: Failure, attempt_number: int | None, others: int, what_follows: str = ""
    ) -> None:
        """Announce a failure on the screens of all nodes, and record it as an event.

        `others` is the number of other ranks that end because of it.
        """
        lines = [failure.text()]

        # An error for the user says what to do, so there is nothing to look up.
        if not failure.for_user:
            facts = []
            if others:
                facts.append(f"{plural(others, 'other rank')} ended because of it.")

            # Rank 0 wrote to the terminal: its output is on the screen already.
            if failure.rank:
                facts.append(f"Log of rank {failure.rank}: {self._logs / f'rank-{failure.rank}.log'}")

            if facts:
                lines.append(f"  {' '.join(facts)}")

            if what_follows:
                lines.append(f"  {what_follows}")

        self.put(Announce("\n".join(lines)))

        # Events hold no log lines: the log itself stays in the run's folder.
        fields = {name: value for name, value in vars(failure).items() if name not in ("log", "traits")}
        self.record_event("failure", attempt=attempt_number, **fields)


class NodeNews:
    """Announces which nodes come and go. If many do at once, the first have a line each, and the rest is summed up."""

    def __init__(self, announce: Callable[[str], None]):
        self._announce = announce

        # Lines about single nodes: when the current second began, and how many lines it has had.
        self._second_began = -math.inf
        self._lines = 0

        # The hosts of nodes that had no line yet, by what happened to them: a key of SUMMARIES.
        self._left_out: dict[str, list[str]] = {}

    def announce(self, what: str, host: str, text: str, now: float) -> None:
        """Announce that a node has joined or was lost; of many in a second, `sum_up` announces the rest in one line."""
        # A new second begins only when everything that was left out before has been announced.
        if now - self._second_began >= 1.0 and not self._left_out:
            self._second_began = now
            self._lines = 0

        self._lines += 1
        if self._lines <= LINES_PER_SECOND:
            self._announce(text)
        else:
            self._left_out.setdefault(what, []).append(host)

    def sum_up(self, now: float, nodes: int) -> None:
        """Announce once a second what was left out; the job has this many `nodes` now."""
        if not self._left_out or now - self._second_began < 1.0:
            return

        for what, hosts in self._left_out.items():
            one, several = SUMMARIES[what]
            self._announce(f"{plural(len(hosts), one, several)} ({some_names(hosts)}); {plural(nodes, 'node')} now")

        self._left_out = {}
        self._second_began = now
        self._lines = 0
