"""What a rank leaves about its own end."""

import json
import runpy
import sys
from dataclasses import asdict

import pytest

from lockstep import api
from lockstep.config import resolve
from lockstep.engine import setup
from lockstep.errors import OutOfStep, Preempted
from lockstep.files import typed_json
from lockstep.launch.failure import Failure, RankExit
from lockstep.launch.ranks import rank_record
from lockstep.runtime import context
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER


def test_records_survive_the_round_trip(recorded):
    found = recorded(1, KeyError("x"))
    assert (found.rank, found.kind, found.host) == (1, "KeyError", "node-a")
    assert "Traceback" in found.traceback
    assert typed_json.parse(Failure, json.loads(json.dumps(asdict(found)))) == found


class Mute(Exception):
    def __str__(self):
        raise AttributeError("only set by another constructor")


def test_an_exception_that_cannot_be_printed_is_recorded(recorded):
    """Its own error took its place, and kept the run from being closed."""
    found = recorded(1, Mute())
    assert (found.kind, found.message) == ("Mute", "(its text is not known: __str__ raised AttributeError)")
    assert "raise error" in found.traceback


@pytest.mark.parametrize("wrong", [{}, {"rank": "1"}, {"extra": 1}, {"time": None}, {"for_user": 1}])
def test_what_is_no_record_is_refused(wrong):
    good = asdict(Failure(1, "h", 0.0, "k", "m"))
    with pytest.raises(ValueError, match=r"not a valid Failure|instead of a value of type"):
        typed_json.parse(Failure, {**good, **wrong} if wrong else {})


def test_a_rank_that_is_out_of_step_is_named_by_those_that_notice_it():
    try:
        raise OutOfStep("the ranks are out of step: rank 1 was in a collective that rank 0 never called", [1])
    except OutOfStep as error:
        noticed = rank_record.ended_by(error, 0).failure
    assert noticed.rank == 1
    assert noticed.lost_peer == "no"
    assert noticed.text().startswith("lockstep: the ranks are out of step: rank 1 was")
    assert "Traceback" not in noticed.text()


@pytest.mark.parametrize(
    ("preempted", "save"),
    [
        (Preempted(7, "SIGTERM", "run/checkpoints/step-00000007"), "saved"),
        (Preempted(7, "SIGTERM", None, save_failed=True), "failed"),
        (Preempted(7, "SIGTERM", None), "nothing"),
    ],
)
def test_a_preempted_rank_says_what_became_of_its_save(preempted, save):
    assert rank_record.ended_by(preempted, 0) == RankExit.as_asked(save, 7)


def ended_by_handler_of_preemption(handle) -> RankExit:
    """Return how a rank ends whose program calls `handle` when it is preempted."""
    try:
        try:
            raise Preempted(7, "SIGTERM", "run/checkpoints/step-00000007")
        except Preempted as preempted:
            handle(preempted)
    except BaseException as error:
        return rank_record.ended_by(error, 0)
    raise AssertionError("handle() raises")


def test_an_error_after_a_preemption_is_a_failure():
    """It was taken for the end that was asked for, and its traceback was shown nowhere."""
    ended = ended_by_handler_of_preemption(lambda preempted: undefined)  # noqa: F821
    assert (ended.code, ended.save_outcome, ended.failure.kind) == (1, None, "NameError")
    assert "undefined" in ended.failure.traceback

    cleaned_up = ended_by_handler_of_preemption(lambda preempted: sys.exit(preempted.code))
    assert cleaned_up == RankExit.as_asked("saved", 7)


def test_the_line_that_raised_is_named(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nfor step in range(3):\n    sys.exit(0)\n")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script))
    assert rank_record.raising_line(left.value) == f"{script}:3"
    assert rank_record.raising_line(SystemExit(0)) == ""


def test_the_line_that_raised_is_the_users(tmp_path, monkeypatch):
    """A library may put a function of its own in place of sys.exit: wandb does."""
    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    library.write_text("def leave(code):\n    raise SystemExit(code)\n")
    monkeypatch.setattr(sys, "exit", runpy.run_path(str(library))["leave"])
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script))
    assert rank_record.raising_line(left.value) == f"{script}:2"


def test_the_first_record_of_a_folder_is_an_error_for_the_user_if_there_is_one(tmp_path):
    assert rank_record.root_failure(tmp_path) is None
    for rank, when, for_user in [(0, 2.0, False), (1, 1.0, False), (2, 3.0, True)]:
        rank_record.write(tmp_path, rank, RankExit(1, Failure(rank, "h", when, "E", "m", for_user=for_user)))
    assert rank_record.root_failure(tmp_path).rank == 2
    (tmp_path / "rank-2.json").write_text("")  # a rank that was killed while it wrote
    assert rank_record.root_failure(tmp_path).rank == 1

    # One that only reports the loss of another rank explains nothing, however early it came.
    lost = Failure(3, "h", 0.5, "DistStoreError", "timed out", lost_peer="yes")
    rank_record.write(tmp_path, 3, RankExit(1, lost))
    assert rank_record.root_failure(tmp_path).rank == 1


@pytest.mark.parametrize("fails", ["in the context", "while the run is opened", "in its body"])
def test_a_failure_is_on_disk_before_the_process_group_is_left(tmp_path, monkeypatch, fails):
    """Leaving it may hang, and then the launcher looks for the record: it was written for the body only."""
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    monkeypatch.setenv(ATTEMPT_FOLDER, str(attempt))
    recorded = []
    monkeypatch.setattr(context.Collectives, "pause", lambda self: recorded.append(rank_record.root_failure(attempt)))

    def fail(*arguments):
        raise ValueError("the cause")

    if fails == "in the context":
        monkeypatch.setattr(context, "attention", fail)
    elif fails == "while the run is opened":
        monkeypatch.setattr(setup, "open_run", fail)

    resolved = resolve([("test", {"device": "cpu", "run_dir": str(tmp_path / "run")})])
    with pytest.raises(ValueError, match="the cause"), api.running(resolved, "test"):
        fail()
    assert [failure.message for failure in recorded] == ["the cause"]
    assert rank_record.root_failure(attempt) is None
