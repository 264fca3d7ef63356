"""What nodes tell each other. Plain JSON, checked field by field; nothing in it is ever evaluated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lockstep.launch.failure import Failure

_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "dict": dict,
    "list": list,
    "dict | None": (dict, type(None)),
}


class Message:
    """A frozen dataclass whose fields are of the types above."""


# From a node to the coordinator


@dataclass(frozen=True)
class Hello(Message):
    host: str
    least: int
    most: int
    first: int
    identity: dict


@dataclass(frozen=True)
class Exited(Message):
    attempt: int
    rank: int
    code: int
    seen: float
    failure: dict | None


@dataclass(frozen=True)
class Stopped(Message):
    """No rank of this attempt lives on the node any more."""

    attempt: int


@dataclass(frozen=True)
class Broke(Message):
    """The node could not go on with its ranks; `hopeless` if another attempt would end the same way."""

    attempt: int
    why: str
    hopeless: bool


@dataclass(frozen=True)
class Stacks(Message):
    attempt: int
    stacks: dict  # rank, as text -> stack
    collectives: dict  # rank, as text -> its last entries of the flight recorder


@dataclass(frozen=True)
class Asked(Message):
    """Somebody asked this node to leave."""

    signal: str


@dataclass(frozen=True)
class Beat(Message):
    """A sign of life in both directions; from a node also those of its ranks, and what they want watched how."""

    views: list = field(default_factory=list)
    settings: dict = field(default_factory=dict)


# From the coordinator to a node


@dataclass(frozen=True)
class Welcome(Message):
    run_dir: str
    decided: list


@dataclass(frozen=True)
class Refused(Message):
    asked: str
    found: str
    fix: str


@dataclass(frozen=True)
class Prepare(Message):
    """So many ranks will be wanted soon."""

    count: int


@dataclass(frozen=True)
class Start(Message):
    attempt: int
    base: int  # the first rank of this node
    count: int
    world: int
    group: int  # the node's number in this attempt
    address: str
    port: int


@dataclass(frozen=True)
class Leave(Message):
    attempt: int


@dataclass(frozen=True)
class Stop(Message):
    attempt: int


@dataclass(frozen=True)
class AskStacks(Message):
    attempt: int


@dataclass(frozen=True)
class Say(Message):
    text: str


@dataclass(frozen=True)
class End(Message):
    code: int
    restarts: int
    failure: dict | None


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Hello, Exited, Stopped, Broke, Stacks, Asked, Beat),
        *(Welcome, Refused, Prepare, Start, Leave, Stop, AskStacks, Say, End),
    )
}


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"  # pyrefly: ignore


def decode(line: bytes) -> Message:
    """Raises ValueError for anything that `encode` would not have made."""
    values: Any = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    kind = _KINDS.get(str(values.pop("kind", None)))
    if kind is None:
        raise ValueError("a message of no known kind")
    wanted = {item.name: _TYPES[str(item.type)] for item in fields(kind)}
    if wanted.keys() != values.keys():
        raise ValueError(f"{kind.__name__} with the fields {sorted(values)}")
    for name, value in values.items():
        if not isinstance(value, wanted[name]) or (isinstance(value, bool) and wanted[name] is not bool):
            raise ValueError(f"{kind.__name__}.{name} of type {type(value).__name__}")
    return kind(**values)


# What the decisions of a job ask for.


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
