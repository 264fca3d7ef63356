"""The messages that the launchers of a job send to each other; `connections.py` sends them.

A message is a frozen dataclass, sent as one line of JSON; every field is checked when it is received
(`typed_json.parse`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from lockstep.files import typed_json
from lockstep.launch.election import Term
from lockstep.launch.failure import Failure, LauncherFailure, RankExit
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import COORDINATOR, Bounds, LauncherSettings
from lockstep.launch.restarts import Dismissals, Restarts
from lockstep.runtime.preemption import PREEMPT_SIGNALS

# The messages, by their names in JSON.
_KINDS: dict[str, type[Message]] = {}


class Message:
    """Base of all messages: a frozen dataclass whose fields `typed_json.parse` can check.

    A message from a node also checks what `typed_json.parse` cannot know. Later code checks entries of collectives.
    """

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that it is about: if it concerns the current attempt, they must be ranks of its node."""
        return ()

    def why_invalid(self) -> str | None:
        """Return why its values cannot be right, or None."""
        return None

    def __init_subclass__(cls, base: bool = False) -> None:
        """Register the message under its name, by which `decode` finds it, unless it is only a base of others."""
        if not base:
            _KINDS[cls.__name__] = cls


@dataclass(frozen=True)
class AttemptMessage(Message, base=True):
    """Base of messages about one attempt. Such a message may arrive after the next attempt has begun."""

    attempt: int


# ---- from a node to the coordinator ----


@dataclass(frozen=True)
class Hello(Message):
    """A node asks to join; `identity` is the part of its command that must be equal on all nodes.

    A node that reconnects gives the number that it had before, and the term in which it had that number.
    """

    host: str
    nproc: Bounds
    identity: dict
    term: int = 0  # terms are numbered from 1 on
    number: int = COORDINATOR


@dataclass(frozen=True)
class RankExited(AttemptMessage):
    """A rank of the node has ended. `age`: how many seconds ago it failed, because clocks of two nodes differ."""

    rank: int
    exit: RankExit
    age: float = 0.0

    @property
    def ranks(self) -> Collection[int]:
        return [self.rank]

    def why_invalid(self) -> str | None:
        if self.exit.failure is None and not self.exit.clean:
            return f"rank {self.rank} failed without a failure"

        if self.exit.failure is not None and self.exit.save_outcome is not None:
            return f"rank {self.rank} failed, and exited as it was asked to"

        if not math.isfinite(self.age):
            return f"rank {self.rank} failed {self.age} seconds ago"

        return None

    def in_time_of(self, clock: float) -> RankExited:
        """Return the message with the time of the failure by the receiver's clock, which shows this time now."""
        if self.exit.failure is None:
            return self

        return replace(self, exit=replace(self.exit, failure=replace(self.exit.failure, time=clock - self.age)))


@dataclass(frozen=True)
class RanksGone(AttemptMessage):
    """No rank of this attempt is alive on the node any more."""


# The failures of a node that its agent notices.
NODE_FAILURES = (LauncherFailure.ZYGOTE, LauncherFailure.IMPORT, LauncherFailure.SETUP)


@dataclass(frozen=True)
class NodeFailed(Message):
    """The node cannot start its ranks, or has lost those that ran."""

    attempt: int | None  # None if no ranks were started before
    what: LauncherFailure
    why: str
    for_user: bool = False  # whether `why` says what to do

    def why_invalid(self) -> str | None:
        return None if self.what in NODE_FAILURES else f"{self.what} is not a failure that nodes report"


@dataclass(frozen=True)
class SharedStack:
    """A stack that several ranks of a node have in common; an empty one if they did not answer."""

    ranks: list[int]
    text: str


@dataclass(frozen=True)
class SharedCollectives:
    """The last entries of the flight recorder, where several ranks of a node have the same ones."""

    ranks: list[int]
    entries: list


@dataclass(frozen=True)
class Stacks(AttemptMessage):
    """The answer to `CollectStacks`.

    Most ranks of a node are at the same place, and what they have in common is sent once: on a thousand nodes,
    everything about every rank would be half a gigabyte.
    """

    request: int  # that of the `CollectStacks`
    stacks: list[SharedStack]
    collectives: list[SharedCollectives]

    @staticmethod
    def of(attempt: int, request: int, stacks: dict[int, str], collectives: dict[int, list]) -> Stacks:
        """Make the message from the stack of each rank, and from the entries of each rank that has answered."""
        # As text: lists cannot be keys.
        entries = {rank: json.dumps(entries) for rank, entries in collectives.items()}
        return Stacks(
            attempt,
            request,
            [SharedStack(ranks, text) for text, ranks in _by_value(stacks).items()],
            [SharedCollectives(ranks, json.loads(text)) for text, ranks in _by_value(entries).items()],
        )

    @property
    def ranks(self) -> Collection[int]:
        return self.stack_of.keys() | self.collectives_of.keys()

    def why_invalid(self) -> str | None:
        # The contents of an entry depend on the version of torch: if `Watchdog` cannot read them, it uses the stacks.
        entries = [entry for shared in self.collectives for entry in shared.entries]
        valid = all(isinstance(entry, dict) for entry in entries)
        return None if valid else "its collectives are not entries of a flight recorder"

    @property
    def stack_of(self) -> dict[int, str]:
        """Rank -> its stack."""
        return {rank: shared.text for shared in self.stacks for rank in shared.ranks}

    @property
    def collectives_of(self) -> dict[int, list]:
        """Rank -> its entries. Ranks that have the same ones share a list."""
        return {rank: shared.entries for shared in self.collectives for rank in shared.ranks}


def _by_value(texts: dict[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each text."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)

    return found


@dataclass(frozen=True)
class SignalReceived(Message):
    """The node's launcher received a signal that asks the whole job to save and exit."""

    signal: str

    def why_invalid(self) -> str | None:
        known = self.signal in [number.name for number in PREEMPT_SIGNALS]
        return None if known else f"{self.signal} is not a signal that preempts a job"


@dataclass(frozen=True)
class NodeHeartbeat(Message):
    """A node's heartbeat, with the heartbeats of its ranks."""

    views: list[RankView] = field(default_factory=list)
    attempt: int | None = None  # the newest attempt whose ranks the node has started

    @property
    def ranks(self) -> Collection[int]:
        return [view.rank for view in self.views]


@dataclass(frozen=True)
class SettingsRead(Message):
    """Rank 0, which is on this node, has read the task's settings: `LauncherSettings`. Sent once in each attempt."""

    settings: dict

    def why_invalid(self) -> str | None:
        try:
            LauncherSettings(**self.settings)
        except (TypeError, ValueError) as error:
            return f"its settings are not valid: {error}"

        return None


# ---- from the coordinator to a node ----


@dataclass(frozen=True)
class Welcome(Message):
    """The node belongs to the job now, and adopts its run folder. A `CoordinatorState` follows at once."""

    run_dir: str
    resume_command: str  # what to type to resume the job
    number: int  # the node's number
    term: Term  # the coordinator's


@dataclass(frozen=True)
class CoordinatorState(Message):
    """The coordinator's heartbeat, sent every second; a successor starts from the last one that it received.

    Times are those of the coordinator's monotonic clock, which shows `clock` now.
    """

    nodes: list[list[int]]  # the numbers of all nodes, as ranges: the first and the last of each
    attempt: int | None = None  # the newest attempt
    restarts: Restarts = field(default_factory=Restarts)
    dismissals: Dismissals = field(default_factory=Dismissals)
    settings: dict = field(default_factory=dict)
    preempt_signal: str | None = None  # the signal that asked the job to save and exit, if one did
    ending: JobEnd | None = None  # how the job ends when all ranks are gone, if no signal can change that
    clock: float = 0.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of all nodes."""
        return [number for first, last in self.nodes for number in range(first, last + 1)]


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return sorted numbers as ranges, so that the state of a thousand nodes is no longer than that of two."""
    found: list[list[int]] = []

    # [first, last] of each range so far. A number either extends the last one or begins another.
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])

    return found


@dataclass(frozen=True)
class Refused(Message):
    """The node may not join; the fields are those of a `UserError`."""

    problem: str
    found: str
    fix: str


@dataclass(frozen=True)
class Prepare(Message):
    """The node will soon start this many ranks and can import torch for them now."""

    count: int


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of an attempt meet. Ranks on one node do not need a store server."""

    address: str
    port: int  # for MASTER_PORT: free when the attempt began
    store_port: int = 0
    store_nonce: str = ""  # with the job's secret it makes the key of the ranks' store


@dataclass(frozen=True)
class Start(AttemptMessage):
    """Start the node's ranks of this attempt."""

    first_rank: int  # the lowest rank on this node
    count: int
    world_size: int
    group_rank: int  # the node's number in this attempt
    rendezvous: Rendezvous


@dataclass(frozen=True)
class SaveAndExit(AttemptMessage):
    """Ask the ranks to save a checkpoint and exit."""

    signal: str | None = None  # the signal that asks for it; None if the job goes on with other ranks


@dataclass(frozen=True)
class Kill(AttemptMessage):
    """Kill the ranks."""


@dataclass(frozen=True)
class CollectStacks(AttemptMessage):
    """Ask every rank for its stack and its last collectives."""

    request: int  # the answer has it too: stacks that were collected for an earlier request say nothing now


# ---- from the coordinator to all other nodes, which it also carries out itself ----


@dataclass(frozen=True)
class Announce(Message):
    """Print a text on the terminals of all nodes."""

    text: str


@dataclass(frozen=True)
class JobEnd(Message):
    """The job is over."""

    code: int  # an `ExitCode`
    failure: Failure | None = None


# ---- which way they go ----

# The reports of a node's agent. Apart from these a node sends only its `Hello`.
ToCoordinator = RankExited | RanksGone | NodeFailed | Stacks | SignalReceived | NodeHeartbeat | SettingsRead

# The orders that a node's agent carries out, and all messages that a node receives.
Order = Start | Prepare | SaveAndExit | CollectStacks | Kill
ToNode = Welcome | Refused | CoordinatorState | Announce | JobEnd | Order


# ---- encoding ----


def encode(message: Message) -> bytes:
    return typed_json.encode_kind(message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in `line`. Raises ValueError for anything that is not a valid message."""
    return typed_json.parse_kind(_KINDS, line)
