"""When checkpoints are written, what happens when they cannot be, and steps that are taken back."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import faults
from lockstep.api import Best, RunResult
from lockstep.checkpoint import command
from lockstep.checkpoint.choose import choose
from lockstep.checkpoint.saving import pending
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.checkpoint.storage.transitions import claim
from lockstep.engine import end, loop
from lockstep.engine.setup import open_run
from lockstep.errors import Preempted, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime import context
from lockstep.runtime.environments.launcher import ATTEMPT
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import Regression, Trace, assert_user_errors, configured, fit, flat, preempted_run, windows
from saved import newest_step

BASE = {"global_batch": 8, "micro_batch": 2, "steps": 12, "checkpoint.at_end": False, "log.every": 1}
LENGTH = 40  # of Regression's data


@contextmanager
def injected(world: World, plan: list[dict[str, Any]]) -> Iterator[None]:
    """Faults in this worker, which other jobs will use after us."""
    os.environ["RANK"], os.environ[faults.VARIABLE] = str(world.rank), faults.to_text([faults.Fault(**f) for f in plan])
    faults.reset()
    try:
        yield
    finally:
        del os.environ["RANK"], os.environ[faults.VARIABLE]
        faults.reset()


def faulty(world: World, store: Any, task: Task, values: dict[str, Any], plan: list[dict[str, Any]]) -> Trace:
    with injected(world, plan):
        return fit(world, store, task, values)


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == kind]


def ids_of(traces: list[Trace], step: int) -> list[int]:
    return sorted(i for trace in traces for i in trace.steps[step].ids)


@pytest.mark.parametrize("world", [1, 3])
def test_checkpoints_come_when_they_are_due_and_old_ones_go(pool: Pool, tmp_path: Path, world: int) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 2, "checkpoint.keep": 2, "checkpoint.keep_every": 6}
    pool.run(fit, Regression(), values, world=world)
    assert steps_kept(tmp_path) == [6, 10, 12]
    saved = events(tmp_path, "checkpoint")
    assert [event["step"] for event in saved] == [2, 4, 6, 8, 10, 12]
    assert all(event["stall_s"] > 0 and event["write_s"] > 0 for event in saved)


def test_minutes_count_on_rank_0_and_all_save_together(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.minutes": 1e-9, "checkpoint.keep": 99}
    pool.run(fit, Regression(), values, world=2)
    assert len(steps_kept(tmp_path)) > 3


class Scored(Regression):
    def eval_data(self) -> Any:
        return TensorDataset(torch.ones(4, 5), torch.ones(4))

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        self.evaluations = getattr(self, "evaluations", 0) + 1
        score = {1: 5.0, 2: 1.0, 3: 3.0}.get(self.evaluations, 9.0)
        return Loss(torch.tensor(score * 4), 4)


def test_the_best_evaluation_is_saved_at_once_and_named_everywhere(pool: Pool, tmp_path: Path) -> None:
    """Step 9 is saved by itself, but its weights were never evaluated; step 8 is not due, but the best."""
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 1, "evaluate.every": 4}
    values |= {"checkpoint.best": "eval_loss", "evaluate.batch": 4, "checkpoint.final": "best"}
    traces = pool.run(fit, Scored(), values, world=2)
    assert steps_kept(tmp_path) == [8, 12]
    best = tmp_path / "checkpoints" / "step-00000008"
    assert traces[0].summary["best"] == {"step": 8, "metric": "eval_loss", "value": 1.0, "checkpoint": str(best)}
    assert traces[1].summary["best"] == traces[0].summary["best"]

    # The weights of step 8 are the final ones, and those that --best exports.
    result = RunResult(tmp_path, traces[0].summary, Scored())
    assert result.best == Best(best, 8, "eval_loss", 1.0)
    for name, weight in traces[0].steps[7].weights.items():
        assert torch.equal(result.weights[name], weight)
    exported, _ = command.export(tmp_path, choose(tmp_path, best=True), tmp_path / "best")
    assert all(torch.equal(load_file(exported)[name], result.weights[name]) for name in result.weights)

    last, row = command.ls(tmp_path)[0].splitlines()[1:]
    assert row.startswith("8 ")
    assert row.endswith("not verified, best eval_loss")
    assert last.endswith("not verified")


class PartlyFrozen(Scored):
    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).requires_grad_(False)
        return model


def test_the_best_weights_of_checkpoints_without_frozen_ones(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "evaluate.every": 4, "evaluate.batch": 4, "checkpoint.frozen": False}
    values |= {"checkpoint.best": "eval_loss", "checkpoint.final": "best"}
    (trace,) = pool.run(fit, PartlyFrozen(), values, world=1)

    result = RunResult(tmp_path, trace.summary, PartlyFrozen())
    frozen = next(name for name, p in PartlyFrozen().model().named_parameters() if not p.requires_grad)
    assert result.best
    assert result.best.step == 8
    assert result.weights.keys() == trace.steps[7].weights.keys() - {frozen}
    assert all(torch.equal(weight, trace.steps[7].weights[name]) for name, weight in result.weights.items())


@pytest.mark.long
def test_the_best_survives_kills_and_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    """A run that leaves after every second step, on 1, 2 and 3 ranks in turn, keeps what an undisturbed one keeps."""
    values = BASE | {"checkpoint.every": 1, "checkpoint.keep": 1, "evaluate.every": 2, "evaluate.batch": 4}
    values |= {"checkpoint.best": "eval_loss", "micro_batch": 2, "exact": True}
    (whole,) = pool.run(fit, Learns(), values | {"run_dir": str(tmp_path / "whole")}, world=1)
    for number, leave_at in enumerate([2, 4, 6, 8, 10, None]):
        parts = values | {"run_dir": str(tmp_path / "parts"), "resume": "auto"}
        found = pool.run(leaving, Learns(), parts, leave_at, world=1 + number % 3)
    assert steps_kept(tmp_path / "parts") == steps_kept(tmp_path / "whole")
    assert {**found[0]["best"], "checkpoint": ""} == {**whole.summary["best"], "checkpoint": ""}


class Learns(Regression):
    """Its evaluations improve, and get worse again when the rate is too high for the noise."""

    def eval_data(self) -> Any:
        return TensorDataset(*self.data()[:7])


def leaving(world: World, store: Any, task: Task, values: dict[str, Any], leave_at: int | None) -> dict[str, Any]:
    resolved = configured(values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test", run_class=preempted_run(runtime, leave_at))
        try:
            return loop.fit(task, builder)
        except Preempted as left:
            return {"left": left.step}


class Fails(Regression):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.count = getattr(self, "count", 0) + 1
        if self.count == 29:  # in the eighth step of the only rank, of four micro-batches each
            raise ZeroDivisionError
        return super().loss(model, batch)


def test_an_error_does_not_throw_away_the_save_in_flight(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 7}
    (error,) = pool.errors(failing, Fails(), values, [{"how": "slow", "phase": "write", "seconds": 0.5}], world=1)
    assert isinstance(error, ZeroDivisionError)
    assert steps_kept(tmp_path) == [7]


def failing(world: World, store: Any, task: Task, values: dict[str, Any], plan: list[dict[str, Any]]) -> None:
    resolved = configured(values)
    with injected(world, plan), context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        try:
            loop.fit(task, builder)
        except ZeroDivisionError as error:
            builder.fail(error)
            raise


def test_the_best_checkpoint_stays(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 2, "checkpoint.keep": 1, "evaluate.every": 2}
    pool.run(fit, Scored(), values | {"checkpoint.best": "eval_loss", "evaluate.batch": 4}, world=1)
    assert steps_kept(tmp_path) == [4, 12]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_does_not_stop_training(pool: Pool, tmp_path: Path, rank: int, asynchronous: bool) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.asynchronous": asynchronous}
    plan = [{"how": "disk full", "rank": rank, "step": 6}]
    traces = pool.run(faulty, Regression(), values, plan, world=2)
    assert traces[0].summary["step"] == 12
    assert steps_kept(tmp_path) == [3, 9, 12]
    (warning,) = [event["reason"] for event in events(tmp_path, "warning")]
    assert "CHECKPOINT OF STEP 6 WAS NOT WRITTEN" in warning
    assert f"rank {rank}: no space left" in warning
    assert "step-00000003" in warning
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))


def retrying_at_once(world: World, store: Any, values: dict[str, Any], plan: list[dict[str, Any]]) -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "RETRY_S", 0.0)
        return faulty(world, store, Regression(), values, plan)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_try_a_save_again_that_failed_on_one(pool: Pool, tmp_path: Path, rank: int) -> None:
    """The pause is over at once here. It ends by the clock of rank 0, whichever rank has failed."""
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 6, "checkpoint.at_end": False}
    plan = [{"how": "disk full", "rank": rank, "step": 6}]
    pool.run(retrying_at_once, values | {"checkpoint.asynchronous": False}, plan, world=2)
    assert len(events(tmp_path, "warning")) == 1
    first, last = steps_kept(tmp_path)
    assert 6 < first < 12 == last


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("final", ["last", "best"])
def test_the_last_save_is_tried_once_more(pool: Pool, tmp_path: Path, failures: int, final: str) -> None:
    """The warning said that training continues, and the summary did not say that the checkpoint is missing."""
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 6, "checkpoint.final": final}
    if final == "best":
        values |= {"checkpoint.best": "eval_loss", "evaluate.every": 4, "evaluate.batch": 4}

    full = {"how": "disk full", "rank": 1, "step": 12}
    traces = pool.run(faulty, Scored(), values, [full] * failures, world=2)
    reasons = [event["reason"] for event in events(tmp_path, "warning")]
    assert all("STEP 12 WAS NOT WRITTEN" in reason for reason in reasons)
    follows = ["The run saves once more before it ends; the last", "The run ends without it; the last"]
    assert [text in reason for text, reason in zip(follows, reasons, strict=False)] == [True] * failures

    assert len(reasons) == failures
    assert (12 in steps_kept(tmp_path)) == (failures == 1)
    assert (tmp_path / "model.safetensors").exists()
    for trace in traces:
        assert ("no space left" in trace.summary.get("save_failed", "")) == (failures == 2)


def without_room(world: World, store: Any, values: dict[str, Any], plan: list[dict[str, Any]], log: Path) -> None:
    """Train where the weights have no room until rank 1 has deleted its file of the failed save, after a while."""
    original_abort, original_write = Save.abort, end.save_weights

    def abort(save: Save, why: str, timeout: float | None = None) -> None:
        if world.rank == 1:
            time.sleep(0.3)  # as a thread that is in the middle of a write

        original_abort(save, why, timeout)
        if world.rank == 1:
            log.touch()

    def write(*args: Any) -> None:
        if not log.exists():
            raise UserError("no space left", "", "")

        original_write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Save, "abort", abort)
        patch.setattr(end, "save_weights", write)
        faulty(world, store, Regression(), values, plan)


def test_the_weights_get_the_room_of_a_save_that_fails_beside_them(pool: Pool, tmp_path: Path) -> None:
    """The run ended with an error, though its weights had room as soon as the files of that save were deleted."""
    values = BASE | {"run_dir": str(tmp_path / "run"), "checkpoint.every": 6}
    pool.run(without_room, values, [{"how": "disk full", "rank": 0, "step": 12}], tmp_path / "deleted", world=2)
    assert (tmp_path / "run" / "model.safetensors").exists()
    (warning,) = [event["reason"] for event in events(tmp_path / "run", "warning")]
    assert "The run ends without it" in warning


def test_a_save_that_failed_is_tried_again_at_the_end(pool: Pool, tmp_path: Path) -> None:
    """The pause before the next try was longer than the rest of the run."""
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 7, "checkpoint.at_end": False}
    [trace] = pool.run(faulty, Regression(), values, [{"how": "disk full", "step": 7}], world=1)
    assert steps_kept(tmp_path) == [12]
    assert "save_failed" not in trace.summary


def taken_over(world: World, store: Any, values: dict[str, Any], at: int) -> Trace:
    """A job whose run another attempt takes over after this many steps."""

    class Suspended(Regression):
        def after_step(self, run: Any, result: Any) -> None:
            if run.steps_done == at:
                claim(CheckpointStorage.of_run(Path(values["run_dir"])), "another")

    return fit(world, store, Suspended(), values)


@pytest.mark.parametrize("at", [1, 12])
@pytest.mark.parametrize("every", [3, None])
def test_a_run_that_was_taken_over_ends_and_writes_no_weights(
    pool: Pool, tmp_path: Path, at: int, every: int | None
) -> None:
    """It took that for a full disk, trained to its end, and replaced the weights of the other attempt."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"of the other attempt")
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": every, "checkpoint.asynchronous": False}
    errors = pool.errors(taken_over, values, at, world=2)
    assert_user_errors(errors, "another attempt has taken over this run")
    assert weights.read_bytes() == b"of the other attempt"
    assert not (tmp_path / "summary.json").exists()
    assert events(tmp_path, "warning") == []


# ---- going back to a checkpoint that --resume names ----


def one_attempt(world: World, store: Any, values: dict[str, Any], attempt: int, plan: list[dict[str, Any]]) -> int:
    """Train in one attempt of a job. Return the step at which it began."""
    os.environ[ATTEMPT] = str(attempt)
    try:
        return faulty(world, store, Regression(), values, plan).steps[0].result.step
    finally:
        del os.environ[ATTEMPT]


def test_a_restart_goes_back_to_the_named_checkpoint_if_the_attempt_before_died_too_early(
    pool: Pool, tmp_path: Path
) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 9}
    pool.run(fit, Regression(), values, world=2)
    back = values | {"resume": str(tmp_path / "checkpoints" / "step-00000003"), "steps": 8}

    died = pool.errors(one_attempt, back, 0, [{"how": "raise", "rank": 1, "phase": "load"}], world=2)
    assert any("injected" in str(error) for error in died)
    assert steps_kept(tmp_path) == [3, 6, 9, 12]  # nothing is set aside before it is verified
    assert newest_step(tmp_path / "checkpoints") == 3  # the launcher announces a restart from there

    assert pool.run(one_attempt, back, 1, [], world=2) == [3, 3]
    assert steps_kept(tmp_path) == [3, 6]

    # Later attempts start from what this one has saved, and another job from the newest checkpoint.
    assert pool.run(one_attempt, back, 2, [], world=2) == [6, 6]


def test_a_job_that_died_before_it_went_back_does_not_bind_the_next_job(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 9, "steps": 10}
    pool.run(fit, Regression(), values, world=1)
    back = values | {"resume": str(tmp_path / "checkpoints" / "step-00000003")}
    pool.errors(one_attempt, back, 0, [{"how": "raise", "phase": "load"}], world=1)

    newest = values | {"resume": str(tmp_path), "steps": 11}
    pool.errors(one_attempt, newest, 0, [{"how": "raise", "phase": "load"}], world=1)
    assert newest_step(tmp_path / "checkpoints") == 9
    assert pool.run(one_attempt, newest, 1, [], world=1) == [9]


def test_a_restart_goes_back_to_a_checkpoint_that_was_set_aside(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 9}
    pool.run(fit, Regression(), values, world=1)
    back = values | {"resume": str(tmp_path / "checkpoints" / "step-00000003"), "steps": 4}
    assert pool.run(one_attempt, back, 0, [], world=1) == [3]

    again = values | {"resume": str(tmp_path / "checkpoints" / "step-00000009.rewound")}
    pool.errors(one_attempt, again, 0, [{"how": "raise", "step": 10, "phase": "compute"}], world=1)
    assert steps_kept(tmp_path) == [3]
    assert pool.run(one_attempt, again, 1, [], world=1) == [9]
    assert steps_kept(tmp_path) == [3, 12]
    assert pool.run(one_attempt, again | {"steps": 13}, 2, [], world=1) == [12]


def test_a_restart_goes_on_when_the_checkpoint_that_was_named_is_not_kept(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 9, "steps": 7}
    values |= {"checkpoint.asynchronous": False}
    pool.run(fit, Regression(), values, world=1)
    back = values | {"resume": str(tmp_path / "checkpoints" / "step-00000003"), "checkpoint.keep": 1, "steps": 13}

    pool.errors(one_attempt, back, 0, [{"how": "raise", "step": 10, "phase": "compute"}], world=1)
    assert steps_kept(tmp_path) == [9]
    assert pool.run(one_attempt, back, 1, [], world=1) == [9]


def test_a_restart_keeps_what_was_committed_just_before_the_attempt_died(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 3, "checkpoint.keep": 9}
    values |= {"checkpoint.asynchronous": False, "steps": 10}
    pool.run(fit, Regression(), values, world=1)
    back = values | {"resume": str(tmp_path / "checkpoints" / "step-00000003"), "steps": 4}
    pool.run(one_attempt, back, 0, [], world=1)

    again = values | {"resume": str(tmp_path / "checkpoints" / "step-00000006.rewound"), "steps": 13}
    pool.errors(one_attempt, again, 0, [{"how": "raise", "step": 9, "phase": "data"}], world=1)
    assert steps_kept(tmp_path) == [3, 9]
    assert pool.run(one_attempt, again, 1, [], world=1) == [9]


# ---- steps that are taken back ----


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_spoiled_step_is_taken_back_and_its_samples_left_out(pool: Pool, tmp_path: Path, kind: str) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 4, "nonfinite.policy": "rewind"}
    plan = [{"how": kind, "rank": 1, "step": 6}]
    traces = pool.run(faulty, Regression(), values, plan, world=2)
    clean = windows(LENGTH, 8, "short", 14)
    ran = [note.result.step for note in traces[0].steps]
    assert ran == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11]
    # Steps 4 and 5 again with the same samples, then the window of step 6 is passed over for good.
    expected = clean[:7] + clean[4:6] + clean[7:13]
    assert [ids_of(traces, n) for n in range(len(ran))] == [sorted(ids) for ids in expected]
    assert torch.equal(flat(traces[0].steps[8].weights), flat(traces[0].steps[5].weights))
    (event,) = events(tmp_path, "rewind")
    assert (event["step"], event["to"]) == (7, 4)  # the seventh step, back to the state after four
    (skip,) = events(tmp_path, "skip")
    assert skip["step"] == 7
    guilty = traces[1].steps[6].pieces[0]
    assert skip["blame"] == [
        f"rank 1, micro-batch {guilty.index}: loss {kind}, samples {guilty.ids[0]}, {guilty.ids[1]}"
    ]


def test_two_spoiled_steps_between_two_checkpoints_are_both_left_out(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 100, "nonfinite.policy": "rewind"}
    traces = pool.run(fit, Poisoned(), values, world=2)
    ran = [note.result.step for note in traces[0].steps]
    assert ran == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [note.result.applied for note in traces[0].steps[-12:]] == [True] * 12
    assert len(events(tmp_path, "rewind")) == 2
    # The checkpoint of step 0 knows no metrics yet; they come back with the steps that are repeated.
    assert "far" in read_jsonl(tmp_path / "metrics.jsonl")[-1]["metrics"]


class Poisoned(Regression):
    """Two samples are nan: one in the window of step 2, one in that of step 5."""

    def data(self) -> Any:
        x, y = super().data().tensors
        y = torch.cat([y, y, y])[:120]
        for step in (2, 5):
            y[windows(120, 8, "short", 6)[step][0]] = math.nan
        return TensorDataset(torch.cat([x, x, x])[:120], y)

    def loss(self, model: torch.nn.Module, batch: Any) -> Loss:
        return replace(super().loss(model, batch), metrics={"far": 1.0})


def test_rewinding_again_and_again_ends(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "nonfinite.policy": "rewind", "nonfinite.max_in_a_row": 3}
    plan = [{"how": "nan", "rank": 0, "step": 2, "times": None}]
    errors = pool.errors(faulty, Regression(), values, plan, world=2)
    assert_user_errors(errors, "has rewound 3 times", "step 3")


def test_saves_that_fail_do_not_reset_the_limit_of_rewinds(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "nonfinite.policy": "rewind", "nonfinite.max_in_a_row": 2}
    plan = [{"how": "nan", "step": 5, "times": None}, {"how": "disk full", "step": 4, "times": None}]
    errors = pool.errors(faulty, Regression(), values | {"checkpoint.every": 2}, plan, world=1)
    assert_user_errors(errors, "has rewound 2 times", "step 6")
    assert [event["to"] for event in events(tmp_path, "rewind")] == [2, 2]


SPIKES = {"spike.factor": 20.0, "spike.window": 8, "steps": 15}


class Spiky(Regression):
    """One sample of step 12 has a target far away from all others; no sample comes twice in 15 steps."""

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(160, 5, generator=g), torch.randn(160, generator=g)
        y[windows(160, 8, "short", 13)[12][3]] = 1e4
        return TensorDataset(x, y)


@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_spike_is_skipped_by_all_ranks(pool: Pool, tmp_path: Path, world: int) -> None:
    values = BASE | SPIKES | {"run_dir": str(tmp_path), "spike.policy": "skip"}
    traces = pool.run(fit, Spiky(), values, world=world)
    assert [note.result.step for note in traces[0].steps if not note.result.applied] == [12]
    assert math.isfinite(traces[0].steps[12].result.grad_norm)
    assert torch.equal(flat(traces[0].steps[12].weights), flat(traces[0].steps[11].weights))
    (skip,) = events(tmp_path, "skip")
    assert skip["reason"].startswith("a loss spike")
    assert str(windows(160, 8, "short", 13)[12][3]) in " ".join(skip["blame"])


def test_a_loss_spike_may_be_taken_back(pool: Pool, tmp_path: Path) -> None:
    values = BASE | SPIKES | {"run_dir": str(tmp_path), "spike.policy": "rewind", "checkpoint.every": 10}
    traces = pool.run(fit, Spiky(), values, world=2)
    assert [note.result.step for note in traces[0].steps][12:] == [12, 10, 11, 12, 13, 14]
    assert all(note.result.applied for note in traces[0].steps[13:])


def test_a_loss_spike_may_stop_the_run(pool: Pool, tmp_path: Path) -> None:
    values = BASE | SPIKES | {"run_dir": str(tmp_path), "spike.policy": "stop"}
    assert_user_errors(pool.errors(fit, Spiky(), values, world=2), "a loss spike", "spike.policy=stop")


# ---- preemption ----


class SlowlyScored(Regression):
    """The preemption notice comes in the middle of an evaluation."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def eval_data(self) -> Any:
        return TensorDataset(torch.ones(64, 5), torch.ones(64))

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        self.before_notice(len(batch[0]))
        return super().loss(model, batch)

    def before_notice(self, size: int) -> None:
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen == self.at:
            self.notice()


def preempted(world: World, store: Any, values: dict[str, Any], at: int) -> tuple[int | None, int, int]:
    """A job: (step it was preempted at, evaluation batches run, exit code)."""
    task = SlowlyScored(at if world.rank == 0 else -1)
    resolved = configured(BASE | {"evaluate.every": 4, "evaluate.batch": 2, "resume": "auto"} | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        task.notice = lambda: setattr(runtime.notice, "signal", "SIGTERM")
        try:
            loop.fit(task, builder)
        except Preempted as left:
            builder.fail(left)
            return left.step, task.seen, left.code
        return None, task.seen, 0


def test_preemption_during_an_evaluation(pool: Pool, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path)}
    results = pool.run(preempted, values, 3, world=2)
    assert [(step, code) for step, _, code in results] == [(4, 75), (4, 75)]
    assert results[0][1] == 3  # broken off at once
    assert steps_kept(tmp_path) == [4]
    assert not events(tmp_path, "eval")
    pool.run(preempted, values, -1, world=3)
    assert [event["step"] for event in events(tmp_path, "eval")] == [4, 8, 12]  # the interrupted one comes first


def test_an_interrupted_evaluation_that_is_the_best_is_added_to_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """The step is not saved again: its checkpoint stays as it was, and gets the results."""
    values = {"run_dir": str(tmp_path), "checkpoint.best": "eval_loss", "evaluate.at_end": False}
    pool.run(preempted, values, 3, world=2)
    manifest = tmp_path / "checkpoints" / "step-00000004" / "manifest.json"
    saved = manifest.read_bytes()
    pool.run(preempted, values | {"steps": 5}, -1, world=2)

    assert manifest.read_bytes() == saved
    [evaluation] = events(tmp_path, "eval")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["best"]["step"] == 4
    assert summary["best"]["value"] == evaluation["loss"]
