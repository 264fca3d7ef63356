"""Messages between launchers: they survive JSON, and anything else is refused."""

import json
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.election import Term
from lockstep.launch.failure import Failure, LauncherFailure, RankExit
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import Bounds
from lockstep.launch.restarts import Dismissals, Restarts
from lockstep.launch.wire import messages
from lockstep.launch.wire.messages import (
    Announce,
    CoordinatorState,
    Hello,
    JobEnd,
    Kill,
    NodeFailed,
    NodeHeartbeat,
    RankExited,
    Rendezvous,
    SettingsRead,
    Stacks,
    Start,
    ToCoordinator,
    ToNode,
    Welcome,
    decode,
    encode,
)

RESTARTS = Restarts([12.5], 1, 1, 5)
DISMISSALS = Dismissals({"host": [7.5]})
VIEW = {"beats": 1, "age": 0.5, "step": 3, "steps_here": 2, "phase": "data", "detail": "", "longest": {"data": 1}}
FAILURE = Failure(1, "host", 12, "ValueError", "text")
MESSAGES = [
    Hello("host", Bounds(1, 2, 1), {"target": "x"}, 2, 1),
    Welcome("runs/b", "type it again", 1, Term(2, "host", "10.0.0.1:29400")),
    CoordinatorState([[0, 0], [2, 2]], 3, RESTARTS, DISMISSALS, {"hang": {}}, "SIGTERM", JobEnd(1, FAILURE), 99.5),
    RankExited(0, 1, RankExit(0)),
    RankExited(0, 1, RankExit.as_asked("saved", 7)),
    RankExited(0, 1, RankExit(1, FAILURE)),
    NodeFailed(0, LauncherFailure.SETUP, "no space left"),
    JobEnd(75),
    Stacks.of(3, 1, {0: "line\nline"}, {0: [{}]}),
    Start(0, 0, 2, 4, 0, Rendezvous("127.0.0.1", 5000, 5001, "a1")),
    NodeHeartbeat([RankView(rank=0, host="host", pid=1, state="S", **VIEW)], 3),
    SettingsRead({"hang": {}}),
    Announce("text with \u00e9"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_round_trip(message):
    assert encode(message).count(b"\n") == 1
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[1]",
        b"GET / HTTP/1.1",
        b'{"kind": "Nothing"}',
        b'{"kind": "Announce"}',
        b'{"kind": "Announce", "text": 1}',
        b'{"kind": "Announce", "text": "x", "more": 1}',
        b'{"kind": "RanksGone", "attempt": true}',
        b'{"kind": "RanksGone", "attempt": 1.5}',
        b'{"kind": "RankExited", "attempt": 0, "rank": 1, "exit": {"code": 1, "failure": {"rank": 1}}}',
        b'{"kind": "RankExited", "attempt": 0, "rank": 1, "exit": {"code": 75, "save_outcome": "perhaps"}}',
        b'{"kind": "Stacks", "attempt": 0, "stacks": {"first": ""}, "collectives": {}}',
        b'{"kind": "NodeFailed", "attempt": 0, "what": "bored", "why": ""}',
        b'{"kind": "Message"}',
        b'{"kind": "AttemptMessage", "attempt": 0}',
        b'{"kind": ["Announce"], "text": "x"}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError):  # noqa: PT011  (JSON's own errors are among them)
        decode(line)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from(["RankExited", "NodeHeartbeat", "Hello", "Start", "JobEnd"]),
    st.dictionaries(st.text(max_size=8), values),
)
def test_nothing_but_a_value_error_comes_of_noise(kind, fields):
    try:
        decode(json.dumps({**fields, "kind": kind}).encode())
    except ValueError:
        pass


def test_every_message_goes_one_way():
    ways = [Hello, *get_args(ToCoordinator), *get_args(ToNode)]
    assert len(ways) == len(set(ways))
    assert set(ways) == {kind for kind in messages._KINDS.values() if kind.__module__ == messages.__name__}


def test_a_message_may_derive_from_any_message():
    @dataclass(frozen=True)
    class KillSoon(Kill):
        seconds: float

    assert decode(encode(KillSoon(3, 1.5))) == KillSoon(3, 1.5)
