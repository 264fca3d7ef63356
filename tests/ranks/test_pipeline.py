"""A model in stages: whatever its parts and its micro-batches look like, the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.end import full_state
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.run import Run
from lockstep.engine.setup import open_run
from lockstep.errors import Preempted, UserError
from lockstep.parallel.pipeline.schedules import fits
from lockstep.parallel.pipeline.stages import list_layers, split_layers
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.runtime import context
from lockstep.runtime.shards import to_local
from lockstep.runtime.world import World
from lockstep.task import Loss, MicroBatch, Task
from pool import Pool
from ranks.support import assert_user_errors, configured, preempted_run

BASE = {"global_batch": 12, "micro_batch": 3, "steps": 6, "clip.norm": 0.5, "strategy": "pp"}


class Row(Task):
    """A plain nn.Sequential: nothing is said about stages."""

    def model(self) -> nn.Module:
        middle = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        return nn.Sequential(nn.Linear(5, 6), middle, nn.Tanh(), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(1)
        weights = torch.randint(0, 5, (32,), generator=g)  # 32 samples: the last micro-batch of an epoch is short
        return TensorDataset(torch.randn(32, 5, generator=g), torch.randn(32, generator=g), weights)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, weights = batch
        each = (model(x).squeeze(-1) - y) ** 2
        return Loss((each * weights).sum(), weights.sum(), {"largest": (each.detach().amax(), 1)})

    def eval_data(self) -> Any:
        return self.data()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(5, 6).requires_grad_(False)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return self.left(x) * scale, self.right(x)


class Cross(nn.Module):
    """One part is used by some micro-batches only, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.rare, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.tanh(self.mix(a)) + b
        return (mixed + self.rare(mixed), b) if len(a) < 3 else (mixed, b)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.fixed = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"prediction": self.out(self.norm(a) + self.fixed(b))}


class Rich(nn.Module):
    """Two tensors between stages, a keyword for the first one, buffers, frozen parts, and an output that is no
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.cross, self.last = Pair(), Cross(), Last()
        self.register_buffer("unused", torch.arange(3.0))

    def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
        return self.last(*self.cross(*self.pair(x, scale=scale)))


class RichTask(Row):
    def model(self) -> nn.Module:
        return Rich()

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Rich)
        return [model.pair, model.cross, model.last]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, weights = batch
        each = (model(x, scale=0.5)["prediction"].squeeze(-1) - y) ** 2
        return Loss((each * weights).sum(), weights.sum())


def final(world: World, store: Any, task: Task, values: dict[str, Any], leave_at: int | None = None) -> dict[str, Any]:
    """A job: the whole model after a run."""
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test", run_class=preempted_run(runtime, leave_at))
        summary: dict[str, Any] = {}
        try:
            summary = loop.fit(task, builder)
        except Preempted:
            pass
        run: Any = builder.run
        weights, _ = full_state(run.driver, keep=True)
        held = sum(to_local(p).untyped_storage().nbytes() for p in run.driver.model.parameters())
        kinds = [type(p.schedule).__name__ for p in run.driver._pipeline._prepared.values()] if world.size > 1 else []
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        return {"weights": copies, "summary": summary, "held": held, "kinds": kinds, "folder": str(run.folder.path)}


def assert_same(found: dict[str, Any], single: dict[str, Any]) -> None:
    assert found["weights"].keys() == single["weights"].keys()
    for name, expected in single["weights"].items():
        torch.testing.assert_close(found["weights"][name], expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)
    if found["summary"]:
        assert found["summary"]["eval_loss"] == pytest.approx(single["summary"]["eval_loss"], rel=1e-5)


WAYS = {
    "gpipe": ({"pp.schedule": "gpipe"}, "ScheduleGPipe"),
    "1f1b": ({"pp.schedule": "1f1b"}, "Schedule1F1B"),
    "interleaved": ({"pp.schedule": "interleaved"}, "ScheduleInterleaved1F1B"),
    "zero-bubble": ({"pp.schedule": "zero-bubble"}, "ScheduleInterleavedZeroBubble"),
    "zero-bubble, two stages": (
        {"pp.schedule": "zero-bubble", "pp.stages_per_rank": 2},
        "ScheduleInterleavedZeroBubble",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_sequential_is_cut_by_itself_under_every_schedule(pool: Pool, name: str) -> None:
    values, kind = WAYS[name]
    (single,) = pool.run(final, Row(), {"strategy": "ddp"}, world=1)
    for found in pool.run(final, Row(), values, world=2):
        assert_same(found, single)
        assert kind in found["kinds"], "the schedule that was asked for did not run"
        assert found["summary"]["eval_metrics"] == pytest.approx(single["summary"]["eval_metrics"], rel=1e-5)


def test_a_rank_holds_its_stages_only(pool: Pool) -> None:
    (single,) = pool.run(final, Row(), {"strategy": "ddp"}, world=1)
    found = pool.run(final, Row(), {}, world=2)
    scalars = 4 * len(single["weights"])  # what is left of a tensor that is elsewhere
    assert sum(one["held"] for one in found) <= single["held"] + scalars
    assert max(one["held"] for one in found) < 0.75 * single["held"]


def test_a_stage_that_is_cut_holds_half_of_itself(pool: Pool) -> None:
    (single,) = pool.run(final, Row(), {"strategy": "ddp"}, world=1)
    for found in pool.run(final, Row(), {"strategy": "fsdp", "mesh.pp": 2}, world=4):
        assert_same(found, single)
        assert found["held"] < 0.45 * single["held"]


class Parted(Row):
    """The first stage ends with a layer whose output is cut."""

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {"1.0": "colwise"}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 8)), nn.Linear(8, 8), nn.Linear(8, 1))


def test_a_part_is_not_passed_on(pool: Pool) -> None:
    errors = pool.errors(final, Parted(), {"mesh": {"pp": 2, "tp": 2}}, world=4)
    told = [error for error in errors if isinstance(error, UserError)]
    assert_user_errors(told[:1], "sharded tensor (mesh.tp)", "gathered")


@pytest.mark.parametrize("world", [2, 3])
def test_tuples_keywords_buffers_and_unused_parts(pool: Pool, world: int) -> None:
    (single,) = pool.run(final, RichTask(), {"strategy": "ddp"}, world=1)
    for found in pool.run(final, RichTask(), {}, world=world):
        assert_same(found, single)


def test_the_final_weights_are_whole(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(final, Row(), {"run_dir": str(tmp_path)}, world=2)
    stored = load_file(str(tmp_path / "model.safetensors"))
    assert stored.keys() == found[0]["weights"].keys()
    assert all(torch.equal(stored[name], found[0]["weights"][name]) for name in stored)


@pytest.mark.parametrize("frozen", [True, False])
def test_buffers_and_frozen_parts_come_back(pool: Pool, tmp_path: Path, frozen: bool) -> None:
    (single,) = pool.run(final, RichTask(), {"strategy": "ddp"}, world=1)
    values = {"run_dir": str(tmp_path), "resume": "auto", "checkpoint.frozen": frozen}
    pool.run(final, RichTask(), values, 3, world=3)
    assert list(tmp_path.glob("checkpoints/step-*"))
    (found,) = pool.run(final, RichTask(), values | {"strategy": "ddp"}, world=1)
    assert_same(found, single)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_short_number_formats(pool: Pool, precision: str) -> None:
    values = {"precision": precision}
    (single,) = pool.run(final, Row(), values | {"strategy": "ddp"}, world=1)
    for found in pool.run(final, Row(), values, world=2):
        assert found["summary"]["skipped"] == single["summary"]["skipped"]
        for name, expected in single["weights"].items():
            torch.testing.assert_close(found["weights"][name], expected, rtol=1e-3, atol=1e-4)


class Unchanging(Row):
    """Does not learn, and reports whether the loss computes its own product in bfloat16."""

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = self.loss(model, batch)
        product = batch[0].T @ batch[0]
        is_short = torch.tensor(float(product.dtype == torch.bfloat16))
        return Loss(loss.total, loss.weight, {"bfloat16": (is_short, 1)})


def test_an_evaluation_computes_in_the_precision_of_the_run(pool: Pool) -> None:
    """In every stage, and in the loss after them."""
    values = {"steps": 1, "precision": "bf16", "evaluate.batch": 8}
    (single,) = pool.run(final, Unchanging(), values | {"strategy": "ddp"}, world=1)
    (full,) = pool.run(final, Unchanging(), values | {"strategy": "ddp", "precision": "fp32"}, world=1)
    expected = single["summary"]["eval_loss"]
    assert full["summary"]["eval_loss"] != pytest.approx(expected, rel=1e-5), "the precision makes no difference"
    for found in pool.run(final, Unchanging(), values, world=2):
        assert found["summary"]["eval_loss"] == pytest.approx(expected, rel=1e-6)
        assert found["summary"]["eval_metrics"]["bfloat16"] == 1


class Spoiled(Row):
    """One target is no number. The loss looks at all parameters, and reads none."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        assert [p.detach().view(-1).shape for p in model.parameters()]
        return super().loss(model, batch)

    def data(self) -> Any:
        x, y, weights = Row.data(self).tensors
        y[7] = float("nan")
        return TensorDataset(x, y, weights.clamp(min=1))


def test_a_bad_gradient_is_named_on_every_rank(pool: Pool) -> None:
    errors = pool.errors(final, Spoiled(), {"nonfinite.policy": "stop"}, world=2)
    assert_user_errors(errors, "no finite gradient for 8 of 8 parameters", "samples")


class Penalty(Row):
    """Beside what the model returns, the loss uses parameters that `among` names."""

    def __init__(self, use: Callable[[Loss, list[nn.Parameter]], Loss], among: str = ""):
        self.use, self.among = use, among

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        chosen = [p for name, p in model.named_parameters() if name.startswith(self.among)]
        return self.use(super().loss(model, batch), chosen)


def shrink(loss: Loss, weights: list[nn.Parameter]) -> Loss:
    return Loss(loss.total + loss.weight * sum(p.square().sum() for p in weights), loss.weight)


def shrink_numbers(loss: Loss, weights: list[nn.Parameter]) -> Loss:
    """No NaN comes of it; but a gradient does."""
    return Loss(loss.total + loss.weight * sum(p.nan_to_num().square().sum() for p in weights), loss.weight)


def measure(loss: Loss, weights: list[nn.Parameter]) -> Loss:
    return Loss(loss.total, loss.weight, {"length": (sum(p.detach().norm() for p in weights), 1)})


class Unmoved(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        # The trial at the start steps made-up parameters, in float64.
        made_up = all(p.dtype == torch.float64 for group in self.param_groups for p in group["params"])
        assert made_up, "a step with another stage's parameters was applied"
        super().step(closure)


@pytest.mark.parametrize(
    ("use", "schedule"), [(shrink, "1f1b"), (shrink, "zero-bubble"), (shrink_numbers, "1f1b"), (measure, "1f1b")]
)
def test_another_stages_parameter_in_the_loss_ends_all_ranks_alike(pool: Pool, use: Any, schedule: str) -> None:
    task = Penalty(use)
    task.optimizer = lambda model: Unmoved(model.parameters(), lr=0.1)  # type: ignore[method-assign]
    errors = pool.errors(final, task, {"pp.schedule": schedule}, world=2)
    assert_user_errors(
        errors,
        "'0.weight' is used in a stage",
        "only stage 0 holds it",
        "and 3 more",
        "weight_decay",
        "strategy=zero1",
    )


def test_a_penalty_on_the_last_stages_own_parameters(pool: Pool) -> None:
    (single,) = pool.run(final, Penalty(shrink, among="3."), {"strategy": "ddp"}, world=1)
    for found in pool.run(final, Penalty(shrink, among="3."), {}, world=2):
        assert_same(found, single)


# ---- what cannot work -----------------------------------------------------------------------------------


class Opaque(Row):
    def model(self) -> nn.Module:
        return Rich()


class Twice(Row):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y, _ = batch
        return Loss((model(x) - model(-x)).square().sum(), len(y))


class Forgetful(RichTask):
    def stages(self, model: nn.Module) -> list[nn.Module]:
        return super().stages(model)[:2]


class Whole(RichTask):
    """A stage that passes on whole numbers."""

    def stages(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Rich)
        return [Rounded(model.pair), model.cross, model.last]


class Rounded(nn.Module):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        left, right = self.pair(x, scale)
        return left, right.long()


REFUSED: dict[str, tuple[Task, dict[str, Any], tuple[str, ...]]] = {
    "no stages": (Opaque(), {}, ("Rich", "def stages(self, model)", "nn.Sequential")),
    "a parameter in no stage": (Forgetful(), {}, ("last.norm.weight", "stages(model)")),
    "too few parts": (RichTask(), {"pp.schedule": "interleaved"}, ("4 stages", "split into 3", "pp.stages_per_rank")),
    "one micro-batch": (
        Row(),
        {"micro_batch": 12},
        ("1 micro-batch of 12 samples", "needs at least two", "micro_batch=6"),
    ),
    "two calls": (Twice(), {}, ("exactly once", "more than once")),
    "whole numbers between stages": (Whole(), {}, ("floating-point", "int64")),
    "compiled zero-bubble": (Row(), {"compile": True, "pp.schedule": "zero-bubble"}, ("compile=false", "1f1b")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(pool: Pool, name: str) -> None:
    task, values, words = REFUSED[name]
    errors = pool.errors(final, task, values, world=2)
    told = [error for error in errors if isinstance(error, UserError)]
    assert told, errors
    assert_user_errors(told, *words)


def own(world: World, store: Any) -> None:
    resolved = configured(BASE)
    with context.start(world, resolved.config, store=store) as runtime:
        task = Row()
        model = task.model()
        OwnRun(open_run(resolved, runtime, "test")).setup(model, task.optimizer(model))


def test_a_loop_of_ones_own_is_refused(pool: Pool) -> None:
    assert_user_errors(pool.errors(own, world=2), "custom loop", "lockstep.fit")


# ---- where the cuts are ---------------------------------------------------------------------------------


def test_cuts_are_balanced_by_parameters() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3), nn.Tanh())
    layers = list_layers(model, None)
    assert len(layers) == 5
    assert [len(some) for some in split_layers(layers, 2)] == [1, 4]
    assert [layer for some in split_layers(layers, 3) for layer in some] == layers
    assert all(len(some) == 1 for some in split_layers(layers, 5))


@pytest.mark.parametrize(("name", "count", "expected"), [("1f1b", 3, False), ("1f1b", 4, True), ("gpipe", 1, True)])
def test_which_numbers_of_micro_batches_fit(name: str, count: int, expected: bool) -> None:
    assert fits(name, 4, count) is expected


def test_interleaved_wants_equal_rounds() -> None:
    assert fits("interleaved", 4, 10)
    assert not fits("interleaved", 4, 9)


class Calls(StepPart):
    """Notes what a pipeline calls."""

    slot = "log"
    runs_in_pipeline = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_pass(self) -> None:
        self.calls.append("begin")

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        self.calls.append("forward")

    def before_all_reduce(self) -> None:
        self.calls.append("all-reduce")

    def end_pass(self, progress: PassProgress) -> None:
        self.calls.append("end")


def calls_of_a_step(world: World, store: Any) -> list[str]:
    """A job: what a part of the steps is called for."""
    resolved = configured(BASE | {"steps": 1, "pp.schedule": "gpipe"})
    part = Calls()

    class WithPart(Run):
        def check_start(self, task: Any = None) -> None:
            self.driver.parts.add(part)

    with context.start(world, resolved.config, store=store) as runtime:
        loop.fit(Row(), open_run(resolved, runtime, "test", run_class=WithPart))
    return part.calls


def test_a_pipeline_calls_the_parts_of_a_step_at_its_own_boundaries(pool: Pool) -> None:
    for calls in pool.run(calls_of_a_step, world=2):
        assert calls[0] == "begin"
        assert calls[-2:] == ["all-reduce", "end"]
        assert set(calls[1:-2]) == {"forward"}
