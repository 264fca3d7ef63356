"""One run in this process, from its first step on. `fit` and custom loops share this code:

    for batches in run.step_batches():       the micro-batches of this rank in one step
        result = run.stepper.step(...)       forward, backward, all-reduce, update (engine/step.py)
        run.end_step(batches, result)        commit the samples, count it in the log, check, call hooks
        run.evaluate(sets)                   if it is due
        run.maintain()                       write the log line; rewind or save; end if preempted
    end_training(run), close(run)            the last checkpoint, the weights, the summary (engine/end.py)

`make_run` in setup/run.py makes a Run with all its objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from lockstep.checkpoint.loading.resume import Resumed
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.config import RunConfig
from lockstep.engine.checks.guards import check_replicas
from lockstep.engine.checks.same_data import DataRecord
from lockstep.engine.checks.start import as_checked
from lockstep.engine.clock import RunClock
from lockstep.engine.end import end_preempted
from lockstep.engine.evaluation.evaluations import Evaluations, results_for_hooks
from lockstep.engine.evaluation.evaluator import Evaluation, EvaluationSet, evaluation_batch
from lockstep.engine.hooks.all_gather import RowGathering
from lockstep.engine.hooks.calls import Hooks
from lockstep.engine.log.step_log import StepLog
from lockstep.engine.outcomes.outcome import SkippedStep
from lockstep.engine.passes import RepeatedBatches
from lockstep.engine.requests import Requests
from lockstep.engine.step import Stepper
from lockstep.engine.trained_model import TrainedModel
from lockstep.errors import UserError, plural
from lockstep.observe.recorder import Recorder
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.driver import Driver
from lockstep.parallel.progress import PassProgress
from lockstep.plan.plan import Plan
from lockstep.precision import Precision
from lockstep.run_folder.opened import RunFolder
from lockstep.runtime.context import Runtime
from lockstep.start_check import check as start_check
from lockstep.start_check.data import take_and_compare
from lockstep.task import BatchSource, MicroBatch, StepBatches, StepResult


@dataclass(eq=False, kw_only=True)
class Run:
    """A run that is ready to train: its objects, and the order in which a step calls them."""

    # The process and its records.
    config: RunConfig
    runtime: Runtime
    name: str
    clock: RunClock
    folder: RunFolder
    recorder: Recorder

    # The model, the data and the step.
    trained_model: TrainedModel
    plan: Plan
    source: BatchSource
    learning_rate: LearningRate
    stepper: Stepper
    checkpoints: CheckpointManager
    resumed: Resumed | None

    # What happens around the steps.
    requests: Requests  # what ranks ask of each other: stop, save, evaluate, preempt
    log: StepLog
    evaluations: Evaluations
    data_record: DataRecord  # whether a resumed run reads the same data
    hooks: Hooks  # the user's functions that the run calls

    passes: int = 1  # how often a custom loop goes over the batches of each step

    gathering: RowGathering = field(init=False, default_factory=RowGathering)
    _waits_s: list[float] = field(init=False, default_factory=list)  # for each micro-batch of the current step

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken, those before a resume included."""
        return self.clock.seconds

    @cached_property
    def driver(self) -> Driver:
        return self.trained_model.driver

    @property
    def precision(self) -> Precision:
        return self.stepper.context.precision

    @property
    def steps_done(self) -> int:
        """The number of steps so far, including skipped ones."""
        return self.stepper.steps_done

    @property
    def progress(self) -> PassProgress:
        """What this rank has done of the current step, or of the last one: of its current pass, if it has several."""
        return self.stepper.progress

    # ---- before the first step ----

    def check_start(self, task: Any = None) -> None:
        """Refuse a loss or data that would train the wrong model, before the first step. Collective.

        `task` is None in a custom loop.
        """
        if self.steps_done > 0:
            return  # a resumed run was checked at its start

        cause = start_check.find_cause(as_checked(self, task), task)
        if cause:
            raise start_check.error_for(cause, self.config)

    # ---- the batches of a step ----

    def step_batches(self) -> Iterator[StepBatches]:
        """Yield this rank's micro-batches of every global step, until the plan ends or some rank requests a stop.

        Iterating over them measures the wait for data and calls the hooks `before_batch`.
        """
        self.log.interval.restart_clock()
        self.trained_model.guard.check_late_hooks()
        self.stepper.choose_kernels()
        is_first = True

        while (steps_left := self.plan.steps - self.steps_done) > 0 and not self.requests.stop_agreed:
            self.trained_model.guard.check()
            for part in self.driver.parts:
                part.begin_step(steps_left)

            # Only the first step of this process compares what ranks and workers have read. `source` is read in every
            # step: a benchmark replaces it between two of them.
            batches = self._take_first() if is_first else self.source.take()

            feed = partial(self._feed, count=batches.num_micro_batches)
            if self.passes == 1:
                fed = feed(batches.micro_batches)
            else:
                fed = RepeatedBatches(batches.micro_batches, self.passes, feed)

            # A copy: the object belongs to the source, which may give it again.
            yield replace(batches, micro_batches=fed, step=self.steps_done)

            if is_first:
                is_first = False
                self.driver.parts.drop_done()

    def _take_first(self) -> StepBatches:
        """Take this rank's batches of the first step of this process, and compare what ranks and workers have read.

        Later batches follow from the same arithmetic, and are not compared.
        """
        if self.config.checks.first_batch:
            self.data_record.compare()

        several_readers = not self.runtime.world.alone or self.config.data.workers > 0
        if several_readers and self.config.checks.first_batch:
            return take_and_compare(self.source, self.runtime, self.driver.role.data_world.rank)

        return self.source.take()

    def _feed(self, micro_batches: Iterable[MicroBatch], count: int) -> Iterable[MicroBatch]:
        """Return `count` micro-batches, to iterate over once. Each comes after the hooks `before_batch`."""
        fed = self._wait_for_each(micro_batches, count)
        return self.hooks.around_batches(fed) if self._has_before_batch else fed

    @cached_property
    def _has_before_batch(self) -> bool:
        """Whether the user's code is called before every micro-batch."""
        return self.hooks.has("before_batch")

    def _wait_for_each(self, micro_batches: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
        """Yield `count` micro-batches and measure how long this rank waits for them."""
        if count < 1:
            raise _no_micro_batch(count, self.steps_done)

        iterator = iter(micro_batches)
        parts, gathering = self.driver.parts, self.gathering
        for done in range(count):
            self.runtime.heartbeat.beat("data", self.steps_done)
            for part in parts:
                part.begin_micro_batch()

            # Time only the wait: the forward runs at the yield.
            began = time.perf_counter()
            micro = next(iterator, None)
            if micro is None:
                raise _wrong_count(count, str(done))

            self._waits_s.append(time.perf_counter() - began)
            if gathering.row_offset is not None:
                gathering.begin_micro_batch()

            # From now on a signal takes effect after the step, with a save.
            if not self.runtime.notice.waits:
                self.runtime.notice.defer_to_step_end()

            yield micro
            del micro  # it must not stay in memory while the next one is read

        # Without an error the rest would count as trained.
        if next(iterator, None) is not None:
            raise _wrong_count(count, "more")

    # ---- the end of a step ----

    def end_step(self, batches: StepBatches, result: StepResult | None) -> StepResult | None:
        """End a step: advance the data source, run periodic checks, and call the hooks `after_step`.

        `result` is what the step has returned: its own, or on a GPU that of the previous step, or None if that was read
        in between. Return the one that this step reports (see `engine/requests.py`). If steps have several passes, both
        are results of passes; the source, the hooks and the log get results of steps.
        """
        for part in self.driver.parts:
            part.end_step(self.progress)

        # A checkpoint that is saved after this line resumes after these samples.
        self.source.commit(batches, result and self.stepper.step_result(result))

        # Act on the requests of all ranks. Only the last step waits for its own result.
        steps_done = self.steps_done
        self.requests.accept(result)
        is_last = steps_done == self.plan.steps or self.requests.stop_agreed
        if is_last:
            self.requests.accept_late()

        reported = self.requests.to_report(result)
        step_result = reported and self.stepper.step_result(reported)
        self.log.end_step(batches.global_num_samples, step_result, is_last, self._waits_s)
        self._waits_s = []

        # Iterating over all modules is too slow for every step.
        if steps_done % self.config.checks.every == 0:
            self.trained_model.guard.check_structure()

        self._request_what_is_due()

        # The user's code may be slow. The watchdog allows more time in the phase "user code".
        if self._has_after_step:
            self.runtime.heartbeat.beat("user code", steps_done)
            with self.driver.parts.around_user_code():
                self.hooks.after_step(step_result)

            self.runtime.heartbeat.beat("data")

        # After the hooks, which may change the weights: clip them, for example. The optimizers' update has waited for a
        # save that was still copying the averages, and a step without an update leaves them as they are.
        if self.trained_model.average:
            self.trained_model.average.update(self.stepper.not_applied)

        return reported

    def _request_what_is_due(self) -> None:
        """Put requests that this rank's clock makes due, and a failed save, into the next control word."""
        # Any rank may fail to write.
        save_failed = self.checkpoints.pending.poll()
        self.checkpoints.decision.request_if_due()
        evaluate = False

        # The clocks of the ranks differ, so rank 0 decides, and the others follow.
        if self._has_time_limits and self.runtime.is_main:
            seconds = self.seconds
            evaluate = self.evaluations.schedule.due_by_clock(seconds)
            if self.evaluations.time_is_over(seconds):
                self.requests.request_stop(f"stop.max_minutes={self.config.stop.max_minutes} is over")

        self.stepper.set_flags(save_failed=save_failed, evaluate=evaluate)

    @cached_property
    def _has_after_step(self) -> bool:
        """Whether the user's code is called after every step."""
        return self.hooks.has("after_step")

    @cached_property
    def _has_time_limits(self) -> bool:
        """True if evaluations, or the end of the run, follow the clock."""
        return self.config.evaluate.minutes is not None or self.config.stop.max_minutes is not None

    # ---- between two steps ----

    def maintain(self) -> None:
        """Write the log line and save if they are due, rewind if the policy says so, and end a preempted process."""
        self.log.write_if_due()

        steps_done = self.steps_done
        save_due = self.checkpoints.decision.is_due(steps_done, self.requests.preempt_agreed)
        if self.requests.preempt_agreed:
            self.checkpoints.pending.note_end(saves_again=True)

        # A checkpoint needs the result of its step, which may also be that the run must rewind.
        if save_due:
            self.requests.accept_late()
            # A run that resumes from this checkpoint does not write the metrics of earlier steps again.
            self.recorder.poll(wait=True)

        # After a rewind there is nothing to check or to save: the state was just loaded from a checkpoint.
        if skipped := self.stepper.take_rewind():
            self._rewind(skipped)
        else:
            self._check_and_save(steps_done, save_due)

        # After the save, whose time belongs to the step.
        for part in self.driver.parts:
            part.after_maintenance()

        if self.requests.preempt_agreed:
            end_preempted(self)

    def _check_and_save(self, steps_done: int, save_due: bool) -> None:
        # Here and not in `end_step`, to include changes by `after_step` or by a custom loop.
        if save_due or steps_done % self.config.checks.every == 0:
            self.check_replicas()

        steps_at_start = self.resumed.step if self.resumed else 0
        if save_due:
            self.save_checkpoint()
        elif steps_done == steps_at_start + 1:
            # Allocate the snapshot after the first step of this process, which makes the first save shorter. By now
            # the optimizers have their state, so the size is known. If the forward adds parameters, it has done so.
            self.trained_model.guard.check_structure()
            self.checkpoints.prepare()

    def _rewind(self, skipped: SkippedStep) -> None:
        """Return to the last checkpoint and leave out the samples of the skipped step from now on."""
        self.driver.reshard()  # the user's code may have called the model, and left its weights gathered
        self.checkpoints.rewinder.rewind(skipped.result, skipped.span)
        self.log.interval.restart_clock()

    def check_replicas(self) -> None:
        """Check that all ranks hold the same parameters, if they should. Collective."""
        if self.driver.role.replicated:
            check_replicas(self.driver.model, self.runtime)

    # ---- a save ----

    def save_if_agreed(self) -> None:
        """Save if the evaluation that a resumed run has just repeated asks for it, as the best one so far does."""
        if self.checkpoints.decision.agreed:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the current state. Collective."""
        began = time.perf_counter()
        self.trained_model.guard.check_structure()  # the state of a replaced parameter would have no name

        # Checkpoints hold the buffers of rank 0.
        self.driver.sync_buffers()

        # checkpoint.best compares these metrics, if these weights were evaluated.
        steps_done = self.steps_done
        metrics = self.evaluations.results() if self.evaluations.is_current(steps_done) else {}

        # The weights are copied at once; only the optimizers' state and the averages are copied later.
        with self.trained_model.optimizers_in_eval():
            self.checkpoints.save(steps_done, self.plan, metrics)

        self.log.interval.exclude(time.perf_counter() - began)  # a step does not include the time of a save

    # ---- an evaluation ----

    def evaluate(self, sets: Sequence[EvaluationSet], may_preempt: bool = False) -> list[Evaluation]:
        """Evaluate the model on each of `sets`, every sample once, log the results, and act on them.

        `may_preempt`: a preemption may interrupt the evaluation, because the rest of this step is done.
        With `ema.decay` the averages of the weights are evaluated. Collective.
        """
        self.log.write_if_due()
        began = time.perf_counter()
        trained = self.trained_model

        # Not the micro-batch of the plan: the results must not depend on the number of ranks.
        batch = evaluation_batch(self.config, self.plan.global_batch)
        with (
            self.source.reading_here(),
            trained.optimizers_in_eval(),
            trained.averaged_weights(),
            self.gathering.whole_batches(),
        ):
            evaluations = trained.evaluator.evaluate(sets, batch, self.steps_done, may_preempt)

        self.log.interval.exclude(time.perf_counter() - began)  # a step does not include the time of an evaluation

        # Some rank was preempted. The checkpoint records that the resumed run must evaluate first.
        if evaluations is None:
            self.requests.repeat_evaluation()
            self.maintain()
            raise AssertionError("unreachable: maintain() raises Preempted")

        # Decide only when all are done: an interrupted evaluation is repeated from the first set on.
        self.evaluations.follow(sets, evaluations, self.seconds)
        if self.hooks.has("after_eval"):
            with self.runtime.heartbeat.visit("user code"):
                self.hooks.after_eval(results_for_hooks(sets, evaluations))

        return evaluations


def _wrong_count(count: int, given: str) -> UserError:
    return UserError(
        f"the source announced {plural(count, 'micro-batch', 'micro-batches')} and gave {given}",
        "",
        "return StepBatches from take() whose count is the number of its micro_batches",
    )


def _no_micro_batch(count: int, step: int) -> UserError:
    return UserError(
        f"the source announced {count} micro-batches for step {step + 1}; every rank needs at least one in every step",
        "the other ranks would wait for this one in the all-reduce",
        "return one from take(); if this rank has no samples left, one with padding=True, whose weight does not count",
    )
