"""The rates of a torch scheduler before the first step: found on a copy, and compared with the real scheduler."""

from __future__ import annotations

import functools
import json
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import UserError
from lockstep.optim.schedulers.preview import MOST_STEPS, Failure, Preview, Rates, can_be_previewed, sign_of_epochs

STEPS = 50
PER_EPOCH = 10


def decay(step: int, *, rate: float) -> float:
    return rate**step


def sequential(o: Any, steps: int = STEPS) -> Any:
    warm_up, cosine = lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(o, steps - 5)
    return lr_scheduler.SequentialLR(o, [warm_up, cosine], [5])


EVERY_KIND: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "a partial": lambda o: lr_scheduler.LambdaLR(o, functools.partial(decay, rate=0.99)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 20, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 25, 30]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 13),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=40),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 45, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=7, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=6, mode="exp_range", gamma=0.99),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=STEPS),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 3)]
    ),
}


def made(scheduler: Callable[[Any], Any]) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    return optimizer, scheduler(optimizer)


def previewed(scheduler: Callable[[Any], Any], steps: int = STEPS) -> Any:
    optimizer, real = made(scheduler)
    assert can_be_previewed([real])
    return Preview([real], optimizer).look(steps)


def test_no_scheduler_of_torch_is_missing() -> None:
    found = {name for name in EVERY_KIND if name in lr_scheduler.__all__}
    assert found | {"LRScheduler", "ReduceLROnPlateau"} == set(lr_scheduler.__all__)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_rates_are_those_of_the_run(kind: str) -> None:
    optimizer, real = made(EVERY_KIND[kind])
    assert can_be_previewed([real])
    rates = Preview([real], optimizer).look(STEPS)
    assert isinstance(rates, Rates)

    taken = []
    for _ in range(STEPS):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        real.step()

    expected = {"start": taken[0], "quarter": taken[12], "half": taken[25], "end": taken[-1]}
    assert rates.landmarks == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert rates.second_half == pytest.approx([taken[25 + 24 * n // 16] for n in range(17)], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_nothing_but_the_copies_changes(kind: str) -> None:
    optimizer, real = made(EVERY_KIND[kind])
    before = json.dumps([real.state_dict(), optimizer.param_groups], default=repr)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preview([real], optimizer).look(STEPS)

    assert json.dumps([real.state_dict(), optimizer.param_groups], default=repr) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]


def plateaus(step: int, bounds: tuple[int, ...] = (10, 30), *, factor: float = 0.5) -> float:
    share = 1.0
    for bound in bounds:
        if step >= bound:
            share = share * pow(factor, 1)

    return max(0.01, math.sqrt(abs(round(share, 6))))


def test_functions_that_do_arithmetic_are_previewed() -> None:
    warm_up, total = 5, STEPS
    exp = math.exp
    for function, end in (
        (lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / total)), None),
        (lambda step: (1.0, 0.5, 0.25)[min(step // 20, 2)], 0.025),
        (lambda step: exp(-step), 0.1 * math.exp(-49)),
        (plateaus, 0.05),
        (functools.partial(plateaus, bounds=(1,), factor=0.25), 0.05),
        (math.cos, None),
    ):
        make = functools.partial(lr_scheduler.LambdaLR, lr_lambda=function)
        rates = previewed(make)
        assert end is None or rates.landmarks["end"] == pytest.approx(end)


def test_what_may_have_an_effect_elsewhere_is_not_previewed() -> None:
    calls: dict[str, int] = {"n": 0}
    shares = [1.0] * 100
    left = iter(shares)
    number = 0

    def counting(step: int) -> float:
        calls["n"] += 1
        return 1.0

    def in_closure(step: int) -> float:
        nonlocal number
        number += 1
        return 1.0

    def generated(step: int) -> Any:
        yield 1.0

    def writing(step: int) -> float:
        print(step)
        return 1.0

    class Own(lr_scheduler.StepLR):
        pass

    class Shares:
        def __call__(self, step: int) -> float:
            return 1.0

        def share(self, step: int) -> float:
            return 1.0

    def exp(step: int) -> float:
        return calls["n"]

    functions: list[Any] = [
        *(counting, in_closure, generated, writing, Shares(), Shares().share),
        lambda step: next(left),
        lambda step, left=left: next(left),
        lambda step: random.random(),
        lambda step: shares[step],
        lambda step: exp(step),
        lambda step: len(str(step)),
        lambda step: sum(number for number in (1, 2)),
        shares.__getitem__,
        functools.partial(decay, rate=torch.ones(())),
        functools.partial(shares.pop),
        left.__next__,
    ]
    for function in functions:
        scheduler = made(EVERY_KIND["LambdaLR"])[1]
        scheduler.lr_lambdas = [function]
        assert not can_be_previewed([scheduler]), function

    assert not can_be_previewed([made(lambda o: Own(o, 3))[1]])
    assert not can_be_previewed([made(lr_scheduler.ReduceLROnPlateau)[1]])


def test_a_long_run_costs_no_more_than_a_short_one() -> None:
    """What torch can only step is left out; a sequence of others is not."""
    assert previewed(EVERY_KIND["ChainedScheduler"], steps=10**6) is None
    rates = previewed(functools.partial(sequential, steps=10**6), steps=10**6)
    assert rates.landmarks["half"] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "step"),
    [
        # torch lets it be stepped once more than its number of steps.
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, epochs=2, steps_per_epoch=PER_EPOCH), 21),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: (1.0, 0.5, 0.25, 0.1)[step]), 4),
        (lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: (1.0, 0.5, 0.25, 0.1)[step]), 4),
    ],
)
def test_the_first_step_that_fails_is_found(make: Callable[[Any], Any], step: int) -> None:
    failure = previewed(make)
    assert isinstance(failure, Failure)
    assert failure.step == step


def sign(make: Callable[[Any], Any], steps: int = STEPS, per_epoch: int | None = PER_EPOCH) -> str:
    optimizer, real = made(make)
    rates = Preview([real], optimizer).look(steps)
    assert isinstance(rates, Rates)
    return sign_of_epochs([real], rates, steps, per_epoch)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: lr_scheduler.StepLR(o, 2), "StepLR(step_size=2)"),
        (lambda o: lr_scheduler.MultiStepLR(o, [3, 4], gamma=1e-4), "milestones=[30, 40] would"),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 5), "T_max=50 would be"),
        (lambda o: lr_scheduler.PolynomialLR(o, 5), "total_iters=50 would"),
        (lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=5), "anneal_epochs=50 would"),
        (lambda o: sequential(o, 10), "T_max=50 would"),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.5), "ExponentialLR looks as if"),
        (lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch), "falls from 0.1 to 2.98e-09"),
    ],
)
def test_a_scheduler_that_counts_epochs_is_named(make: Callable[[Any], Any], words: str) -> None:
    assert words in sign(make)
    assert "once for every optimizer step" in sign(make)


def test_a_long_run_of_swalr_is_judged_without_its_rates() -> None:
    optimizer, real = made(lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=5))
    assert Preview([real], optimizer).look(10 * MOST_STEPS) is None
    assert "SWALR(anneal_epochs=5)" in sign_of_epochs([real], None, 10 * MOST_STEPS, MOST_STEPS)
    assert sign_of_epochs([real], None, 10 * MOST_STEPS, 2500) == ""  # four epochs


@pytest.mark.parametrize(
    "kind", [kind for kind in EVERY_KIND if kind not in ("ExponentialLR", "MultiplicativeLR", "ChainedScheduler")]
)
def test_a_scheduler_that_counts_steps_is_not_named(kind: str) -> None:
    assert sign(EVERY_KIND[kind]) == ""


def test_small_steps_of_a_smooth_decay_are_not_named() -> None:
    assert sign(lambda o: lr_scheduler.StepLR(o, 1, 0.999)) == ""
    # An epoch of one or two steps is no sign.
    assert sign(lambda o: lr_scheduler.CosineAnnealingLR(o, 25), per_epoch=2) == ""
    assert sign(lambda o: lr_scheduler.CosineAnnealingLR(o, 25), per_epoch=None) == ""


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=500, T_mult=2),
        lambda o: lr_scheduler.MultiStepLR(o, [500, 900]),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 1000),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 100),
    ],
)
def test_a_number_of_steps_below_that_of_many_epochs_is_not_named(make: Callable[[Any], Any]) -> None:
    assert sign(make, steps=8000, per_epoch=8) == ""


def test_a_cosine_is_named_only_where_it_goes_up_and_down_in_most_of_the_run() -> None:
    def between(o: Any) -> Any:
        parts = [lr_scheduler.CosineAnnealingLR(o, 5), lr_scheduler.ConstantLR(o, 0.5, STEPS)]
        return lr_scheduler.SequentialLR(o, parts, [5])

    def alone(o: Any) -> Any:
        return lr_scheduler.SequentialLR(o, [lr_scheduler.CosineAnnealingLR(o, 5)], [])

    assert sign(between) == ""
    assert "T_max=50 would" in sign(alone)
    assert sign(lambda o: lr_scheduler.CosineAnnealingLR(o, 4)) == ""
    assert "T_max=3000 would" in sign(lambda o: lr_scheduler.CosineAnnealingLR(o, 300), steps=3000)
    assert sign(lambda o: lr_scheduler.CosineAnnealingLR(o, 301), steps=3010) == ""


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_group_is_no_sign(frozen: int) -> None:
    def stops(step: int) -> float:
        return 1.0 if step < 20 else 0.0

    shares = [stops if number == frozen else lambda step: 1.0 for number in range(2)]
    groups = [{"params": nn.Linear(2, 1).parameters(), "lr": rate} for rate in (0.1, 1e-8)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    real = lr_scheduler.LambdaLR(optimizer, shares)
    rates = Preview([real], optimizer).look(STEPS)
    assert isinstance(rates, Rates)
    assert rates.landmarks["end"] == (0.0 if frozen == 0 else 0.1)
    assert sign_of_epochs([real], rates, STEPS, PER_EPOCH) == ""


class Points(lockstep.Task):
    """Five epochs of ten steps."""

    defaults = {"global_batch": 8, "epochs": 5, "log.progress": "off"}

    def __init__(self, make: Any = None):
        self.make = make

    def model(self) -> Any:
        return nn.Linear(2, 1)

    def data(self) -> Any:
        return TensorDataset(torch.ones(80, 2))

    def optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def scheduler(self, optimizer: Any) -> Any:
        return self.make(optimizer)

    def loss(self, model: Any, batch: Any) -> Any:
        return lockstep.Loss((model(batch[0]) ** 2).sum(), len(batch[0]))


def one_cycle(steps: int) -> Callable[[Any], Any]:
    return lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=steps)


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_the_banner_has_the_rates_and_a_warning_says_what_is_wrong(tmp_path: Path) -> None:
    lockstep.fit(Points(lambda o: lr_scheduler.StepLR(o, 2)), run_dir=str(tmp_path / "run"))
    records = events(tmp_path / "run")
    (start,) = [record for record in records if record["event"] == "start"]
    assert start["facts"]["learning rate"] == "start 0.1, quarter 1e-07, half 1e-13, end 1e-25, by StepLR"
    (warning,) = [record["reason"] for record in records if record["event"] == "warning"]
    assert "step_size=20 would be that many epochs of 10 steps" in warning


def test_a_scheduler_that_ends_before_the_run_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with pytest.raises(UserError, match=r"step 22, and the run has 50 steps[^$]*total_steps=50"):
        lockstep.fit(Points(one_cycle(20)), run_dir=run)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()

    # Also where a run is extended.
    lockstep.fit(Points(one_cycle(50)), run_dir=run)
    with pytest.raises(UserError, match="step 52, and the run has 90 steps"):
        lockstep.fit(Points(one_cycle(50)), run_dir=run, resume="auto", epochs=9)
    lockstep.fit(Points(one_cycle(90)), run_dir=run, resume="auto", epochs=9)


def test_a_run_that_may_end_earlier_is_only_warned(tmp_path: Path) -> None:
    class Early(Points):
        def after_step(self, run: Any, result: Any) -> None:
            if run.steps_done == 15:
                run.stop("enough")

    lockstep.fit(Early(one_cycle(20)), run_dir=str(tmp_path / "run"), stop={"max_minutes": 5})
    assert any("cannot set the learning rate of step 22" in str(event) for event in events(tmp_path / "run"))


def own_loop(
    folder: Path, make: Callable[[Any], Any], stop: int | None = None, passes: int = 1, **settings: Any
) -> list[float]:
    """Train in a custom loop, on 64 samples, up to step `stop`, and return the rates."""
    taken = []
    with lockstep.start(run_dir=str(folder), log={"progress": "off"}, **settings) as run:
        model: Any = nn.Linear(2, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, _ = run.setup(model, optimizer, make(optimizer))
        for step in run.steps(TensorDataset(torch.ones(64, 2)), passes=passes):
            for _ in range(passes):
                for (x,) in step:
                    step.backward(model(x).square().sum(), weight=len(x))
                step.apply()
                taken.append(optimizer.param_groups[0]["lr"])
            if step.number == stop:
                run.stop("enough")

    return taken


def warnings_of(folder: Path) -> list[str]:
    return [record["reason"] for record in events(folder) if record["event"] == "warning"]


def test_a_function_that_uses_up_its_rates_has_all_of_them(tmp_path: Path) -> None:
    shares = [0.5, *(1 - n / 20 for n in range(20))]
    left = iter(shares)
    # torch calls it in the constructor, for the first step.
    rates = own_loop(tmp_path, lambda o: lr_scheduler.LambdaLR(o, lambda step: next(left)), steps=20, global_batch=8)
    assert rates == pytest.approx([0.1 * share for share in shares[:20]])


def test_a_loop_that_ends_itself_is_only_warned(tmp_path: Path) -> None:
    rates = own_loop(tmp_path, one_cycle(10), stop=9, steps=1000, global_batch=8)
    assert len(rates) == 10
    assert any("cannot set the learning rate of step 12" in text for text in warnings_of(tmp_path))


def test_a_resume_with_another_batch_size_is_judged_by_its_own_number_of_steps(tmp_path: Path) -> None:
    def fit(batch: int, steps: int, **settings: Any) -> None:
        values = {"epochs": 2, "global_batch": batch, "resume": "auto", "run_dir": str(tmp_path)}
        lockstep.fit(Points(one_cycle(steps)), **(values | settings))

    # Ten of twenty steps of 8, and then the second epoch in twenty steps of 4.
    fit(8, 20, epochs=1)
    with pytest.raises(UserError, match="step 27, and the run has 30 steps"):
        fit(4, 25)
    fit(4, 30)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 30


def test_several_passes_over_a_step_are_not_looked_at_in_advance(tmp_path: Path) -> None:
    rates = own_loop(tmp_path, one_cycle(40), passes=2, steps=20, global_batch=8)
    assert len(rates) == 40
    (start,) = [record for record in events(tmp_path) if record["event"] == "start"]
    assert start["facts"]["learning rate"].endswith("then by OneCycleLR")
