"""Whether to save after a step: requests of one rank, and what all ranks decide alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.checkpoint.saving.decision import SaveDecision
from lockstep.config import RunConfig, resolve


class FakePending:
    """Has saved some steps, the last one a while ago."""

    def __init__(self, *saved: int, seconds: float = 0.0, fails: bool = False):
        self._saved = saved
        self._seconds = seconds
        self.waits_for_retry = fails

    def has_step(self, step: int) -> bool:
        return step in self._saved

    def seconds_since_last(self) -> float:
        return self._seconds

    def retry_due(self) -> bool:
        return self.waits_for_retry


class FakeNotice:
    """A notice of Ray Train, which a save answers."""

    def __init__(self, given: bool = False):
        self.given = given

    def asks_for_save(self) -> bool:
        return self.given

    def saved(self) -> None:
        self.given = False


def config(**checkpoint: Any) -> RunConfig:
    nothing = {"minutes": None, "at_end": False}
    return resolve(
        [("argument", {f"checkpoint.{key}": value for key, value in {**nothing, **checkpoint}.items()})]
    ).config


def decision(
    settings: RunConfig, pending: Any, rank: int = 0, noticed: bool = False
) -> tuple[SaveDecision, list[bool]]:
    """Return a decision, and what it asks of the other ranks."""
    asked: list[bool] = []
    runtime: Any = SimpleNamespace(is_main=rank == 0, notice=FakeNotice(noticed))
    metrics: Any = None
    return SaveDecision(settings, runtime, pending, metrics, lambda *_, **__: None, asked.append), asked


@pytest.mark.parametrize(
    ("settings", "pending", "rank", "noticed", "asks"),
    [
        ({}, FakePending(), 0, False, False),
        ({"minutes": 1}, FakePending(seconds=59.0), 0, False, False),
        ({"minutes": 1}, FakePending(seconds=61.0), 0, False, True),
        ({"minutes": 1}, FakePending(seconds=61.0), 1, False, False),
        ({}, FakePending(fails=True), 0, False, True),
        ({}, FakePending(fails=True), 1, False, False),
        ({}, FakePending(), 1, True, True),
    ],
)
def test_a_rank_asks_for_what_it_alone_knows(
    settings: dict[str, Any], pending: Any, rank: int, noticed: bool, asks: bool
) -> None:
    """Clocks differ, so only rank 0's counts. A notice counts wherever it comes."""
    found, asked = decision(config(**settings), pending, rank, noticed)
    found.request_if_due()
    assert asked == [asks]
    assert not found.is_due(3, preempted=False)


def test_a_request_stays_until_it_is_carried_out() -> None:
    found, asked = decision(config(), FakePending(), rank=1)
    found.request()
    found.request_if_due()
    assert not found.is_due(3, preempted=False)
    found.agree()
    assert found.is_due(3, preempted=False)
    found.note_begun()
    found.request_if_due()
    assert asked == [True, True, False, False]
    assert not found.is_due(4, preempted=False)


def test_a_step_that_is_saved_is_not_saved_again() -> None:
    found, _ = decision(config(every=3, at_end=True), FakePending(6))
    assert [step for step in range(1, 10) if found.is_due(step, preempted=False)] == [3, 9]
    assert [step for step in range(5, 8) if found.is_due(step, preempted=True)] == [5, 7]
    found.agree()
    assert not found.is_due(6, preempted=True)
    assert not found.is_due_at_end(6)
    assert found.is_due_at_end(7)


def test_a_save_that_failed_is_due_at_the_end() -> None:
    assert not decision(config(), FakePending())[0].is_due_at_end(7)
    assert decision(config(), FakePending(fails=True))[0].is_due_at_end(7)


def test_the_settings_say_whether_a_run_saves() -> None:
    assert not decision(config(), FakePending())[0].settings_ask
    for settings in ({"every": 3}, {"minutes": 1}, {"at_end": True}, {"best": "eval_loss"}):
        assert decision(config(**settings), FakePending())[0].settings_ask, settings

    rewinds = resolve(
        [("argument", {"checkpoint.minutes": None, "checkpoint.at_end": False, "spike.policy": "rewind"})]
    )
    assert decision(rewinds.config, FakePending())[0].settings_ask
