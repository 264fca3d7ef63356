"""The user's scheduler: stepped by Lockstep, saved with the run; a rate that anybody else sets is an error."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.optim.schedulers.scheduler_state import _differences
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import Trace, assert_user_errors, open_watched, trace_of, windows
from zoo import SLOW_TO_IMPORT

STEPS, BATCH = 7, 8
VALUES = {"global_batch": BATCH, "micro_batch": 2, "steps": STEPS}


class WarmUp(lr_scheduler.LRScheduler):
    """A scheduler as people write them: it holds another one, and hands over to it."""

    def __init__(self, optimizer: Any, steps: int, after: Any):
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [rate * (self.last_epoch + 1) / (self.steps + 1) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.steps:
            super().step(epoch)
        else:
            self.after.step()


def cosine(optimizer: Any, steps: int = STEPS) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=steps)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=STEPS + 1),
    "transformers": cosine,
    "milestones": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.MultiStepLR(optimizer, [2, 4])],
        milestones=[2],
    ),
    "step of 3": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "warm-up": lambda optimizer: WarmUp(optimizer, 4, lr_scheduler.CosineAnnealingLR(optimizer, 3)),
}


class Regression(Task):
    """A regression in float64; each of its parameter groups has a rate of its own."""

    def __init__(self, scheduler: Any = None, spoiled: int | None = None, evaluated: bool = False):
        """`spoiled` is the sample whose loss is infinite."""
        self.make_scheduler, self.spoiled, self.evaluated = scheduler, spoiled, evaluated

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def optimizer(self, model: Any) -> Any:
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def scheduler(self, optimizer: Any) -> Any:
        return self.make_scheduler(optimizer) if self.make_scheduler else None

    def data(self) -> Any:
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(56, 3, generator=g).double(), torch.randn(56, generator=g).double()
        if self.spoiled is not None:
            y[self.spoiled] = torch.inf
        return TensorDataset(x, y)

    def eval_data(self) -> Any:
        return TensorDataset(*self.data()[:8]) if self.evaluated else None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(((model(x).squeeze(-1) - y) ** 2).sum(), len(x))


class Sentences(Regression):
    """The same with transformers' BERT."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(3)
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=1, **sizes, **quiet)).double()

    def optimizer(self, model: Any) -> Any:
        groups = [{"params": model.bert.parameters(), "lr": 0.02}, {"params": model.classifier.parameters()}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randint(0, 9, (56, 5), generator=g), torch.randn(56, generator=g).double())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        words, y = batch
        return Loss(((model(input_ids=words).logits.squeeze(-1) - y) ** 2).sum(), len(y))


def fit_with(world: World, store: Any, task: Task, values: dict[str, Any]) -> Trace:
    with open_watched(world, store, values) as builder:
        loop.fit(task, builder)
        return trace_of(builder)


def loop_with(world: World, store: Any, task: Regression, values: dict[str, Any]) -> Trace:
    with open_watched(world, store, values) as builder:
        own = OwnRun(builder)
        plain = task.model()
        made = task.optimizer(plain)
        model, optimizer, _ = own.setup(plain, made, task.scheduler(made))
        assert optimizer is made
        for step in own.steps(task.data(), task.collate):
            for batch in step:
                loss = task.loss(model, batch)
                step.backward(loss.total, loss.weight)
            step.apply()
        own.close()
        return trace_of(builder)


JOBS = {"fit": fit_with, "own loop": loop_with}


def plain_pytorch(task: Regression) -> list[tuple[list[float], dict[str, Tensor]]]:
    """What plain PyTorch does: the rates of every applied step, and the weights after it."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer)
    data = task.data()
    found = []
    for ids in windows(56, BATCH, "drop", STEPS):
        summed = task.loss(model, data[ids])
        loss = summed.total / summed.weight
        optimizer.zero_grad()
        if torch.isfinite(loss):
            loss.backward()
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            scheduler.step()
        found.append((rates, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def assert_same(traces: list[Trace], expected: list[tuple[list[float], dict[str, Tensor]]]) -> None:
    for trace in traces:
        for note, (rates, weights) in zip(trace.steps, expected, strict=True):
            if note.result.applied:
                assert note.optimizer_lrs == pytest.approx(rates, rel=1e-14)
            for name, weight in weights.items():
                assert (note.weights[name] - weight).abs().max() <= 1e-12


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_does_what_it_does_in_plain_pytorch(pool: Pool, kind: str, job: str) -> None:
    pool.preload(*SLOW_TO_IMPORT)
    task = (Sentences if kind == "transformers" else Regression)(SCHEDULERS[kind])
    for world in (1, 2):
        assert_same(pool.run(JOBS[job], task, VALUES, world=world), plain_pytorch(task))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "fsdp-grads", "pp"])
def test_the_rates_are_the_same_under_every_strategy(pool: Pool, strategy: str) -> None:
    task = Regression(SCHEDULERS["one cycle"])
    expected = [rates for rates, _ in plain_pytorch(task)]
    for trace in pool.run(fit_with, task, VALUES | {"strategy": strategy}, world=2):
        assert [note.optimizer_lrs for note in trace.steps] == [pytest.approx(rates, rel=1e-14) for rates in expected]


def test_a_skipped_step_does_not_move_the_scheduler(pool: Pool) -> None:
    third = windows(56, BATCH, "drop", STEPS)[2]
    task = Regression(SCHEDULERS["one cycle"], spoiled=third[3])
    traces = pool.run(fit_with, task, VALUES, world=2)
    assert [note.result.applied for note in traces[0].steps] == [True, True, False, True, True, True, True]
    assert_same(traces, plain_pytorch(task))


@pytest.mark.parametrize(
    ("kind", "at"), [("one cycle", 3), ("milestones", 3), ("milestones", 1), ("transformers", 3), ("warm-up", 6)]
)
def test_a_resumed_run_goes_on_with_the_schedulers_state(pool: Pool, tmp_path: Path, kind: str, at: int) -> None:
    task = Regression(SCHEDULERS[kind])
    expected = plain_pytorch(task)
    values = VALUES | {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    assert_same(pool.run(fit_with, task, values | {"steps": at}, world=2), expected[:at])
    assert_same(pool.run(fit_with, task, values, world=1), expected[at:])


EVERY_KIND: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda step: 0.9, lambda step: 0.8]),
    "StepLR": SCHEDULERS["step of 3"],
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.001, 0.002], [0.05, 0.02], step_size_up=2),
    "OneCycleLR": SCHEDULERS["one cycle"],
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingWarmRestarts(o, 2)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 3)]
    ),
}


def test_no_scheduler_of_torch_is_missing() -> None:
    """ReduceLROnPlateau follows evaluations, and has tests of its own below."""
    assert EVERY_KIND.keys() | {"LRScheduler", "ReduceLROnPlateau"} == set(lr_scheduler.__all__)


@pytest.mark.long
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_scheduler_of_torch_resumes_bit_for_bit(pool: Pool, tmp_path: Path, kind: str) -> None:
    task = Regression(EVERY_KIND[kind])
    expected = plain_pytorch(task)
    for world in (1, 2):
        whole = pool.run(fit_with, task, VALUES, world=world)
        assert_same(whole, expected)
        values = VALUES | {"run_dir": str(tmp_path / str(world)), "resume": "auto"}
        for at in (1, 4, STEPS):
            parts = pool.run(fit_with, task, values | {"steps": at}, world=world)
        for name, weight in whole[0].steps[-1].weights.items():
            assert torch.equal(parts[0].steps[-1].weights[name], weight)


def test_another_scheduler_does_not_take_over_the_state(pool: Pool, tmp_path: Path) -> None:
    values = VALUES | {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    pool.run(fit_with, Regression(SCHEDULERS["step of 3"]), values | {"steps": 3}, world=1)
    errors = pool.errors(fit_with, Regression(SCHEDULERS["one cycle"]), values, world=2)
    assert_user_errors(errors, "the checkpoint holds StepLR", "this run has OneCycleLR")


class OtherRates(Regression):
    """The same, made with half the rates."""

    def optimizer(self, model: Any) -> Any:
        made = super().optimizer(model)
        for group in made.param_groups:
            group["lr"] /= 2
        return made


CHANGES: dict[str, tuple[Callable[[Any], Any], Regression, str]] = {
    "another step size": (
        SCHEDULERS["step of 3"],
        Regression(lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5)),
        "StepLR: step_size 3 -> 2",
    ),
    "other rates": (
        SCHEDULERS["step of 3"],
        OtherRates(SCHEDULERS["step of 3"]),
        "StepLR: base_lrs [0.02, 0.01] -> [0.01, 0.005]",
    ),
    "a longer cosine, inside": (
        SCHEDULERS["warm-up"],
        Regression(lambda optimizer: WarmUp(optimizer, 4, lr_scheduler.CosineAnnealingLR(optimizer, 9))),
        "WarmUp: after.T_max 3 -> 9",
    ),
    "another peak": (
        SCHEDULERS["one cycle"],
        Regression(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.08, total_steps=STEPS + 3)),
        "OneCycleLR: total_steps 8 -> 10",
    ),
    "transformers, longer": (cosine, Regression(lambda optimizer: cosine(optimizer, 12)), "num_training_steps 7 -> 12"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_was_changed_in_code_is_followed_as_if_it_had_always_been_so(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    began_with, changed, words = CHANGES[kind]
    values = VALUES | {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    pool.run(fit_with, Regression(began_with), values | {"steps": 5}, world=1)
    traces = pool.run(fit_with, changed, values, world=2)
    expected = [rates for rates, _ in plain_pytorch(changed)][5:]
    for trace in traces:
        assert [note.optimizer_lrs for note in trace.steps] == [pytest.approx(rates, rel=1e-14) for rates in expected]

    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(words in str(event) for event in events), events


def plateau(factor: float) -> Callable[[Any], Any]:
    # No loss is better than the first by that much.
    return lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=factor, patience=0, threshold=0.99)


def test_a_plateau_with_other_settings_is_refused(pool: Pool, tmp_path: Path) -> None:
    values = VALUES | {"run_dir": str(tmp_path / "run"), "resume": "auto", "evaluate.every": 2, "evaluate.batch": 8}
    pool.run(fit_with, Regression(plateau(0.5), evaluated=True), values | {"steps": 4}, world=1)
    errors = pool.errors(fit_with, Regression(plateau(0.1), evaluated=True), values, world=2)
    assert_user_errors(errors, "ReduceLROnPlateau: factor 0.5 -> 0.1", "the run began with")
    errors = pool.errors(fit_with, OtherRates(plateau(0.5), evaluated=True), values, world=1)
    assert_user_errors(errors, "ReduceLROnPlateau: lr [0.02, 0.01] -> [0.01, 0.005]")


def test_what_a_checkpoint_stores_in_another_type_is_no_change() -> None:
    then = {"factor": 0.5, "min_lrs": [1e-5, 0.0], "betas": [0.9, 0.95]}
    now = {"factor": np.float64(0.5), "min_lrs": [np.float64(1e-5), 0.0], "betas": (0.9, 0.95)}
    assert list(_differences("", then, now)) == []
    assert list(_differences("", then, now | {"factor": np.float64(0.25)})) == [("factor", 0.5, 0.25)]


def test_a_rewind_goes_back_in_a_changed_schedule(pool: Pool, tmp_path: Path) -> None:
    """The checkpoint that it goes back to has the settings of before the change."""
    seventh = windows(56, BATCH, "drop", STEPS)[5]
    values = VALUES | {"run_dir": str(tmp_path / "run"), "resume": "auto", "nonfinite.policy": "rewind"}
    pool.run(fit_with, Regression(SCHEDULERS["step of 3"]), values | {"steps": 4}, world=1)
    changed = Regression(lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5), spoiled=seventh[0])
    (trace,) = pool.run(fit_with, changed, values, world=1)
    rates = [note.optimizer_lrs[0] / 0.02 for note in trace.steps if note.result.applied]
    assert rates[0] == 0.25
    assert 0.25 in rates[1:]
    assert rates[-1] == 0.125


def test_a_function_of_the_step_is_a_share_of_the_peak(pool: Pool) -> None:
    task = Regression(lambda optimizer: lambda step: 1 / (1 + step))
    for job in JOBS.values():
        traces = pool.run(job, task, VALUES | {"lr.peak": 0.04}, world=2)
        found = [note.optimizer_lrs for note in traces[0].steps]
        assert found == [[pytest.approx(0.04 / (1 + n)), pytest.approx(0.02 / (1 + n))] for n in range(STEPS)]


def test_a_plateau_follows_the_evaluations(pool: Pool) -> None:
    task = Regression(plateau(0.5), evaluated=True)
    traces = pool.run(fit_with, task, VALUES | {"evaluate.every": 2, "evaluate.batch": 8}, world=2)
    for trace in traces:
        assert [note.optimizer_lrs[0] / 0.02 for note in trace.steps] == [1, 1, 1, 1, 0.5, 0.5, 0.25]

    assert_user_errors(pool.errors(fit_with, task, VALUES, world=2), "ReduceLROnPlateau", "set evaluate.every=100")


def loop_that_evaluates_twice(world: World, store: Any, first_moves: bool, values: dict[str, Any]) -> list[float]:
    """Evaluate two datasets after every step; return the rates, as shares of the first."""
    with open_watched(world, store, values) as builder:
        own = OwnRun(builder)
        task = Regression(plateau(0.5))
        model = task.model()
        made = task.optimizer(model)
        model, optimizer, _ = own.setup(model, made, task.scheduler(made))
        rates = []
        easy = TensorDataset(torch.zeros(8, 3).double(), torch.zeros(8).double())
        for number, step in enumerate(own.steps(task.data(), task.collate)):
            for batch in step:
                loss = task.loss(model, batch)
                step.backward(loss.total, loss.weight)
            step.apply()
            rates.append(optimizer.param_groups[0]["lr"] / 0.02)
            # Its loss is infinite in all but the first evaluation, so the rate falls if it is followed.
            odd = TensorDataset(*(torch.full_like(part, torch.inf if number else 0.0) for part in easy.tensors))
            own.evaluate(odd, task.loss, monitor=first_moves)
            falling = Loss(torch.tensor(8.0 / 1000**number), 1)
            own.evaluate(easy, lambda *_, loss=falling: loss)
        own.close()
        return rates


def test_a_plateau_moves_once_in_a_step(pool: Pool, tmp_path: Path) -> None:
    values = VALUES | {"steps": 4, "evaluate.batch": 8, "run_dir": str(tmp_path / "run")}
    assert pool.run(loop_that_evaluates_twice, True, values, world=1)[0] == [1, 1, 0.5, 0.25]
    warnings = [
        line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if "monitor=False" in line
    ]
    assert len(warnings) == 1
    assert "a second time at step 1" in warnings[0]

    values["run_dir"] = str(tmp_path / "named")
    assert pool.run(loop_that_evaluates_twice, False, values, world=1)[0] == [1, 1, 1, 1]
    assert "a second time" not in (tmp_path / "named" / "events.jsonl").read_text()


def loop_that_evaluates_around_steps(world: World, store: Any, values: dict[str, Any]) -> list[float]:
    """Evaluate before and after every step; return the rates of the steps, as shares of the first."""
    with open_watched(world, store, values) as builder:
        own, task = OwnRun(builder), Regression(plateau(0.5))
        model = task.model()
        made = task.optimizer(model)
        model, optimizer, _ = own.setup(model, made, task.scheduler(made))
        easy = TensorDataset(torch.zeros(8, 3).double(), torch.zeros(8).double())
        rates = []
        for step in own.steps(task.data(), task.collate):
            own.evaluate(easy, lambda *_: Loss(torch.tensor(8.0), 1))
            for batch in step:
                loss = task.loss(model, batch)
                step.backward(loss.total, loss.weight)
            step.apply()
            rates.append(optimizer.param_groups[0]["lr"] / 0.02)
            own.evaluate(easy, lambda *_: Loss(torch.tensor(8.0), 1))
        own.close()
        return rates


def test_a_resumed_run_knows_which_evaluation_a_plateau_has_followed(pool: Pool, tmp_path: Path) -> None:
    """The first evaluation after the resume is the second of the step that was saved."""
    values = VALUES | {"steps": 5, "evaluate.batch": 8, "run_dir": str(tmp_path / "run")}
    (undisturbed,) = pool.run(loop_that_evaluates_around_steps, values, world=1)
    assert undisturbed == [1, 0.5, 0.25, 0.125, 0.0625]

    values |= {"run_dir": str(tmp_path / "resumed"), "resume": "auto"}
    (before,) = pool.run(loop_that_evaluates_around_steps, values | {"steps": 2}, world=1)
    (after,) = pool.run(loop_that_evaluates_around_steps, values, world=1)
    assert before + after == undisturbed


@pytest.mark.parametrize(
    ("make", "values", "words"),
    [
        (
            SCHEDULERS["one cycle"],
            {"lr.warmup": 3},
            ("OneCycleLR sets the learning rate", "leave the scheduler out, or set lr.warmup=0"),
        ),
        (SCHEDULERS["one cycle"], {"lr.peak": 0.1}, ("OneCycleLR sets the learning rate", "or set lr.peak=null")),
        (lambda _: abs, {"lr.schedule": "cosine"}, ("a function of the step sets", "or set lr.schedule=constant")),
        (lambda _: lambda step: -1.0, {}, ("returned -1.0 for step 0", "a finite share of the peak")),
        (lambda _: 0.1, {}, ("a float is not a scheduler", "LRScheduler")),
        (lambda o: [cosine(o), abs], {}, ("a second scheduler was passed",)),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max"), {}, ("has mode='max'", "leave mode out")),
        (
            lambda _: cosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)),
            {},
            ("LambdaLR sets the rates of an optimizer that this run does not have",),
        ),
    ],
)
def test_what_contradicts_is_refused(
    pool: Pool, make: Callable[[Any], Any], values: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert_user_errors(pool.errors(fit_with, Regression(make), VALUES | values, world=1), *words)


class Foreign:
    """A scheduler that is not torch's, as timm has its own."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def step(self, epoch: int) -> None: ...


def test_a_scheduler_that_is_not_torchs_is_no_optimizer(pool: Pool) -> None:
    errors = pool.errors(loop_with, Regression(Foreign), VALUES, world=1)
    assert_user_errors(errors, "run.setup got a Foreign", "pass a function of the step")


def test_a_scheduler_can_be_made_for_an_optimizer_by_name(pool: Pool) -> None:
    traces = pool.run(fit_with, Regression(SCHEDULERS["step of 3"]), VALUES | {"optimizer": "adamw"}, world=1)
    assert [note.optimizer_lrs[0] for note in traces[0].steps] == [0.02] * 3 + [0.01] * 3 + [0.005]


# ---- rates that somebody else sets ------------------------------------------------------------------------


class Assigns(Regression):
    def optimizer(self, model: Any) -> Any:
        self.made = super().optimizer(model)
        return self.made

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 2:
            self.made.param_groups[1]["lr"] = 0.5


class AssignsToTensor(Assigns):
    def optimizer(self, model: Any) -> Any:
        self.made = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), capturable=False, foreach=False)
        self.made.add_param_group({"params": [], "lr": torch.tensor(0.01)})
        return self.made

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 2:
            self.made.param_groups[1]["lr"].fill_(0.5)


class StepsItsOwn(Assigns):
    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 1:
            self.late = lr_scheduler.StepLR(self.made, 1, 0.5)
        self.late.step()


class StepsOurs(Regression):
    def scheduler(self, optimizer: Any) -> Any:
        self.own = lr_scheduler.StepLR(optimizer, 100)
        return self.own

    def after_step(self, run: Any, result: Any) -> None:
        self.own.step()


class KeepsItself(Regression):
    def optimizer(self, model: Any) -> Any:
        made = super().optimizer(model)
        self.own = cosine(made)
        return made


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Assigns, ("the learning rate of parameter group 1 was changed", "it is 0.5; Lockstep set 0.01", "run.setup")),
        (AssignsToTensor, ("the learning rate of parameter group 1 was changed", "it is 0.5")),
        (StepsItsOwn, ("the learning rate of parameter group 0 was changed", "it is 0.01; Lockstep set 0.02")),
        (StepsOurs, ("scheduler.step() was called", "remove the call")),
        (
            KeepsItself,
            ("this SGD has a scheduler that was not passed to Lockstep", "run.setup(model, optimizer, scheduler)"),
        ),
    ],
)
def test_a_rate_that_lockstep_did_not_set_is_an_error(pool: Pool, task: type[Task], words: tuple[str, ...]) -> None:
    assert_user_errors(pool.errors(fit_with, task(), VALUES, world=2), *words)


def test_the_scheduler_is_given_back(pool: Pool) -> None:
    def job(world: World, store: Any) -> list[float]:
        task = StepsOurs()
        task.after_step = lambda run, result: None  # type: ignore[method-assign]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of a scheduler that is stepped too early
            fit_with(world, store, task, VALUES)
        task.own.step()
        return task.own.get_last_lr()

    assert pool.run(job, world=1)[0] == [0.02, 0.01]
