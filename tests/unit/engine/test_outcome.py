"""What follows from the summed control word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import RunConfig
from lockstep.engine.outcome import Outcome, Outcomes
from lockstep.errors import OutOfStep
from lockstep.runtime.control_word import ControlWord, step_mark

RANKS = 3


def concluded(step: int, summed: int, noticed: tuple[int, ...] = ()) -> Any:
    config = RunConfig(global_batch=4, steps=10)
    ranks_that_report = lambda name, seconds: list(noticed or range(RANKS))
    runtime: Any = SimpleNamespace(world=SimpleNamespace(size=RANKS), ranks_that_report=ranks_that_report)
    word = ControlWord(weight=4.0, step=summed)
    control: Any = SimpleNamespace(step=step)
    outcome = Outcome(control, reduced=None, loss_limit=float("inf"), word=word, grad_norm=1.0)  # type: ignore[arg-type]
    return Outcomes(config, None, runtime, None).conclude(outcome)


@pytest.mark.parametrize("step", [0, 1, 4095, 4096])
def test_ranks_that_are_in_step(step: int) -> None:
    assert concluded(step, RANKS * step_mark(step)).applied


@pytest.mark.parametrize("step", [0, 1, 4095, 4096])
@pytest.mark.parametrize("arrived", [0, 1, RANKS - 1, RANKS + 1, RANKS * RANKS])
def test_words_that_get_lost_or_count_twice_show_in_every_step(step: int, arrived: int) -> None:
    with pytest.raises(RuntimeError, match=r"out of step.* a collective .* that not every rank calls"):
        concluded(step, arrived * step_mark(step))


def test_the_rank_that_does_not_notice_it_is_the_one_at_fault() -> None:
    with pytest.raises(OutOfStep, match="rank 1 was in a collective that ranks 0, 2 never called") as raised:
        concluded(3, 0, noticed=(0, 2))
    assert raised.value.ranks == [1]
