"""Optimizers and the model they belong to; metrics that come late; modes that stay; ends that come early."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep
from lockstep.config import resolve
from lockstep.engine.checks.model import check_equal_work
from lockstep.errors import UserError
from lockstep.optim.optimizers import Optimizers
from lockstep.plan.plan import make_plan
from lockstep.runtime.environments.launcher import ATTEMPT_FOLDER
from lockstep.task import Loss
from pool import Pool
from ranks.support import Regression, WatchedRun, assert_user_errors, backward_by_hand, fit, open_watched

VALUES = {"global_batch": 4, "micro_batch": 2, "steps": 6}


def test_a_parameter_in_no_optimizer_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"2 trainable parameters are in no optimizer, first '1\.weight'"):
        Optimizers(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    model[1].requires_grad_(False)
    Optimizers(torch.optim.SGD(model[0].parameters(), lr=0.1), model)


def test_a_parameter_outside_the_model_is_refused():
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    with pytest.raises(UserError, match="1 trainable parameters that the model does not have"):
        Optimizers(torch.optim.SGD([*model.parameters(), temperature], lr=0.1), model)


def test_lbfgs_and_strangers_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="LBFGS"):
        Optimizers(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(UserError, match="a Linear"):
        Optimizers(model, model)


class Claims(torch.optim.SGD):
    """Says it takes part in loss scaling, but expects a GradScaler, as some public optimizers do."""

    _step_supports_amp_scaling = True


class Own(torch.optim.SGD):
    """Says it in our words."""

    divides_and_skips = True


@pytest.mark.parametrize(
    ("make", "divides", "skips"),
    [
        (lambda p: Own(p, lr=0.1), True, True),
        (lambda p: torch.optim.AdamW(p, fused=True), True, True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), True, False),
        (lambda p: torch.optim.AdamW(p), False, False),
        (lambda p: Claims(p, lr=0.1), False, False),
    ],
)
def test_only_torchs_own_fused_optimizers_are_trusted_with_a_factor_and_those_that_say_so(make, divides, skips):
    model = nn.Linear(2, 2)
    optimizers = Optimizers(make(model.parameters()), model)
    assert (optimizers.divides_gradients, optimizers.skips_on_device) == (divides, skips)
    assert not Optimizers(make(model.double().parameters()), model).divides_gradients


def test_after_a_run_a_fused_optimizer_steps_as_it_did_before(tmp_path: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    rows = torch.utils.data.TensorDataset(torch.ones(8, 1))
    with lockstep.start(run_dir=tmp_path / "run", global_batch=8, steps=1, log={"progress": "off"}) as run:
        replica, _ = run.setup(model, optimizer)
        for step in run.steps(rows):
            for (x,) in step:
                step.backward(replica(x).sum(), weight=len(x))
            step.apply()

    before = model.weight.item()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 0.5)  # not divided by the weight of the last step


class LateMetric(Regression):
    """One rank sees a metric first in a later step, and only that rank."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        import torch.distributed as dist

        loss = super().loss(model, batch)
        type(self).calls += 1
        if self.calls > 4 and dist.get_rank() == 1:
            loss.metrics["late"] = (torch.tensor(6.0), 2)
        return loss


def logged(world: Any, store: Any, task: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    import json

    with open_watched(world, store, values) as builder:
        from lockstep.engine import loop

        loop.fit(task, builder)
        return [json.loads(line) for line in (builder.folder.path / "metrics.jsonl").read_text().splitlines()]


def test_a_metric_may_appear_late_and_on_one_rank_only(pool: Pool) -> None:
    records = pool.run(logged, LateMetric(), VALUES | {"log.every": 2}, world=2)[0]
    assert ["late" in record["metrics"] for record in records] == [False, False, True]
    assert records[-1]["metrics"]["late"] == pytest.approx(3.0)


def test_a_metric_may_not_be_named_loss(pool: Pool) -> None:
    class Named(Regression):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            loss.metrics["loss"] = loss.total.detach()
            return loss

    assert_user_errors(pool.errors(fit, Named(), VALUES, world=1), "a metric is named 'loss'")


def modes_after_evaluation(world: Any, store: Any) -> list[bool]:
    class Evaluated(Regression):
        def eval_data(self) -> Any:
            return self.data()

        def model(self) -> nn.Module:
            model = super().model()
            model.out.eval()  # a frozen batch norm would be kept so
            return model

    modes: list[bool] = []

    class ModesRun(WatchedRun):
        def end_step(self, batches: Any, result: Any) -> None:
            modes.append(self.driver.model.out.training)
            super().end_step(batches, result)

    with open_watched(world, store, VALUES | {"evaluate.every": 2}) as builder:
        from lockstep.engine import loop

        builder.run_class = ModesRun
        loop.fit(Evaluated(), builder)
        return [*modes, builder.driver.model.hidden.training]


def test_an_evaluation_leaves_every_module_in_its_mode(pool: Pool) -> None:
    *out, hidden = pool.run(modes_after_evaluation, world=1)[0]
    assert out == [False] * 6
    del hidden  # after the end the model is shown, in eval mode


def leaves_alone(world: Any, store: Any, launchers_folder: Path | None = None) -> None:
    from datetime import timedelta

    from lockstep.engine import own_loop as module

    # With a launcher, its heartbeats must end the wait.
    limit = timedelta(hours=1) if launchers_folder else timedelta(seconds=2)
    environment = {ATTEMPT_FOLDER: str(launchers_folder)} if launchers_folder else {}
    with (
        mock.patch.object(module, "BREAK_TIMEOUT", limit),
        mock.patch.dict(os.environ, environment),
        open_watched(world, store, VALUES) as builder,
    ):
        own = module.OwnRun(builder)
        for step in backward_by_hand(own, Regression()):
            step.apply()
            if world.rank == 0 and step.index == 2:
                break
        own.close("sys.exit() at script.py:7")


def test_a_rank_that_leaves_the_loop_alone_says_so(pool: Pool) -> None:
    errors = pool.errors(leaves_alone, world=2)
    assert_user_errors(errors[:1], "rank 0 of 2 left `for step in run.steps(...)` at step 3", "run.stop()")


def test_a_launchers_heartbeats_show_at_once_that_the_others_wait(pool: Pool, tmp_path: Path) -> None:
    errors = pool.errors(leaves_alone, tmp_path, world=2)
    assert_user_errors(errors[:1], "rank 0 of 2 left `for step", "sys.exit() at script.py:7")


def leave_before_apply(world: Any, store: Any, launchers_folder: Path) -> int:
    """All ranks leave between the last backward and apply(), rank 1 some time after the others."""
    from datetime import timedelta

    import torch.distributed as dist

    from lockstep.engine.own_loop import OwnRun
    from lockstep.runtime import context

    looks = timedelta(milliseconds=20)
    environment = {ATTEMPT_FOLDER: str(launchers_folder)}
    with (
        mock.patch.object(context, "BARRIER_CHECK", looks),
        mock.patch.dict(os.environ, environment),
        open_watched(world, store, VALUES) as builder,
    ):
        own = OwnRun(builder)
        for step in backward_by_hand(own, Regression()):
            if step.index == 2:
                break
            step.apply()
        if world.rank == 1:
            # Rank 0 waits in close(), and looks at the heartbeats again and again.
            dist.distributed_c10d._get_default_store().wait(["left-at-2/1/0"], timedelta(seconds=60))
            time.sleep(5 * looks.total_seconds())
        own.close()
        return builder.runtime.heartbeat.step


def test_a_rank_that_leaves_before_apply_exchanges_nothing_any_more(pool: Pool, tmp_path: Path) -> None:
    """Its heartbeat still said "all-reduce", so that it took itself for a rank that waits for the others."""
    assert pool.run(leave_before_apply, tmp_path, world=2) == [2, 2]


def ends_early(world: Any, store: Any, way: str) -> dict[str, Any]:
    """Train 3 steps, with log lines that are further apart, and return the last line."""
    from lockstep.engine.own_loop import OwnRun

    with open_watched(world, store, VALUES | {"log.every": 100, "steps": 3 if way == "plan" else 6}) as builder:
        own = OwnRun(builder)
        for step in backward_by_hand(own, Regression()):
            step.apply()
            # The request travels with the next step, which is then the last one.
            if way == "stop" and world.rank == 1 and step.index == 1:
                own.stop()
            if way == "break" and own.agree(step.index == 2):
                break
        own.close()
        return builder.recorder.last


@pytest.mark.parametrize("way", ["stop", "break"])
def test_a_run_that_ends_between_two_log_lines_logs_its_last_steps(pool: Pool, way: str) -> None:
    planned = pool.run(ends_early, "plan", world=2)[0]
    ended = pool.run(ends_early, way, world=2)[0]
    assert (ended["step"], ended["samples"], ended["loss"]) == (3, 12, planned["loss"])


def test_the_weights_are_saved_even_if_show_fails(pool: Pool, tmp_path) -> None:
    class Shown(Regression):
        def show(self, model: nn.Module) -> str:
            raise ZeroDivisionError("in show")

    folder = tmp_path / "run"
    pool.run(fit, Shown(), VALUES | {"run_dir": str(folder)}, world=2)
    assert (folder / "model.safetensors").exists()
    assert "in show" in (folder / "events.jsonl").read_text()
    with pytest.raises(UserError, match="already holds a run"):
        pool.run(fit, Shown(), VALUES | {"run_dir": str(folder)}, world=2)


def test_sparse_gradients_are_refused(pool: Pool) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 2, sparse=True)

    errors = pool.errors(fit, Regression(network=Sparse), VALUES, world=1)
    assert_user_errors(errors, "'table' has sparse=True")


def test_sync_batch_norm_needs_even_work():
    """Its forward waits for all ranks (and torch has it for GPUs only, so this looks at the check alone)."""
    model = nn.Sequential(nn.Linear(5, 1), nn.SyncBatchNorm(1))
    config = resolve([("test", {"global_batch": 6, "micro_batch": 2, "steps": 1})]).config
    with pytest.raises(UserError, match="3 on 2 data-parallel ranks"):
        check_equal_work(model, make_plan(config, 2, 12), "short")
    with pytest.raises(UserError, match="short last step"):
        check_equal_work(model, make_plan(config, 3, 13), "short")
    check_equal_work(model, make_plan(config, 3, 13), "drop")
    check_equal_work(nn.Linear(5, 1), make_plan(config, 2, 12), "short")


def test_the_time_of_an_evaluation_is_not_the_time_of_a_step(pool: Pool) -> None:
    """An evaluation between two log lines: the steps before it keep their time, so the rate stays honest."""

    class Evaluated(Regression):
        def eval_data(self) -> Any:
            return self.data()

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            time.sleep(0.02)
            return super().loss(model, batch)

        def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
            return super().loss(model, batch)

    values = VALUES | {"log.every": 6, "evaluate.every": 5, "evaluate.batch": 40}
    (record,) = pool.run(logged, Evaluated(), values, world=1)[0]
    assert record["step_s"] >= 2 * 0.02  # two micro-batches a step, six steps: none of them is forgotten
