"""Which messages of a node can be right, by the ranks of the attempt that it has."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.config.sections import HangConfig
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.failure import Failure, LauncherFailure, RankExit
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import Bounds, Job
from lockstep.launch.validation import MAX_RANKS, difference, different_program, problem_with, refusal_of
from lockstep.launch.wire.messages import (
    Hello,
    JobEnd,
    NodeFailed,
    NodeHeartbeat,
    RankExited,
    RanksGone,
    SettingsRead,
    SignalReceived,
    Stacks,
)

KILLED = RankExit(-9, Failure(2, "host-1", 0.0, "SIGKILL", "killed", origin="signal"))


def view(rank: int) -> RankView:
    return RankView(
        rank=rank, host="host-1", pid=1, state="S", beats=1, age=0.5, step=3, steps_here=2, phase="data", detail=""
    )


@pytest.fixture
def attempt():
    """Attempt 5: ranks 0 and 1 on node 0, ranks 2 and 3 on node 1."""
    return Attempt(5, {0: 2, 1: 2}, {0: "host-0", 1: "host-1"}, None, Watchdog(HangConfig()))


@pytest.mark.parametrize(
    "message",
    [
        RankExited(5, 2, KILLED),
        RankExited(5, 3, RankExit(0)),
        RankExited(5, 3, RankExit.as_asked("failed", 900)),
        RankExited(4, 0, KILLED),  # of an attempt in which it had this rank: ignored later
        Stacks.of(5, 1, {2: "", 3: ""}, {3: []}),
        Stacks.of(5, 1, {}, {3: [{"profiling_name": None}]}),  # another version of torch may write that
        NodeHeartbeat([view(2), view(3)], 5),
        SettingsRead({"hang": {"least": 5.0}}),
        NodeHeartbeat(),
        SignalReceived("SIGTERM"),
        RanksGone(5),
        NodeFailed(5, LauncherFailure.ZYGOTE, "died"),
    ],
    ids=str,
)
def test_a_message_that_can_be_right(attempt, message):
    assert problem_with(message, 1, attempt) is None


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (RankExited(5, 0, KILLED), r"ranks \[0\] are not its ranks"),
        (RankExited(5, 9, KILLED), r"ranks \[9\] are not its ranks"),
        (RankExited(5, 2, RankExit(1)), "rank 2 failed without a failure"),
        (RankExited(5, 2, RankExit(75)), "rank 2 failed without a failure"),
        (RankExited(5, 2, RankExit(0, save_outcome="saved")), "rank 2 failed without a failure"),
        (RankExited(5, 2, replace(KILLED, save_outcome="saved")), "rank 2 failed, and exited as it was asked to"),
        (RankExited(5, 2, KILLED, float("nan")), "rank 2 failed nan seconds ago"),
        (Stacks.of(5, 1, {1: ""}, {}), r"ranks \[1\]"),
        (Stacks.of(5, 1, {}, {7: []}), r"ranks \[7\]"),
        (Stacks.of(5, 1, {}, {2: [None]}), "collectives are not entries"),
        (NodeHeartbeat([view(0)], 5), r"ranks \[0\]"),
        (SettingsRead({"hang": {"least": "long"}}), "settings are not valid"),
        (SettingsRead({"other": 1}), "settings are not valid"),
        (NodeFailed(5, LauncherFailure.EXIT, "died"), "exit is not a failure that nodes report"),
        (SignalReceived("SIGNAL"), "SIGNAL is not a signal"),
        (JobEnd(0), "JobEnd is not for the coordinator"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_right(attempt, message, problem):
    assert re.search(problem, problem_with(message, 1, attempt))


@pytest.mark.parametrize(
    ("nproc", "full", "problem"),
    [
        (Bounds(1, 2), False, None),
        (Bounds(1, 2), True, "no more nodes can join"),
        (Bounds(1, MAX_RANKS + 1), False, "a node cannot run"),
        (Bounds(0, 1), False, "a node cannot run"),
    ],
)
def test_who_may_join(nproc, full, problem):
    job = Job({}, Path("runs/x"), Bounds(1, 1), Bounds(2, 3), join="host-0:29400")
    refused = refusal_of(Hello("host-1", nproc, job.identity), job, full)
    assert refused is None if problem is None else problem in refused.problem


def test_a_host_that_was_dismissed_is_told_what_to_mend():
    job = Job({}, Path("runs/x"), Bounds(1, 1), Bounds(2, 3), join="host-0:29400")
    refused = refusal_of(Hello("host-1", Bounds(1, 1), job.identity), job, full=False, dismissed=True)
    assert "nodes on host-1 were dismissed" in refused.problem
    assert "could not import the program" in refused.found


def test_a_node_with_another_command_may_not_join():
    job = Job({}, Path("runs/x"), Bounds(1, 1), Bounds(2, 3), join="host-0:29400")
    refused = refusal_of(Hello("host-1", Bounds(1, 1), {**job.identity, "target": "another"}), job, full=False)
    assert "the commands of two nodes differ" in refused.problem


def test_differences_are_named():
    ours = {"target": "a.py", "layers": [["command line", {"steps": 3}]], "nnodes": "2"}
    theirs = Hello("h", Bounds(1, 1), {**ours, "target": "b.py"})
    assert difference(theirs, ours) == "target: 'b.py' here, 'a.py' on the coordinating node"
    assert difference(Hello("h", Bounds(1, 1), ours), ours) is None

    # Versions and files are named one by one.
    program = {"torch": "2.13.0", "python": "3.11"}
    theirs = Hello("h", Bounds(1, 1), {**ours, "program": {**program, "torch": "2.12.1"}})
    assert difference(theirs, {**ours, "program": program}) is None
    assert different_program(theirs, {**ours, "program": program}) == (
        "torch: '2.12.1' here, '2.13.0' on the coordinating node"
    )
