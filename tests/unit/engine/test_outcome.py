"""What follows from the summed control word."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lockstep
from lockstep.config import RunConfig, ScalerConfig, SpikeConfig
from lockstep.engine.outcomes.late import not_applied_on_device
from lockstep.engine.outcomes.outcome import Outcome, OutcomeHandler
from lockstep.engine.passes import StepStatus
from lockstep.errors import OutOfStep, UserError
from lockstep.parallel import progress
from lockstep.parallel.progress import StepContext
from lockstep.precision import PRECISIONS
from lockstep.runtime.control_word import FLAGS, ControlWord, ControlWordCodec, SummedWord, step_mark

RANKS = 3


def concluded(step: int, summed: int = 0, noticed: tuple[int, ...] = (), word: SummedWord | None = None) -> Any:
    config = RunConfig(global_batch=4, steps=10)
    ranks_that_report = lambda name, seconds: list(noticed or range(RANKS))
    runtime: Any = SimpleNamespace(world=SimpleNamespace(size=RANKS), ranks_that_report=ranks_that_report)
    word = word or SummedWord(weight=4.0, steps=summed)
    progress: Any = SimpleNamespace(step=step)
    reduced: Any = None
    outcome = Outcome(StepStatus(step), progress, reduced, math.inf, word, grad_norm=1.0)
    handler = OutcomeHandler(StepContext(config, runtime, PRECISIONS["fp32"], global_batch=4))
    handler.check(outcome)
    return handler.handle(outcome)


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
    with pytest.raises(UserError, match="1 of 3 ranks loaded a checkpoint before step 8"):
        concluded(7, word=SummedWord(weight=4.0, steps=2 * step_mark(7) + step_mark(2), loaded=1))


@pytest.mark.parametrize("marks", [-1, 0, RANKS - 1])
def test_a_tensor_that_is_no_control_word_does_not_say_that_ranks_loaded(marks: int) -> None:
    with pytest.raises(OutOfStep):
        concluded(7, word=SummedWord(weight=4.0, steps=marks, loaded=1))


def outcome_of(word: SummedWord, grad_norm: float) -> Outcome:
    names = ["weight"]
    reduced: Any = SimpleNamespace(norms=torch.tensor([grad_norm]), names=names)
    progress: Any = SimpleNamespace(step=0, micro_batches=[], losses=[], batches=SimpleNamespace(span=None))
    return Outcome(StepStatus(0), progress, reduced, math.inf, word, grad_norm)


@pytest.fixture
def fp16_handler() -> OutcomeHandler:
    return fp16_handler_with(ScalerConfig(interval=1))


def fp16_handler_with(scaler: ScalerConfig) -> OutcomeHandler:
    config = RunConfig(global_batch=4, steps=10, spike=SpikeConfig(policy="skip"), scaler=scaler, precision="fp16")
    collectives = SimpleNamespace(all_gather_json=lambda value: [value])
    runtime: Any = SimpleNamespace(world=SimpleNamespace(size=1, rank=0), collectives=collectives)
    return OutcomeHandler(StepContext(config, runtime, PRECISIONS["fp16"], global_batch=4))


def word_of(handler: OutcomeHandler, weight: float) -> SummedWord:
    scaler = handler._scaler
    assert scaler is not None
    return SummedWord(weight=weight, steps=step_mark(0), scales=math.log2(scaler.value), loss=3.0)


@pytest.mark.parametrize("weight", [4.0, 0.0])
def test_a_measured_pass_counts_for_nothing(fp16_handler: OutcomeHandler, weight: float) -> None:
    fp16_handler.skips_in_a_row = fp16_handler.empty_in_a_row = 1
    before = fp16_handler.state_dict()

    grad_norm = 1.0 if weight else math.nan
    result = fp16_handler.handle_measured(outcome_of(word_of(fp16_handler, weight), grad_norm))

    assert (result.applied, result.weight, result.skip_reason) == (False, weight, None)
    assert fp16_handler.state_dict() == before
    assert fp16_handler.empty_in_a_row == 1


def test_a_measured_pass_that_overflows_lowers_the_loss_scale(fp16_handler: OutcomeHandler) -> None:
    scaler = fp16_handler._scaler
    assert scaler is not None
    scale = scaler.value
    for _ in range(scaler.config.hysteresis):
        result = fp16_handler.handle_measured(outcome_of(word_of(fp16_handler, 4.0), math.inf))
    assert scaler.value < scale
    assert "no finite gradient" in (result.skip_reason or "")


def test_a_skip_is_logged_with_the_loss_scale_of_its_step() -> None:
    handler = fp16_handler_with(ScalerConfig(initial=1024.0))
    logged: list[dict[str, Any]] = []
    handler._log_event = lambda event, **fields: logged.append({"event": event, **fields})
    for _ in range(2):
        handler.handle(outcome_of(word_of(handler, 4.0), math.inf))
    assert [(record["event"], record["scale"]) for record in logged] == [("skip", 1024.0), ("skip", 512.0)]


def test_an_overflow_that_the_hysteresis_allows_is_no_failure() -> None:
    handler = fp16_handler_with(ScalerConfig(initial=4.0, minimum=2.0, hysteresis=3))
    for expected in (4.0, 4.0, 2.0):
        handler.handle(outcome_of(word_of(handler, 4.0), math.inf))
        assert handler._scaler is not None
        assert (handler._scaler.value, handler.skips_in_a_row) == (expected, 0)

    # The scale cannot be lowered any more, so from now on it is not to blame.
    handler.handle(outcome_of(word_of(handler, 4.0), math.inf))
    assert handler.skips_in_a_row == 1


def test_a_resumed_run_still_knows_that_only_the_loss_scale_was_too_large(fp16_handler: OutcomeHandler) -> None:
    scaler = fp16_handler._scaler
    assert scaler is not None
    fp16_handler.handle(outcome_of(word_of(fp16_handler, 4.0), math.inf))
    state = fp16_handler.state_dict()

    # A rewind loads the state into an object that has counted more since.
    fp16_handler._overflows += 5
    fp16_handler.load_state_dict(state)
    with pytest.raises(UserError, match="1 overflowed: the loss scale of fp16 is still too large"):
        fp16_handler.check_something_learned(steps=1, applied=0)

    # An older checkpoint.
    del state["skips"]["scale_backoffs"]
    fp16_handler.load_state_dict(state)
    with pytest.raises(UserError, match="skipped for the reasons above"):
        fp16_handler.check_something_learned(steps=1, applied=0)


def test_a_weight_that_is_not_finite_is_the_reason_for_a_skip() -> None:
    assert outcome_of(SummedWord(weight=math.nan), math.nan).skip_reason() == "the weight of the loss is not finite"


def test_a_negative_weight_is_refused_in_the_words_for_one_on_the_host() -> None:
    with pytest.raises(UserError, match=r"the weight of a loss is the number of its terms; it cannot be -4\.0"):
        concluded(2, word=SummedWord(weight=-4.0, steps=RANKS * step_mark(2)))


@pytest.mark.parametrize("limit", [math.inf, 1.0])
@pytest.mark.parametrize("weight", [4.0, 2.5, 0.0, -4.0, math.nan])
@pytest.mark.parametrize("norm", [0.0, 3.0, math.inf, math.nan])
def test_the_device_decides_as_the_host_does(weight: float, norm: float, limit: float) -> None:
    codec = ControlWordCodec(torch.device("cpu"), torch.float32)
    packed = codec.pack(ControlWord(weight=torch.tensor(weight), loss=3.0))
    on_device = codec.weight(packed)
    grad_norm = torch.tensor(norm) * (1.0 / on_device)
    reduced: Any = SimpleNamespace(codec=codec, packed_word=packed)
    progress: Any = None
    applied = Outcome(StepStatus(0), progress, reduced, limit, codec.unpack(packed.tolist()), float(grad_norm)).applied

    assert applied == (weight > 0 and math.isfinite(norm) and 3.0 / weight <= limit)
    assert applied != bool(not_applied_on_device(reduced, grad_norm, on_device, limit))


def test_a_result_carries_every_flag() -> None:
    word = SummedWord(weight=4.0, steps=RANKS * step_mark(0), **dict.fromkeys(FLAGS, RANKS))
    result = concluded(0, word=word)
    assert result.exhausted
    assert [getattr(result.flags, name) for name in FLAGS] == [RANKS] * len(FLAGS)


@pytest.mark.parametrize(
    ("weight", "mark", "error"),
    [(8.0, lambda step: step_mark(step) + 1, OutOfStep), (-8.0, step_mark, UserError)],
    ids=["out of step", "negative weight"],
)
def test_a_control_word_that_is_refused_changes_no_weights(
    weight: float, mark: Any, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "step_mark", mark)
    monkeypatch.setattr(progress, "checked_weight", lambda weight: weight)  # as for one on a GPU
    model = torch.nn.Linear(1, 1)
    before = [p.detach().clone() for p in model.parameters()]

    def loop() -> None:
        with lockstep.start(run_dir=tmp_path / "run", global_batch=8, steps=1, log={"progress": "off"}) as run:
            replica, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
            for step in run.steps(torch.utils.data.TensorDataset(torch.ones(8, 1))):
                for (x,) in step:
                    step.backward(replica(x).sum(), weight=weight)
                step.apply()

    with pytest.raises(error):
        loop()

    assert all(map(torch.equal, before, model.parameters()))
