"""Requests of ranks: what is sent with the control word, and what is received from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.engine.requests import Requests
from lockstep.observe.metrics import MetricNames
from lockstep.runtime.control_word import Flags


class FakeStepper:
    """Keeps the flags that were set, and has one result that is not read yet."""

    def __init__(self, steps_done: int = 3, late: Any = None):
        self.flags: dict[str, bool] = {}
        self.steps_done = steps_done
        self._late = late

    def step_result(self, result: Any) -> Any:
        return result

    def set_flags(self, **flags: bool) -> None:
        self.flags |= flags

    def read_late_outcome(self) -> Any:
        late, self._late = self._late, None
        return late


class FakeCollectives:
    """Has the requests of two ranks: this one, and one that requests nothing."""

    def all_gather_json(self, requested: Any) -> list[Any]:
        return [None, requested]


class FakeCheckpoints:
    """Counts what is asked of the save in flight, and of the decision whether to save."""

    def __init__(self) -> None:
        self.pending = self.decision = self
        self.aborted = 0
        self.agreed = False

    def abort_if_failed(self) -> None:
        self.aborted += 1

    def agree(self) -> None:
        self.agreed = True


def result(**flags: int) -> Any:
    return SimpleNamespace(flags=Flags(**flags))


def requests(total_steps: int = 10, steps_changed: bool = False, **arguments: Any) -> Any:
    stepper, checkpoints = FakeStepper(**arguments), FakeCheckpoints()
    source: Any = SimpleNamespace(note_result=lambda result: None)
    return Requests(stepper, checkpoints, source, MetricNames(new=False), FakeCollectives(), total_steps, steps_changed)  # pyrefly: ignore


@pytest.mark.parametrize("name", ["stop", "save", "evaluate", "preempt"])
def test_a_flag_of_any_rank_is_agreed_on_and_stays_so(name: str) -> None:
    found = requests()
    found.accept(result(**{name: 1}))
    found.accept(result())
    agreed = {flag for flag in ("stop", "evaluate", "preempt") if getattr(found, f"{flag}_agreed")}
    agreed |= {"save"} if found.checkpoints.agreed else set()
    assert agreed == {name}
    assert found.is_stopping == (name in ("stop", "preempt"))


def test_what_this_rank_requests_is_not_agreed_on_yet() -> None:
    found = requests()
    found.request_stop("enough")
    assert found.stepper.flags == {"stop": True}
    assert not found.stop_agreed


def test_a_result_that_is_read_late_is_accepted_once() -> None:
    found = requests(late=result(evaluate=1, new_metrics=2, save_failed=1))
    assert found.accept_late() is not None
    assert found.accept_late() is None
    assert found.evaluate_agreed
    assert found.metric_names.new
    assert found.checkpoints.aborted == 1


def test_what_is_done_is_not_requested_again() -> None:
    found = requests()
    found.accept(result(evaluate=1))
    found.evaluated()
    assert found.stepper.flags == {"evaluate": False}
    assert not found.evaluate_agreed


def test_a_checkpoint_holds_the_stop_of_the_users_code_only() -> None:
    found = requests()
    found.request_stop("the time is over")
    assert found.state_dict()["stop"] is None

    # The first reason is the one to report.
    found.request_stop("enough", by_user=True)
    found.request_stop("again", by_user=True)
    assert found.stop_reason == "the time is over"
    assert found.state_dict()["stop"] == {"reason": "enough", "done": False}
    found.total_steps = 3
    assert found.state_dict()["stop"] == {"reason": "enough", "done": True}


@pytest.mark.parametrize(
    ("done", "changed", "agreed", "sent"),
    [(False, False, False, True), (True, False, True, False), (True, True, False, False)],
)
def test_a_stop_before_the_checkpoint_is_resumed(done: bool, changed: bool, agreed: bool, sent: bool) -> None:
    found = requests(steps_changed=changed)
    found.load_state_dict({"stop": {"reason": "enough", "done": done}})
    assert (found.stop_agreed, "stop" in found.stepper.flags) == (agreed, sent)
    assert (found.stop_reason == "enough") == (agreed or sent)
