"""What the decisions of a job ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.launch.failure import Failure
from lockstep.launch.messages import Message


@dataclass(frozen=True)
class Form:
    """Start a round: so many ranks on each of these nodes, numbered in this order."""

    attempt: int
    ranks: dict[int, int]


@dataclass(frozen=True)
class Send:
    node: int
    message: Message


@dataclass(frozen=True)
class Tell:
    """To the people at all nodes."""

    text: str


@dataclass(frozen=True)
class Log:
    """To the run's events.jsonl."""

    event: dict[str, Any]


@dataclass(frozen=True)
class Ending:
    """The job is over. Codes: 0 done, 1 failed, 2 the user can mend it, 75 saved and left, 130 the same by Ctrl-C."""

    code: int
    failure: Failure | None = None
    restarts: int = 0


Command = Form | Send | Tell | Log | Ending
