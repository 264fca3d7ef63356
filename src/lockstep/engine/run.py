"""One run in this process, from its first step on. `fit` and custom loops share this code.

setup.py builds the parts of a Run (driver, source, stepper, recorder, ...). `step_batches()` is the skeleton of the
loop, `end_step()` ends a step, and `maintain()` rewinds, saves or preempts between two steps. Everything about
gradients is in the Stepper.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from lockstep.callbacks.weight_average import WeightAverage
from lockstep.checkpoint.inspect import read_weights
from lockstep.checkpoint.manager import CheckpointManager, LoopState, Resumed
from lockstep.config import RunConfig
from lockstep.engine.banner import summary_of
from lockstep.engine.checks.guards import TrainableGuard, check_replicas
from lockstep.engine.determinism import Exactness
from lockstep.engine.evaluation.early_stop import EarlyStop, check_metric
from lockstep.engine.evaluation.evaluator import Evaluation, EvaluationSet, Evaluator, evaluation_batch
from lockstep.engine.evaluation.schedule import EvaluationSchedule
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.load_balance import LoadBalancer
from lockstep.engine.outcome import SkippedStep
from lockstep.engine.start_check import check as start_check
from lockstep.engine.start_check.data import take_and_compare
from lockstep.engine.step import Stepper
from lockstep.errors import Preempted, UserError
from lockstep.observe.profile.tracer import StepTracer
from lockstep.observe.recorder import Recorder
from lockstep.observe.report import write_report
from lockstep.observe.run_folder import RunFolder, save_weights, write_summary
from lockstep.observe.sinks import JsonlSink
from lockstep.optim.optimizers import Optimizers
from lockstep.parallel.cudagraph.graphs import release_captures
from lockstep.parallel.driver import Driver, full_state
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.task import BatchSource, MicroBatch, Number, StepBatches, StepResult, Weight


@dataclass(frozen=True)
class ModelSetup:
    """The model under its driver, with its optimizers, evaluator and guards."""

    driver: Driver
    optimizers: Optimizers
    evaluator: Evaluator
    guard: TrainableGuard
    exactness: Exactness | None  # with `exact`
    schedulers: Any = None  # the user's, as `make_learning_rate` takes them
    average: WeightAverage | None = None  # with `ema.decay`


@dataclass
class Interval:
    """What was trained since the last log line."""

    steps: int = 0
    samples: int = 0


@dataclass(eq=False, kw_only=True)
class Run:
    """A run that is ready to train."""

    # The process and its records.
    config: RunConfig
    runtime: Runtime
    name: str
    started: float  # start time, minus the seconds trained before a resume
    folder: RunFolder
    recorder: Recorder

    # The model, the data and the step.
    model_setup: ModelSetup
    plan: Plan
    source: BatchSource
    sample_log: JsonlSink | None  # with `log.samples`: which samples this rank trained in each step
    stepper: Stepper
    load_balancer: LoadBalancer | None  # with `load_balance=auto`

    # Checkpoints and evaluations.
    checkpoints: CheckpointManager
    resumed: Resumed | None
    evaluation: Evaluation | None  # the newest that decides
    evaluation_schedule: EvaluationSchedule
    early_stop: EarlyStop
    hooks: Hooks  # the user's functions that the run calls

    # The RunBuilder, whose `run` is this Run. This reference cycle is intended: only the garbage collector frees the
    # Run. Freed by reference count just after the process group was destroyed, DDP's destructor could deadlock with
    # gloo's threads (pytorch/pytorch#179291).
    _keep_alive: Any = field(repr=False)

    tracer: StepTracer | None = field(init=False, default=None)  # while steps are traced
    profiled: Any = field(init=False, default=None)  # with `profile.count`: the ProfiledSteps of profile/steps.py

    # Requests that all ranks received through the control word and that are not carried out yet.
    _stop_agreed: bool = field(init=False, default=False)
    stop_reason: str | None = field(init=False, default=None)  # why the run ended before its last step, if known
    _save_agreed: bool = field(init=False, default=False)
    _evaluate_agreed: bool = field(init=False, default=False)

    # Requests of the user's code on this rank, for the next control word.
    _stop_requested: str | None = field(init=False, default=None)  # the reason, "" if none was given
    _save_requested: bool = field(init=False, default=False)

    _preempt_agreed: bool = field(init=False, default=False)
    evaluations_by_set: dict[str, Evaluation] = field(init=False, default_factory=dict)  # the newest of each named set
    best: dict[str, Any] | None = field(init=False, default=None)  # the best checkpoint, known at the end
    _warned_second_evaluation: bool = field(init=False, default=False)
    _interval: Interval = field(init=False, default_factory=Interval)
    batches_are_whole: bool = field(init=False, default=False)  # the loss gets batches that no other rank has a part of
    _line_due: bool = field(init=False, default=False)  # the log line of this step is not written yet
    _newest: StepResult | None = field(init=False, default=None)  # the newest known result

    @property
    def is_stopping(self) -> bool:
        """Whether all ranks have agreed that this step is the last one."""
        return self._stop_agreed or self._preempt_agreed

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken, those before a resume included."""
        return time.time() - self.started

    @property
    def driver(self) -> Driver:
        return self.model_setup.driver

    # ---- the loop ----

    def check_start(self, task: Any = None) -> None:
        """Refuse a loss or data that would train the wrong model, before the first step. Collective.

        `task` is None in a custom loop.
        """
        if self.stepper.counters.steps_done > 0:
            return  # a resumed run was checked at its start

        cause = start_check.find_cause(self, task)
        if cause:
            raise start_check.error_for(cause, self.config)

    def step_batches(self) -> Iterator[StepBatches]:
        """Yield this rank's micro-batches of every global step, until the plan ends or some rank requests a stop."""
        self.recorder.start_clock()
        self.model_setup.guard.late_hooks.check()
        first = True

        # `first`: the batches of the first step are compared between ranks and workers.
        while self.stepper.counters.steps_done < self.plan.steps and not self._stop_agreed:
            self.model_setup.guard.check()
            if self.profiled:
                self.profiled.begin_step()
            batches = self._take(first)
            first = False
            batches.step = self.stepper.counters.steps_done
            batches.micro_batches = self._feed(batches.micro_batches, batches.count)
            yield batches

    def end_pass(self, result: StepResult | None) -> None:
        """End a pass over the batches of a step, other than its last pass."""
        self._accept_flags(result)

    def end_step(self, batches: StepBatches, result: StepResult | None) -> None:
        """End a step: advance the data source, run periodic checks, and call the hooks `after_step`.

        `result` is the newest known result. On a GPU it may be that of the previous step, and None in the first. A log
        line that is due is written later, so that it includes what the user's code logs after the step.
        """
        if self.tracer:
            self.tracer.end_step()

        # A checkpoint that is saved after this line resumes after these samples.
        self.source.commit(batches, result)
        steps_done = self.stepper.counters.steps_done

        if self.sample_log:
            # A step that is repeated after a restart has one line per attempt. The last attempt counts.
            ids = [[batch.epoch, *map(int, batch.ids)] for batch in self.stepper.progress.trained]
            record = {"step": batches.step, "attempt": self.folder.attempt, "time": time.time(), "epoch_and_ids": ids}
            self.sample_log.write(record)

        self._accept_flags(result)

        self._interval.steps += 1
        self._interval.samples += batches.samples
        if self.load_balancer:
            self.load_balancer.end_step(steps_done)

        # Only the last log line waits for the result of its own step. Earlier lines use the newest known result.
        if steps_done == self.plan.steps or self._stop_agreed:
            last = self.stepper.wait_for_outcome()
            self._accept_flags(last)
            result = last or result
            self._line_due = True
        elif steps_done % self.config.log.every == 0:
            self._line_due = True
        else:
            self.recorder.poll()

        self._newest = result

        if self.model_setup.exactness:
            self.model_setup.exactness.end_step()

        # Iterating over all modules is too slow for every step.
        if steps_done % self.config.checks.every == 0:
            self.model_setup.guard.check_structure()

        # The next control word sends both flags to the other ranks.
        save_failed = self.checkpoints.poll()
        save = self.checkpoints.save_is_due_by_clock() or self.runtime.notice.asks_for_save()
        save |= self._save_requested
        evaluate = self.runtime.is_main and self.evaluation_schedule.due_by_clock(self.seconds)
        self.stepper.set_flags(save=save, save_failed=save_failed, evaluate=evaluate)

        # The clocks of the ranks differ, so rank 0 requests the stop, and the others follow.
        if self.runtime.is_main and self.early_stop.time_is_over(self.seconds):
            self.request_stop(f"stop.max_minutes={self.config.stop.max_minutes} is over")

        # The user's code may be slow. The watchdog allows more time in the phase "user code".
        if self.hooks.follow_steps:
            self.runtime.heartbeat.beat("user code", steps_done)
            self.hooks.after_step(result)
            self.runtime.heartbeat.beat("data")

        # After the hooks, which may change the weights: clip them, for example.
        if self.model_setup.average:
            self.model_setup.average.update()

    def log_metric(self, name: str, total: Number, weight: Weight) -> None:
        """Add to a metric of the next log line."""
        self.stepper.context.metric_names.seen.add(name)
        self.stepper.sums.add([], [(name, total, weight)])

    def request_stop(self, reason: str | None = None, by_user: bool = False) -> None:
        """Ask all ranks to stop: they do so together, after the step whose control word carries the request.

        `by_user`: the user's code asked for it, so a run that is killed before that step stops there as well.
        """
        self.stop_reason = self.stop_reason or reason
        self.stepper.set_flags(stop=True)
        if by_user and self._stop_requested is None:
            self._stop_requested = reason or ""

    def resume_stop(self, resumed: Resumed) -> None:
        """Carry out a stop that the user's code had requested before the checkpoint, or stay stopped.

        A run that has stopped trains on if the user sets another number of steps.
        """
        stop = resumed.loop.stop
        if stop is None:
            return
        if not stop["done"]:
            self.request_stop(stop["reason"] or None, by_user=True)
        elif not {"steps", "epochs"} & {change.key for change in resumed.changed_settings}:
            self.stop_reason = stop["reason"] or None
            self._stop_requested = stop["reason"]
            self._stop_agreed = True

    def request_save(self) -> None:
        """Ask all ranks to save, after the step whose control word carries the request."""
        self._save_requested = True
        self.stepper.set_flags(save=True)

    def write_line_if_due(self) -> None:
        """Write the log line of this step, unless it is written or not due."""
        if self._line_due:
            self._line_due = False
            self._log(self._newest)

    def maintain(self, evaluation_due: bool = False) -> None:
        """Rewind after a skipped step if the policy says so, save if due, and end the process if it is preempted.

        `evaluation_due`: the evaluation of this step was interrupted, so the resumed run must evaluate first.
        """
        if self._line_due:
            self.write_line_if_due()

        steps_done = self.stepper.counters.steps_done
        save_due = self.checkpoints.due(steps_done, self._save_agreed or self._preempt_agreed)

        # A checkpoint needs the result of its step, which may also be that the run must rewind.
        if save_due:
            self._accept_flags(self.stepper.wait_for_outcome())
            # A run that resumes from this checkpoint does not write the metrics of earlier steps again.
            self.recorder.poll(wait=True)

        # After a rewind there is nothing to check or to save: the state was just loaded from a checkpoint.
        if self.stepper.outcomes.rewind_after:
            self._rewind(self.stepper.outcomes.rewind_after)
        else:
            # Here and not in `end_step`, to include changes by `after_step` or by a custom loop.
            if save_due or steps_done % self.config.checks.every == 0:
                self._check_replicas()

            if save_due:
                self._save_now(evaluation_due)
            elif self._is_first_step_of_process:
                self._prepare_snapshot()

        # After the save, whose time belongs to the step.
        if self.profiled:
            self.profiled.end_step()

        if self._preempt_agreed:
            self._end_preempted()

    def _save_now(self, evaluation_due: bool) -> None:
        """Save a checkpoint that is due or was requested, and mark the request as carried out."""
        began = time.perf_counter()
        self.save_checkpoint(evaluation_due)
        self._save_agreed = False
        self._save_requested = False
        self.stepper.set_flags(save=False)
        self.runtime.notice.saved()
        self.recorder.exclude(time.perf_counter() - began)  # the time of a save is not the time of a step

    def save_if_best(self) -> None:
        """Save again if the evaluation with which a resumed run begins is the best one."""
        if self._save_agreed:
            self._save_now(evaluation_due=False)

    def _prepare_snapshot(self) -> None:
        """Allocate the snapshot after the first step of this process, which makes the first save shorter."""
        # By now the optimizers have their state, so the size is known. If the forward adds parameters, it has done so.
        self.model_setup.guard.check_structure()
        self.checkpoints.prepare()

    @property
    def _is_first_step_of_process(self) -> bool:
        return self.stepper.counters.steps_done == (self.resumed.steps_done if self.resumed else 0) + 1

    def save_checkpoint(self, evaluation_due: bool = False) -> None:
        """Save a checkpoint of the current state. `evaluation_due`: see `maintain`."""
        self.model_setup.guard.check_structure()  # the state of a replaced parameter would have no name

        # Checkpoints hold the buffers of rank 0.
        self.driver.sync_buffers()

        # checkpoint.best compares these metrics, if these weights were evaluated.
        metrics = self.results() if self.evaluation_is_current else {}
        stop = self._agree_before_save()
        interval = self.recorder.interval_state(self.stepper.sums)
        loop = LoopState(evaluation_due, interval, self.seconds, self.early_stop.state_dict(), stop)
        # The weights are copied at once; only the optimizers' state is copied later.
        with self.evaluation_weights():
            self.checkpoints.save(self.stepper.counters.steps_done, loop, metrics)

    def _agree_before_save(self) -> dict[str, Any] | None:
        """Make all ranks know the metrics' names, and return the stop that the user's code requested. Collective."""
        names = self.stepper.context.metric_names
        gathered = self.runtime.collectives.gather_json([sorted(names.seen - names.known), self._stop_requested])
        if any(new for new, _ in gathered):
            self._agree_on_names()

        # A request in the last step has nothing left to stop: with more steps, the run goes on.
        reasons = [reason for _, reason in gathered if reason is not None]
        done = self._stop_agreed or self.stepper.counters.steps_done >= self.plan.steps
        return {"reason": reasons[0], "done": done} if reasons else None

    def evaluate(self, sets: Sequence[EvaluationSet], may_preempt: bool = False) -> list[Evaluation]:
        """Evaluate the model on each of `sets`, every sample once, log the results, and decide what follows from them.

        `may_preempt`: a preemption may interrupt the evaluation, because the rest of this step is done.
        With `ema.decay` the averages of the weights are evaluated.
        """
        self.write_line_if_due()
        evaluations = self._evaluate_all(sets, may_preempt)

        # Some rank was preempted. The checkpoint records that the resumed run must evaluate first.
        if evaluations is None:
            self._preempt_agreed = True
            self.maintain(evaluation_due=True)
            raise AssertionError("unreachable: maintain() raises Preempted")

        # The next control word must not ask for it again.
        self._evaluate_agreed = False
        self.stepper.set_flags(evaluate=False)
        self.evaluation_schedule.seconds = self.seconds

        # Decide only when all are done: an evaluation that is interrupted is repeated from the first set on.
        self.evaluations_by_set |= {evaluation.name: evaluation for evaluation in evaluations if evaluation.name}
        for chosen, evaluation in zip(sets, evaluations, strict=True):
            if chosen.decides:
                self._follow(evaluation)

        if self.hooks.follow_evaluations:
            with self.runtime.heartbeat.visit("user code"):
                self.hooks.after_eval(_results_for_hooks(sets, evaluations))

        return evaluations

    def _evaluate_all(self, sets: Sequence[EvaluationSet], may_preempt: bool) -> list[Evaluation] | None:
        """Return the evaluations of all sets, or None if a preemption interrupted one of them."""
        evaluations = []

        # The data may be the training dataset, which worker processes read too.
        with self.source.reading_here(), self.evaluation_weights(), self._averaged_weights(), self.whole_batches():
            for chosen in sets:
                evaluation = self.model_setup.evaluator.evaluate(
                    chosen, self.evaluation_batch(), self.stepper.counters.steps_done, may_preempt
                )
                if evaluation is None:
                    return None

                evaluations.append(evaluation)

        return evaluations

    def _follow(self, evaluation: Evaluation) -> None:
        """Let early stopping, the best checkpoint and schedulers follow an evaluation. Collective."""
        self.evaluation = evaluation
        results = self.results()
        self.early_stop.observe(results, evaluation.step)
        self.stop_if_no_improvement()

        # The best checkpoint is that of the best evaluation, so it is saved now and not when the next save is due.
        if self.config.checkpoint.best:
            check_metric("checkpoint.best", self.config.checkpoint.best, results)
            self._save_agreed |= self.checkpoints.is_new_best(results)

        if not self.stepper.learning_rate.observe(evaluation.loss, evaluation.step):
            self._warn_second_evaluation(evaluation.step)

    def results(self) -> dict[str, float]:
        """Return the newest results by the names that settings use: `eval_loss`, `accuracy`, `val/accuracy`.

        Names without a set are those of the evaluation that decides.
        """
        if self.evaluation is None:
            return {}

        # Results of another step do not belong to these weights.
        current = [other for other in self.evaluations_by_set.values() if other.step == self.evaluation.step]
        by_set = {name: value for other in current for name, value in other.named().items()}
        return {"eval_loss": self.evaluation.loss, **self.evaluation.metrics, **by_set}

    def evaluation_is_due(self) -> bool:
        """Return whether to evaluate after this step. All ranks get the same answer."""
        due = self.evaluation_schedule.due_after(self.stepper.counters.steps_done)
        if due or self._evaluate_agreed:
            # On a GPU the request for this evaluation may still be part of a result that is not read yet.
            self._accept_flags(self.stepper.wait_for_outcome())

        return due or self._evaluate_agreed

    @contextmanager
    def whole_batches(self) -> Iterator[None]:
        """Return a context in which the loss gets whole batches: `run.all_gather` has nothing to gather there."""
        self.batches_are_whole = True
        try:
            yield
        finally:
            self.batches_are_whole = False

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that its optimizers evaluate and save."""
        return self.model_setup.optimizers.evaluation_weights(self.driver.drop_gathered)

    def _averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averages as weights, if there are any."""
        average = self.model_setup.average
        return average.applied(self.driver.drop_gathered) if average else nullcontext()

    def stop_if_no_improvement(self) -> None:
        """End the loop if the evaluations no longer improve. All ranks know the same ones, and decide alike."""
        if self.early_stop.reason:
            self.stop_reason = self.early_stop.reason
            self._stop_agreed = True

    def _warn_second_evaluation(self, step: int) -> None:
        if self._warned_second_evaluation:
            return

        self._warned_second_evaluation = True
        reason = (
            f"ReduceLROnPlateau follows the first evaluation of a step, and run.evaluate was called a second time at "
            f"step {step}: pass decides=False for every dataset except the one that it should follow"
        )
        self.recorder.event("warning", reason=reason)

    @property
    def evaluation_is_current(self) -> bool:
        """Whether the newest evaluation used the current weights."""
        return self.evaluation is not None and self.evaluation.step == self.stepper.counters.steps_done

    def evaluation_batch(self) -> int:
        """Return the batch size of evaluations."""
        return evaluation_batch(self.config, self.plan.global_batch)

    # ---- the end ----

    def end_training(self) -> None:
        """Log the last step, write the last checkpoint, then the weights. Raise if no step was applied."""
        self.close_source()
        last = self.stepper.wait_for_outcome()
        self._accept_flags(last)

        # After a `break` in a custom loop, the last steps are not logged yet.
        if self._interval.steps:
            self._line_due = False
            self._log(last or self._newest)

        # Only the rank that requested a stop knows why.
        reasons = self.runtime.collectives.gather_json(self.stop_reason)
        self.stop_reason = next(filter(None, reasons), None)

        counters = self.stepper.counters
        if self.stop_reason:
            self.recorder.event("stop", step=counters.steps_done, reason=self.stop_reason)
        self.stepper.outcomes.check_something_learned(counters.steps_done, counters.applied)
        self._check_replicas()

        # The last evaluation may be the best one.
        at_end = self.config.checkpoint.at_end or self._save_agreed
        if at_end and self.checkpoints.due(counters.steps_done, requested=True):
            self.save_checkpoint()

        self.checkpoints.settle()
        self.recorder.poll(wait=True)

        # Gathering sharded parameters is collective: all ranks take part, and only rank 0 gets the result.
        self.driver.sync_buffers()
        self.best = self.runtime.collectives.run_on_rank0(self._best_for_summary)
        with self.evaluation_weights():
            self._save_weights("model.safetensors")
        if self.model_setup.average:
            with self._averaged_weights():
                self._save_weights("ema.safetensors", ema=True)

    def _best_for_summary(self) -> dict[str, Any] | None:
        best = self.checkpoints.best()
        if best is None:
            return None

        path = self.folder.as_shown(best.checkpoint.location)
        return {"step": best.checkpoint.step, "metric": best.metric, "value": best.value, "checkpoint": path}

    def _save_weights(self, file: str, ema: bool = False) -> None:
        weights, aliases = full_state(self.driver, self.runtime.is_main, self.config.checkpoint.frozen)
        self.runtime.collectives.run_on_rank0(lambda: self._save_final(file, weights, aliases, ema))

    def _save_final(self, file: str, weights: dict[str, Tensor], aliases: dict[str, str], ema: bool) -> None:
        """Write the weights, or those of the best checkpoint, as `checkpoint.final` says, on rank 0."""
        best = self.checkpoints.best()
        if self.config.checkpoint.final == "best" and best is None:
            reason = f"checkpoint.final=best: no checkpoint has a finite value, so {file} is of the last step"
            self.recorder.event("warning", reason=reason)
        elif self.config.checkpoint.final == "best" and best is not None:
            # A checkpoint may hold float32 masters of weights that the model stores in another format.
            saved, aliases = read_weights(best.checkpoint, ema)
            weights = {name: tensor.to(weights[name].dtype) for name, tensor in saved.items()}

        save_weights(self.folder.path / file, weights, aliases)

    def close(self, text: str | None = None) -> dict[str, Any]:
        """Write the summary and the report, and return the summary. `text` is what the task's `show` returned."""
        self.runtime.heartbeat.beat("end")
        self.recorder.write_rest(self.stepper.sums, self.stepper.counters.steps_done)

        # Return the model and the optimizers to the user without our hooks, and with the weights to use from now on.
        self.model_setup.optimizers.use_evaluation_weights(self.driver.drop_gathered)
        self.model_setup.optimizers.release()
        self.stepper.learning_rate.release()
        release_captures(self.driver.model)
        self.checkpoints.close()

        summary = summary_of(self)
        if text:
            self.recorder.event("sample", text=text)

        for goal in summary.get("goals", ()):
            self.recorder.event("goal", **goal)

        self.recorder.event("end", **summary)
        self.recorder.close()

        if self.runtime.is_main:
            self._write_report(summary)

        # No rank ends before the folder is complete.
        self.runtime.collectives.final_barrier()
        self.folder.release_lock()
        return summary

    def _write_report(self, summary: dict[str, Any]) -> None:
        # The weights are saved, so a failure only prints a message.
        try:
            write_summary(self.folder.path, summary)
            report = write_report(self.folder.path)
        except OSError as error:
            print(f"lockstep: the summary and the report cannot be written: {error}", file=sys.stderr)
        else:
            if self.config.log.progress != "off":
                print(f"report   {Path(self.folder.shown) / report.name}")

    def close_source(self) -> None:
        self.source.close()
        if self.sample_log:
            self.sample_log.close()

    def _end_preempted(self) -> NoReturn:
        """Raise `Preempted`, which ends this process. All ranks have saved at the same step."""
        steps_done = self.stepper.counters.steps_done
        self.close_source()

        # If the save failed, there is no checkpoint of this step to report.
        saved = self.checkpoints.saved_location() if self.checkpoints.settle() else None
        path = self.folder.as_shown(saved) if saved else None

        # Only some ranks may have received the signal.
        notice = self.runtime.notice
        received = self.runtime.collectives.gather_json([notice.signal, notice.original])
        signal, original = next((both for both in received if both[0]), ("SIGTERM", "SIGTERM"))
        self.recorder.event("leave", step=steps_done, signal=original, checkpoint=path)
        self.runtime.collectives.final_barrier()
        raise Preempted(steps_done, signal, path)

    # ---- parts of a step ----

    def _take(self, first: bool) -> StepBatches:
        """Take this rank's batches of the next step. Those of the first are compared (`checks.first_batch`)."""
        # Later batches follow from the same arithmetic as the first one, and are not compared.
        several_readers = not self.runtime.world.alone or self.config.data.workers > 0
        if first and several_readers and self.config.checks.first_batch:
            return take_and_compare(self.source, self.runtime, self.driver.role.data_rank)

        return self.source.take()

    def _feed(self, batches: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """Yield `count` micro-batches and measure how long this rank waits for them."""
        iterator = iter(batches)
        for done in range(count):
            self.runtime.heartbeat.beat("data", self.stepper.counters.steps_done)
            if self.load_balancer:
                self.load_balancer.mark()

            began = time.perf_counter()
            micro = next(iterator, None)
            if micro is None:
                raise UserError(
                    f"the source announced {count} micro-batches and gave {done}",
                    "",
                    "return StepBatches from take() whose count is the number of its micro_batches",
                )

            self.recorder.data_wait_s += time.perf_counter() - began
            self.recorder.micro_batches += 1

            # From now on a signal takes effect after the step, with a save.
            self.runtime.notice.waits = True
            yield micro

    def _log(self, result: StepResult | None) -> None:
        """Write the log line for the steps since the last one. `result` is the newest known result."""
        stepper, outcomes = self.stepper, self.stepper.outcomes
        steps_done = stepper.counters.steps_done
        numbers: dict[str, Any] = {"step": steps_done, "lr": float(stepper.lr), "skipped": outcomes.skipped}

        # Numbers that not every run has.
        if result is not None:
            numbers["grad_norm"] = result.grad_norm
        if self.plan.steps_per_epoch:
            numbers["epoch"] = steps_done / self.plan.steps_per_epoch
        if stepper.scaler:
            numbers["scale"] = stepper.scaler.value

        # `new` comes from the control word, so all ranks enter this collective together. It is set for the first line
        # of a process: a hook may have logged its first values after the control word of this step.
        names = stepper.context.metric_names
        if names.new:
            self._agree_on_names()

        # The sums stay on the device. The recorder reduces them over the ranks and reads them later, without waiting.
        self.recorder.end_interval(
            stepper.sums, self._interval.steps, self._interval.samples, outcomes.skipped_since_log, numbers
        )
        self._interval = Interval()
        outcomes.skipped_since_log = 0

    def _agree_on_names(self) -> None:
        names = self.stepper.context.metric_names
        self.recorder.agree_on_names(names.seen | names.known)
        names.known = set(self.recorder.names)
        names.new = False

    def _accept_flags(self, result: StepResult | None) -> None:
        """Record what any rank requested with the flags of a step's control word."""
        if result is None:
            return

        flags = result.flags
        self._stop_agreed |= flags.stop > 0
        self._preempt_agreed |= flags.preempt > 0
        self._save_agreed |= flags.save > 0
        self._evaluate_agreed |= flags.evaluate > 0
        self.stepper.context.metric_names.new |= flags.new_metrics > 0

        # All ranks abandon the save in the same step, because they read the same control word.
        if flags.save_failed:
            self.checkpoints.abandon_if_failed()

    def _rewind(self, skipped: SkippedStep) -> None:
        """Return to the last checkpoint and leave out the samples of the skipped step from now on."""
        self.stepper.outcomes.rewind_after = None
        resumed = self.checkpoints.rewind(skipped.result, skipped.span)

        # The log interval also returns to its state in the checkpoint.
        self.recorder.resume_interval(self.stepper.sums, resumed.loop.interval)
        self.stepper.context.metric_names.known = set(self.recorder.names)
        self._interval = Interval()
        self.recorder.start_clock()
        if resumed.loop.early_stop:
            self.early_stop.load_state_dict(resumed.loop.early_stop)

    def _check_replicas(self) -> None:
        if self.driver.role.replicated:
            check_replicas(self.driver.model, self.runtime)


def _results_for_hooks(sets: Sequence[EvaluationSet], evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Return the results of an evaluation: "loss" and metrics of the set that decides, and "SET/loss" of named sets."""
    deciding = [evaluation for chosen, evaluation in zip(sets, evaluations, strict=True) if chosen.decides]
    main = (deciding or list(evaluations))[0]
    by_set = {name: value for evaluation in evaluations for name, value in evaluation.named().items()}
    return {"loss": main.loss, **main.metrics, **by_set}
