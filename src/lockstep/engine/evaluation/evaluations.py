"""The evaluations of a run: when they are due, their newest results, and the decisions that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.checkpoint.saving.decision import SaveDecision
from lockstep.config import RunConfig
from lockstep.engine.evaluation.early_stop import EarlyStop, check_metric
from lockstep.engine.evaluation.evaluator import Evaluation, EvaluationSet
from lockstep.engine.evaluation.schedule import EvaluationSchedule
from lockstep.engine.requests import Requests
from lockstep.observe.recorder import Recorder
from lockstep.optim.schedule import LearningRate


class Evaluations:
    """Lets early stopping, the best checkpoint and ReduceLROnPlateau follow the evaluations that are monitored.

    All ranks have the same results, so each of them decides alike without asking the others.
    """

    def __init__(
        self,
        config: RunConfig,
        schedule: EvaluationSchedule,
        requests: Requests,
        saves: SaveDecision,
        learning_rate: LearningRate,
        recorder: Recorder,
        newest: Evaluation | None = None,
    ):
        """`newest` was made before the first step."""
        self.schedule = schedule
        self.early_stop = EarlyStop(config.stop)
        self._best_metric = config.checkpoint.best

        # Objects that follow the results.
        self._requests = requests
        self._saves = saves
        self._learning_rate = learning_rate
        self._recorder = recorder

        # The results.
        self.newest = newest  # the newest evaluation of the monitored set
        self.by_set: dict[str, Evaluation] = {}  # the newest of each named set
        self._warned_of_second = False

    def are_due(self, steps_done: int) -> bool:
        """Return whether to evaluate after this step. All ranks get the same answer."""
        due = self.schedule.due_after(steps_done)
        if due or self._requests.evaluate_agreed:
            # On a GPU the request for this evaluation may be part of a late outcome.
            self._requests.accept_late()

        return due or self._requests.evaluate_agreed

    def follow(self, sets: Sequence[EvaluationSet], evaluations: Sequence[Evaluation], seconds: float) -> None:
        """Keep new results, and act on them. `seconds` is the time that the run has taken. Collective."""
        self._requests.evaluated()
        self.schedule.seconds = seconds
        self.by_set |= {evaluation.name: evaluation for evaluation in evaluations if evaluation.name}

        # Early stopping, the best checkpoint and the rate follow one set, so that two do not contradict each other.
        for chosen, evaluation in zip(sets, evaluations, strict=True):
            if chosen.monitored:
                self._decide(evaluation)

    def _decide(self, evaluation: Evaluation) -> None:
        """Let early stopping, the best checkpoint and the learning rate follow a new evaluation."""
        self.newest = evaluation
        results = self.results()
        self.early_stop.observe(results, evaluation.steps_done)
        self.stop_if_no_improvement()

        if self._best_metric:
            check_metric("checkpoint.best", self._best_metric, results)

        self._saves.note_evaluation(evaluation.steps_done, results)

        # Unlike the others, ReduceLROnPlateau counts calls: a second evaluation at one step would be a bad step for it.
        if not self._learning_rate.observe(evaluation.loss, evaluation.steps_done):
            self._warn_of_second(evaluation.steps_done)

    def stop_if_no_improvement(self) -> None:
        """End the loop if the evaluations no longer improve."""
        if self.early_stop.reason:
            self._requests.stop_now(self.early_stop.reason)

    def time_is_over(self, seconds: float) -> bool:
        """Return whether a run that has taken this long must stop: `stop.max_minutes`."""
        return self.early_stop.time_is_over(seconds)

    def _warn_of_second(self, steps_done: int) -> None:
        """Warn once that a second evaluation of one step did not move the learning rate."""
        if self._warned_of_second:
            return

        self._warned_of_second = True
        reason = (
            f"ReduceLROnPlateau follows the first evaluation of a step, and run.evaluate was called a second time at "
            f"step {steps_done}: pass monitor=False for every dataset except the one that it should follow"
        )
        self._recorder.event("warning", reason=reason)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        return {"early_stop": self.early_stop.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the early stopping of a checkpoint. Results that a rewind undoes no longer count."""
        steps_done = self._requests.steps_done
        self.by_set = {name: other for name, other in self.by_set.items() if other.steps_done <= steps_done}
        if self.newest is not None and self.newest.steps_done > steps_done:
            self.newest = None

        if state.get("early_stop"):
            self.early_stop.load_state_dict(state["early_stop"])
            self.stop_if_no_improvement()

    # ---- results ----

    def is_current(self, steps_done: int) -> bool:
        """Return whether the newest evaluation used the weights after this many steps."""
        return self.newest is not None and self.newest.steps_done == steps_done

    def results(self) -> dict[str, float]:
        """Return the newest results by the names that settings use: `eval_loss`, `accuracy`, `val/accuracy`.

        Names without a set are those of the evaluation that is monitored.
        """
        if self.newest is None:
            return {}

        # Results of another step do not belong to these weights.
        current = [other for other in self.by_set.values() if other.steps_done == self.newest.steps_done]
        return {"eval_loss": self.newest.loss, **self.newest.metrics, **_named(current)}


def results_for_hooks(sets: Sequence[EvaluationSet], evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Return the results of an evaluation: "loss" and metrics of the monitored set, and "SET/loss" of named sets."""
    monitored = [evaluation for chosen, evaluation in zip(sets, evaluations, strict=True) if chosen.monitored]
    main = (monitored or list(evaluations))[0]
    return {"loss": main.loss, **main.metrics, **_named(evaluations)}


def _named(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    return {name: value for evaluation in evaluations for name, value in evaluation.named().items()}
