"""The commands that the state machine has issued, until the coordinator takes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import plural
from lockstep.launch.decisions.commands import Command, LogEvent, Send
from lockstep.launch.failure import Failure
from lockstep.launch.wire.messages import Announce, Message


class Outbox:
    """A queue of commands, with a method for each kind that is issued in several places."""

    def __init__(self, logs: Path):
        self._logs = logs  # the folder of the ranks' logs
        self._commands: list[Command] = []

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def put(self, command: Command) -> None:
        self._commands.append(command)

    def send(self, nodes: Iterable[int], message: Message) -> None:
        self._commands += [Send(node, message) for node in sorted(nodes)]

    def say(self, text: str) -> None:
        self.put(Announce(f"lockstep: {text}"))

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
