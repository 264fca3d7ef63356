"""The user's own loop, on the same step:

with lockstep.start(global_batch=64, steps=1000) as run:
    model, optimizer = run.setup(model, optimizer)
    for step in run.steps(dataset):
        for x, y in step:
            step.backward(loss_sum, weight=len(x))
        step.apply()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.engine.start_check.check import check_own_loop, keep_for_own_loop
from lockstep.errors import UserError
from lockstep.parallel.driver import BaseDriver
from lockstep.precision import full_precision
from lockstep.runtime.seeds import derive, seed_torch
from lockstep.task import Loss, Metric, StepBatches, StepResult, Weight

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

    def setup(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """Return the model to call from now on, and its optimizers: `model, optimizer = run.setup(model, optimizer)`.

        A model with nothing to train (a frozen teacher) may be passed alone: it is moved to the device, not wrapped.
        """
        # Without an optimizer nothing is trained, so there is nothing to wrap or to save.
        if not optimizers:
            if any(p.requires_grad for p in model.parameters()):
                raise UserError(
                    f"run.setup(model) has no optimizer, and {type(model).__name__} has trainable parameters",
                    "nothing would update them",
                    "model, optimizer = run.setup(model, optimizer); or freeze it with model.requires_grad_(False)",
                )

            return model.to(self.device)

        setup = self._builder.setup_model(model, lambda _: list(optimizers))
        if not setup.driver.placement.runs_whole_model:
            raise UserError(
                "a pipeline (mesh.pp) cannot run in a loop of your own",
                "such a loop computes the loss of one micro-batch after another; in a pipeline all of them are in "
                "flight together, and only the last stage knows the loss",
                "write a Task and use lockstep.fit or `lockstep train`; or choose strategy=fsdp",
            )

        # A direct optimizer.step() would apply sums that are not yet divided.
        setup.optimizers.refuse_direct_steps()
        return setup.driver.module, *setup.optimizers.all

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

    def steps(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> Iterator[OwnStep]:
        """Yield every step of the run, epoch after epoch."""
        self._check_model("run.steps(dataset)")
        if self._run is not None:
            raise UserError(
                "run.steps(dataset) was called a second time",
                "the first call goes over all steps of the run, epoch after epoch",
                "set epochs or steps in lockstep.start(...), and call run.steps once",
            )

        self._run = run = self._builder.setup_run(dataset, collate)
        run.check_start()

        # Still True in close() if the user's code leaves the loop with `break`.
        self._in_loop = True
        for batches in run.step_batches():
            step = OwnStep(run, batches)
            yield step
            if not step.ended:
                raise UserError(
                    f"step {step.index} ended without step.apply()",
                    "",
                    "call step.apply() after the loop over its batches",
                )

            run.maintain()
        self._in_loop = False

    def evaluate(
        self,
        dataset: Any,
        loss: Callable[[nn.Module, Any], Loss],
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over `dataset`: every sample once, the same at any world size."""
        self._check_model("run.evaluate(dataset, loss)")
        # Before the first step there is no Run yet, and evaluate.batch must be set.
        evaluation = (self._run or self._builder).evaluate(dataset, loss, collate)
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
        self._run.stepper.context.requests.stop = True

    def close(self) -> None:
        """Save the weights and write the report, if there was a loop."""
        # A script that only set up a model has nothing to save.
        run = self._run
        if run is None:
            return

        # After a `break` on this rank only, the others would wait for it for ever. They are asked over the store, which
        # works while they wait in a collective.
        step = run.stepper.counters.step
        if self._in_loop and not run.runtime.store_barrier(f"left-at-{step}", BREAK_TIMEOUT):
            raise UserError(
                f"rank {self.rank} of {self.world_size} left `for step in run.steps(...)` at step {step}, and not all "
                "of the others did",
                "",
                "call run.stop() instead of break: it stops all ranks; or decide with `if run.agree(...): break`",
            )

        run.end_training()
        run.close()

    def _check_model(self, call: str) -> None:
        if self._builder.model_setup is None:
            raise UserError(
                f"{call} was called before run.setup",
                "no model yet",
                "model, optimizer = run.setup(model, optimizer), before the loop",
            )


class OwnStep:
    """One optimizer step: iterate over its batches, call `backward` for each, then `apply`."""

    def __init__(self, run: Run, batches: StepBatches):
        self._run = run
        self._batches = batches
        self._taken = 0  # batches yielded so far
        self.index = run.stepper.counters.step
        self.first = 0  # position of this batch's first sample in the global step, on any rank
        self.ended = False
        self.result: StepResult | None = None

        # The numbers that the loop draws before its first batch must not depend on where the run was resumed.
        seed_torch(derive(run.config.seed, "step", self.index), run.runtime.device)
        self._driver = cast(BaseDriver, run.driver)  # `setup` refused a pipeline
        self._control = run.stepper.begin(batches)
        self._driver.begin()

        # Until the first backward of the run: what its forward must not change.
        self._kept = keep_for_own_loop(run)

    def __iter__(self) -> Iterator[Any]:
        for micro in self._batches:
            self._taken += 1
            self.first = micro.first
            self._driver.before_forward(micro, self._control)

            # The loop's body runs here, under autocast. It must call `backward` once.
            with self._control.autocast():
                yield micro.data
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

        if self._kept:
            check_own_loop(self._run, self._kept)
            self._kept = None

        # Autocast is on in the loop's body, but must not reach into the backward.
        with full_precision(self._run.stepper.context.precision):
            self._driver.backward(Loss(loss_sum, weight, metrics), self._control)

    def apply(self) -> StepResult | None:
        """Divide by the global weight, clip, and step. Returns the newest outcome known (on a GPU, the previous)."""
        if self.ended or self._control is not self._run.stepper.control:
            raise UserError(
                f"step.apply() was called on step {self.index}, which has ended",
                "",
                "call apply() once per step, before the next one begins",
            )

        done = self._control.backwards_done
        # The all-reduce is part of the last backward: without it the other ranks would wait.
        if done != self._batches.count:
            raise UserError(
                f"step.apply() was called after {done} of {self._batches.count} batches of the step",
                "",
                "iterate over all batches first: for batch in step: ... step.backward(loss_sum, weight)",
            )

        self.ended = True
        self.result = self._run.stepper.apply(self._control, self._driver.reduced())
        # Now and not after the loop's body, so that the rest of the body finds the step ended.
        self._run.end_step(self._batches, self.result)
        self._run.runtime.heartbeat.beat("user code")
        return self.result

    def _miscounted(self, times: str) -> UserError:
        return UserError(
            f"step.backward was called {times} for batch {self._taken - 1} of step {self.index}",
            "",
            "call step.backward exactly once per batch; pass weight=0 if a batch should not count",
        )
