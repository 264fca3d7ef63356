"""One optimizer step, as a transaction: all ranks apply it, or none does.

    progress = self.new_progress(batches)                                sums and counts start at 0
    reduced  = self.driver.forward_backward(batches, loss_fn, progress)  reduced over micro-batches and ranks
    factor   = to_sum x clipping / (global weight x loss scale)          to_sum: ranks, if gradients are means; else 1
    if the step is to be applied: optimizer.step(factor)                 the same answer on every rank

A custom loop runs the micro-batches itself, between `new_progress` and `apply`.

This module knows no strategy. It treats GPUs differently in one respect: if the optimizers can skip on the device, the
device itself decides, and the outcome is *late*: the host reads the decision one step later. Ranks that are in
different steps are then noticed only after the update, and the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.hooks.trained_parameters import TrainedParameters
from lockstep.engine.outcomes.handler import OutcomeHandler, SkippedStep
from lockstep.engine.outcomes.late import LateOutcome, not_applied_on_device
from lockstep.engine.outcomes.outcome import Outcome
from lockstep.observe.metrics import Interval
from lockstep.optim.optimizers import Optimizers, Update
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.driver import Driver, LossFn, Reduced
from lockstep.parallel.progress import PassProgress, StepContext
from lockstep.runtime.control_word import SummedWord
from lockstep.task import StepBatches, StepResult


@dataclass
class Counters:
    steps_done: int = 0  # applied or skipped; `apply` counts a step before it updates
    steps_applied: int = 0  # skipped steps do not count here; the learning-rate schedule follows this count

    # A custom loop may make several passes over the batches of a step, which is applied if any of its passes is.
    applied_step: int = -1  # the newest step with a pass that is known to be applied
    updates: int = 0  # passes of the current step so far that ended with `apply`


class Stepper:
    """Runs optimizer steps on this rank, in lockstep with all others."""

    def __init__(
        self,
        context: StepContext,
        driver: Driver,
        optimizers: Optimizers,
        learning_rate: LearningRate,
        interval: Interval,
        trained_parameters: TrainedParameters | None = None,
    ):
        """`interval` is what the next log line covers: the step adds its losses there, and notes skips.

        `trained_parameters` says which ones each step trains, if a hook delays some.
        """
        # Fixed for the run.
        self.context = context
        self.driver = driver
        self.learning_rate = learning_rate

        self.scaler = context.scaler
        self.outcome_handler = OutcomeHandler(context)

        self.update = Update(
            optimizers, context.config.clip, driver.role.replicated, driver.norms, context.runtime.device
        )
        self._interval = interval
        self._trained_parameters = trained_parameters

        # The next loss scale of fp16 depends on the outcome. On a CPU nothing is to be gained.
        self._may_be_late = context.runtime.on_gpu and not context.scaler

        # Changed by every step. The progress is that of the current step, and empty before the first.
        self.progress = PassProgress(context, StepBatches(0, (), 0), 0)
        self.not_applied: bool | Tensor = True  # no pass of the step; a tensor () where only the device knows yet
        self.counters = Counters()
        self.lr = learning_rate.at(0)
        self._late: LateOutcome | None = None  # of the last step, where outcomes are late

    def step(self, batches: StepBatches, loss_fn: LossFn) -> StepResult | None:
        """Run a whole step. Return the newest known result: on a GPU it may be that of the previous step."""
        progress = self.new_progress(batches)
        reduced = self.driver.forward_backward(batches, loss_fn, progress)
        return self.apply(progress, reduced)

    def new_progress(self, batches: StepBatches, pass_index: int = 0, passes: int = 1) -> PassProgress:
        """Return the progress of a new step, now the current one.

        A custom loop may make several `passes` over the batches of a step: then it is that of one pass.
        """
        if pass_index == 0:
            self.not_applied = True
            self.counters.updates = 0

        self.progress = PassProgress(self.context, batches, self.counters.steps_done, pass_index, passes)
        return self.progress

    def apply(
        self, progress: PassProgress, reduced: Reduced, optimizers: Sequence[int] | None = None
    ) -> StepResult | None:
        """Divide once, clip, and step the optimizers: everything that scales a gradient is one factor.

        `optimizers` holds the indices of the optimizers to step; None means all of them. The caller must have cleared
        the gradients of the others.
        """
        assert progress.backwards_done == progress.batches.num_micro_batches, "apply() before the last micro-batch"
        indices = self.update.optimizer_indices if optimizers is None else optimizers
        progress.release_data()  # `progress` lives until the outcome is known
        self.context.runtime.heartbeat.beat("update")

        # With `exact`, random numbers drawn from here on must not depend on this rank's last forward.
        if self.context.config.exact:
            progress.seed("update")

        if self._trained_parameters is not None:
            reduced = self._trained_parameters.drop_untrained(reduced, progress.step)

        # The schedule follows the applied steps, so a skipped one does not move it. On a GPU the previous outcome is
        # not known yet: if it is a skip, this step's rate is one point ahead.
        self.lr = self.learning_rate.set(self.counters.steps_applied)

        # Only the last pass over the batches ends the step.
        self.counters.steps_done += progress.ends_step
        self.counters.updates += 1

        # The norm of all norms is the norm of the whole gradient, shape (). The sum is not divided by its weight yet.
        norm = torch.linalg.vector_norm(reduced.norms)
        if self.outcomes_are_late:
            return self._apply_late(progress, reduced, norm, indices)

        return self._apply_now(progress, reduced, norm, indices)

    def choose_kernels(self) -> None:
        """Follow hooks that were set on optimizers' steps since the set-up. Call it before the first step."""
        assert self._late is None, "choose_kernels() before read_late_outcome()"
        self.update.choose_kernels()

    @property
    def outcomes_are_late(self) -> bool:
        """Whether the device decides about an update, and the host reads the outcome one step late, so it never waits.

        This is impossible with sharded parameters, or if an optimizer cannot skip on the device (`choose_kernels`).
        """
        return self._may_be_late and self.update.skips_on_device

    def take_rewind(self) -> SkippedStep | None:
        """Return the skipped step after which the run must rewind now, or None. It is returned once."""
        handler = self.outcome_handler
        skipped, handler.rewind_after = handler.rewind_after, None
        return skipped

    def set_flags(self, **flags: bool) -> None:
        """Set `Flags`, such as `stop` or `save`, in every control word from now on, until they are set to False."""
        self.context.flags |= flags

    def measure(self, progress: PassProgress, reduced: Reduced) -> StepResult:
        """End a pass without an update. `p.grad` then holds the gradient of the mean loss."""
        if self._trained_parameters is not None:
            reduced = self._trained_parameters.drop_untrained(reduced, progress.step)

        word, weight = self._wait_for_word(reduced)
        if word.weight:
            to_mean = self._to_mean(reduced, weight)
            grad_norm = float(torch.linalg.vector_norm(reduced.norms)) * to_mean
        else:
            to_mean = grad_norm = 0.0  # the gradient of no terms

        # No limit: a pass that applies nothing cannot be skipped as a spike.
        outcome = Outcome(progress, reduced, math.inf, word, grad_norm)
        self.outcome_handler.check(outcome)

        # In place, because the user reads `p.grad` until the next pass.
        self.update.multiply(reduced.parameters, to_mean)
        result = self.outcome_handler.handle_measured(outcome)
        if result.skip_reason:
            self._interval.note_skip()

        return result

    def _apply_now(self, progress: PassProgress, reduced: Reduced, norm: Tensor, indices: Sequence[int]) -> StepResult:
        """Wait for the control word and the norm, then apply the step to these optimizers, or do not."""
        word, weight = self._wait_for_word(reduced)
        grad_norm, factor = self._norm_and_factor(reduced, float(norm), weight)

        # All ranks have the same numbers here, so they agree without another collective.
        outcome = Outcome(progress, reduced, self.outcome_handler.spikes.limit(), word, grad_norm)
        self.outcome_handler.check(outcome)
        self.not_applied = self.not_applied and not outcome.applied
        if outcome.applied:
            self.update.step(reduced.parameters, factor, progress.pass_count, indices)
            self.learning_rate.count_step(indices)
            self.counters.applied_step = progress.step

        self.counters.steps_applied += progress.ends_step and self.counters.applied_step == progress.step
        return self._conclude(outcome)

    def _apply_late(
        self, progress: PassProgress, reduced: Reduced, norm: Tensor, indices: Sequence[int]
    ) -> StepResult | None:
        """Let the device decide whether the fused optimizers step. Return the result of the previous step.

        The host queues the update of this step, reads the outcome of the previous one, and queues the copy of this
        step's numbers, which become the late outcome.
        """
        # Queue the update. With weight 0 the norm is 0 x inf = nan, so the device does not apply it.
        weight = reduced.codec.weight(reduced.packed_word)
        grad_norm, factor = self._norm_and_factor(reduced, norm, weight)

        loss_limit = self.outcome_handler.spikes.limit()
        not_applied = not_applied_on_device(reduced, grad_norm, weight, loss_limit)

        # A step with one pass launches no kernel here.
        self.not_applied = not_applied if self.not_applied is True else self.not_applied & not_applied

        # `factor` and `not_applied` are tensors of shape (): the host only launches kernels, and knows neither value.
        self.update.step_on_device(factor, not_applied, progress.pass_count, indices)

        # The next rate depends on this count. Most steps are applied; `read_late_outcome` takes it back otherwise.
        self.counters.steps_applied += progress.ends_step
        self.learning_rate.count_step(indices)

        # Read the previous outcome: only now, while the device is busy with this step.
        previous = self.read_late_outcome()

        self._late = LateOutcome.queue_copy(progress, reduced, indices, loss_limit, not_applied, grad_norm)
        return previous

    @property
    def late_steps(self) -> float:
        """The part of the last step whose outcome is not read yet, so that the interval lacks its losses.

        It is 0, 1 or, if several passes of the step ended with `apply`, the share of the last one.
        """
        return 0 if self._late is None else 1 / max(1, self.counters.updates)

    def read_late_outcome(self) -> StepResult | None:
        """Wait for the late outcome and return the result of its step, or None if there is none to read."""
        late, self._late = self._late, None
        if late is None:
            return None

        outcome, step = late.read(), late.progress.step
        if outcome.applied:
            self.counters.applied_step = step
        else:
            self.learning_rate.uncount_step(late.optimizer_indices)

        # `_apply_late` has counted the step when its last pass was queued; by now all earlier passes are known.
        self.counters.steps_applied -= late.progress.ends_step and self.counters.applied_step != step

        # The device has decided about the update long ago: this can only end the run.
        self.outcome_handler.check(outcome)
        return self._conclude(outcome)

    def _wait_for_word(self, reduced: Reduced) -> tuple[SummedWord, float]:
        """Return the summed control word and its weight. On a GPU the host waits here for the device.

        A weight of 0, where no term counts, is returned as nan. The norm then becomes nan too, and nothing is applied.
        """
        word = reduced.codec.unpack(reduced.packed_word.tolist())
        return word, word.weight or math.nan

    def of_step(self, result: StepResult) -> StepResult:
        """Return the result of a pass as that of its step, which is applied if any of its passes is."""
        if result.applied or result.step != self.counters.applied_step:
            return result

        return replace(result, applied=True, skip_reason=None)

    def _conclude(self, outcome: Outcome) -> StepResult:
        """Count the step, also in the interval of the next log line, and react to a skip."""
        if outcome.applied:
            self._interval.add_losses(outcome.progress.losses, outcome.progress.metrics)

        result = self.outcome_handler.handle(outcome)
        if result.skip_reason:
            self._interval.note_skip()

        return result

    def _norm_and_factor(self, reduced: Reduced, norm: Any, weight: Any) -> tuple[Any, Any]:
        """Return the norm of the mean loss's gradient, and the factor by which to multiply the summed gradients.

        `norm` and `weight` are numbers, or tensors of shape () on the device.
        """
        to_mean = self._to_mean(reduced, weight)
        grad_norm = norm * to_mean
        return grad_norm, to_mean * self.update.clip_factor(grad_norm)

    def _to_mean(self, reduced: Reduced, weight: Any) -> Any:
        """Return the factor that turns the reduced gradients into the gradient of the mean loss."""
        # Without a scaler, skip the multiplication by 1: on a GPU it would launch a kernel in every step.
        if self.scaler:
            weight = weight * self.scaler.factor_on_sums

        return reduced.to_sum / weight

    def state_dict(self) -> dict[str, Any]:
        assert self._late is None, "state_dict() before read_late_outcome()"
        # The keys are part of the file format: `step` is the number of steps done.
        counters = {"step": self.counters.steps_done, "applied": self.counters.steps_applied}
        return {"counters": counters, **self.outcome_handler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters = Counters(state["counters"]["step"], state["counters"]["applied"])
        self.outcome_handler.load_state_dict(state)

        self._late = None  # the outcome of a step that this load undoes
        self.learning_rate.remember_rates()  # loading replaced the parameter groups
        self.lr = self.learning_rate.at(self.counters.steps_applied)
