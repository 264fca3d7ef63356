"""One run in this process: what `fit` and the user's own loop have in common.

A Run owns the pieces (driver, source, stepper, recorder), which setup.py makes and run.py closes. `shares()` is
the skeleton of the loop, `finish()` the end of every transaction. It decides nothing about gradients: that is the
Stepper's.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from lockstep.checkpoint.manager import CheckpointManager, Resumed
from lockstep.checkpoint.run_state import Stateful, full_state
from lockstep.config import Resolved
from lockstep.data.loader import SampleReader
from lockstep.engine import setup
from lockstep.engine.banner import summary_of, tell_launcher
from lockstep.engine.checks import TrainableGuard, check_replicas, check_same_config, first_share
from lockstep.engine.control import TrainedBatch
from lockstep.engine.determinism import Exactness
from lockstep.engine.evaluate import Evaluation, Evaluator, evaluate
from lockstep.engine.load_balance import LoadBalancer
from lockstep.engine.outcome import is_spike
from lockstep.engine.step import Stepper
from lockstep.errors import Preempted, UserError
from lockstep.observe.recorder import Recorder
from lockstep.observe.report import write_report
from lockstep.observe.run_folder import open_run_dir, save_weights, write_summary
from lockstep.observe.sinks import JsonlSink
from lockstep.optim.optimizers import Optimizers
from lockstep.parallel.cudagraph.graphs import release_captures
from lockstep.parallel.driver import Driver
from lockstep.plan.plan import Plan
from lockstep.precision import choose
from lockstep.runtime.context import Runtime
from lockstep.runtime.seeds import derive, seed_everything, seed_torch
from lockstep.task import BatchSource, Loss, MicroBatch, StepBatches, StepResult


class Run:
    driver: Driver  # from `adopt` on
    optimizers: Optimizers
    guard: TrainableGuard
    exactness: Exactness | None
    plan: Plan  # from `open` on
    source: BatchSource
    stepper: Stepper
    load_balancer: LoadBalancer | None
    checkpoints: CheckpointManager

    def __init__(self, resolved: Resolved, runtime: Runtime, name: str, unit: str = "sample"):
        self.resolved, self.config, self.runtime = resolved, resolved.config, runtime
        self.name, self.unit = name, unit
        check_same_config(self.config, runtime)
        self.precision = choose(self.config, runtime.device)
        self.folder = open_run_dir(self.config, name, runtime)
        self.run_dir = self.folder.path
        self.recorder = Recorder(self.run_dir, runtime, self.config.checks.slow_rank, self.config.log.sinks)
        tell_launcher(self.config)
        self.others: dict[str, Stateful] = {}  # what else is saved: the task, what the user's loop has registered
        self.resumed: Resumed | None = None
        self.started = time.time()
        self.evaluation: Evaluation | None = None
        self._evaluated_at = 0
        self._interval_samples = self._interval_steps = self._interval_skips = 0
        log_samples = self.config.log.samples
        self._stopped = self._leaving = self._save_asked = False
        self._spans: tuple[Any, Any] = (None, None)  # (step, positions of its samples) of the last two
        self._sample_log = SampleLog(self.run_dir, runtime.world.rank, self.folder.attempt) if log_samples else None
        self.opened = self._began = self._prepared = False
        runtime.heartbeat.beat("build")
        # What draws random numbers before the first step (building the model, say) draws the same on every rank.
        seed_everything(derive(self.config.seed, "init"))
        seed_torch(derive(self.config.seed, "init"), runtime.device)

    adopt = setup.adopt  # the model, under its driver

    def open(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        """With the data known, everything that depends on its size is decided, written down and told."""
        setup.open_data(self, data, collate)
        self.stepper.outcomes.skips.on_skip, self.stepper.outcomes.skips.on_many_empty = (
            self._on_skip,
            self._on_many_empty,
        )

    def shares(self) -> Iterator[StepBatches]:
        """This rank's part of every global step, until the plan ends or some rank stops all of them."""
        self.recorder.start_clock()
        while self.stepper.counters.step < self.plan.steps and not self._stopped:
            self.guard.check()
            first = not self._began and self.config.checks.first_batch and not self.runtime.world.alone
            self._began = True
            share = (
                first_share(self.source, self.runtime, self.driver.placement.data_rank) if first else self.source.take()
            )
            share.batches = self._timed(share.batches, share.count)
            self._spans = (self._spans[1], (self.stepper.counters.step, share.span))
            yield share

    def finish(self, share: StepBatches, result: StepResult | None) -> None:
        """The transaction ends here: the source moves on, and what is due is written down."""
        self.source.commit(share, result)
        if self._sample_log:
            self._sample_log.write(self.stepper.counters.step - 1, self.stepper.control.trained)
        self._heed(result)
        self._interval_samples += share.samples
        self._interval_steps += 1
        step = self.stepper.counters.step
        if self.load_balancer:
            self.load_balancer.end_step(step)
        if step == self.plan.steps:
            settled = self.stepper.settle()
            self._heed(settled)
            self._log(settled or result)
        elif step % self.config.log.every == 0:
            self._log(result)
        else:
            self.recorder.poll()
        if self.exactness:
            self.exactness.end_step()
        if step % self.config.checks.every == 0:
            self.guard.check_structure()
        self.stepper.context.requests.save_failed = self.checkpoints.poll()
        self.stepper.context.requests.save = self.checkpoints.wants(step)

    def keep(self, evaluation_due: bool = False) -> None:
        """Between two steps: go back if the step was spoiled, save what is due, and leave if we were asked to."""
        step = self.stepper.counters.step
        due = self.checkpoints.due(step, self._save_asked or self._leaving)
        if due:
            self._heed(self.stepper.settle())  # it may say that the step was spoiled
        if self.stepper.outcomes.skips.rewind_wanted:
            self._rewind()
            due = False  # the state is that of a checkpoint
        if due or step % self.config.checks.every == 0:
            self._compare_replicas()
        if due:
            began = time.perf_counter()
            self._save(evaluation_due)
            self._save_asked = self.stepper.context.requests.save = False
            self.recorder.exclude(time.perf_counter() - began)
        elif not self._prepared:
            self.checkpoints.prepare()
        self._prepared = True
        if self._leaving:
            _leave(self, self.stepper.counters.step)

    def evaluate(
        self,
        data: Any,
        loss_of: Callable[[nn.Module, Any], Loss],
        collate: Callable[[list[Any]], Any],
        may_leave: bool = False,
    ) -> Evaluation:
        """`may_leave`: nothing of this step is left to do after it, so that it may be broken off to leave."""
        began = time.perf_counter()
        reader = SampleReader(data, collate, self.config.seed, self.config.data.seed_samples)
        if not self.opened and self.config.evaluate.batch is None:
            raise UserError(
                "an evaluation before the first step", "no batch size for it yet", "set evaluate.batch, such as 64"
            )
        batch = self.evaluation_batch()
        evaluator = Evaluator(loss_of, reader, batch, self.config.data.workers, self.precision, may_leave)
        self.runtime.heartbeat.beat("evaluate", self.stepper.counters.step if self.opened else 0)
        found = evaluate(evaluator, self.driver, self.runtime)
        if found is None:  # somebody was asked to leave, and waits no longer
            self._leave_evaluation()
        self.evaluation, self._evaluated_at = found, self.stepper.counters.step if self.opened else 0
        self.recorder.event(
            "eval",
            step=self.stepper.counters.step if self.opened else 0,
            loss=found.loss,
            metrics=found.metrics,
            samples=found.samples,
            weight=found.weight,
            seconds=time.perf_counter() - began,
        )
        self.recorder.exclude(time.perf_counter() - began)  # the time of an evaluation is not the time of a step
        return found

    @property
    def evaluated(self) -> bool:
        """Whether the last evaluation was that of these very weights."""
        return self.evaluation is not None and self._evaluated_at == self.stepper.counters.step

    def evaluation_batch(self) -> int:
        """Not the derived micro-batch, which follows the number of ranks: the same batches give the same number."""
        set_to = None if self.config.micro_batch == "auto" else self.config.micro_batch
        return self.config.evaluate.batch or set_to or min(self.plan.global_batch, 32)

    def save(self) -> None:
        """The training is over: wait for its last outcome, and keep the weights before anything else can go wrong."""
        self.end_loaders()
        self._heed(self.stepper.settle())
        self.stepper.outcomes.skips.check_something_learned(self.stepper.counters.step, self.stepper.counters.applied)
        self._compare_replicas()
        if self.config.checkpoint.at_end and self.checkpoints.due(self.stepper.counters.step, asked=True):
            self._save(evaluation_due=False)
        self.checkpoints.settle()
        self.recorder.poll(wait=True)
        self.driver.sync_buffers()
        weights, aliases = full_state(self.driver.model, self.runtime.is_main, self.driver.fetch)
        self.runtime.collectives.run_on_rank0(lambda: save_weights(self.run_dir, weights, aliases))

    def close(self, text: str | None = None) -> dict[str, Any]:
        """Write the summary and the report."""
        return _close(self, text)

    def fail(self, error: BaseException) -> None:
        """Leave what is known on disk; the error itself goes on its way, whatever happens here."""
        _fail(self, error)

    def end_loaders(self) -> None:
        if self.opened and hasattr(self.source, "close"):
            self.source.close()
        if self._sample_log:
            self._sample_log.close()

    def _timed(self, batches: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
        iterator = iter(batches)
        for _ in range(count):
            self.runtime.heartbeat.beat("data", self.stepper.counters.step)
            if self.load_balancer:
                self.load_balancer.mark()
            began = time.perf_counter()
            micro = next(iterator)
            self.recorder.data_wait_s += time.perf_counter() - began
            self.recorder.micro_batches += 1
            yield micro

    def _log(self, result: StepResult | None) -> None:
        counters, stepper = self.stepper.counters, self.stepper
        samples, steps, skips = self._interval_samples, self._interval_steps, self._interval_skips
        self._interval_samples = self._interval_steps = self._interval_skips = 0
        facts: dict[str, Any] = {"step": counters.step, "lr": stepper.lr, "skipped": stepper.outcomes.skips.skipped}
        if result is not None:
            facts["grad_norm"] = result.grad_norm
        if self.plan.steps_per_epoch:
            facts["epoch"] = counters.step / self.plan.steps_per_epoch
        if stepper.scaler:
            facts["scale"] = stepper.scaler.value
        if stepper.context.metrics.new:  # all ranks have heard of it, in the same step
            self.recorder.agree_on_names(stepper.context.metrics.seen)
            stepper.context.metrics.known, stepper.context.metrics.new = set(self.recorder.names), False
        self.recorder.interval(stepper.sums, steps, samples, skips, facts)

    def _on_skip(self, result: StepResult, reason: str) -> str:
        """Name the samples that are to blame: every rank looks at its own, and all hear of them."""
        self._interval_skips += 1
        scale = {"scale": self.stepper.scaler.value} if self.stepper.scaler else {}
        tally = self.stepper.settled
        losses = [float(loss) for loss in tally.sums.losses]
        worst = blame(tally.trained, losses, self.runtime.world.rank, spike=is_spike(result))
        everybody = [line for lines in self.runtime.collectives.gather_json(worst) for line in lines]
        self.recorder.event("skip", step=result.step, reason=reason, blame=everybody, **scale)
        return f"{reason} ({'; '.join(everybody[:3])})" if everybody else reason

    def _on_many_empty(self, result: StepResult, reason: str) -> None:
        self.recorder.event("warning", step=result.step, reason=reason)

    def _heed(self, result: StepResult | None) -> None:
        """What the control word of a step says to all ranks."""
        if result is None:
            return
        self._stopped |= result.stop
        self._leaving |= result.leave
        self._save_asked |= result.save
        if result.save_failed:
            self.checkpoints.give_up()

    def _rewind(self) -> None:
        result, self.stepper.outcomes.skips.rewind_wanted = self.stepper.outcomes.skips.rewind_wanted, None
        assert result is not None
        resumed = self.checkpoints.rewind(
            result, next(span for step, span in filter(None, self._spans) if step == result.step)
        )
        self.recorder.carry_on(self.stepper.sums, resumed.interval)
        self._interval_samples = self._interval_steps = self._interval_skips = 0
        self.recorder.start_clock()

    def _leave_evaluation(self) -> NoReturn:
        self._leaving = True
        if self.opened:
            self.keep(evaluation_due=True)
        raise Preempted(0, self.runtime.notice.signal or "SIGTERM", None)  # before the first step: nothing to save

    def _compare_replicas(self) -> None:
        """Not in `finish`: what the task or the user's loop does after a step is part of what is compared."""
        if self.driver.placement.replicated:
            check_replicas(self.driver.model, self.runtime)

    def _save(self, evaluation_due: bool) -> None:
        self.driver.sync_buffers()
        interval, seconds = self.recorder.carry(self.stepper.sums), time.time() - self.started
        self.checkpoints.save(
            {"metrics": self._metrics(), "evaluation_due": evaluation_due, "interval": interval, "seconds": seconds}
        )

    def _metrics(self) -> dict[str, float]:
        """What checkpoints are compared by: the evaluation of these very weights, if there was one."""
        if self.evaluation is None or not self.evaluated:
            return {}
        return {"eval_loss": self.evaluation.loss, **self.evaluation.metrics}


# How a run ends: done, failed, or asked to leave.


LAST_SAVE = 5.0  # seconds that a save in flight gets when the run fails


def _close(run: Run, text: str | None) -> dict[str, Any]:
    """Write the summary and the report."""
    run.runtime.heartbeat.beat("end")
    run.optimizers.release()
    release_captures(run.driver.model)
    run.checkpoints.close()
    summary = summary_of(run)
    if text:
        run.recorder.event("sample", text=text)
    for goal in summary.get("goals", ()):
        run.recorder.event("goal", **goal)
    run.recorder.event("end", **summary)
    run.recorder.close()
    if run.runtime.is_main:
        report = _write_end(run, summary)
        if report and run.config.log.progress != "off":
            print(f"report   {Path(run.folder.shown) / report.name}")
    run.runtime.collectives.farewell()  # nobody leaves before the folder is complete
    run.folder.let_go()
    return summary


def _fail(run: Run, error: BaseException) -> None:
    """Leave what is known on disk; the error itself goes on its way, whatever happens here."""
    with contextlib.suppress(Exception):
        run.end_loaders()
        if hasattr(run, "driver"):
            release_captures(run.driver.model)
        if hasattr(run, "optimizers"):
            run.optimizers.release()
        if hasattr(run, "checkpoints"):
            run.checkpoints.close(patience=LAST_SAVE)
        run.recorder.hide()  # whoever started us shows the error, once; a launcher the first, which caused the others
        if not isinstance(error, Preempted):
            run.recorder.event("error", type=type(error).__name__, message=str(error))
        run.recorder.close()
        if run.runtime.is_main:
            write_report(run.run_dir)
    run.folder.let_go()


def _leave(run: Run, step: int) -> NoReturn:
    """All ranks have saved at the same step."""
    run.end_loaders()
    safe = run.checkpoints.settle()
    newest = run.checkpoints.newest_path() if safe else None
    path = run.folder.as_shown(newest) if newest else None
    signals = [name for name in run.runtime.collectives.gather_json(run.runtime.notice.signal) if name]
    signal = signals[0] if signals else "SIGTERM"
    run.recorder.event("leave", step=step, signal=signal, checkpoint=path)
    run.runtime.collectives.farewell()
    raise Preempted(step, signal, path)


def _write_end(run: Run, summary: dict[str, Any]) -> Path | None:
    """The weights are safe: what cannot be written about them is said, and does not spoil the run."""
    try:
        write_summary(run.run_dir, summary)
        return write_report(run.run_dir)
    except OSError as error:
        print(f"lockstep: the summary and the report cannot be written: {error}", file=sys.stderr)
        return None


# Which samples a step was made of: written down on request, and named when they have spoiled it.


MOST_IDS = 8  # named of one micro-batch


class SampleLog:
    """`samples/rank-N.jsonl`: one line per step. A step that was repeated has several; the last attempt's counts."""

    def __init__(self, run_dir: Path, rank: int, attempt: int):
        folder = run_dir / "samples"
        folder.mkdir(exist_ok=True)
        self._sink, self._attempt = JsonlSink(folder / f"rank-{rank}.jsonl"), attempt

    def write(self, step: int, pieces: list[TrainedBatch]) -> None:
        ids = [[piece.epoch, *(int(i) for i in piece.ids)] for piece in pieces]
        self._sink.write({"step": step, "attempt": self._attempt, "time": time.time(), "epoch_and_ids": ids})

    def close(self) -> None:
        self._sink.close()


def blame(pieces: list[TrainedBatch], losses: list[float], rank: int, spike: bool) -> list[str]:
    """This rank's micro-batches that look guilty: a loss that is not finite; for a spike, the largest loss."""
    pairs = list(zip(pieces, losses, strict=True))
    if spike:
        worst = [max(pairs, key=lambda pair: pair[1])] if pairs else []
    else:
        worst = [(piece, loss) for piece, loss in pairs if not math.isfinite(loss)]
    return [f"rank {rank}, micro-batch {piece.index}: loss {loss:.4g}{_samples(piece)}" for piece, loss in worst]


def _samples(piece: TrainedBatch) -> str:
    ids = [str(int(i)) for i in piece.ids[:MOST_IDS]]
    if not ids:
        return ""
    return f", samples {', '.join(ids)}" + (
        f" and {len(piece.ids) - MOST_IDS} more" if len(piece.ids) > MOST_IDS else ""
    )
