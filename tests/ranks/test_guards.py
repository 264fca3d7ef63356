"""Mistakes that would train a wrong model, or hang: every rank stops with the right message, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.engine.outcomes.outcome import MANY_EMPTY
from lockstep.engine.own_loop import OwnRun
from lockstep.errors import OutOfStep, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime.control_word import LENGTH
from lockstep.runtime.world import World
from lockstep.task import Loss
from pool import Pool
from ranks.support import (
    DEVICE,
    JOBS,
    Perceptron,
    Regression,
    WeightedRegression,
    assert_exact,
    assert_user_errors,
    fit,
    flat,
    open_watched,
    weighted_regression,
    windows,
)

VALUES = {"global_batch": 8, "micro_batch": 2, "steps": 6}


# ---- what is trainable stays trainable ------------------------------------------------------------------


def half_frozen() -> nn.Module:
    model = Perceptron()
    model.hidden.weight.requires_grad_(False)
    return model


def unfreeze(task: Regression, call: int) -> None:
    if call == 5:
        task.net.hidden.weight.requires_grad_(True)


def freeze(task: Regression, call: int) -> None:
    if call == 4:  # the first micro-batch of a step: the parameter has a gradient in none
        task.net.out.bias.requires_grad_(False)


def replace(task: Regression, call: int) -> None:
    if call == 4:
        task.net.out = nn.Linear(6, 1).to(DEVICE)


def add(task: Regression, call: int) -> None:
    if call == 5:
        task.net.extra = nn.Parameter(torch.zeros(3, device=DEVICE))


def test_a_parameter_unfrozen_after_wrapping(pool: Pool) -> None:
    task = Regression(network=half_frozen, before_loss=unfreeze)
    assert_user_errors(pool.errors(fit, task, VALUES, world=2), "'hidden.weight' was unfrozen", "in model()")


def test_a_parameter_frozen_after_wrapping(pool: Pool) -> None:
    errors = pool.errors(fit, Regression(before_loss=freeze), VALUES, world=2)
    assert_user_errors(errors, "out.bias")


@pytest.mark.parametrize(("change", "name"), [(replace, "out.weight"), (add, "extra")])
def test_parameters_replaced_or_added(pool: Pool, change: Callable[..., None], name: str) -> None:
    errors = pool.errors(fit, Regression(before_loss=change), VALUES | {"checks.every": 3}, world=2)
    assert_user_errors(errors, name)


def test_half_precision_weights(pool: Pool) -> None:
    errors = pool.errors(fit, Regression(network=lambda: Perceptron().bfloat16()), VALUES, world=2)
    assert_user_errors(
        errors, "4 trainable parameters are stored in half precision, first 'hidden.weight'", "model.float()"
    )


class HalfTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(5, 5).bfloat16().requires_grad_(False), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x.bfloat16()).float())


def test_frozen_half_precision_is_fine(pool: Pool) -> None:
    pool.run(fit, Regression(network=HalfTrunk), VALUES, world=2)


# ---- frozen modules -------------------------------------------------------------------------------------


class Trunk(nn.Module):
    """Frozen; its buffer differs between ranks."""

    def __init__(self, rank: int):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("note", torch.full((3,), float(rank)))
        self.requires_grad_(False)


class TrunkAndHead(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        self.trunk, self.head = Trunk(rank), Perceptron()
        self.head.register_buffer("note", torch.full((3,), float(rank)))
        if rank:
            nn.init.zeros_(self.head.out.weight)  # trainable: rank 0's is given to all

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk.linear(x))


def frozen_trunk(world: World, store: Any) -> dict[str, Any]:
    task = Regression(network=lambda: TrunkAndHead(world.rank))
    with open_watched(world, store, VALUES) as builder:
        driver = builder.setup_model(task.model(), task.optimizer).driver
        run = builder.setup_run(task.data(), task.collate)
        frozen = task.net.trunk.linear.weight.clone()
        for batches in run.step_batches():
            run.end_step(batches, run.stepper.step(batches, task.loss))
        return {
            "names": [*driver.parameters],
            "ignored": set(driver._ddp.parameters_to_ignore),
            "trunk note": task.net.trunk.note.tolist(),
            "head note": task.net.head.note.tolist(),
            "frozen": torch.equal(task.net.trunk.linear.weight, frozen),
            "weights": flat({name: p.detach() for name, p in task.net.named_parameters()}),
        }


def test_frozen_modules_are_not_wrapped(pool: Pool) -> None:
    first, second = pool.run(frozen_trunk, world=2)
    for rank, found in enumerate((first, second)):
        assert not any(name.startswith("trunk") for name in found["names"])
        ignored = {name.removeprefix("module.") for name in found["ignored"]}
        assert ignored >= {"trunk.linear.weight", "trunk.linear.bias", "trunk.note"}
        assert not any(name.startswith("head") for name in ignored)
        assert found["trunk note"] == [float(rank)] * 3, "the buffer of a frozen module was touched"
        assert found["head note"] == [0.0] * 3, "the buffer of a trained module was not made equal"
        assert found["frozen"]
    assert torch.equal(first["weights"], second["weights"])


def test_frozen_parts_that_differ_between_ranks(pool: Pool) -> None:
    class Different(TrunkAndHead):
        def __init__(self) -> None:
            super().__init__(0)
            nn.init.constant_(self.trunk.linear.bias, float(dist.get_rank()))

    errors = pool.errors(fit, Regression(network=Different), VALUES, world=2)
    assert_user_errors(errors, "'trunk.linear.bias' differs between rank 0 and rank 1")


# ---- data and configuration -----------------------------------------------------------------------------


class SameSamples(Regression):
    def data(self) -> Any:
        return TensorDataset(torch.ones(40, 5), torch.ones(40))


def test_equal_first_batches(pool: Pool) -> None:
    errors = pool.errors(fit, SameSamples(), VALUES, world=3)
    assert_user_errors(errors, "ranks 0 and 1 read the same first batch", "checks.first_batch=false")
    pool.run(fit, SameSamples(), VALUES | {"checks.first_batch": False}, world=3)


class FewSamples(Regression):
    """Four different samples, many times: two ranks may well hold the same ones."""

    def data(self) -> Any:
        x = torch.eye(5)[:4].repeat(10, 1)
        return TensorDataset(x, x.sum(1))


def test_equal_batches_of_a_dataset_that_repeats_itself_are_fine(pool: Pool) -> None:
    for seed in range(4):
        values = VALUES | {"global_batch": 2, "micro_batch": 1, "steps": 1, "seed": seed}
        pool.run(fit, FewSamples(), values, world=2)


def fit_with_own_seed(world: World, store: Any) -> None:
    fit(world, store, Regression(), VALUES | {"seed": 5 + world.rank // 2, "log.every": 7})


def test_unequal_configuration(pool: Pool) -> None:
    errors = pool.errors(fit_with_own_seed, world=3)
    assert_user_errors(errors, "seed is 5 on rank 0 and 6 on rank 2", "same file and the same key=value")


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"global_batch": 3}, "set global_batch=4 or more, or --nproc 3"),
        ({"global_batch": 8, "micro_batch": 4}, "set micro_batch=2 or less"),
    ],
)
def test_a_batch_that_cannot_be_split(pool: Pool, values: dict[str, Any], fix: str) -> None:
    errors = pool.errors(fit, Regression(), {"steps": 2} | values, world=4)
    assert_user_errors(errors, "cannot be split", fix)


# ---- parameters that take no part -----------------------------------------------------------------------


class WithBranch(nn.Module):
    """The branch is used where some sample's first input is positive, or everywhere, or nowhere."""

    def __init__(self, use: Callable[[Tensor], bool]):
        super().__init__()
        self.main, self.branch, self.use = Perceptron(), nn.Linear(5, 1), use

    def forward(self, x: Tensor) -> Tensor:
        found = self.main(x)
        if self.use(x):
            found = found + torch.where(x[:, 0] > 0, self.branch(x).squeeze(-1), 0.0)
        return found


@pytest.mark.parametrize("job", sorted(JOBS))
def test_an_unused_parameter_is_named(pool: Pool, job: str) -> None:
    task = Regression(network=lambda: WithBranch(lambda x: False))
    errors = pool.errors(JOBS[job], task, VALUES, world=2)
    assert_user_errors(errors, "no gradient for branch.weight, branch.bias", "ddp.find_unused_parameters=true")


def test_a_parameter_unused_in_the_last_micro_batch(pool: Pool) -> None:
    """It has a gradient, from an earlier micro-batch, and yet its bucket is never sent."""
    task = Regression(network=lambda: WithBranch(lambda x: False))
    task.before_loss = lambda task, call: setattr(task.net, "use", lambda x: call % 2 == 0)
    errors = pool.errors(fit, task, VALUES, world=2)
    assert_user_errors(errors, "branch.weight", "ddp.find_unused_parameters=true")


def test_a_parameter_unused_on_one_rank(pool: Pool) -> None:
    """Its peer waits for a bucket that never comes; it must not wait for long."""
    task = Regression(network=lambda: WithBranch(lambda x: dist.get_rank() == 0))
    errors = pool.errors(fit, task, VALUES, world=2)
    assert_user_errors(errors[1:], "no gradient for branch.weight, branch.bias")
    assert errors[0] is not None, "rank 0 went on alone"


class Branching(WeightedRegression):
    def network(self) -> nn.Module:
        return WithBranch(lambda x: bool((x[:, 0] > 0).any()))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_find_unused_parameters_is_exact(pool: Pool, world: int, micro_batch: int) -> None:
    """Used by some ranks, in some micro-batches, and in the second epoch's first step by no rank."""
    made = weighted_regression(24, seed=10)
    samples = windows(24, 8, "short", 5)
    made.tensors[0][samples[1], 0] = -1.0
    task = Branching(made.tensors)
    values = {"global_batch": 8, "micro_batch": micro_batch, "steps": 5, "ddp.find_unused_parameters": True}
    traces = pool.run(fit, task, values, world=world)
    assert_exact(task, traces, samples)
    used = [bool((made.tensors[0][ids, 0] > 0).any()) for ids in samples]
    assert used[:3] == [True, False, True]


# ---- the own loop ---------------------------------------------------------------------------------------


def own(world: World, store: Any, body: Callable[..., None]) -> None:
    """A loop whose body a test gets wrong."""
    task = Regression()
    with open_watched(world, store, VALUES) as builder:
        loop = OwnRun(builder)
        plain = task.model()
        model, optimizer = loop.setup(plain, task.optimizer(plain))
        for step in loop.steps(task.data()):
            body(task, model, optimizer, step)
        loop.close()


def forgets_apply(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    for batch in step:
        loss = task.loss(model, batch)
        step.backward(loss.total, loss.weight)


def steps_the_optimizer(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    forgets_apply(task, model, optimizer, step)
    optimizer.step()


def applies_too_early(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    for batch in step:
        loss = task.loss(model, batch)
        step.backward(loss.total, loss.weight)
        step.apply()


def applies_twice(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    forgets_apply(task, model, optimizer, step)
    step.apply()
    step.apply()


def applies_the_previous_step(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    for batch in step:
        loss = task.loss(model, batch)
        step.backward(loss.total, loss.weight)
        if hasattr(task, "previous"):
            task.previous.apply()
    step.apply()
    task.previous = step


def forgets_backward(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    for batch in step:
        task.loss(model, batch)
    step.apply()


def goes_backward_twice(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    for batch in step:
        for _ in range(2):
            loss = task.loss(model, batch)
            step.backward(loss.total, loss.weight)
    step.apply()


MISTAKES = [
    (forgets_apply, ("step 1 ended without step.apply()", "call step.apply()", "set micro_batch")),
    (steps_the_optimizer, ("optimizer.step() was called directly", "call step.apply()")),
    (applies_too_early, ("step.apply() was called after 1 of",)),
    (applies_twice, ("step.apply() was called on step 1, which has ended", "once per step")),
    (applies_the_previous_step, ("step.apply() was called on step 1, which has ended",)),
    (forgets_backward, ("step.backward was called 0 times for batch 0",)),
    (goes_backward_twice, ("step.backward was called twice for batch 0",)),
]


@pytest.mark.parametrize(("body", "words"), MISTAKES, ids=[body.__name__ for body, _ in MISTAKES])
def test_mistakes_in_the_own_loop(pool: Pool, body: Callable[..., None], words: tuple[str, ...]) -> None:
    for size in (1, 2):
        assert_user_errors(pool.errors(own, body, world=size), *words)


def mends_its_loop(task: Any, model: Any, optimizer: Any, step: Any) -> None:
    forgets_apply(task, model, optimizer, step)
    try:
        optimizer.step()
    except UserError:
        step.apply()
    else:
        raise AssertionError("a direct optimizer.step() went through")


def test_the_refused_step_changes_nothing(pool: Pool) -> None:
    pool.run(own, mends_its_loop, world=2)


def refused_states(world: World, store: Any) -> dict[str, str]:
    """A job: what is refused before `setup`, between `setup` and `steps`, and inside the loop."""
    task = Regression()
    found: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UserError as error:
            found[name] = str(error).splitlines()[0]

    def evaluate() -> Any:
        return loop.evaluate(task.data(), task.loss)

    with open_watched(world, store, VALUES | {"steps": 1}) as builder:
        loop = OwnRun(builder)
        attempt("steps without a model", lambda: next(iter(loop.steps(task.data()))))
        attempt("evaluate without a model", evaluate)
        plain = task.model()
        attempt("no optimizer", lambda: loop.setup(plain))
        model, _ = loop.setup(plain, task.optimizer(plain))
        attempt("second model", lambda: loop.setup(task.model(), task.optimizer(plain)))
        attempt("evaluate without a batch", evaluate)
        attempt("stop", loop.stop)
        attempt("no state", lambda: loop.register("count", 3))
        loop.register("average", plain)
        attempt("registered twice", lambda: loop.register("average", plain))
        attempt("registered data", lambda: loop.register("data", plain))
        for step in loop.steps(task.data()):
            attempt("register late", lambda: loop.register("count", model))
            attempt("second loop", lambda: next(iter(loop.steps(task.data()))))
            forgets_apply(task, model, None, step)
            step.apply()
        loop.close()
    return found


def test_what_is_called_in_the_wrong_order(pool: Pool) -> None:
    for found in pool.run(refused_states, world=2):
        assert found == {
            "steps without a model": "run.steps(dataset) was called before run.setup",
            "evaluate without a model": "run.evaluate(dataset, loss) was called before run.setup",
            "no optimizer": "run.setup(model) has no optimizer, and Perceptron has trainable parameters",
            "second model": "run.setup was called a second time with a model to train",
            "evaluate without a batch": "evaluate.batch is not set, and an evaluation before the first step needs it",
            "stop": "run.stop() was called before the first step",
            "no state": "run.register('count', stateful) needs a stateful object; int has no state",
            "registered twice": "'average' cannot be saved with the run: the name is taken",
            "registered data": "'data' cannot be saved with the run: the name is taken",
            "register late": "run.register('count', ...) was called after run.steps(...)",
            "second loop": "run.steps(dataset) was called a second time",
        }


# ---- replicas -------------------------------------------------------------------------------------------


def one_bit(weight: Tensor) -> None:
    weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], weight.new_tensor(9.0))


DRIFTS: dict[str, Callable[[Tensor], Any]] = {
    "one element": lambda weight: weight.view(-1)[0].add_(0.5),
    "one bit": one_bit,
    "the sign": lambda weight: weight.neg_(),
    "the order": lambda weight: weight.copy_(weight.flip(0)),
}


@pytest.mark.parametrize("kind", sorted(DRIFTS))
def test_replicas_that_drift_are_named(pool: Pool, kind: str) -> None:
    def drift(task: Regression, call: int) -> None:
        if call == 5 and dist.get_rank() == 1:
            DRIFTS[kind](task.net.hidden.weight.data)

    errors = pool.errors(fit, Regression(before_loss=drift), VALUES | {"checks.every": 3}, world=2)
    assert_user_errors(errors, "'hidden.weight' differs between rank 0 and rank 1")


class Favours(Regression):
    """A task that changes the weights of one rank after step 2."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 2 and dist.get_rank() == 1:
            self.net.hidden.weight.data.add_(0.5)


ENDS: dict[str, dict[str, Any]] = {
    "the end": {"steps": 2, "checkpoint.at_end": False},
    "a checkpoint": {"steps": 6, "checkpoint.every": 2},
    "a check in the last step": {"steps": 2, "checks.every": 2},
}


@pytest.mark.parametrize("what", sorted(ENDS))
def test_replicas_that_drift_are_found_before_anything_is_kept(pool: Pool, tmp_path: Path, what: str) -> None:
    values = VALUES | ENDS[what] | {"run_dir": str(tmp_path / "run")}
    errors = pool.errors(fit, Favours(), values, world=2)
    assert_user_errors(errors, "'hidden.weight' differs between rank 0 and rank 1")
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_replicas_that_do_not_drift(pool: Pool) -> None:
    pool.run(fit, Regression(), VALUES | {"checks.every": 1}, world=3)


# ---- a run that learns nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("job", sorted(JOBS))
def test_a_run_whose_steps_all_have_weight_0(pool: Pool, job: str, tmp_path: Path) -> None:
    values = VALUES | {"steps": MANY_EMPTY + 2, "run_dir": str(tmp_path / "run")}
    errors = pool.errors(JOBS[job], weighted_regression(40, seed=0, zeros=1.0), values, world=2)
    assert_user_errors(
        errors,
        f"none of the {MANY_EMPTY + 2} steps was applied",
        "the loss of every step had weight 0",
        "is not written",
    )
    assert not (tmp_path / "run" / "model.safetensors").exists()
    warnings = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["event"] == "warning"]
    assert [(event["step"], f"last {MANY_EMPTY} steps" in event["reason"]) for event in warnings] == [
        (MANY_EMPTY, True)
    ]


def test_one_step_with_something_in_it_is_enough(pool: Pool) -> None:
    task = weighted_regression(40, seed=0, zeros=1.0)
    task.tensors[-1][3] = 1
    (trace,) = pool.run(fit, task, VALUES | {"steps": 5}, world=1)
    assert (trace.summary["applied"], trace.summary["skipped"]) == (1, 0)


@pytest.mark.parametrize(
    ("values", "found", "fix"),
    [
        (
            {"nonfinite.policy": "skip"},
            "3 were skipped for the reasons above",
            "look at the samples",
        ),
        (
            {"precision": "fp16"},
            "3 overflowed: the loss scale of fp16 is still too large",
            "a smaller scaler.initial",
        ),
    ],
    ids=["nan", "the scaler at work"],
)
def test_a_run_whose_steps_are_all_skipped(pool: Pool, values: dict[str, Any], found: str, fix: str) -> None:
    task = weighted_regression(40, seed=0)
    task.tensors[0][:] = float("nan")
    (error,) = pool.errors(fit, task, VALUES | {"steps": 3} | values, world=1)
    assert_user_errors([error], "none of the 3 steps was applied", found, fix, "is not written")


# ---- mistakes that would end in words of torch's ----


class Lazy(Regression):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1), nn.Flatten(0))


class OnHost(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(super().loss(model, batch).total.item(), 1)  # pyrefly: ignore[bad-argument-type]


class ShapeForWeight(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(super().loss(model, batch).total, batch[0].shape)  # pyrefly: ignore[bad-argument-type]


class ManyWeights(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(super().loss(model, batch).total, torch.ones(len(batch[0])))


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 5))

    def forward(self, x: Any) -> Any:
        rows = torch.zeros(len(x), dtype=torch.long)
        return (x * nn.functional.embedding(rows, self.table, sparse=True)).sum(1)


class Hidden:
    def __init__(self, value: Any):
        self.value = value


class HidesItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, x: Any) -> Any:
        return Hidden(self.net(x).squeeze(-1))


class GrowsInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(1))
        return self.net(x).squeeze(-1) * self.late


class Recomputed(Perceptron):
    def forward(self, x: Any) -> Any:
        return checkpoint(self.out, self.hidden(x), use_reentrant=True).squeeze(-1)


class ReplacesLater(Regression):
    def after_step(self, run: Any, result: Any) -> None:
        run.model.out.weight = nn.Parameter(run.model.out.weight.detach().clone())


def explained_fit(world: Any, store: Any, task: Any, values: dict[str, Any]) -> None:
    """A job: training with the words that `lockstep.fit` and `lockstep train` put in place of torch's."""
    from lockstep.engine import loop
    from lockstep.engine.diagnose import explained

    values = {"global_batch": 4, "micro_batch": 2, "steps": 3} | values
    with open_watched(world, store, values) as builder, explained(builder):
        loop.fit(task, builder)


WORDS: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    (Lazy(), {}, ("'0.weight' has no shape yet", "nn.Linear(in_features")),
    (OnHost(), {}, ("it is a float", "remove .item() or float()")),
    (ShapeForWeight(), {}, ("it cannot be a Size", "weight=len(batch)")),
    (ManyWeights(), {}, ("it cannot be a Tensor (2,)", "mask.sum()")),
    (Regression(network=SparseTable), {}, ("sparse gradients are not supported", "leave sparse=True out")),
    (Regression(network=SparseTable), {"strategy": "fsdp"}, ("sparse gradients are not supported",)),
    (Regression(network=GrowsInForward), {}, ("parameter 'late' was added",)),
    (ReplacesLater(), {"strategy": "fsdp"}, ("parameter 'out.weight' was replaced or removed",)),
    (
        Regression(lambda task, model, x: model(x).value, HidesItsOutput),
        {"strategy": "fsdp"},
        ("inside an object that torch does not look into", "strategy=ddp"),
    ),
    (
        Regression(lambda task, model, x: model(x) + (model(x) if task.calls > 2 else 0), Recomputed),
        {},
        ("a gradient is computed in several parts", "use_reentrant=False"),  # not in the first step
    ),
    (Regression(network=lambda: Perceptron().double()), {"precision": "bf16"}, ("no effect on a model in float64",)),
]


@pytest.mark.parametrize(("task", "values", "words"), WORDS, ids=lambda value: type(value).__name__)
def test_a_mistake_is_answered_in_words(pool: Pool, task: Any, values: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_user_errors(pool.errors(explained_fit, task, values, world=2), *words)


class OneSided(Regression):
    """Rank 1 calls a collective of its own, of the size of a bucket with gradients and the control word."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 1 and dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(sum(p.numel() for p in run.model.parameters()) + LENGTH))


def test_a_collective_on_one_rank_is_blamed_on_that_rank(pool: Pool) -> None:
    noticed, _ = pool.errors(fit, OneSided(), {"global_batch": 8, "micro_batch": 4, "steps": 4}, world=2)
    assert isinstance(noticed, OutOfStep)
    assert noticed.ranks == [1]
    assert "rank 1 was in a collective that rank 0 never called" in str(noticed)
