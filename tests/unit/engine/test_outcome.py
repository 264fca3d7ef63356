"""What follows from the summed control word."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config import RunConfig, ScalerConfig, SpikeConfig
from lockstep.engine.outcome import Outcome, Outcomes
from lockstep.engine.progress import StepContext
from lockstep.errors import OutOfStep, UserError
from lockstep.precision import PRECISIONS
from lockstep.runtime.control_word import FLAGS, ControlWord, step_mark

RANKS = 3


def concluded(step: int, summed: int = 0, noticed: tuple[int, ...] = (), word: ControlWord | None = None) -> Any:
    config = RunConfig(global_batch=4, steps=10)
    ranks_that_report = lambda name, seconds: list(noticed or range(RANKS))
    runtime: Any = SimpleNamespace(world=SimpleNamespace(size=RANKS), ranks_that_report=ranks_that_report)
    word = word or ControlWord(weight=4.0, step=summed)
    progress: Any = SimpleNamespace(step=step)
    outcome = Outcome(progress, reduced=None, loss_limit=float("inf"), word=word, grad_norm=1.0)  # type: ignore[arg-type]
    return Outcomes(StepContext(config, runtime, PRECISIONS["fp32"], global_batch=4)).conclude(outcome)


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


def test_ranks_that_loaded_alone_are_named_although_they_are_in_another_step() -> None:
    with pytest.raises(UserError, match="1 of 3 ranks loaded a checkpoint before step 7"):
        concluded(7, word=ControlWord(weight=4.0, step=2 * step_mark(7) + step_mark(2), loaded=1))


@pytest.mark.parametrize("marks", [-1, 0, RANKS - 1])
def test_a_tensor_that_is_no_control_word_does_not_say_that_ranks_loaded(marks: int) -> None:
    with pytest.raises(OutOfStep):
        concluded(7, word=ControlWord(weight=4.0, step=marks, loaded=1))


def outcome_of(word: ControlWord, grad_norm: float) -> Outcome:
    names = ["weight"]
    reduced: Any = SimpleNamespace(norms=torch.tensor([grad_norm]), names=names)
    progress: Any = SimpleNamespace(step=0, trained=[], losses=[], batches=SimpleNamespace(span=None))
    return Outcome(progress, reduced, loss_limit=math.inf, word=word, grad_norm=grad_norm)


@pytest.fixture
def fp16_outcomes() -> Outcomes:
    config = RunConfig(
        global_batch=4, steps=10, spike=SpikeConfig(policy="skip"), scaler=ScalerConfig(interval=1), precision="fp16"
    )
    collectives = SimpleNamespace(gather_json=lambda value: [value])
    runtime: Any = SimpleNamespace(world=SimpleNamespace(size=1, rank=0), collectives=collectives)
    return Outcomes(StepContext(config, runtime, PRECISIONS["fp16"], global_batch=4))


def word_of(outcomes: Outcomes, weight: float) -> ControlWord:
    scaler = outcomes._scaler
    assert scaler is not None
    return ControlWord(weight=weight, step=step_mark(0), scale=math.log2(scaler.value), loss=3.0)


@pytest.mark.parametrize("weight", [4.0, 0.0])
def test_a_measured_pass_counts_for_nothing(fp16_outcomes: Outcomes, weight: float) -> None:
    fp16_outcomes.skips_in_a_row = fp16_outcomes.empty_in_a_row = 1
    before = fp16_outcomes.state_dict()

    grad_norm = 1.0 if weight else math.nan
    result = fp16_outcomes.conclude_measured(outcome_of(word_of(fp16_outcomes, weight), grad_norm))

    assert (result.applied, result.weight, result.skip_reason) == (False, weight, None)
    assert fp16_outcomes.state_dict() == before
    assert fp16_outcomes.empty_in_a_row == 1


def test_a_measured_pass_that_overflows_lowers_the_loss_scale(fp16_outcomes: Outcomes) -> None:
    scaler = fp16_outcomes._scaler
    assert scaler is not None
    scale = scaler.value
    for _ in range(scaler.config.hysteresis):
        result = fp16_outcomes.conclude_measured(outcome_of(word_of(fp16_outcomes, 4.0), math.inf))
    assert scaler.value < scale
    assert "no finite gradient" in (result.skip_reason or "")


def test_a_resumed_run_still_knows_that_only_the_loss_scale_was_too_large(fp16_outcomes: Outcomes) -> None:
    scaler = fp16_outcomes._scaler
    assert scaler is not None
    while fp16_outcomes._scale_backoffs == 0:
        fp16_outcomes.conclude(outcome_of(word_of(fp16_outcomes, 4.0), math.inf))
    # Skips that a hysteresis allows before the scale is lowered would be another reason.
    fp16_outcomes.skipped = fp16_outcomes._scale_backoffs
    state = fp16_outcomes.state_dict()

    # A rewind loads the state into an object that has counted more since.
    fp16_outcomes._scale_backoffs += 5
    fp16_outcomes.load_state_dict(state)
    with pytest.raises(UserError, match="halved the loss scale of fp16"):
        fp16_outcomes.check_something_learned(steps=1, applied=0)

    # An older checkpoint.
    del state["skips"]["scale_backoffs"]
    fp16_outcomes.load_state_dict(state)
    with pytest.raises(UserError, match="skipped for the reasons above"):
        fp16_outcomes.check_something_learned(steps=1, applied=0)


def test_a_weight_that_is_not_finite_is_the_reason_for_a_skip() -> None:
    assert outcome_of(ControlWord(weight=math.nan), math.nan).skip_reason() == "the weight of the loss is not finite"


def test_a_result_carries_every_flag() -> None:
    word = ControlWord(weight=4.0, step=RANKS * step_mark(0), **dict.fromkeys(FLAGS, RANKS))
    result = concluded(0, word=word)
    assert result.exhausted
    assert [getattr(result.flags, name) for name in FLAGS] == [RANKS] * len(FLAGS)
