"""A custom loop around the same step that `fit` runs:

with lockstep.start(global_batch=64, steps=1000) as run:
    model, optimizer = run.setup(model, optimizer)
    for step in run.steps(dataset):
        for x, y in step:
            step.backward(loss_sum, weight=len(x))
        step.apply()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from lockstep.engine.checks.guards import GradientGuard
from lockstep.engine.end import close, end_training
from lockstep.engine.evaluation.evaluator import make_set
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.own_step import OwnStep
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.engine.trained_model import TrainedModel
from lockstep.errors import UserError
from lockstep.optim.schedulers.user_scheduler import is_scheduler
from lockstep.parallel.compiled.compiler import compiler_of
from lockstep.parallel.meta.init import check_init, fill_model, init_as_configured
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.runtime.heartbeat import waits_in_step
from lockstep.runtime.seeds import HostSeeds
from lockstep.task import Loss

BREAK_TIMEOUT = timedelta(seconds=30)  # for all ranks to leave the loop after one of them did


class OwnRun(BuiltRunView):
    """The object that `lockstep.start` yields. Calling `steps` turns its RunBuilder into a Run."""

    def __init__(self, builder: RunBuilder):
        super().__init__(builder)
        builder.reads_loss = True  # the loop may read `step.result.loss`
        self._run: Run | None = None
        self._in_loop = False

    @contextmanager
    def init_module(self) -> Iterator[None]:
        """Build models inside this context as the setting `init` says: `with run.init_module(): model = Net()`."""
        with init_as_configured(self._builder.config):
            yield

    def setup(self, model: nn.Module, *others: Any) -> Any:
        """Return the model to call from now on, and its optimizers: `model, optimizer = run.setup(model, optimizer)`.

        Pass everything that the run trains in one call: models, optimizers and schedulers (torch's, or a function of
        the step). They are returned in the same order. A frozen model, such as a teacher, may be passed alone: it is
        moved to the device.
        """
        given = [model, *others]
        _check_setup_arguments(given)
        models = [each for each in given if isinstance(each, nn.Module)]
        schedulers = [each for each in given if is_scheduler(each)]
        optimizers = [each for each in given if isinstance(each, torch.optim.Optimizer)]

        # Without an optimizer there is nothing to train.
        if not optimizers:
            moved = self._setup_frozen(models)
            return moved[0] if len(moved) == 1 else moved

        # A driver has one model. Several are put into one module, and each is called through it.
        several = SeveralModels(models) if len(models) > 1 else None
        if _are_trained_in_turn(models, optimizers):
            self._builder.expect_unused_parameters("each of several models has an optimizer of its own")

        trained = self._builder.setup_model(several or model, lambda _: optimizers, schedulers=lambda _: schedulers)
        self._check_setup(trained, len(optimizers))

        # A direct optimizer.step() would apply gradient sums that are not divided yet.
        trained.optimizers.refuse_direct_steps()

        # One model is returned as it is. The setting `optimizer` may have replaced optimizers.
        replaced: dict[int, Any] = {id(model): proxy for model, proxy in zip(models, several or models, strict=True)}
        replaced |= {id(own): new for own, new in zip(optimizers, trained.optimizers.all, strict=True)}
        return tuple(replaced.get(id(each), each) for each in given)

    def _check_setup(self, trained: TrainedModel, optimizers: int) -> None:
        """Raise if a custom loop cannot run this model, or if the user has made another number of optimizers."""
        if not runs_whole_model(trained.driver):
            raise UserError(
                "a pipeline (mesh.pp) cannot run in a custom loop",
                "such a loop computes the loss of one micro-batch after another; in a pipeline all of them are in "
                "flight together, and only the last stage computes the loss",
                "write a Task and use lockstep.fit or `lockstep train`; or set strategy=fsdp",
            )

        if len(trained.optimizers.all) != optimizers:
            raise UserError(
                f"optimizer={self._builder.config.optimizer} makes two optimizers of one",
                "a custom loop names the optimizers that it steps",
                "make both in your script: muon, adamw = torch.optim.Muon(...), torch.optim.AdamW(...); "
                "step.apply(muon, adamw)",
            )

    def _setup_frozen(self, models: list[nn.Module]) -> list[nn.Module]:
        """Move models without an optimizer to the device. They are not saved."""
        for model in models:
            if any(p.requires_grad for p in model.parameters()):
                raise UserError(
                    f"run.setup(model) has no optimizer, and {type(model).__name__} has trainable parameters",
                    "nothing would update them",
                    "model, optimizer = run.setup(model, optimizer); or freeze it with model.requires_grad_(False)",
                )

        # With `init=meta` a model has no data yet, and no driver will fill it.
        for model in models:
            check_init(model, self._builder.config, trained=False)
            if any(p.is_meta for p in model.parameters()):
                fill_model(model, (), lambda _: None, self._builder.runtime)

        return [model.to(self.device) for model in models]

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function `(model, *batch)` to call in the loop: `loss = run.compile(loss)`, after `run.setup`.

        It is compiled together with the model, if `compile` says so and torch can do it. Without this call, only the
        model is compiled.
        """
        driver = self._builder.driver
        if driver is None or isinstance(driver.model, SeveralModels):
            raise UserError(
                "run.compile(function) needs the one model that the function calls",
                "run.setup was not called yet" if driver is None else "run.setup got several models",
                "call it after model, optimizer = run.setup(model, optimizer)",
            )

        # Without a compiler nothing is compiled, or the model's forward is collective and compiled by itself.
        compiler = compiler_of(driver)
        if compiler is None:
            return function

        return compiler.around(function, self._run.steps_done + 1 if self._run else 1)

    def register(self, name: str, stateful: Any) -> None:
        """Save `stateful` with every checkpoint and restore its state on resume. Call it before `run.steps`.

        `stateful` is anything with `state_dict` and `load_state_dict`, such as a moving average. If it also has
        `parameter_tensors`, a tensor for each parameter by its name, these are saved and restored like the parameters,
        under any strategy; `restart(names)` is then called for those that a checkpoint lacks.
        """
        if not (hasattr(stateful, "state_dict") and hasattr(stateful, "load_state_dict")):
            raise UserError(
                f"run.register({name!r}, stateful) needs a stateful object; {type(stateful).__name__} has no state",
                "",
                "pass an object with state_dict() and load_state_dict(state)",
            )

        if self._run is not None:
            raise UserError(
                f"run.register({name!r}, ...) was called after run.steps(...)", "", "call it before run.steps(...)"
            )

        self._builder.registered.add(name, stateful)
        self._builder.registers_own = True

    def add_callback(self, callback: Any) -> None:
        """Call the hooks of `callback` during the run, see `lockstep.callbacks`. Call it before `run.steps`."""
        if self._run is not None:
            raise UserError("run.add_callback was called after run.steps(...)", "", "call it before run.steps(...)")

        self._builder.callbacks.append(callback)

    def steps(
        self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate, passes: int = 1
    ) -> Iterator[OwnStep]:
        """Yield every step of the run, epoch after epoch.

        `passes`: how often the loop iterates over the batches of each step. Each pass has its own update.
        """
        self._check_model("run.steps(dataset)")
        self._check_passes(passes)
        self._check_first_call()

        self._builder.passes = passes

        # Make the hooks first: a step computes more if some exist.
        self._builder.use_hooks(Hooks(self, callbacks=self._builder.callbacks))
        self._run = run = self._builder.setup_run(dataset, collate)
        run.hooks.before_training()
        run.check_start()
        run.hooks.inject_faults()

        gradients = GradientGuard(run.trained_model.optimizers)
        host_seeds = HostSeeds(run.config.seed, always=run.config.exact)

        # From here on, until the run ends, the user's code may call the model between steps.
        for part in run.driver.parts:
            part.begin_user_code()

        # `close` finds it True if the user's code left the loop with `break`.
        self._in_loop = True
        for batches in run.step_batches():
            step = OwnStep(run, batches, gradients, host_seeds)
            try:
                yield step
            finally:
                gradients.forget()

            step.check_ended()
            run.maintain()

        self._in_loop = False

    def evaluate(
        self,
        dataset: Any,
        loss: Callable[[nn.Module, Any], Loss],
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        name: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        monitor: bool = True,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over `dataset`, which may be a DataLoader: its parts are taken.

        Every sample counts once, at any world size.

        After each step, the first evaluation with `monitor=True` steps ReduceLROnPlateau. Early stopping and
        `checkpoint.best` follow all of them. `name` tells several datasets apart: their results are logged as
        eval/NAME/loss. `metrics` are torchmetrics by name, updated with the `outputs` of each loss.
        """
        self._check_model("run.evaluate(dataset, loss)")
        chosen = make_set(dataset, loss, collate, name=name, monitored=monitor, metrics=metrics or {})

        # Ranks that do not call it are in another collective: after the loop, in one of the end of the run.
        self._builder.runtime.collectives.all_gather_json(None, "run.evaluate(...)")

        # Before the first step there is no Run yet, and evaluate.batch must be set.
        if self._run:
            (evaluation,) = self._run.evaluate([chosen])
        else:
            evaluation = self._builder.evaluate(chosen)

        return {"loss": evaluation.loss, **evaluation.metrics}

    def close(self, left_by: str = "") -> None:
        """Save the weights and write the report, if `steps` was called. `left_by` describes what ended the loop."""
        run = self._run
        if run is None:
            return

        # After a `break` on this rank only, the other ranks would wait forever in a collective. A barrier through the
        # store detects this, and heartbeats detect it before the timeout.
        steps_done = run.steps_done
        heartbeat = run.runtime.heartbeat
        if self._in_loop:
            heartbeat.beat("collective")
            heartbeat.set_detail("leaving the loop")

            waits_for_us = partial(waits_in_step, steps_done, self.world_size)
            if not run.runtime.store_barrier(f"left-at-{steps_done}", BREAK_TIMEOUT, waits_for_us):
                raise self._left_alone(steps_done, left_by)

            heartbeat.set_detail("")

        heartbeat.beat("end")
        rate = run.learning_rate
        if rate.needs_evaluations and not rate.evaluations:
            run.recorder.event("warning", reason="ReduceLROnPlateau never moved: run.evaluate was not called")

        end_training(run)
        close(run)

    def _left_alone(self, steps_done: int, left_by: str) -> UserError:
        """Return the error for a rank that has left the loop while others are still in it."""
        return UserError(
            f"rank {self.rank} of {self.world_size} left `for step in run.steps(...)` at step {steps_done}, and not "
            "all of the others did",
            left_by,
            "call run.stop() instead of break or sys.exit(): it stops all ranks; or decide with "
            "`if run.agree(...): break`",
        )

    def _check_first_call(self) -> None:
        if self._run is not None:
            raise UserError(
                "run.steps(dataset) was called a second time",
                "the first call goes over all steps of the run, epoch after epoch",
                "set epochs or steps in lockstep.start(...), and call run.steps once",
            )

    def _check_passes(self, passes: int) -> None:
        if passes < 1:
            raise UserError(f"run.steps(passes={passes}) must have at least one pass", "", "pass 1 or more")

        if passes > 1 and self._builder.config.load_balance == "auto":
            raise UserError(
                f"run.steps(passes={passes}) cannot be used with load_balance=auto",
                "it measures steps of one pass",
                "leave load_balance out",
            )

    def _check_model(self, call: str) -> None:
        if self._builder.trained_model is None:
            raise UserError(
                f"{call} was called before run.setup",
                "no model yet",
                "model, optimizer = run.setup(model, optimizer), before the loop",
            )


def _check_setup_arguments(given: list[Any]) -> None:
    """Raise a UserError if `run.setup` got something that it does not take."""
    for each in given:
        if not isinstance(each, nn.Module | torch.optim.Optimizer) and not is_scheduler(each):
            raise UserError(
                f"run.setup got a {type(each).__name__}: it takes models, torch's optimizers and schedulers",
                "",
                "instead of other schedulers pass a function of the step that returns a share of the peak: "
                "run.setup(model, optimizer, lambda step: 0.99**step)",
            )


def _are_trained_in_turn(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether each of several models belongs to one of several optimizers, as in a GAN."""
    owners: list[set[int]] = []  # for each model, the optimizers that update a part of it
    for model in models:
        own = {id(p) for p in model.parameters() if p.requires_grad}
        owners.append({i for i, optimizer in enumerate(optimizers) if own & _parameter_ids(optimizer)})

    # One model with two optimizers, or one optimizer for all: then every step gives all of them gradients.
    return all(len(found) <= 1 for found in owners) and len(set[int]().union(*owners)) > 1


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


# ---- several models of one run, as one module ----
#
# Their gradients are reduced together, and one checkpoint holds them all.


class SeveralModels(nn.Module):
    """A module whose forward gets the index of the model to call. Parameters are named `0.NAME`, `1.NAME` and so on."""

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        self.count = len(models)
        for index, model in enumerate(models):
            self.add_module(str(index), model)

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(str(index))(*args, **kwargs)

    def __iter__(self) -> Iterator[OneOfSeveral]:
        """Yield a proxy of each model. Its calls go through this module."""
        for index in range(self.count):
            yield OneOfSeveral(self, index, self.get_submodule(str(index)))


class OneOfSeveral:
    """A proxy of one of the models, for the user's code. It has the attributes, parameters and names of that model."""

    def __init__(self, module: SeveralModels, index: int, model: nn.Module):
        # Not by assignment, which `__setattr__` forwards to the model.
        vars(self).update(_module=module, _index=index, _model=model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(self._index, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # A user may copy a model for a moving average of its weights: copy the model itself, not the proxy.
        return copy.deepcopy(self._model, memo)
