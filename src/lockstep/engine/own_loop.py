"""A custom loop around the same step that `fit` runs:

with lockstep.start(global_batch=64, steps=1000) as run:
    model, optimizer = run.setup(model, optimizer)
    for step in run.steps(dataset):
        for x, y in step:
            step.backward(loss_sum, weight=len(x))
        step.apply()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.engine.checks.guards import GradientGuard
from lockstep.engine.end import close, end_training
from lockstep.engine.evaluation.evaluator import EvaluationSet
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.model_setup import ModelSetup
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.engine.start_check.check import check_own_loop, snapshot_for_own_loop
from lockstep.errors import UserError
from lockstep.optim.user_scheduler import SchedulerRate, is_scheduler
from lockstep.parallel.driver import Reduced
from lockstep.parallel.inner_gradients import TORCH_ENGINE, use_engine
from lockstep.parallel.meta.init import check_init, fill_model, init_as_configured
from lockstep.parallel.several_models import SeveralModels
from lockstep.runtime import heartbeat
from lockstep.runtime.seeds import derive, seed_torch
from lockstep.task import Loss, Metric, MicroBatch, StepBatches, StepResult, Weight

BREAK_TIMEOUT = timedelta(seconds=30)  # for all ranks to leave the loop after one of them did


class OwnRun(BuiltRunView):
    """The object that `lockstep.start` yields. The call of `steps` turns its RunBuilder into a Run."""

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
        moved to the device, and not wrapped.
        """
        parts = [model, *others]
        models = [part for part in parts if isinstance(part, nn.Module)]
        schedulers = [part for part in parts if is_scheduler(part)]
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        _check_parts(parts)

        if not optimizers:
            moved = self._setup_frozen(models)
            return moved[0] if len(moved) == 1 else moved

        several = SeveralModels(models) if len(models) > 1 else None
        if _are_trained_in_turn(models, optimizers):
            self._builder.expect_unused_parameters("each of several models has an optimizer of its own")

        setup = self._builder.setup_model(several or model, lambda _: optimizers, schedulers=lambda _: schedulers)
        self._check_setup(setup, len(optimizers))

        # A direct optimizer.step() would apply gradient sums that are not divided yet.
        setup.optimizers.refuse_direct_steps()

        # Return wrapped models in place of the plain ones. The setting `optimizer` may also have replaced optimizers.
        module = setup.driver.module
        wrapped_models = several.called_by(module) if several else iter([module])
        replaced = {id(model): wrapped for model, wrapped in zip(models, wrapped_models, strict=True)}
        replaced |= {id(own): new for own, new in zip(optimizers, setup.optimizers.all, strict=True)}
        return tuple(replaced.get(id(part), part) for part in parts)

    def _check_setup(self, setup: ModelSetup, optimizers: int) -> None:
        """Raise if a custom loop cannot run this model, or if the user has made another number of optimizers."""
        if not setup.driver.role.runs_whole_model:
            raise UserError(
                "a pipeline (mesh.pp) cannot run in a custom loop",
                "such a loop computes the loss of one micro-batch after another; in a pipeline all of them are in "
                "flight together, and only the last stage computes the loss",
                "write a Task and use lockstep.fit or `lockstep train`; or set strategy=fsdp",
            )

        if len(setup.optimizers.all) != optimizers:
            raise UserError(
                f"optimizer={self._builder.config.optimizer} makes two optimizers of one",
                "a custom loop names the optimizers that it steps",
                "make both in your script: muon, adamw = torch.optim.Muon(...), torch.optim.AdamW(...); "
                "step.apply(muon, adamw)",
            )

    def _setup_frozen(self, models: list[nn.Module]) -> list[nn.Module]:
        """Move models without an optimizer to the device. They are neither wrapped nor saved."""
        for model in models:
            if any(p.requires_grad for p in model.parameters()):
                raise UserError(
                    f"run.setup(model) has no optimizer, and {type(model).__name__} has trainable parameters",
                    "nothing would update them",
                    "model, optimizer = run.setup(model, optimizer); or freeze it with model.requires_grad_(False)",
                )

        for model in models:
            check_init(model, self._builder.config, trained=False)
            if any(p.is_meta for p in model.parameters()):
                fill_model(model, (), lambda _: None, self._builder.runtime)

        return [model.to(self.device) for model in models]

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function `(model, *batch)` to call in the loop: `loss = run.compile(loss)`, after `run.setup`.

        It is compiled together with the model if `compile` says so and it can be. Without this call the model alone is.
        """
        driver = self._builder.driver
        if driver is None or isinstance(driver.model, SeveralModels):
            raise UserError(
                "run.compile(function) needs the one model that the function calls",
                "run.setup was not called yet" if driver is None else "run.setup got several models",
                "call it after model, optimizer = run.setup(model, optimizer)",
            )

        # Without a compiler nothing is compiled, or the model's forward is collective and compiled by itself.
        return driver.compiler.around(function) if driver.compiler else function

    def register(self, name: str, part: Any) -> None:
        """Save `part` with every checkpoint and restore its state on resume. Call it before `run.steps`.

        `part` is anything with `state_dict` and `load_state_dict`, such as a moving average.
        """
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UserError(
                f"run.register({name!r}, part) needs a part with state; {type(part).__name__} has none",
                "",
                "pass an object with state_dict() and load_state_dict(state)",
            )

        if self._run is not None:
            raise UserError(
                f"run.register({name!r}, ...) was called after run.steps(...)", "", "call it before run.steps(...)"
            )

        self._builder.add_part(name, part)

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

        self._builder.use_hooks(Hooks(self, callbacks=self._builder.callbacks))
        self._run = run = self._builder.setup_run(dataset, collate)
        run.hooks.before_training()
        run.check_start()
        gradients = GradientGuard(run.model_setup.optimizers)

        # `close` finds it True if the user's code left the loop with `break`.
        self._in_loop = True
        for batches in run.step_batches():
            if run.hooks.follow_batches:
                batches.micro_batches = run.hooks.around_batches(batches.micro_batches)

            step = OwnStep(run, batches, gradients, passes)
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
        decides: bool | None = None,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over `dataset`. Every sample counts once, at any world size.

        After each step, the first evaluation with `monitor=True` steps ReduceLROnPlateau. Early stopping and
        `checkpoint.best` follow all of them. `name` tells several datasets apart: their results are logged as
        eval/NAME/loss. `metrics` are torchmetrics by name, updated with the `outputs` of each loss. `decides` is the
        old name of `monitor`.
        """
        if decides is not None:
            raise UserError(
                "run.evaluate has no argument decides any more: it is called monitor",
                "",
                f"call run.evaluate(..., monitor={decides})",
            )

        self._check_model("run.evaluate(dataset, loss)")

        chosen = EvaluationSet(dataset, loss, collate, name, monitor, metrics or {})

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
        steps_done = run.stepper.counters.steps_done
        beats = run.runtime.heartbeat

        # Inside the loop the other ranks may still be training: wait for them, or name the rank that left.
        if self._in_loop:
            beats.beat("collective")
            beats.set_detail("leaving the loop")
            waits_for_us = partial(heartbeat.waits_in_step, steps_done, self.world_size)
            if not run.runtime.store_barrier(f"left-at-{steps_done}", BREAK_TIMEOUT, waits_for_us):
                raise self._left_alone(steps_done, left_by)

            beats.set_detail("")

        beats.beat("end")

        rate = run.stepper.learning_rate
        if isinstance(rate, SchedulerRate) and rate.needs_evaluations and not rate.evaluations:
            run.recorder.event("warning", reason="ReduceLROnPlateau never moved: run.evaluate was not called")

        end_training(run)
        close(run)

    def _left_alone(self, step: int, left_by: str) -> UserError:
        return UserError(
            f"rank {self.rank} of {self.world_size} left `for step in run.steps(...)` at step {step}, and not all "
            "of the others did",
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
        if self._builder.model_setup is None:
            raise UserError(
                f"{call} was called before run.setup",
                "no model yet",
                "model, optimizer = run.setup(model, optimizer), before the loop",
            )


class OwnStep:
    """One optimizer step. In each pass, iterate over its batches, call `backward` for each of them, then `apply`."""

    def __init__(self, run: Run, batches: StepBatches, gradients: GradientGuard, passes: int = 1):
        self._run = run
        self._batches = batches
        self._gradients = gradients

        # The batches of this step, and the passes over them.
        self._yielded = 0  # batches so far, in this pass
        self._passes = passes
        self._saved_batches: list[MicroBatch] = []  # for later passes
        self.passes_done = 0

        # What a user may read.
        self.index = run.stepper.counters.steps_done
        self.first = 0  # offset of the current batch's first sample in the global step
        self.ended = False
        self.result: StepResult | None = None

        # Random numbers that the loop draws before its first batch must not depend on the step of a resume.
        seed_torch(derive(run.config.seed, "step", self.index), run.runtime.device)
        self._driver = run.driver
        self._watched = use_engine(self._driver.watched_engine)  # for gradients that the loop computes itself
        self._unwatched = use_engine(TORCH_ENGINE)
        self._begin_pass()

        # State that the first forward of the run must not change; compared in the first backward.
        self._snapshot = snapshot_for_own_loop(run)

    def __iter__(self) -> Iterator[Any]:
        if self.ended:
            raise UserError(
                f"the loop went over the batches of step {self.index} again, after step.apply() had ended the step",
                "",
                f"announce the number of passes: run.steps(dataset, passes={self._passes + 1})",
            )

        # Not at the end of the previous pass: after `measure` its gradients stay available until here.
        if self._progress.pass_index != self.passes_done:
            self._begin_pass()

        for micro in self._batches if self.passes_done == 0 else self._saved_batches:
            if self.passes_done == 0 and self._passes > 1:
                self._saved_batches.append(micro)

            self._yielded += 1
            self.first = micro.first
            self._driver.before_forward(micro, self._progress)
            self._gradients.note()

            # The body of the user's loop runs at this yield, under autocast. It must call `backward` once.
            with self._watched, self._progress.autocast():
                yield micro.data

            if self._progress.backwards_done != self._yielded:
                raise self._backward_count_error("0 times")

    @property
    def padding(self) -> bool:
        """Whether this batch is padding, with weight 0. It runs only because collectives need every rank."""
        return self._progress.micro is not None and self._progress.micro.padding

    def backward(self, loss_sum: Tensor, weight: Weight, **metrics: Metric) -> None:
        """Backpropagate the SUM of the loss over this batch; `weight` is the number of terms in the sum.

        `loss_sum` and the metrics, which are sums as well, have shape ().
        """
        if self._progress.backwards_done == self._yielded:
            raise self._backward_count_error("twice")

        self._gradients.check("step.backward")

        if self._snapshot:
            check_own_loop(self._run, self._snapshot)
            self._snapshot = None

        # Autocast is on in the body of the loop, but must be off in the backward.
        with self._unwatched, self._run.stepper.context.precision.no_autocast():
            loss = Loss(loss_sum, weight, metrics)
            if self._run.hooks.follow_losses:
                loss = self._run.hooks.before_backward(loss)

            self._driver.backward(loss, self._progress)

        # The exchange is over, and the loop may do anything now, but `apply` needs these gradients.
        if self._progress.backwards_done == self._batches.count:
            self._gradients.note()
            self._run.runtime.heartbeat.beat("user code")

    def apply(self, *optimizers: torch.optim.Optimizer) -> StepResult | None:
        """Divide by the global weight, clip, and step the optimizers.

        If there are several, pass those to step; the gradients of the others are dropped. Return the newest known
        result: on a GPU it may be that of the previous step.
        """
        self._check_pass("step.apply()")
        indices = self._indices(optimizers)
        reduced = self._reduced()

        # Only these optimizers are stepped, so the gradients of all other parameters are dropped.
        if indices is not None:
            reduced = reduced.drop_others(self._run.model_setup.optimizers.parameter_ids(indices))
            if not reduced.parameters:
                raise UserError(
                    f"step {self.index} has no gradient for any parameter of the optimizer in step.apply(optimizer)",
                    "the loss does not depend on them",
                    "pass the optimizer of the parameters that the loss depends on",
                    cause="unused",
                )

        self.result = self._run.stepper.apply(self._progress, reduced, indices)
        self._end_pass()
        return self.result

    def measure(self) -> StepResult:
        """End a pass without an update. Until the next pass begins, p.grad is the gradient of the mean loss.

        The result holds the norm of this gradient over all ranks. The last pass of a step must end with `apply`.
        """
        self._check_pass("step.measure()")
        if self._progress.ends_step:
            raise UserError(
                f"step.measure() was called in the last of {self._passes} passes over the batches of step {self.index}",
                "a step ends with step.apply()",
                f"add a pass over the batches: run.steps(dataset, passes={self._passes + 1})",
            )

        # On a GPU the host may not have read the result of the previous update yet.
        self._run.requests.accept_last()
        self.result = self._run.stepper.measure(self._progress, self._reduced())
        self._end_pass()
        return self.result

    def check_ended(self) -> None:
        """Raise if the user's loop goes on to the next step without `apply`."""
        if self.ended:
            return

        several = self._passes > 1
        in_pass = f" in pass {self.passes_done + 1} of {self._passes}" if several else ""
        raise UserError(
            f"step {self.index} ended without step.apply(){in_pass}",
            "",
            "call step.apply() after the loop over its batches" + (", once per pass" if several else ""),
        )

    def _reduced(self) -> Reduced:
        """Return the reduced gradients. Some drivers exchange them only now."""
        self._run.runtime.heartbeat.beat("exchange")
        return self._driver.collect_reduced()

    def _begin_pass(self) -> None:
        self._yielded = 0
        self._progress = self._run.stepper.begin(self._batches, self.passes_done, self._passes)
        self._gradients.forget()
        self._driver.begin()

    def _end_pass(self) -> None:
        self.passes_done += 1
        if self.passes_done < self._passes:
            self._run.requests.accept(self.result)
        else:
            # End the step here, not after the body of the loop, so that the rest of the body sees the new step count.
            self.ended = True
            self._saved_batches.clear()
            self._run.end_step(self._batches, self.result)

        self._run.runtime.heartbeat.beat("user code")

    def _check_pass(self, call: str) -> None:
        if self.ended or self._progress is not self._run.stepper.progress:
            raise UserError(
                f"{call} was called on step {self.index}, which has ended",
                "",
                "call apply() once per step, before the next one begins; to go over its batches more than once, "
                "run.steps(dataset, passes=2)",
            )

        # Without the last backward, which includes the all-reduce, the other ranks would wait.
        done = self._progress.backwards_done if self._progress.pass_index == self.passes_done else 0
        if done != self._batches.count:
            raise UserError(
                f"{call} was called after {done} of {self._batches.count} batches of the step",
                "",
                "iterate over all batches first: for batch in step: ... step.backward(loss_sum, weight)",
            )

        self._gradients.check(call)

    def _indices(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[int] | None:
        """Return the indices of the optimizers to step, or None for all of them."""
        known = self._run.model_setup.optimizers.all
        if len(known) == 1 and not optimizers:
            return None

        if not optimizers:
            raise UserError(
                f"step.apply() must name the optimizers to step, because there are {len(known)}",
                "a GAN's discriminator must not learn from the generator's loss",
                "step.apply(optimizer) steps one of them and drops the gradients of the others; or pass all of them",
            )

        indices = [
            next((i for i, candidate in enumerate(known) if candidate is optimizer), None) for optimizer in optimizers
        ]
        if None in indices:
            raise UserError(
                "step.apply(optimizer) got something other than the optimizers of run.setup",
                "",
                "pass what run.setup returned: model, first, second = run.setup(model, first, second)",
            )

        # If all are named, no gradient is dropped.
        distinct = {index for index in indices if index is not None}
        return sorted(distinct) if len(distinct) < len(known) else None

    def _backward_count_error(self, times: str) -> UserError:
        return UserError(
            f"step.backward was called {times} for batch {self._yielded - 1} of step {self.index}",
            "",
            "call step.backward exactly once per batch; pass weight=0 if a batch should not count",
        )


def _are_trained_in_turn(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether each of several models belongs to one of several optimizers, as in a GAN."""
    owners: list[set[int]] = []  # of each model, the optimizers that update a part of it
    for model in models:
        own = {id(p) for p in model.parameters() if p.requires_grad}
        owners.append({i for i, optimizer in enumerate(optimizers) if own & _parameter_ids(optimizer)})

    return all(len(found) <= 1 for found in owners) and len(set[int]().union(*owners)) > 1


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _check_parts(parts: list[Any]) -> None:
    """Raise a UserError if `run.setup` got something that it does not take."""
    for part in parts:
        if not isinstance(part, nn.Module | torch.optim.Optimizer) and not is_scheduler(part):
            raise UserError(
                f"run.setup got a {type(part).__name__}: it takes models, torch's optimizers and schedulers",
                "",
                "instead of other schedulers pass a function of the step that returns a share of the peak: "
                "run.setup(model, optimizer, lambda step: 0.99**step)",
            )
