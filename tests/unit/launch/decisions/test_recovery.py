"""What follows a failure: the rules, without a state machine."""

from dataclasses import replace

import pytest

from lockstep.config.sections import HangConfig, RestartConfig
from lockstep.errors import ExitCode
from lockstep.launch.decisions.recovery import (
    AttemptFacts,
    Continue,
    End,
    EndPreempted,
    Restart,
    Situation,
    UndoResize,
    after_failure,
    after_request,
    after_second_ctrl_c,
    if_none_can_start,
    node_loss,
)
from lockstep.launch.failure import PROGRAM_ERROR, Failure, LauncherFailure
from lockstep.launch.job import LauncherSettings
from lockstep.launch.wire.messages import JobEnd

KILLED = Failure(1, "host-0", 1000.0, "SIGKILL", "killed", origin="signal")
RAISED = Failure(1, "host-0", 1000.0, "ValueError", "no such column", traits=PROGRAM_ERROR)
PEER_LOST = replace(RAISED, kind="DistBackendError", message="NCCL error: ncclRemoteError", lost_peer="yes")
NO_IMPORT = Failure.by_launcher(LauncherFailure.IMPORT, "no torch")
REFUSED = replace(RAISED, for_user=True)


HANG = Failure.by_launcher(LauncherFailure.HANG, "no rank has advanced", 1, "host-0")
DEADLOCK = Failure.by_launcher(LauncherFailure.DEADLOCK, "no rank has advanced", 1, "host-0")

SAVED = Situation(settings=LauncherSettings(), newest_step=10, attempt=AttemptFacts(has_saved=True))
UNSAVED = Situation(settings=LauncherSettings())
STOP = LauncherSettings(hang=HangConfig(action="stop"))
RECURS = "no checkpoint has been saved since the last start, so the same error would most likely recur"
FINISHED = "another rank has ended with code 0, so the same would most likely recur"
GRACE_EXCEEDED = Failure.by_launcher(LauncherFailure.GRACE_EXCEEDED, "2 ranks did not exit in time", 0, "host-0")
LOST = Failure.by_launcher(LauncherFailure.NODE, "node 1 is lost", host="host-1", node=1)
NO_SETUP = Failure.by_launcher(LauncherFailure.SETUP, "no space left", host="host-1", node=1)
SAVE_FAILED = "the save failed, and there is no checkpoint"
TOO_FEW = "1 node left, and 2 needed"
FAILED = End(JobEnd(ExitCode.FAILED, NO_IMPORT), "it would end the same way")
ASKED = {"preempt_signal": "SIGTERM"}
GONE = {"in_job": False, "can_be_spared": False}
NEEDED = {"in_job": True, "can_be_spared": False}
SPARE = {"in_job": True, "can_be_spared": True}


@pytest.mark.parametrize(
    ("failure", "situation", "decision"),
    [
        (KILLED, UNSAVED, Restart()),
        (RAISED, SAVED, Restart()),
        (PEER_LOST, UNSAVED, Restart()),
        (HANG, UNSAVED, Restart()),
        (HANG, replace(UNSAVED, reached_timeout=True), Restart(longer_timeouts=True)),
        (DEADLOCK, SAVED, Restart()),
        (DEADLOCK, UNSAVED, End(JobEnd(ExitCode.FAILED, DEADLOCK), RECURS)),
        (HANG, replace(SAVED, settings=STOP), End(JobEnd(ExitCode.FAILED, HANG), "hang.action is stop")),
        (
            DEADLOCK,
            replace(SAVED, settings=STOP),
            End(JobEnd(ExitCode.FAILED, DEADLOCK), "hang.action is stop"),
        ),
        (
            HANG,
            replace(SAVED, attempt=AttemptFacts(has_saved=True, any_finished=True)),
            End(JobEnd(ExitCode.FAILED, HANG), FINISHED),
        ),
        (KILLED, replace(SAVED, attempt=AttemptFacts(has_saved=True, any_finished=True)), Restart()),
        (
            NO_IMPORT,
            replace(SAVED, **ASKED),
            End(JobEnd(ExitCode.FAILED, NO_IMPORT), "it would end the same way"),
        ),
        (
            REFUSED,
            SAVED,
            End(JobEnd(ExitCode.REFUSED, REFUSED), "the same program would run into the same error"),
        ),
        (KILLED, replace(SAVED, **ASKED), EndPreempted()),
        (
            KILLED,
            replace(UNSAVED, **ASKED),
            End(JobEnd(ExitCode.FAILED, KILLED), "the job was asked to save and exit (SIGTERM)"),
        ),
        (KILLED, replace(UNSAVED, **ASKED, attempt=AttemptFacts(save_outcome="nothing")), EndPreempted()),
        (GRACE_EXCEEDED, UNSAVED, Continue()),
        (GRACE_EXCEEDED, replace(SAVED, **ASKED), EndPreempted()),
        (LOST, replace(SAVED, shortage=TOO_FEW), End(JobEnd(ExitCode.RESTART, LOST), TOO_FEW)),
        (LOST, SAVED, Restart()),
        (NO_SETUP, UNSAVED, End(JobEnd(ExitCode.FAILED, NO_SETUP), RECURS)),
    ],
)
def test_the_rules_for_failures(failure, situation, decision):
    assert after_failure(failure, situation) == decision


@pytest.mark.parametrize(
    ("situation", "arguments", "decision"),
    [
        (
            replace(UNSAVED, **ASKED, attempt=AttemptFacts(was_started=True, save_outcome="failed")),
            {},
            End(JobEnd(ExitCode.FAILED), SAVE_FAILED),
        ),
        (
            replace(UNSAVED, **ASKED, attempt=AttemptFacts(was_started=True)),
            {},
            End(JobEnd(ExitCode.FAILED), "the job was asked to save and exit (SIGTERM)"),
        ),
        (replace(UNSAVED, **ASKED, attempt=AttemptFacts(was_started=True, save_outcome="nothing")), {}, EndPreempted()),
        (replace(SAVED, **ASKED, attempt=AttemptFacts(was_started=True)), {}, EndPreempted()),
        (replace(SAVED, **ASKED, attempt=AttemptFacts(has_saved=True, save_outcome="failed")), {}, EndPreempted()),
        (UNSAVED, {}, Continue()),
        (replace(UNSAVED, **ASKED), {}, EndPreempted()),
        (replace(SAVED, **ASKED), {"final_end": FAILED}, FAILED),
    ],
)
def test_the_rules_for_requests(situation, arguments, decision):
    assert after_request(situation, **arguments) == decision


def test_a_second_ctrl_c_ends_the_job_with_the_code_of_the_first_signal():
    end = End(JobEnd(ExitCode.RESTART), "Ctrl-C was typed twice")
    assert after_second_ctrl_c(replace(SAVED, **ASKED)) == end


@pytest.mark.parametrize(
    ("failure", "node", "loss"),
    [
        (LOST, NEEDED, "lost"),
        (LOST, GONE, None),
        (NO_IMPORT, SPARE, "dismissed"),
        (NO_SETUP, SPARE, "dismissed"),
        (NO_SETUP, NEEDED, None),
        (KILLED, SPARE, None),
    ],
)
def test_which_nodes_the_job_does_without(failure, node, loss):
    assert node_loss(failure, **node) == loss


def test_how_a_job_ends_whose_nodes_are_too_few():
    ended = if_none_can_start(TOO_FEW, SAVED)
    assert (ended.ending.code, ended.ending.failure.message, ended.reason) == (ExitCode.RESTART, TOO_FEW, TOO_FEW)
    no_restart = LauncherSettings(restart=RestartConfig(per_hour=0))
    assert if_none_can_start(TOO_FEW, replace(SAVED, settings=no_restart)).ending.code == ExitCode.FAILED
    assert if_none_can_start(TOO_FEW, replace(SAVED, **ASKED)) == EndPreempted()
    assert if_none_can_start(TOO_FEW, replace(UNSAVED, **ASKED)).ending.code == ExitCode.FAILED


def test_a_restart_is_refused_once_the_hour_has_had_its_restarts():
    """The number is a fact that is passed in: asked a hundred times, it uses up none."""
    for _ in range(100):
        assert after_failure(KILLED, SAVED) == Restart()

    reason = "10 restarts within the last hour, which is the limit"
    assert after_failure(KILLED, replace(SAVED, recent_restarts=10)) == End(JobEnd(ExitCode.FAILED, KILLED), reason)


def test_a_restart_is_refused_after_too_many_without_a_new_checkpoint():
    """At any rate, so that a hang that takes a quarter of an hour does not repeat for ever."""
    assert after_failure(HANG, replace(UNSAVED, restarts_in_a_row=4, recent_restarts=4)) == Restart()

    reason = "5 restarts in a row without a new checkpoint, which is the limit (restart.max_in_a_row)"
    assert after_failure(HANG, replace(UNSAVED, restarts_in_a_row=5)) == End(JobEnd(ExitCode.FAILED, HANG), reason)


def test_a_resize_whose_first_attempt_raises_is_undone():
    situation = replace(UNSAVED, first_after_resize=True)
    assert after_failure(RAISED, situation) == UndoResize()
    assert after_failure(KILLED, situation) == Restart()
