"""What the two ends of a tether say to each other: the command that logged in sends requests, a host sends answers.

Each is one line of JSON with the name of its class. Answers are lines of the host's standard output, which also carries
the output of the job, so they begin with `ANSWER_PREFIX`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

from lockstep.files import typed_json

# No text of a job begins a line like this: U+001E is a separator of records.
ANSWER_PREFIX = "\x1elockstep "


# ---- requests ----


@dataclass(frozen=True)
class Look:
    """Say what is on this host: versions, addresses, files. The answer is `HostFacts`."""

    target: str
    hosts: list[str] = field(default_factory=list)  # names whose addresses this host looks up
    files: list[str] = field(default_factory=list)  # files that the job needs


@dataclass(frozen=True)
class Listen:
    """For the first host: listen where the hosts are to meet, until the job starts. The answer is `Listening`."""

    address: str
    port: int  # 0: choose a free one
    mark: str  # a file for the other hosts to see, which this host writes into the run folder


@dataclass(frozen=True)
class TryOut:
    """For the others: try to reach the first host, and to see its file. The answer is `Tried`."""

    address: str
    port: int
    mark: str


@dataclass(frozen=True)
class StartTraining:
    """Train; the words are those of `lockstep train`. The answer, when the launcher has ended, is `Ended`."""

    target: str
    overrides: list[str]
    config_files: list[str]
    arguments: list[str]
    nproc: str
    nnodes: str
    join: str
    resume: str | None
    resume_command: str
    env: dict[str, str]
    run_dir: str
    place: int  # this host's, in the list of hosts
    least: int  # the fewest hosts with which the job goes on
    again: bool = False  # the host was lost, and is logged in to again


@dataclass(frozen=True)
class PassSignal:
    """Have the job save and exit, as if this host's launcher had received the signal."""

    name: str


@dataclass(frozen=True)
class Beat:
    """The other side is alive, and is logged in to these hosts."""

    connected: list[int]


Request = Look | Listen | TryOut | StartTraining | PassSignal | Beat


# ---- answers ----


@dataclass(frozen=True)
class HostFacts:
    """What a host says about itself."""

    name: str
    program: dict[str, str]  # versions and digests, see `targets.program_of`
    addresses: list[str]  # of its interfaces
    resolved: dict[str, list[str]]  # the addresses of the other hosts, as this one knows their names
    reached_at: str = ""  # the address at which the login arrived, if it came over ssh
    missing: list[str] = field(default_factory=list)  # files of the job that are not here


@dataclass(frozen=True)
class Listening:
    port: int


@dataclass(frozen=True)
class Tried:
    """What keeps this host from joining the first one; "" if nothing does."""

    problem: str


@dataclass(frozen=True)
class HostProblem:
    """The request could not be carried out: the error of the system."""

    problem: str


@dataclass(frozen=True)
class Ended:
    """The launcher of this host has ended."""

    code: int


Answer = HostFacts | Listening | Tried | HostProblem | Ended

_REQUESTS = {kind.__name__: kind for kind in get_args(Request)}
_ANSWERS = {kind.__name__: kind for kind in get_args(Answer)}


def encode(message: Request | Answer) -> str:
    return typed_json.encode_kind(message)


def decode_request(line: str | bytes) -> Any:
    """Return the `Request` in a line. Raises ValueError if there is none."""
    return typed_json.parse_kind(_REQUESTS, line)


def decode_answer(line: str | bytes) -> Any:
    """Return the `Answer` in a line. Raises ValueError if there is none."""
    return typed_json.parse_kind(_ANSWERS, line)
