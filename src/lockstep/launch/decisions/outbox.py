"""The commands that the state machine has issued, until the coordinator takes them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import plural, some_names
from lockstep.launch.decisions.commands import Command, LogEvent, Send
from lockstep.launch.failure import Failure
from lockstep.launch.wire.messages import Announce, Message

# How many lines a second all screens show about single nodes that come or go. Each line is a message to every node.
LINES_PER_S = 8


class Outbox:
    """A queue of commands, with a method for each kind that is issued in several places."""

    def __init__(self, logs: Path):
        self._logs = logs  # the folder of the ranks' logs
        self._commands: list[Command] = []

        # When a line about a node was last the first one of its second, how many came since, and what was not said.
        self._second_began = -math.inf
        self._lines = 0
        self._unsaid: dict[str, list[str]] = {}

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def put(self, command: Command) -> None:
        self._commands.append(command)

    def send(self, nodes: Iterable[int], message: Message) -> None:
        self._commands += [Send(node, message) for node in sorted(nodes)]

    def say(self, text: str) -> None:
        self.put(Announce(f"lockstep: {text}"))

    def say_of_node(self, what: str, host: str, text: str, now: float) -> None:
        """Say that a node has joined or was lost; if many do within a second, the rest is summed up in one line."""
        if now - self._second_began >= 1.0 and not self._unsaid:
            self._second_began, self._lines = now, 0

        self._lines += 1
        if self._lines <= LINES_PER_S:
            self.say(text)
        else:
            self._unsaid.setdefault(what, []).append(host)

    def sum_up(self, now: float, nodes: int) -> None:
        """Say once a second what was left out; `nodes` are there now."""
        if self._unsaid and now - self._second_began >= 1.0:
            for what, hosts in self._unsaid.items():
                verb = what if len(hosts) > 1 else what.replace("were", "was")
                named = some_names(hosts)
                self.say(f"{plural(len(hosts), 'more node')} {verb} ({named}); {plural(nodes, 'node')} now")
            self._unsaid = {}
            self._second_began, self._lines = now, 0

    def log(self, event: str, **fields: Any) -> None:
        self.put(LogEvent({"event": event, **fields}))

    def announce_failure(self, failure: Failure, attempt: int | None, stopped: int, verdict: str = "") -> None:
        """Announce a failure on the screens of all nodes, and log it.

        `stopped` is the number of other ranks that are stopped because of it, `verdict` says what follows.
        """
        lines = [failure.text()]
        if not failure.for_user:
            victims = f"{plural(stopped, 'other rank was', 'other ranks were')} stopped." if stopped else ""

            # Rank 0 wrote to the terminal: its output is on the screen already.
            log = f"Log of rank {failure.rank}: {self._logs / f'rank-{failure.rank}.log'}" if failure.rank else ""
            lines += [f"  {text}" for text in (f"{victims} {log}".strip(), verdict) if text]

        self.put(Announce("\n".join(lines)))

        # Events hold no log lines: the log itself stays in the run's folder.
        fields = {name: value for name, value in vars(failure).items() if name != "log"}
        self.log("failure", attempt=attempt, **fields)
