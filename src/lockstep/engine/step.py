"""One optimizer step, as a transaction: all ranks apply it, or none does.

    progress = self.new_progress(batches)                                sums and counts start at 0
    reduced  = self.driver.forward_backward(batches, loss_fn, progress)  reduced over micro-batches and ranks
    factor   = to_sum x clipping / (global weight x loss scale)          to_sum: ranks, if gradients are means; else 1
    if the step is to be applied: optimizer.step(factor)                 the same answer on every rank

A custom loop runs the micro-batches itself, between `new_progress` and `apply`. It may go through all of this several
times in one step: these are its *passes* (`passes.py`). Otherwise a step is one pass.

This module knows no strategy. It treats GPUs differently in one respect: if the optimizers can skip on the device, the
device itself decides, and the outcome is *late*: the host reads the decision one step later. Ranks that are in
different steps are then noticed only after the update, and the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.hooks.trained_parameters import TrainedParameters
from lockstep.engine.outcomes.late import LateOutcome, not_applied_on_device
from lockstep.engine.outcomes.outcome import Outcome, OutcomeHandler, SkippedStep
from lockstep.engine.passes import StepStatus
from lockstep.observe.metrics import Interval
from lockstep.optim.optimizers import Optimizers, Update
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.driver import Driver, LossFn, Reduced
from lockstep.parallel.progress import PassProgress, StepContext
from lockstep.precision import DynamicScaler
from lockstep.runtime.control_word import SummedWord
from lockstep.task import StepBatches, StepResult


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
        self.outcome_handler = OutcomeHandler(context)

        self.update = Update(
            optimizers, context.config.clip, driver.role.replicated, driver.norms, context.runtime.device
        )
        self._interval = interval
        self._trained_parameters = trained_parameters

        # Changed by every step.
        self.steps_done = 0  # applied or skipped; `apply` counts a step before it updates
        self.steps_applied = 0  # skipped steps do not count here; the learning-rate schedule follows this count
        self.lr = learning_rate.at(0)

        # Of the current step; empty before the first.
        self.progress = PassProgress(context, StepBatches(0, (), 0), 0)
        self._status = StepStatus(0)
        self._previous_status = self._status  # of the step before, whose result may still be reported
        self._late: LateOutcome | None = None  # of the last update, where outcomes are late

    # ---- a step ----

    def step(self, batches: StepBatches, loss_fn: LossFn) -> StepResult | None:
        """Run a whole step. Return the newest known result: on a GPU it may be that of the previous step."""
        progress = self.new_progress(batches)
        reduced = self.driver.forward_backward(batches, loss_fn, progress)
        return self.apply(progress, reduced)

    def new_progress(self, batches: StepBatches, pass_index: int = 0, passes: int = 1) -> PassProgress:
        """Return the progress of a new pass, which is now the current one. The first of `passes` begins a step."""
        if pass_index == 0:
            self._previous_status, self._status = self._status, StepStatus(self.steps_done)

        self.progress = PassProgress(self.context, batches, self.steps_done, pass_index, passes)
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
        self.lr = self.learning_rate.set(self.steps_applied)
        if progress.ends_step:
            self.steps_done += 1

        # The norm () of all norms is that of the whole gradient. It is still a sum, not divided by its weight.
        norm = torch.linalg.vector_norm(reduced.norms)
        if self.outcomes_are_late:
            return self._apply_late(progress, reduced, norm, indices)

        return self._apply_now(progress, reduced, norm, indices)

    def _apply_now(self, progress: PassProgress, reduced: Reduced, norm: Tensor, indices: Sequence[int]) -> StepResult:
        """Wait for the control word and the norm, then step these optimizers unless the step must be skipped."""
        word, weight = self._wait_for_word(reduced)
        grad_norm, factor = self._norm_and_factor(reduced, float(norm), weight)

        # All ranks have the same numbers here, so they agree without another collective.
        loss_limit = self.outcome_handler.spikes.limit()
        outcome = Outcome(self._status, progress, reduced, loss_limit, word, grad_norm)
        self.outcome_handler.check(outcome)
        if outcome.applied:
            self.update.step(reduced.parameters, factor, progress.pass_count, indices)
            self.learning_rate.count_step(indices)

        # A step counts as applied if any of its passes is.
        self._status.add_update(not outcome.applied)
        self._status.applied |= outcome.applied
        if progress.ends_step and self._status.applied:
            self.steps_applied += 1

        return self._conclude(outcome)

    def _conclude(self, outcome: Outcome) -> StepResult:
        """Add the losses to the interval of the next log line, or react to a skip."""
        if outcome.applied:
            self._interval.add_losses(outcome.progress.losses, outcome.progress.metrics)

        result = self.outcome_handler.handle(outcome)
        if result.skip_reason:
            self._interval.note_skip()

        return result

    # ---- the factor ----

    def _wait_for_word(self, reduced: Reduced) -> tuple[SummedWord, float]:
        """Return the summed control word and its weight. On a GPU the host waits here for the device.

        A weight of 0, where no term counts, is returned as nan. The norm then becomes nan too, and nothing is applied.
        """
        word = reduced.codec.unpack(reduced.packed_word.tolist())
        return word, word.weight or math.nan

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

    # ---- late outcomes ----

    @property
    def outcomes_are_late(self) -> bool:
        """Whether the device decides about an update, and the host reads the outcome one step late, so it never waits.

        This is impossible with sharded parameters, or if an optimizer cannot skip on the device (`choose_kernels`), or
        if the next loss scale of fp16 depends on the outcome. On a CPU there is nothing to gain.
        """
        return self.update.skips_on_device and self.context.runtime.on_gpu and not self.context.scaler

    def _apply_late(
        self, progress: PassProgress, reduced: Reduced, norm: Tensor, indices: Sequence[int]
    ) -> StepResult | None:
        """Let the device decide whether the fused optimizers step. Return the result of the previous step.

        The host queues the update of this step, reads the outcome of the previous one, and queues the copy of this
        step's numbers, which become the late outcome.
        """
        # Queue the update. With weight 0 the norm is 0 x inf = nan, so the device does not apply it. `factor` and
        # `not_applied` are tensors of shape (): the host only launches kernels, and knows neither value.
        weight = reduced.codec.weight(reduced.packed_word)
        grad_norm, factor = self._norm_and_factor(reduced, norm, weight)
        loss_limit = self.outcome_handler.spikes.limit()
        not_applied = not_applied_on_device(reduced, grad_norm, weight, loss_limit)
        self.update.step_on_device(factor, not_applied, progress.pass_count, indices)
        self._status.add_update(not_applied)

        # The next rate depends on these counts. Most steps are applied; `read_late_outcome` takes them back otherwise.
        self.learning_rate.count_step(indices)
        if progress.ends_step:
            self.steps_applied += 1

        # Read the previous outcome: only now, while the device is busy with this step.
        previous = self.read_late_outcome()

        self._late = LateOutcome.queue_copy(
            self._status, progress, reduced, indices, loss_limit, not_applied, grad_norm
        )
        return previous

    def read_late_outcome(self) -> StepResult | None:
        """Wait for the late outcome and return its result, or None if there is no late outcome."""
        late, self._late = self._late, None
        if late is None:
            return None

        outcome = late.read()
        if not outcome.applied:
            self.learning_rate.uncount_step(late.optimizer_indices)

        # `_apply_late` has counted the step with its last pass. By now the outcomes of all earlier passes are known.
        late.status.applied |= outcome.applied
        if late.progress.ends_step and not late.status.applied:
            self.steps_applied -= 1

        # The device has decided about the update long ago: this can only end the run.
        self.outcome_handler.check(outcome)
        return self._conclude(outcome)

    @property
    def late_steps(self) -> float:
        """The part of the last step whose losses the interval lacks, as its outcome is not read yet: 1 or less."""
        return 0 if self._late is None else self._late.share

    # ---- steps of several passes ----

    @property
    def not_applied(self) -> bool | Tensor:
        """Whether no pass of the current step is applied; a tensor () where only the device knows yet."""
        return self._status.not_applied

    def step_result(self, result: StepResult) -> StepResult:
        """Return the result of the current step, or of the one before it, from the newest result of its passes."""
        is_current = result.step == self._status.step
        status = self._status if is_current else self._previous_status
        return status.complete(result)

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
        outcome = Outcome(self._status, progress, reduced, math.inf, word, grad_norm)
        self.outcome_handler.check(outcome)

        # In place, because the user reads `p.grad` until the next pass.
        self.update.multiply(reduced.parameters, to_mean)
        result = self.outcome_handler.handle_measured(outcome)
        if result.skip_reason:
            self._interval.note_skip()

        return result

    # ---- around the steps ----

    @property
    def scaler(self) -> DynamicScaler | None:
        """The loss scale of fp16; None in other precisions."""
        return self.context.scaler

    def set_flags(self, **flags: bool) -> None:
        """Set `Flags`, such as `stop` or `save`, in every control word from now on, until they are set to False."""
        self.context.flags |= flags

    def choose_kernels(self) -> None:
        """Follow hooks that were set on optimizers' steps since the set-up. Call it before the first step."""
        assert self._late is None, "choose_kernels() before read_late_outcome()"
        self.update.choose_kernels()

    def take_rewind(self) -> SkippedStep | None:
        """Return the skipped step after which the run must rewind now, or None. It is returned once."""
        handler = self.outcome_handler
        skipped, handler.rewind_after = handler.rewind_after, None
        return skipped

    def check_something_learned(self) -> None:
        """Raise at the end of a run if no step was applied, so that untrained weights do not pass for a result."""
        self.outcome_handler.check_something_learned(self.steps_done, self.steps_applied)

    @property
    def steps_skipped(self) -> int:
        """The number of steps so far that were skipped. Steps of weight 0 are neither applied nor skipped."""
        return self.outcome_handler.skipped

    def change_total_steps(self, steps: int) -> None:
        """Let the learning rate end with another number of steps."""
        self.learning_rate.change_total_steps(steps)
        self.lr = self.learning_rate.at(self.steps_applied)

    def state_dict(self) -> dict[str, Any]:
        assert self._late is None, "state_dict() before read_late_outcome()"
        # The keys are part of the file format: `step` is the number of steps done.
        counters = {"step": self.steps_done, "applied": self.steps_applied}
        return {"counters": counters, **self.outcome_handler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_done, self.steps_applied = state["counters"]["step"], state["counters"]["applied"]
        self.outcome_handler.load_state_dict(state)

        self._late = None  # the outcome of a step that this load undoes
        self.learning_rate.remember_rates()  # loading replaced the parameter groups
        self.lr = self.learning_rate.at(self.steps_applied)
