"""Hooks of tasks and callbacks: called on every rank, with the same facts. What one rank asks for holds for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from lockstep.callbacks import ProgressiveSizes, crop_sequences
from lockstep.checkpoint.state.stateful import RegisteredState
from lockstep.engine import loop
from lockstep.engine.hooks.calls import Hooks
from lockstep.errors import UserError
from lockstep.observe.history import read_history
from lockstep.observe.sinks import read_jsonl
from lockstep.task import Loss
from pool import Pool
from ranks.support import Regression, assert_user_errors, fit, open_watched
from ranks.test_keeping import leaving

BASE = {"global_batch": 8, "micro_batch": 2, "steps": 4, "evaluate.every": 2, "evaluate.batch": 4, "log.every": 1}


class Hooked(Regression):
    """Notes what its hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def eval_data(self) -> Any:
        return self.data()

    def before_training(self, run: Any) -> None:
        self.notes.append(("before_training", run.steps_done, run.rank, run.world_size, run.is_main))

    def before_backward(self, run: Any, loss: Loss) -> Loss:
        return Loss(2 * loss.total, loss.weight, loss.metrics)

    def after_step(self, run: Any, result: Any) -> None:
        self.notes.append(("after_step", run.steps_done, round(run.epoch, 3), result.loss))
        run.log("rank", run.rank, weight=run.rank)
        if run.rank == run.world_size - 1:
            run.log("late", run.steps_done)

    def after_eval(self, run: Any, metrics: Any) -> None:
        self.notes.append(("after_eval", run.steps_done, metrics["loss"]))
        run.log("twice", 2.0)


class Calls(Hooked):
    """Has callbacks of its own."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__()
        self._callbacks = callbacks

    def callbacks(self) -> Any:
        return self._callbacks


class Counter:
    """A callback with state."""

    def __init__(self, stop_at: int | None = None, rank: int = 0) -> None:
        self.count = 0
        self.stop_at = stop_at
        self.rank = rank

    def after_step(self, run: Any, result: Any) -> None:
        self.count += 1
        if run.steps_done == self.stop_at and run.rank == self.rank:
            run.stop("seen enough")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def hooked(world: Any, store: Any, values: dict[str, Any], *callbacks: Any) -> Any:
    """A job: train with callbacks. Return the task's notes, the callbacks and the summary."""
    task = Hooked()
    with open_watched(world, store, values) as builder:
        builder.callbacks += callbacks
        summary = loop.fit(task, builder)
        return task.notes, callbacks, summary


@pytest.mark.parametrize("world", [1, 2])
def test_each_hook_is_called_on_every_rank_with_the_same_facts(pool: Pool, tmp_path: Path, world: int) -> None:
    found = pool.run(hooked, BASE | {"run_dir": str(tmp_path)}, world=world)
    history = read_history(tmp_path)
    for rank, (notes, _, _) in enumerate(found):
        assert notes[0] == ("before_training", 0, rank, world, rank == 0)
        assert [note[:2] for note in notes[1:]] == [
            ("after_step", 1),
            ("after_step", 2),
            ("after_eval", 2),
            ("after_step", 3),
            ("after_step", 4),
            ("after_eval", 4),
        ]
        # The result's loss is that of the log; the hook before the backward has doubled it.
        losses = [note[3] for note in notes if note[0] == "after_step"]
        assert losses == pytest.approx([record["loss"] for record in history])

    # Sums and weights were added over the ranks; rank 0 has weight 0 here.
    assert history[0]["metrics"].get("rank") == (1 if world == 2 else None)
    assert [record["metrics"]["late"] for record in history] == [1, 2, 3, 4]
    assert [record["eval"] is not None for record in history] == [False, True, False, True]
    assert history[3]["eval"]["loss"] == found[0][0][-1][2]
    assert [record["metrics"].get("twice") for record in history] == [None, None, 2.0, None]  # from step 2
    (rest,) = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "metrics"]
    assert rest["metrics"] == {"twice": 2.0}


def test_a_stop_of_one_rank_holds_for_all_and_survives_a_resume(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"steps": 9, "evaluate.every": None, "checkpoint.every": 1}
    whole = pool.run(hooked, values | {"run_dir": str(tmp_path / "whole")}, Counter(3, rank=1), world=2)
    for _, (counter,), summary in whole:
        # The request travels in the control word of step 4.
        assert (counter.count, summary["step"], summary["stopped"]) == (4, 4, "seen enough")

    # Preempted after step 3, with the request on its way; then on another number of ranks, without the condition.
    halves = values | {"run_dir": str(tmp_path / "halves")}
    pool.run(leaving, Calls(Counter(3, rank=1)), halves, 3, world=2)
    ((_, (counter,), summary),) = pool.run(hooked, halves | {"resume": "auto"}, Counter(), world=1)
    assert (counter.count, summary["step"], summary["stopped"]) == (4, 4, "seen enough")

    # It stays stopped, until it gets another number of steps.
    ((_, (counter,), summary),) = pool.run(hooked, halves | {"resume": "auto"}, Counter(), world=1)
    assert (counter.count, summary["step"], summary["stopped"]) == (4, 4, "seen enough")
    ((_, (counter,), summary),) = pool.run(hooked, halves | {"resume": "auto", "steps": 6}, Counter(), world=1)
    assert (counter.count, summary["step"]) == (6, 6)

    # A request in the last step has stopped nothing, so it does not stop a run that gets more steps.
    last = halves | {"run_dir": str(tmp_path / "last")}
    pool.run(hooked, last | {"steps": 3}, Counter(3), world=1)
    ((_, _, summary),) = pool.run(hooked, last | {"resume": "auto", "steps": 6}, Counter(), world=1)
    assert summary["step"] == 6


class Saves(Hooked):
    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done == 2 and run.rank == 1:
            run.save()


def test_a_save_of_one_rank_is_made_by_all(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": None, "checkpoint.at_end": False}
    pool.run(fit, Saves(), values, world=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000003"]


class NoRun(Hooked):
    def before_batch(self, micro: Any) -> None:  # pyrefly: ignore[bad-override]
        raise AssertionError


class Waits(Hooked):
    async def after_step(self, run: Any, result: Any) -> None:
        raise AssertionError


class Number(Hooked):
    def before_backward(self, run: Any, loss: Any) -> Any:
        return 0.0


class NeverRestored:
    def after_step(self, run: Any, result: Any) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        return {}


class Raises(Hooked):
    def after_eval(self, run: Any, metrics: Any) -> None:
        if run.rank == 1:
            raise ValueError("no luck")


class Ends(Hooked):
    def before_batch(self, run: Any, micro: Any) -> None:
        if run.steps_done == 2:
            next(iter(()))


def test_what_is_wrong_with_a_hook_is_said_in_words(pool: Pool) -> None:
    errors = pool.errors(fit, NoRun(), BASE, world=1)
    assert_user_errors(errors, "NoRun.before_batch(micro)", "def before_batch(self, run, micro)")
    assert_user_errors(pool.errors(fit, Waits(), BASE, world=1), "Waits.after_step is an async function")
    assert_user_errors(pool.errors(fit, Number(), BASE, world=1), "must return a lockstep.Loss, or None", "a float")
    assert_user_errors(pool.errors(hooked, BASE, Counter, world=1), "Counter is a class", "pass Counter(...)")
    assert_user_errors(pool.errors(hooked, BASE, object(), world=1), "has none of the hooks", "after_step")
    assert_user_errors(pool.errors(hooked, BASE, NeverRestored(), world=1), "and no load_state_dict()")


class AgreesAlone(Hooked):
    def after_step(self, run: Any, result: Any) -> None:
        if run.is_main:
            run.agree(True)


def test_a_collective_of_one_rank_is_not_mixed_up_with_another(pool: Pool) -> None:
    assert_user_errors(pool.errors(fit, AgreesAlone(), BASE, world=2), "run.agree() was called on rank 0, and not")


class Misnamed(Hooked):
    def __init__(self, name: Any) -> None:
        super().__init__()
        self.name = name

    def after_step(self, run: Any, result: Any) -> None:
        run.log(self.name, 1.0)


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_with_names_that_cannot_be_logged(pool: Pool, world: int) -> None:
    assert_user_errors(pool.errors(fit, Misnamed(5), BASE, world=world), "run.log(5, ...)")
    for name in ("loss", "eval_loss"):
        errors = pool.errors(fit, Misnamed(name), BASE, world=world)
        assert_user_errors(errors, f"a metric is named {name!r}, which is the name of the loss itself")


def test_a_hook_that_raises_names_itself_its_rank_and_its_step(pool: Pool) -> None:
    errors = pool.errors(fit, Raises(), BASE, world=2)
    (error,) = [error for error in errors if isinstance(error, ValueError)]
    assert error.__notes__[0] == "raised in Raises.after_eval() on rank 1, at step 2"


def test_a_stop_iteration_of_a_hook_is_an_error_and_does_not_end_the_batches(pool: Pool) -> None:
    (error,) = pool.errors(fit, Ends(), BASE, world=1)
    assert str(error) == "Ends.before_batch() raised StopIteration"
    # Two steps are done: the hook is called in the third one.
    assert error.__notes__[0] == "raised in Ends.before_batch() on rank 0, at step 3"


# ---- numbers --------------------------------------------------------------------------------------------


class Graphs(Hooked):
    """Its weight, its metrics and what it logs are tensors with a graph, or numbers of NumPy."""

    def loss(self, model: Any, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        self.with_graph = loss.total * 0 + loss.weight
        return Loss(loss.total, self.with_graph, {"own": (self.with_graph, self.with_graph)})

    def after_step(self, run: Any, result: Any) -> None:
        run.log("graph", self.with_graph, weight=self.with_graph)
        run.log("small", np.int8(100), weight=np.float32(1))


def kept(world: Any, store: Any, values: dict[str, Any]) -> list[Any]:
    """A job: train, and return the sums that wait for the log line."""
    with open_watched(world, store, values) as builder:
        training = loop.Training(Graphs(), builder)
        for _ in training.steps():
            if training.run.steps_done == 2:
                sums: Any = training.run.log.interval.sums
                found = [number for _, *pair in sums._metrics for number in pair]
                found += [number for pair in sums._losses for number in pair]
                graphs = [number.requires_grad for number in found if isinstance(number, torch.Tensor)]

        training.end()
        return graphs


def test_no_graph_waits_for_the_log_line_and_numbers_of_numpy_are_added(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"log.every": 4, "run_dir": str(tmp_path), "checks.loss": "off", "evaluate.every": None}
    (graphs,) = pool.run(kept, values, world=1)
    assert len(graphs) > 4
    assert not any(graphs)
    assert read_history(tmp_path)[0]["metrics"] == {"own": 1.0, "graph": 1.0, "small": 100.0}


class Weightless(Hooked):
    """Only the loss of its first step has a weight."""

    ended = 0

    def loss(self, model: Any, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.total * 0, 0) if self.ended else loss

    def after_step(self, run: Any, result: Any) -> None:
        self.ended += 1
        if self.ended == 2:
            run.stop(f"weight {result.weight}, loss {result.loss}")


def weightless(world: Any, store: Any) -> Any:
    """A job: train with losses of weight 0, and return why the run stopped."""
    with open_watched(world, store, BASE | {"checks.loss": "off", "evaluate.every": None}) as builder:
        return loop.fit(Weightless(), builder)["stopped"]


def test_a_step_of_weight_0_has_no_loss(pool: Pool) -> None:
    assert pool.run(weightless, world=1) == ["weight 0.0, loss None"]


class CalledEvalLoss(Hooked):
    def eval_loss(self, model: Any, batch: Any) -> Loss:
        loss = self.loss(model, batch)
        return Loss(loss.total, loss.weight, {"eval_loss": 0.0})


def test_no_metric_of_an_evaluation_takes_the_place_of_its_loss(pool: Pool) -> None:
    errors = pool.errors(fit, CalledEvalLoss(), BASE, world=1)
    assert_user_errors(errors, "a metric is named 'eval_loss'", "give the metric another name")


# ---- callbacks ------------------------------------------------------------------------------------------


class Named(Counter):
    """A Counter with a name, which counts in its own steps."""

    def __init__(self, name: str, by: int = 1) -> None:
        super().__init__()
        self.name = name
        self.by = by

    def after_step(self, run: Any, result: Any) -> None:
        self.count += self.by


def test_callbacks_get_their_own_state_back_by_name(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "resume": "auto", "evaluate.every": None}
    pool.run(hooked, values, Named("a"), Named("b", 100), world=1)
    more = values | {"steps": 5}
    errors = pool.errors(hooked, more, Named("a"), Named("c"), world=1)
    assert_user_errors(errors, "only in the checkpoint: callback b; only in this run: callback c", "same names")

    ((_, callbacks, _),) = pool.run(hooked, more, Named("b", 100), Named("a"), world=1)
    assert [callback.count for callback in callbacks] == [500, 5]


def test_callbacks_that_only_their_order_would_tell_apart_are_refused(pool: Pool) -> None:
    other = type("Counter", (Named,), {"name": None, "__init__": lambda self: None})()
    for callbacks in ([Named("a"), Named("a")], [Counter(), Named("Counter")], [Counter(), other]):
        with pytest.raises(UserError, match=r"2 callbacks with state are called '(a|Counter)'"):
            Hooks(cast(Any, None), callbacks=callbacks).register(RegisteredState())

    state = RegisteredState()
    Hooks(cast(Any, None), callbacks=[Counter(), Counter(), Named("a")]).register(state)
    assert list(state) == ["callback Counter", "callback Counter 2", "callback a", "order of callbacks"]


class Every(Counter):
    def __init__(self, every: int):
        super().__init__()
        self.every = every


def test_callbacks_without_names_that_change_places_are_refused(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "resume": "auto", "evaluate.every": None}
    pool.run(hooked, values, Every(1), Every(2), world=1)
    errors = pool.errors(hooked, values | {"steps": 5}, Every(2), Every(1), world=1)
    assert_user_errors(errors, "the callbacks Every are in another order", "every=1", "self.name = '...'")

    # Another value is no other order, and neither is another number in all of them.
    pool.run(hooked, values | {"steps": 5}, Every(1), Every(3), world=1)
    pool.run(hooked, values | {"steps": 6}, Every(1), Every(3), world=1)


class Places:
    def before_batch(self, run: Any, micro: Any) -> None:
        raise AssertionError


def test_a_callback_that_may_follow_places_is_refused_where_they_move(pool: Pool) -> None:
    moving = BASE | {"load_balance": "auto", "micro_batch": 1}
    errors = pool.errors(hooked, moving, Places(), world=2)
    assert_user_errors(errors, "Places.before_batch() cannot be used with load_balance=auto", "leave load_balance out")
    pool.run(fit, Calls(ProgressiveSizes({0: 9}, crop_sequences)), moving, world=2)
