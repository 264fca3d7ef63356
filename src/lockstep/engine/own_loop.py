"""A custom loop, on the same step:

with lockstep.start(global_batch=64, steps=1000) as run:
    model, optimizer = run.setup(model, optimizer)
    for step in run.steps(dataset):
        for x, y in step:
            step.backward(loss_sum, weight=len(x))
        step.apply()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.engine.checks import GradientGuard
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.engine.start_check.check import check_own_loop, keep_for_own_loop
from lockstep.errors import UserError
from lockstep.optim.own_scheduler import SchedulerRate, is_scheduler
from lockstep.parallel.driver import BaseDriver, Reduced
from lockstep.parallel.inner_gradients import start_watching, stop_watching, unwatched
from lockstep.parallel.meta.init import check_made_as_asked, fill, model_made_as_asked
from lockstep.parallel.several_models import SeveralModels
from lockstep.precision import full_precision
from lockstep.runtime import heartbeat
from lockstep.runtime.seeds import derive, seed_torch
from lockstep.task import Loss, Metric, MicroBatch, StepBatches, StepResult, Weight

BREAK_TIMEOUT = timedelta(seconds=30)  # for all ranks to leave the loop after one of them did


class OwnRun:
    """What `lockstep.start` yields. Before `steps` there is only a builder; the Run exists from then on."""

    def __init__(self, builder: RunBuilder):
        self.rank = builder.runtime.world.rank
        self.world_size = builder.runtime.world.size
        self.device = builder.runtime.device
        self.run_dir = builder.folder.path
        self._builder = builder
        self._run: Run | None = None
        self._in_loop = False

    @contextmanager
    def init_module(self) -> Iterator[None]:
        """Make models as `init` says: `with run.init_module(): model = Net()`. With init=host this does nothing."""
        with model_made_as_asked(self._builder.config):
            yield

    def setup(self, model: nn.Module, *others: Any) -> Any:
        """Return the model to call from now on, and its optimizers: `model, optimizer = run.setup(model, optimizer)`.

        All that a run trains comes in one call: several models, several optimizers, and schedulers, torch's or a
        function of the step. They are returned in their places. A model with nothing to train (a frozen teacher) may be
        passed alone: it is moved to the device, not wrapped.
        """
        parts = [model, *others]
        models = [part for part in parts if isinstance(part, nn.Module)]
        schedulers = [part for part in parts if is_scheduler(part)]
        optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        for part in parts:
            if not isinstance(part, nn.Module | torch.optim.Optimizer) and not is_scheduler(part):
                raise UserError(
                    f"run.setup got a {type(part).__name__}: it takes models, torch's optimizers and schedulers",
                    "",
                    "in place of any other scheduler pass a function of the step, which returns a share of the peak: "
                    "run.setup(model, optimizer, lambda step: 0.99**step)",
                )

        # Without an optimizer nothing is trained, so there is nothing to wrap or to save.
        if not optimizers:
            if any(p.requires_grad for model in models for p in model.parameters()):
                raise UserError(
                    f"run.setup(model) has no optimizer, and {type(model).__name__} has trainable parameters",
                    "nothing would update them",
                    "model, optimizer = run.setup(model, optimizer); or freeze it with model.requires_grad_(False)",
                )

            for part in models:
                check_made_as_asked(part, self._builder.config, trained=False)
                if any(p.is_meta for p in part.parameters()):
                    fill(part, (), lambda _: None, self._builder.runtime)
            moved = [model.to(self.device) for model in models]
            return moved[0] if len(moved) == 1 else moved

        several = SeveralModels(models) if len(models) > 1 else None
        setup = self._builder.setup_model(several or model, lambda _: optimizers, schedulers=lambda _: schedulers)
        if not setup.driver.role.runs_whole_model:
            raise UserError(
                "a pipeline (mesh.pp) cannot run in a custom loop",
                "such a loop computes the loss of one micro-batch after another; in a pipeline all of them are in "
                "flight together, and only the last stage knows the loss",
                "write a Task and use lockstep.fit or `lockstep train`; or choose strategy=fsdp",
            )

        # A direct optimizer.step() would apply sums that are not yet divided.
        setup.optimizers.refuse_direct_steps()

        # `optimizer=NAME` puts others in the places of the optimizers.
        module = setup.driver.module
        called, stepped = several.called_by(module) if several else iter([module]), iter(setup.optimizers.all)
        new = {id(part): next(called) for part in models} | {id(part): next(stepped) for part in optimizers}
        return tuple(new.get(id(part), part) for part in parts)

    def register(self, name: str, part: Any) -> None:
        """Save `part` with every checkpoint and restore its state on resume. Call it before `run.steps`.

        `part` is anything with `state_dict` and `load_state_dict`, such as a moving average.
        """
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UserError(
                f"run.register({name!r}, part) needs a part with a state; {type(part).__name__} has none",
                "",
                "pass an object with state_dict() and load_state_dict(state)",
            )

        if self._run is not None:
            raise UserError(
                f"run.register({name!r}, ...) was called after run.steps(...)", "", "call it before run.steps(...)"
            )

        self._builder.add_part(name, part)

    def steps(
        self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate, passes: int = 1
    ) -> Iterator[OwnStep]:
        """Yield every step of the run, epoch after epoch.

        `passes`: how often the loop goes over the batches of a step, each time with an update of its own.
        """
        self._check_model("run.steps(dataset)")
        self._check_passes(passes)
        if self._run is not None:
            raise UserError(
                "run.steps(dataset) was called a second time",
                "the first call goes over all steps of the run, epoch after epoch",
                "set epochs or steps in lockstep.start(...), and call run.steps once",
            )

        self._run = run = self._builder.setup_run(dataset, collate)
        run.check_start()
        gradients = GradientGuard(run.model_setup.optimizers)

        # Still True in close() if the user's code leaves the loop with `break`.
        self._in_loop = True
        for batches in run.step_batches():
            step = OwnStep(run, batches, gradients, passes)
            yield step
            if not step.ended:
                in_pass = f" in pass {step.passes_done + 1} of {passes}" if passes > 1 else ""
                raise UserError(
                    f"step {step.index} ended without step.apply(){in_pass}",
                    "",
                    "call step.apply() after the loop over its batches" + (", once per pass" if passes > 1 else ""),
                )

            run.maintain()
        self._in_loop = False

    def evaluate(
        self,
        dataset: Any,
        loss: Callable[[nn.Module, Any], Loss],
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        moves_rate: bool = True,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over `dataset`: every sample once, the same at any world size.

        ReduceLROnPlateau follows the first evaluation of a step, unless that has `moves_rate=False`.
        """
        self._check_model("run.evaluate(dataset, loss)")
        # Before the first step there is no Run yet, and evaluate.batch must be set.
        if self._run:
            evaluation = self._run.evaluate(dataset, loss, collate, moves_rate=moves_rate)
        else:
            evaluation = self._builder.evaluate(dataset, loss, collate)
        return {"loss": evaluation.loss, **evaluation.metrics}

    def agree(self, value: bool) -> bool:
        """Return True on every rank if `value` is true on any. Collective: every rank must call it."""
        return any(self._builder.runtime.collectives.gather_json(bool(value)))

    def stop(self) -> None:
        """End the run after the next gradient all-reduce, on all ranks, even if only this one calls it."""
        if self._run is None:
            raise UserError(
                "run.stop() was called before the first step", "", "call it inside `for step in run.steps(...)`"
            )
        # The control word of the next step carries it to the other ranks.
        self._run.stepper.request(stop=True)

    def close(self, left_by: str = "") -> None:
        """Save the weights and write the report, if there was a loop. `left_by`: what ended the loop, if known."""
        # A script that only set up a model has nothing to save.
        run = self._run
        if run is None:
            return

        # After a `break` on this rank only, the others would wait for it for ever. They are asked over the store, which
        # works while they wait in a collective; heartbeats show sooner that they do.
        step = run.stepper.counters.step
        beats = run.runtime.heartbeat
        if self._in_loop:
            beats.beat("collective")
            beats.set_detail("leaving the loop")
            waits_for_us = partial(heartbeat.waits_in_step, step, self.world_size)
            if not run.runtime.store_barrier(f"left-at-{step}", BREAK_TIMEOUT, waits_for_us):
                raise self._left_alone(step, left_by)
            beats.set_detail("")
        beats.beat("end")

        rate = run.stepper.learning_rate
        if isinstance(rate, SchedulerRate) and rate.needs_evaluations and not rate.evaluations:
            run.recorder.event("warning", reason="ReduceLROnPlateau never moved: run.evaluate was not called")
        run.end_training()
        run.close()

    def _left_alone(self, step: int, left_by: str) -> UserError:
        return UserError(
            f"rank {self.rank} of {self.world_size} left `for step in run.steps(...)` at step {step}, and not all "
            "of the others did",
            left_by,
            "call run.stop() instead of break or sys.exit(): it stops all ranks; or decide with "
            "`if run.agree(...): break`",
        )

    def _check_passes(self, passes: int) -> None:
        if passes < 1:
            raise UserError(f"run.steps(passes={passes}) makes no sense", "", "pass 1 or more")
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
    """One optimizer step: iterate over its batches, call `backward` for each, then `apply`; once in every pass."""

    def __init__(self, run: Run, batches: StepBatches, gradients: GradientGuard, passes: int = 1):
        self._run = run
        self._batches = batches
        self._gradients = gradients
        self._taken = 0  # batches yielded so far, in this pass
        self._passes = passes
        self._kept: list[MicroBatch] = []  # for further passes
        self.passes_done = 0
        self.index = run.stepper.counters.step
        self.first = 0  # position of this batch's first sample in the global step, on any rank
        self.ended = False
        self.result: StepResult | None = None

        # The numbers that the loop draws before its first batch must not depend on where the run was resumed.
        seed_torch(derive(run.config.seed, "step", self.index), run.runtime.device)
        self._driver = cast(BaseDriver, run.driver)  # `setup` refused a pipeline
        self._begin_pass()

        # Until the first backward of the run: what its forward must not change.
        self._kept_state = keep_for_own_loop(run)

    def __iter__(self) -> Iterator[Any]:
        if self.ended:
            raise UserError(
                f"the loop went over the batches of step {self.index} again, after step.apply() had ended the step",
                "",
                f"say how often it goes over them: run.steps(dataset, passes={self._passes + 1})",
            )

        # Not at the end of the pass before: its gradients stay until now.
        if self._control.pass_index != self.passes_done:
            self._begin_pass()

        for micro in self._batches if self.passes_done == 0 else self._kept:
            if self.passes_done == 0 and self._passes > 1:
                self._kept.append(micro)
            self._taken += 1
            self.first = micro.first
            self._driver.before_forward(micro, self._control)
            self._gradients.note()

            # The loop's body runs here, under autocast. It must call `backward` once.
            start_watching(self._driver.before_inner_gradient)
            try:
                with self._control.autocast():
                    yield micro.data
            finally:
                stop_watching()
            if self._control.backwards_done != self._taken:
                raise self._miscounted("0 times")

    @property
    def padding(self) -> bool:
        """Whether this batch only keeps the rank in step with the others: its weight is 0, whatever you pass."""
        return self._control.micro is not None and self._control.micro.padding

    def backward(self, loss_sum: Tensor, weight: Weight, **metrics: Metric) -> None:
        """Backpropagate the SUM of the loss over this batch; `weight` is the number of its terms.

        `loss_sum` and the metrics, which are sums too, have shape ().
        """
        if self._control.backwards_done == self._taken:
            raise self._miscounted("twice")
        self._gradients.check("step.backward")

        if self._kept_state:
            check_own_loop(self._run, self._kept_state)
            self._kept_state = None

        # Autocast is on in the loop's body, but must not reach into the backward.
        with unwatched(), full_precision(self._run.stepper.context.precision):
            self._driver.backward(Loss(loss_sum, weight, metrics), self._control)
        self._gradients.note()
        if self._control.backwards_done == self._batches.count:
            self._run.runtime.heartbeat.beat("user code")  # the exchange is over, and the loop may do anything now

    def apply(self, *optimizers: torch.optim.Optimizer) -> StepResult | None:
        """Divide by the global weight, clip, and step the optimizers; with several, name those to step.

        The gradients of the others are dropped. Returns the newest outcome known (on a GPU, the previous).
        """
        self._check_pass("step.apply()")
        to_step = self._indices(optimizers)
        reduced = self._reduced()
        if to_step is not None:
            reduced = reduced.only(self._run.model_setup.optimizers.parameters_of(to_step))
            if not reduced.parameters:
                raise UserError(
                    f"step {self.index} has no gradient for any parameter of the optimizer in step.apply(optimizer)",
                    "the loss does not depend on them",
                    "pass the optimizer of the parameters that the loss depends on",
                )

        self.result = self._run.stepper.apply(self._control, reduced, to_step)
        self._end_pass()
        return self.result

    def measure(self) -> StepResult:
        """End a pass without an update: p.grad is the gradient of the mean until the next pass begins.

        The result has its norm over all ranks. Not in the last pass of a step.
        """
        self._check_pass("step.measure()")
        if self._control.ends_step:
            raise UserError(
                f"step.measure() was called in the last of {self._passes} passes over the batches of step {self.index}",
                "a step ends with step.apply()",
                f"go over the batches once more: run.steps(dataset, passes={self._passes + 1})",
            )

        # On a GPU the outcome of the update before may still be on its way, and comes first.
        self._run.end_pass(self._run.stepper.wait_for_outcome())
        self.result = self._run.stepper.measure(self._control, self._reduced())
        self._end_pass()
        return self.result

    def _reduced(self) -> Reduced:
        """Return the reduced gradients. Some drivers exchange them only now."""
        self._run.runtime.heartbeat.beat("exchange")
        return self._driver.reduced()

    def _begin_pass(self) -> None:
        self._taken = 0
        self._control = self._run.stepper.begin(self._batches, self.passes_done, self._passes)
        self._driver.begin()

    def _end_pass(self) -> None:
        self.passes_done += 1
        if self.passes_done < self._passes:
            self._run.end_pass(self.result)
        else:
            # Now and not after the loop's body, so that the rest of the body finds the step ended.
            self.ended = True
            self._kept.clear()
            self._run.end_step(self._batches, self.result)
        self._run.runtime.heartbeat.beat("user code")

    def _check_pass(self, call: str) -> None:
        if self.ended or self._control is not self._run.stepper.control:
            raise UserError(
                f"{call} was called on step {self.index}, which has ended",
                "",
                "call apply() once per step, before the next one begins; to go over its batches more than once, "
                "run.steps(dataset, passes=2)",
            )

        done = self._control.backwards_done if self._control.pass_index == self.passes_done else 0
        # The all-reduce is part of the last backward: without it the other ranks would wait.
        if done != self._batches.count:
            raise UserError(
                f"{call} was called after {done} of {self._batches.count} batches of the step",
                "",
                "iterate over all batches first: for batch in step: ... step.backward(loss_sum, weight)",
            )
        self._gradients.check(call)

    def _indices(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[int] | None:
        """Return the indices of the optimizers to step; None stands for all."""
        known = self._run.model_setup.optimizers.all
        if len(known) == 1 and not optimizers:
            return None
        if not optimizers:
            raise UserError(
                f"step.apply() does not say which of the {len(known)} optimizers to step",
                "a GAN's discriminator must not learn from the generator's loss",
                "step.apply(optimizer) for one of them, the gradients of the others are dropped; or name them all",
            )

        indices = [next((i for i, own in enumerate(known) if own is optimizer), None) for optimizer in optimizers]
        if None in indices:
            raise UserError(
                "step.apply(optimizer) got something other than the optimizers of run.setup",
                "",
                "pass what run.setup returned: model, first, second = run.setup(model, first, second)",
            )

        # With all of them there is nothing to drop.
        distinct = {index for index in indices if index is not None}
        return sorted(distinct) if len(distinct) < len(known) else None

    def _miscounted(self, times: str) -> UserError:
        return UserError(
            f"step.backward was called {times} for batch {self._taken - 1} of step {self.index}",
            "",
            "call step.backward exactly once per batch; pass weight=0 if a batch should not count",
        )
