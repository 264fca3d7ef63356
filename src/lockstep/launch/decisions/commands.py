"""What the state machine wants done on the coordinating node. `Coordinator` carries these commands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.launch.wire.messages import Announce, JobEnd, Message


@dataclass(frozen=True)
class StartAttempt:
    """Start a new attempt: `counts` maps each node to its number of ranks, which are numbered in this order."""

    attempt: int
    counts: dict[int, int]


@dataclass(frozen=True)
class Send:
    """Send a message to a node, which may be the coordinating one itself."""

    node: int
    message: Message


@dataclass(frozen=True)
class DropNode:
    """Close the connection to a node that does not belong to the job any more."""

    node: int


@dataclass(frozen=True)
class LogEvent:
    """Append an event to the run's events.jsonl."""

    event: dict[str, Any]


# The last two are messages as well: the coordinator also sends them to all other nodes.
Command = StartAttempt | Send | DropNode | LogEvent | Announce | JobEnd
