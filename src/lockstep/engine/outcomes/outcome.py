"""The outcome of a pass, which is that of its step if the step has one: whether it is applied, and what follows.

A step with a non-finite gradient or a loss spike is skipped and logged with its reason. Then the run continues, rewinds
to its last checkpoint, or stops, as the policy says. A step of weight 0 is legal and changes nothing; many in a row
cause a warning, and a run with no other steps is an error.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lockstep.config import SpikeConfig
from lockstep.engine.outcomes.blame import blamed_micro_batches, out_of_step
from lockstep.engine.passes import StepStatus
from lockstep.errors import UserError, plural
from lockstep.parallel.driver import Reduced
from lockstep.parallel.progress import PassProgress, StepContext, wrong_weight
from lockstep.runtime.control_word import SummedWord, step_mark
from lockstep.task import StepResult

MIN_LOSSES = 8  # spike detection needs this many losses
MANY_EMPTY = 20  # this many steps of weight 0 in a row cause a warning


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reduced pass and the numbers that decide whether it is applied. They are the same on every rank."""

    status: StepStatus  # of the step that the pass belongs to
    progress: PassProgress
    reduced: Reduced
    loss_limit: float  # a mean loss above this is a spike
    word: SummedWord
    grad_norm: float  # of the gradient of the mean loss; any number if the weight is 0
    applied_by_device: bool | None = None  # whether the device has applied it; None: the host decides now

    @property
    def finite(self) -> bool:
        """Whether the norm of the gradient is finite."""
        return math.isfinite(self.grad_norm)

    @property
    def mean_loss(self) -> float:
        """The mean loss of the pass; 0 if the control word does not include the loss."""
        return self.word.loss / self.word.weight if self.word.weight else 0.0

    @property
    def applied(self) -> bool:
        """Whether the pass is applied."""
        if self.applied_by_device is not None:
            return self.applied_by_device

        # `not >` instead of `<=`: a mean loss of nan is not a spike. Only the gradient decides then, as on the device.
        # A negative weight, which `OutcomeHandler.check` refuses, would turn the descent into an ascent.
        return self.finite and self.word.weight > 0 and not (self.mean_loss > self.loss_limit)

    def skip_reason(self) -> str | None:
        """Return why the pass is skipped, or None if it is applied or has weight 0, which is legal."""
        if self.applied or not self.word.weight:
            return None

        if self.finite:
            return f"a loss spike: {self.mean_loss:.4g}, above {self.loss_limit:.4g}"

        if not math.isfinite(self.word.weight):
            return "the weight of the loss is not finite"

        # The host waits for the norms here. Skipped steps are rare, so this is acceptable.
        nonfinite = (~torch.isfinite(self.reduced.norms)).nonzero().flatten().tolist()
        if not nonfinite:
            return "the gradient norm overflowed, though every parameter's own gradient is finite"

        names = self.reduced.names
        return f"no finite gradient for {len(nonfinite)} of {len(names)} parameters, first {names[nonfinite[0]]!r}"


class SpikeDetector:
    """Detects losses far above the recent ones. All ranks add the same losses, so they get the same limit."""

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.on = config.policy != "off"
        self.recent: deque[float] = deque(maxlen=config.window)

    def limit(self) -> float:
        """Return the limit above which a loss is a spike: the median plus `factor` robust standard deviations."""
        if not self.on or len(self.recent) < MIN_LOSSES:
            return math.inf

        median = statistics.median(self.recent)
        deviation = statistics.median(abs(loss - median) for loss in self.recent)

        # 1.4826 turns the median absolute deviation of normally distributed losses into their standard deviation. For a
        # loss that hardly changes this is almost 0, so at least 1 % of the median is used.
        return median + self.config.factor * max(1.4826 * deviation, 0.01 * abs(median))

    def add(self, loss: float) -> None:
        if self.on and math.isfinite(loss):
            self.recent.append(loss)


class SkippedStep(NamedTuple):
    """A skipped step after which the run must rewind."""

    result: StepResult
    span: tuple[int, int] | None  # positions [start, stop) of its samples, if the source has positions


class OutcomeHandler:
    """Checks and counts the outcomes of all steps, and reacts to skipped ones.

    All ranks get the same numbers, and so make the same decisions.
    """

    def __init__(self, context: StepContext):
        self._config = context.config
        self._scaler = context.scaler
        self._runtime = context.runtime
        self._log_event = context.log_event
        self._knows_loss = context.sends_loss

        self.spikes = SpikeDetector(context.config.spike)

        # Counts of steps so far. `StepStatus` says which are counted already, by an earlier pass.
        self.skipped = 0
        self._overflows = 0  # of the skipped steps: those that a lower loss scale of fp16 may prevent
        self.skips_in_a_row = 0  # the other skipped steps since the last one that was applied
        self.empty_in_a_row = 0  # steps of weight 0

        self.rewind_after: SkippedStep | None = None  # set if the run must rewind to its last checkpoint

    def handle(self, outcome: Outcome) -> StepResult:
        """Count a step that `check` has passed, adapt the loss scale, and apply the policy if the step was skipped.

        Return its result. Collective if the step was skipped.
        """
        result = self._result(outcome)
        if result.weight == 0:
            # One pass of a custom loop may be empty, as when it stops early: only the last one ends an empty step.
            if outcome.progress.ends_step:
                self._count_empty(result)

            return result

        self.empty_in_a_row = 0
        if not result.applied:
            self._handle_skip(outcome, result)
            return result

        self.skips_in_a_row = 0
        outcome.status.counted_in_a_row = False
        self.spikes.add(outcome.mean_loss)
        if self._scaler:
            self._scaler.update(overflowed=False)

        return result

    def handle_measured(self, outcome: Outcome) -> StepResult:
        """Return the result of a pass without an update, which `check` has passed.

        It counts neither as an applied step nor as one of weight 0, and spike detection ignores its loss. If its
        gradient is not finite, it is handled as a skipped step.
        """
        result = replace(self._result(outcome), applied=False)
        if result.skip_reason:
            self._handle_skip(outcome, result)

        return result

    def check(self, outcome: Outcome) -> None:
        """Raise if the ranks do not agree, or if the weight is negative.

        Call it as soon as the host has the control word: before the update, unless the device decides about that.
        """
        word = outcome.word
        step = outcome.progress.step
        ranks = self._runtime.world.size

        # Ranks that loaded are in another step too, so `loaded` comes first. But if the marks are too small to be a sum
        # of marks, this is no control word.
        if 0 < word.loaded < ranks <= word.steps:
            raise UserError(
                f"{word.loaded} of {ranks} ranks loaded a checkpoint before step {step + 1}, and the others did not",
                "the ranks no longer have the same weights",
                "call load_checkpoint(path) on every rank, not under `if rank == 0:`",
            )

        if word.steps != ranks * step_mark(step):
            raise out_of_step(self._runtime, step, word.steps)

        # Every rank must have multiplied its loss by the same scale, or the sum of the gradients means nothing.
        if self._scaler and abs(word.scales / ranks - math.log2(self._scaler.value)) > 1e-3:
            raise RuntimeError(f"the loss scale differs between ranks; on this rank it is {self._scaler.value}")

        # Weights on a GPU are not checked one by one, because the host would wait for each (`parallel/progress.py`).
        if word.weight < 0:
            raise wrong_weight(word.weight)

    def _result(self, outcome: Outcome) -> StepResult:
        word = outcome.word
        return StepResult(
            step=outcome.progress.step,
            applied=outcome.applied,
            weight=word.weight,
            grad_norm=outcome.grad_norm if word.weight else 0.0,  # the gradient of no terms
            skip_reason=outcome.skip_reason(),
            loss=outcome.mean_loss if self._knows_loss and word.weight else None,
            exhausted=word.exhausted == self._runtime.world.size,
            flags=word,
        )

    def _count_empty(self, result: StepResult) -> None:
        """Count a step of weight 0. It is legal, but many in a row cause a warning."""
        self.empty_in_a_row += 1
        if self.empty_in_a_row == MANY_EMPTY:
            reason = f"the loss of the last {MANY_EMPTY} steps has weight 0: nothing is learned from them"
            self._log_event("warning", step=result.step + 1, reason=reason)

    def _handle_skip(self, outcome: Outcome, result: StepResult) -> None:
        """Log a skipped step, adapt the loss scale, and apply the policy. Collective: every rank must call it."""
        # A step counts once, even if several of its passes are skipped.
        status = outcome.status
        is_first = not status.counted_as_skipped
        if is_first:
            status.counted_as_skipped = True
            self.skipped += 1

        # Before the scaler changes: the log has the loss scale with which the step was computed.
        reason = self._log_skip(outcome, result)

        # An overflow of fp16 is not a failure: this is how the scaler finds its value.
        if self._handle_overflow(outcome):
            if is_first:
                self._overflows += 1

            return

        # Too many of the others in a row end the run under every policy.
        if not status.counted_in_a_row:
            status.counted_in_a_row = True
            self.skips_in_a_row += 1

        limit = self._config.nonfinite.max_in_a_row

        # A spike has a finite gradient; each of the two cases has its own policy.
        key = "spike" if outcome.finite else "nonfinite"
        policy = getattr(self._config, key).policy

        if policy == "stop" or self.skips_in_a_row >= limit:
            in_a_row = f"{plural(self.skips_in_a_row, 'such step')} in a row"
            raise UserError(
                f"step {result.step + 1}: {reason} ({in_a_row}; {key}.policy={policy}, nonfinite.max_in_a_row={limit})",
                "",
                "lower lr.peak, set clip.norm, lengthen lr.warmup, or look at the samples of this step",
            )

        if policy == "rewind":
            self.rewind_after = SkippedStep(result, outcome.progress.batches.span)

    def _handle_overflow(self, outcome: Outcome) -> bool:
        """Lower the loss scale of fp16 if the gradient is not finite. Return whether the scale explains the skip.

        It does as long as it can be lowered. The scaler may wait for a few more overflows (`scaler.hysteresis`).
        """
        # The skip of a loss spike, whose gradient is finite, says nothing about the scale.
        if self._scaler is None or outcome.finite:
            return False

        can_be_lowered = self._scaler.value > self._scaler.config.minimum
        self._scaler.update(overflowed=True)
        return can_be_lowered

    def _log_skip(self, outcome: Outcome, result: StepResult) -> str | None:
        """Log the skip with its reason and the samples to blame, and return both as text. Collective."""
        gathered = self._runtime.collectives.all_gather_json(
            blamed_micro_batches(outcome.progress, self._runtime.world.rank, is_spike=outcome.finite)
        )
        blamed = [line for lines in gathered for line in lines]
        scale = {"scale": self._scaler.value} if self._scaler else {}
        self._log_event("skip", step=result.step + 1, reason=result.skip_reason, blame=blamed, **scale)

        if not blamed:
            return result.skip_reason

        return f"{result.skip_reason} ({'; '.join(blamed[:3])})"

    def check_something_learned(self, steps: int, applied: int) -> None:
        """Raise at the end of a run if no step was applied, so that untrained weights do not pass for a result."""
        if applied or not steps:
            return

        empty = steps - self.skipped

        # The usual reasons: empty losses, an fp16 scale that is still too large, or a loss that is not finite.
        if not self.skipped:
            cause = "the loss of every step had weight 0"
            fix = "look at the weight that loss() returns (how many terms its sum has; 0 where all of them are masked)"
        elif self._overflows == self.skipped:
            cause = f"{self.skipped} overflowed: the loss scale of fp16 is still too large"
            fix = "train for more steps, or set a smaller scaler.initial"
        else:
            cause = f"{self.skipped} were skipped for the reasons above"
            fix = "look at the samples that are named above, and at the loss of an untrained model"

        # Some steps were skipped, and the others were empty.
        if self.skipped and empty:
            cause += f"; {empty} had weight 0"

        raise UserError(
            f"none of the {plural(steps, 'step')} was applied: {cause}",
            "",
            f"{fix}; the model is as it was before the first step, and model.safetensors is not written",
        )

    def state_dict(self) -> dict[str, Any]:
        # The keys are part of the file format.
        return {
            "skips": {
                "skipped": self.skipped,
                "failures_in_a_row": self.skips_in_a_row,
                "scale_backoffs": self._overflows,
            },
            "spikes": {"recent": list(self.spikes.recent)},
            "scaler": self._scaler.state_dict() if self._scaler else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        skips = state["skips"]
        self.skipped = skips["skipped"]
        self.skips_in_a_row = skips["failures_in_a_row"]
        self._overflows = skips.get("scale_backoffs", 0)  # older checkpoints do not have it
        self.empty_in_a_row = 0

        self.spikes.recent.clear()
        self.spikes.recent.extend(state["spikes"]["recent"])

        if self._scaler and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
