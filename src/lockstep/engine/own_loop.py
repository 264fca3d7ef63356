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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.engine.run import Run
from lockstep.errors import UserError
from lockstep.precision import full_precision
from lockstep.runtime.seeds import derive, seed_torch
from lockstep.task import Loss, Metric, StepBatches, StepResult, Weight

LEAVE_TOGETHER = timedelta(seconds=30)


class OwnRun:
    """What `lockstep.start` gives."""

    def __init__(self, run: Run):
        self._run = run
        self._left_early = False

    @property
    def rank(self) -> int:
        return self._run.runtime.world.rank

    @property
    def world_size(self) -> int:
        return self._run.runtime.world.size

    @property
    def device(self) -> torch.device:
        return self._run.runtime.device

    @property
    def run_dir(self) -> Path:
        return self._run.run_dir

    def setup(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """The model to call from now on, and its optimizers: `model, optimizer = run.setup(model, optimizer)`.

        A model with nothing to train (a frozen teacher) may be passed alone: it is moved to the device, not wrapped.
        """
        if not optimizers:
            if any(p.requires_grad for p in model.parameters()):
                raise UserError(
                    "run.setup(model) without an optimizer",
                    f"{type(model).__name__} has trainable parameters that nothing would update",
                    "model, optimizer = run.setup(model, optimizer); or freeze it with model.requires_grad_(False)",
                )
            return model.to(self.device)
        driver = self._run.adopt(model, lambda _: list(optimizers))
        if not driver.placement.runs_whole_model:
            raise UserError(
                "a pipeline (mesh.pp) in a loop of your own",
                "a loop that computes the loss of one micro-batch after another; in a pipeline they are on their way "
                "together, and the loss is known on the last stage only",
                "write a Task and use lockstep.fit or `lockstep train`; or choose strategy=fsdp",
            )
        self._run.optimizers.refuse_direct_steps()
        return driver.module, *self._run.optimizers.all

    def register(self, name: str, part: Any) -> None:
        """Save `part` with every checkpoint, and give it its state back on resume: anything with `state_dict` and
        `load_state_dict`, such as a moving average. Call it before `run.steps`."""
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")) or name == "data":
            raise UserError(
                f"run.register({name!r}, part)",
                "a name that is the data's own" if name == "data" else f"a {type(part).__name__} without a state",
                "pass an object with state_dict() and load_state_dict(state)",
            )
        if self._run.opened:
            raise UserError(f"run.register({name!r}, ...)", "a run that has begun", "call it before run.steps(...)")
        self._run.others[name] = part

    def steps(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> Iterator[OwnStep]:
        if not hasattr(self._run, "driver"):
            raise UserError(
                "run.steps(dataset)",
                "no model yet",
                "model, optimizer = run.setup(model, optimizer), before the loop",
            )
        if self._run.opened:
            raise UserError(
                "run.steps(dataset) a second time",
                "it goes over all steps of the run, epoch after epoch, so there is nothing left",
                "set epochs or steps in lockstep.start(...), and call run.steps once",
            )
        self._run.open(dataset, collate)
        self._left_early = True  # until the loop has come to its end
        for share in self._run.shares():
            step = OwnStep(self._run, share)
            yield step
            if not step.ended:
                raise UserError(
                    "one step.apply() at the end of every step",
                    f"step {step.index} ended without it",
                    "call step.apply() after the loop over its batches",
                )
            self._run.keep()
        self._left_early = False

    def evaluate(
        self,
        dataset: Any,
        loss: Callable[[nn.Module, Any], Loss],
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> dict[str, float]:
        """Mean loss and metrics over `dataset`, every sample once, the same at any world size."""
        found = self._run.evaluate(dataset, loss, collate)
        return {"loss": found.loss, **found.metrics}

    def agree(self, value: bool) -> bool:
        """True on every rank if it is true on any. For decisions of your own: every rank must call it."""
        return self._run.runtime.collectives.any(value)

    def stop(self) -> None:
        """End the run after the next exchange, on all ranks, even if only this one asks."""
        if not self._run.opened:
            raise UserError("run.stop()", "a run that has not started", "call it inside `for step in run.steps(...)`")
        self._run.stepper.context.requests.stop = True

    def close(self) -> None:
        if self._run.opened:
            if self._left_early:
                self._meet_after_break()
            self._run.save()
            self._run.close()

    def _meet_after_break(self) -> None:
        """Leaving the loop early is fine if all ranks do; one alone would leave the others waiting for ever."""
        world, step = self._run.runtime.world, self._run.stepper.counters.step
        if not self._run.runtime.meet(f"left-at-{step}", LEAVE_TOGETHER):
            raise UserError(
                "all ranks leave `for step in run.steps(...)` together",
                f"rank {world.rank} of {world.size} left it at step {step}, and not all of the others did",
                "call run.stop() instead of break: it stops all ranks; or decide with `if run.agree(...): break`",
            )


class OwnStep:
    """One optimizer step: iterate over its batches, `backward` each, then `apply`."""

    def __init__(self, run: Run, share: StepBatches):
        self._run, self._share = run, share
        self.index = run.stepper.counters.step
        self.ended = False
        self._taken = 0  # batches handed out so far
        self.first = 0  # the place of this batch's first sample in the global step, whoever runs it
        self.result: StepResult | None = None
        # What the loop draws before its first batch must not depend on where the run was resumed.
        seed_torch(derive(run.config.seed, "step", self.index), run.runtime.device)
        run.stepper.begin(share)

    def __iter__(self) -> Iterator[Any]:
        stepper = self._run.stepper
        for micro in self._share:
            self._taken += 1
            self.first = micro.first
            stepper.before_forward(micro)
            with self._run.precision.autocast():  # on while the loop's body runs
                yield micro.data
            if stepper.control.backwards_done != self._taken:
                raise self._miscounted(0)

    @property
    def padding(self) -> bool:
        """Whether this batch only keeps the rank in step with the others: it weighs nothing, whatever you pass."""
        return self._run.stepper.control.padding

    def backward(self, loss_sum: Tensor, weight: Weight, **metrics: Metric) -> None:
        """Backpropagate the SUM of the loss over this batch; `weight` is how many terms it has."""
        if self._run.stepper.control.backwards_done == self._taken:
            raise self._miscounted(2)
        with full_precision(self._run.precision):
            self._run.stepper.backward(Loss(loss_sum, weight, metrics))

    def apply(self) -> StepResult | None:
        """Divide by the global weight, clip, step. Returns the newest outcome known (on a GPU, the previous one)."""
        if self._run.stepper.control.backwards_done != self._share.count:
            raise UserError(
                "step.apply() after the last batch of the step",
                f"{self._run.stepper.control.backwards_done} of {self._share.count} batches went backward",
                "iterate over the whole step first: for batch in step: ... step.backward(loss_sum, weight)",
            )
        self.ended = True
        self.result = self._run.stepper.apply()
        self._run.finish(self._share, self.result)  # here, so that whatever the user does next finds the step ended
        self._run.runtime.heartbeat.beat("yours")
        return self.result

    def _miscounted(self, count: int) -> UserError:
        return UserError(
            "one step.backward(loss_sum, weight) for every batch of `for batch in step`",
            f"{count} for batch {self._taken - 1} of step {self.index}",
            "call step.backward exactly once per batch; pass weight=0 to let a batch count nothing",
        )
