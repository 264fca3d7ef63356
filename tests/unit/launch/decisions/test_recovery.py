"""What follows a failure: the rules, without a state machine."""

from dataclasses import replace

import pytest

from lockstep.config.sections import HangConfig
from lockstep.errors import ExitCode
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster, Node
from lockstep.launch.decisions.recovery import End, EndPreempted, Recovery, Restart, Situation, UndoResize
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.failure import Failure
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import Bounds
from lockstep.launch.wire.messages import CoordinatorState

KILLED = Failure(1, "host-0", 1000.0, "SIGKILL", "killed", origin="signal")
RAISED = Failure(1, "host-0", 1000.0, "ValueError", "no such column")
PEER_LOST = Failure(1, "host-0", 1000.0, "DistBackendError", "NCCL error: ncclRemoteError: remote process exited")
REFUSED = replace(RAISED, for_user=True)


def attempt(number: int = 0, ranks: int = 2) -> Attempt:
    return Attempt(number, {0: ranks}, {0: "host-0"}, None, Watchdog(HangConfig()))


@pytest.fixture
def recovery() -> Recovery:
    cluster = Cluster(Bounds(1, 1), now=0.0)
    cluster.add(Node(0, "host-0", Bounds(1, 4)), now=0.0)
    return Recovery(cluster, CoordinatorState([]), now=0.0)


SAVED = Situation(attempt(), 10, Settings(), None, nothing_to_save=False, now=0.0)
UNSAVED = replace(SAVED, saved=None)
ASKED = {"preempt_signal": "SIGTERM"}


@pytest.mark.parametrize(
    ("failure", "situation", "decision"),
    [
        (KILLED, UNSAVED, Restart(raise_limit=False)),
        (RAISED, SAVED, Restart(raise_limit=False)),
        (PEER_LOST, UNSAVED, Restart(raise_limit=False)),
        (REFUSED, SAVED, End(ExitCode.REFUSED, "the same program would run into the same error")),
        (KILLED, replace(SAVED, **ASKED), EndPreempted()),
        (KILLED, replace(UNSAVED, **ASKED), End(ExitCode.FAILED, "the job was asked to save and exit (SIGTERM)")),
        (KILLED, replace(UNSAVED, **ASKED, nothing_to_save=True), EndPreempted()),
    ],
)
def test_the_rules(recovery, failure, situation, decision):
    assert recovery.decide(failure, situation) == decision


def test_deciding_changes_nothing(recovery):
    """Asked a hundred times, it uses up no restart: only a restart that is carried out counts."""
    for _ in range(100):
        assert recovery.decide(KILLED, SAVED) == Restart(raise_limit=False)

    assert recovery.restarts.total == 0


def test_a_resize_whose_first_attempt_raises_is_undone(recovery):
    before = attempt(0)
    recovery.resize(3, before)
    situation = replace(UNSAVED, attempt=attempt(1, ranks=3))
    assert recovery.decide(RAISED, situation) == UndoResize()
    assert recovery.decide(KILLED, situation) == Restart(raise_limit=False)
