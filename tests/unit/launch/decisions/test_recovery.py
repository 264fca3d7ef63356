"""What follows a failure: the rules, without a state machine."""

from dataclasses import replace

import pytest

from lockstep.config.sections import HangConfig
from lockstep.errors import ExitCode
from lockstep.launch.decisions.recovery import (
    Continue,
    Drop,
    End,
    EndPreempted,
    Restart,
    Situation,
    UndoResize,
    decide,
)
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import Settings

KILLED = Failure(1, "host-0", 1000.0, "SIGKILL", "killed", origin="signal")
RAISED = Failure(1, "host-0", 1000.0, "ValueError", "no such column")
PEER_LOST = Failure(1, "host-0", 1000.0, "DistBackendError", "NCCL error: ncclRemoteError", follows_lost_peer=True)
NO_IMPORT = Failure.by_launcher(LauncherFailure.IMPORT, "no torch")
REFUSED = replace(RAISED, for_user=True)


HANG = Failure.by_launcher(LauncherFailure.HANG, "no rank has advanced", 1, "host-0")
DEADLOCK = replace(HANG, kind=LauncherFailure.DEADLOCK)

SAVED = Situation(settings=Settings(), newest=10, progress=True)
UNSAVED = Situation(settings=Settings())
STOP = Settings(hang=HangConfig(action="stop"))
RECURS = "no checkpoint has been saved since the last start, so the same error would most likely recur"
FINISHED = "another rank has ended with code 0, so the same would most likely recur"
OVERDUE = Failure.by_launcher(LauncherFailure.OVERDUE, "2 ranks did not exit in time", 0, "host-0")
LOST = Failure.by_launcher(LauncherFailure.NODE, "node 1 vanished", host="host-1", node=1)
NO_SETUP = replace(LOST, kind=LauncherFailure.SETUP)
SAVE_FAILED = "the save failed, and there is no checkpoint"
TOO_FEW = "1 node left, and 2 needed"
FAILED = End(ExitCode.FAILED, "it would end the same way", NO_IMPORT)
ASKED = {"preempt_signal": "SIGTERM"}


@pytest.mark.parametrize(
    ("failure", "situation", "decision"),
    [
        (KILLED, UNSAVED, Restart()),
        (RAISED, SAVED, Restart()),
        (PEER_LOST, UNSAVED, Restart()),
        (HANG, UNSAVED, Restart()),
        (DEADLOCK, SAVED, Restart()),
        (DEADLOCK, UNSAVED, End(ExitCode.FAILED, RECURS, DEADLOCK)),
        (HANG, replace(SAVED, settings=STOP), End(ExitCode.FAILED, "hang.action is stop", HANG)),
        (DEADLOCK, replace(SAVED, settings=STOP), End(ExitCode.FAILED, "hang.action is stop", DEADLOCK)),
        (HANG, replace(SAVED, any_finished=True), End(ExitCode.FAILED, FINISHED, HANG)),
        (KILLED, replace(SAVED, any_finished=True), Restart()),
        (NO_IMPORT, replace(SAVED, **ASKED), End(ExitCode.FAILED, "it would end the same way", NO_IMPORT)),
        (REFUSED, SAVED, End(ExitCode.REFUSED, "the same program would run into the same error", REFUSED)),
        (KILLED, replace(SAVED, **ASKED), EndPreempted()),
        (
            KILLED,
            replace(UNSAVED, **ASKED),
            End(ExitCode.FAILED, "the job was asked to save and exit (SIGTERM)", KILLED),
        ),
        (KILLED, replace(UNSAVED, **ASKED, save="nothing"), EndPreempted()),
        (None, replace(UNSAVED, **ASKED, save="failed"), End(ExitCode.FAILED, SAVE_FAILED)),
        (None, replace(SAVED, **ASKED, save="failed"), EndPreempted()),
        (OVERDUE, UNSAVED, Continue()),
        (OVERDUE, replace(SAVED, **ASKED), EndPreempted()),
        (LOST, replace(SAVED, node_is_member=True), Drop()),
        (LOST, replace(SAVED, cannot_start=TOO_FEW), End(ExitCode.RESTART, TOO_FEW, LOST)),
        (LOST, SAVED, Restart()),
        (NO_IMPORT, replace(SAVED, node_is_member=True, can_spare_node=True), Drop(dismiss=True)),
        (NO_SETUP, replace(SAVED, node_is_member=True, can_spare_node=True), Drop(dismiss=True)),
        (NO_SETUP, replace(UNSAVED, node_is_member=True), End(ExitCode.FAILED, RECURS, NO_SETUP)),
        (None, UNSAVED, Continue()),
        (None, replace(UNSAVED, **ASKED), EndPreempted()),
        (None, replace(SAVED, **ASKED, decided_end=FAILED), FAILED),
        (None, replace(SAVED, **ASKED, typed_twice=True), End(ExitCode.RESTART, "Ctrl-C was typed twice")),
    ],
)
def test_the_rules(failure, situation, decision):
    assert decide(failure, situation) == decision


def test_a_restart_is_refused_once_the_hour_has_had_its_restarts():
    """The number is a fact that is passed in: asked a hundred times, `decide` uses up none."""
    for _ in range(100):
        assert decide(KILLED, SAVED) == Restart()

    reason = "10 restarts within the last hour, which is the limit"
    assert decide(KILLED, replace(SAVED, recent_restarts=10)) == End(ExitCode.FAILED, reason, KILLED)


def test_a_restart_is_refused_after_too_many_without_a_new_checkpoint():
    """At any rate, so that a hang that takes a quarter of an hour does not repeat for ever."""
    assert decide(HANG, replace(UNSAVED, restarts_in_a_row=4, recent_restarts=4)) == Restart()

    reason = "5 restarts in a row without a new checkpoint, which is the limit (restart.max_in_a_row)"
    assert decide(HANG, replace(UNSAVED, restarts_in_a_row=5)) == End(ExitCode.FAILED, reason, HANG)


def test_a_resize_whose_first_attempt_raises_is_undone():
    situation = replace(UNSAVED, first_after_resize=True)
    assert decide(RAISED, situation) == UndoResize()
    assert decide(KILLED, situation) == Restart()
