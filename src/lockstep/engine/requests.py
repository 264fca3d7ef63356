"""Requests that travel in the control word: stop, save, evaluate, preempt.

A rank requests something by setting a flag. The flags of all ranks are summed with the gradients of the next step, so
every rank receives a request with the result of the same step. A rank acts on what was received, never on a request of
its own: the ranks then do the same after the same step.

A result is accepted once, as soon as the host knows it, and reported once, at the end of a step: to the hooks and the
log. Usually a step accepts and reports its own. Where outcomes are late (`outcomes/late.py`), on a GPU, the order is:

    step n      its outcome is late. The step accepts and reports the result of step n - 1
    in between  a save, an evaluation or the last log line may need the outcome of step n: `accept_late` reads it
    step n + 1  accepts the result of step n, unless `accept_late` has done so, and reports it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.manager import CheckpointManager
from lockstep.engine.step import Stepper
from lockstep.observe.metrics import MetricNames
from lockstep.runtime.collectives import Collectives
from lockstep.task import BatchSource, StepResult


@dataclass(eq=False)
class Requests:
    """The requests of this rank, and the requests that all ranks have agreed on and not carried out yet.

    `SaveDecision` (`checkpoint/saving/decision.py`) has the requests for a save.
    """

    stepper: Stepper
    checkpoints: CheckpointManager
    source: BatchSource
    metric_names: MetricNames
    collectives: Collectives
    total_steps: int
    steps_changed: bool = False  # whether the user has set another number of steps than the resumed run had

    # Agreed: the same on every rank.
    stop_agreed: bool = False
    evaluate_agreed: bool = False
    preempt_agreed: bool = False
    evaluation_due: bool = False  # the evaluation of this step was interrupted: the resumed run evaluates first

    stop_reason: str | None = None  # why the run ends before its last step; other ranks may not know it

    # Requested by the user's code on this rank, for the next control word.
    stop_requested: str | None = None  # the reason, "" if none was given

    _unreported: StepResult | None = None  # accepted by `accept_late`, for the next step to report

    @property
    def steps_done(self) -> int:
        return self.stepper.steps_done

    @property
    def is_stopping(self) -> bool:
        """True if all ranks have agreed that this step is the last one."""
        return self.stop_agreed or self.preempt_agreed

    def accept(self, result: StepResult | None) -> None:
        """Record the requests of any rank, which the control word of a pass has carried."""
        if result is None:
            return

        flags = result.flags

        # Above 0: some rank has set the flag. Earlier agreements stay.
        self.stop_agreed |= flags.stop > 0
        self.preempt_agreed |= flags.preempt > 0
        self.evaluate_agreed |= flags.evaluate > 0
        if flags.save > 0:
            self.checkpoints.decision.agree()

        if flags.new_metrics > 0:
            self.metric_names.announce()

        # All ranks abort the save in the same step, because they read the same control word.
        if flags.save_failed:
            self.checkpoints.pending.abort_if_failed()

    def accept_late(self, note_source: bool = True) -> StepResult | None:
        """Read the late outcome, if there is one, accept its result, and return it.

        `note_source`: pass it to the source, which has advanced past its step without it and may be saved now. In the
        middle of a step a source gets no results.
        """
        result = self.stepper.read_late_outcome()
        if result is None:
            return None

        self.accept(result)
        self._unreported = result
        if note_source:
            self.source.note_result(self.stepper.step_result(result))

        return result

    def to_report(self, result: StepResult | None) -> StepResult | None:
        """Return the result for a step to report: the one that `accept_late` has accepted, or else `result`.

        If there are both, `result` is not reported: it is that of the step before the last one, or of an earlier pass.
        """
        unreported, self._unreported = self._unreported, None
        return unreported or result

    # ---- an evaluation ----

    def evaluated(self) -> None:
        """Mark a request for an evaluation as carried out: the next control word must not ask for it again."""
        self.evaluate_agreed = False
        self.stepper.set_flags(evaluate=False)

    def repeat_evaluation(self) -> None:
        """Save and exit: a preemption has interrupted the evaluation of this step, which the resumed run repeats."""
        self.preempt_agreed = True
        self.evaluation_due = True

    def take_evaluation_due(self) -> bool:
        """Return whether this run must repeat an evaluation first. It is returned once."""
        is_due, self.evaluation_due = self.evaluation_due, False
        return is_due

    # ---- a stop ----

    def request_stop(self, reason: str | None = None, by_user: bool = False) -> None:
        """Ask all ranks to stop: they do so together, after the step whose control word carries the request.

        `by_user`: the user's code asked for it, so a run that is killed before that step stops there as well.
        """
        self.stop_reason = self.stop_reason or reason
        self.stepper.set_flags(stop=True)
        if by_user and self.stop_requested is None:
            self.stop_requested = reason or ""

    def stop_now(self, reason: str) -> None:
        """End the loop after this step, for a reason that all ranks know. Every rank must call it."""
        self.stop_reason = reason
        self.stop_agreed = True

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the stop that the user's code requested on any rank, and whether an evaluation is due. Collective."""
        requested = self.collectives.all_gather_json(self.stop_requested)
        reason = next((reason for reason in requested if reason is not None), None)

        # A request in the last step has nothing left to stop: with more steps, the run goes on.
        done = self.stop_agreed or self.steps_done >= self.total_steps
        stop = None if reason is None else {"reason": reason, "done": done}
        return {"stop": stop, "evaluation_due": self.evaluation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Carry out a stop that the user's code had requested before the checkpoint, or stay stopped.

        A run that has stopped continues if the user sets another number of steps.
        """
        self.evaluation_due = state.get("evaluation_due", False)
        stop = state.get("stop")
        if stop is None:
            return

        if not stop["done"]:
            self.request_stop(stop["reason"] or None, by_user=True)
        elif not self.steps_changed:
            # The reason is "" if the user gave none.
            self.stop_reason = stop["reason"] or None
            self.stop_requested = stop["reason"]
            self.stop_agreed = True
