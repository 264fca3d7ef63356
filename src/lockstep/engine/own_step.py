"""One step of a custom loop: the user's code runs the forward of each batch, and calls `backward` and `apply`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.checks.guards import GradientGuard
from lockstep.engine.checks.scaled_loss import check_not_scaled
from lockstep.engine.checks.start import check_own_loop, snapshot_for_own_loop
from lockstep.engine.run import Run
from lockstep.errors import UserError
from lockstep.parallel.driver import Reduced
from lockstep.parallel.inner_gradients import LET_THROUGH
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.parallel.progress import backward_failed
from lockstep.runtime.seeds import HostSeeds, derive, seed_torch
from lockstep.task import Loss, Metric, StepBatches, StepResult, Weight


class OwnStep:
    """One optimizer step: iterate over its batches, call `backward` for each of them, then `apply`.

    If the loop asked for several passes over the batches of a step (`passes.py`), each pass is all of this.
    """

    def __init__(self, run: Run, batches: StepBatches, gradients: GradientGuard, host_seeds: HostSeeds):
        self._run = run
        self._gradients = gradients
        self._host_seeds = host_seeds
        assert runs_whole_model(run.driver), "OwnRun.setup refuses a pipeline"
        self._driver = run.driver

        # What a user may read.
        self.index = run.steps_done
        self.number = self.index + 1  # in messages, as in the log: the steps done when it has ended
        self.ended = False
        self.passes_done = 0
        self.result: StepResult | None = None

        # Random numbers that the loop draws before its first batch must not depend on the step of a resume.
        seed_torch(derive(run.config.seed, "step", self.index), run.runtime.device)
        host_seeds.begin("step", self.index)

        # The current pass over the batches.
        self._batches = batches
        self._passes = run.passes
        self._yielded: int  # batches so far
        self._reduced: Reduced | None  # after the last backward
        self._pass_ended: bool
        self._begin_pass()

        # State that the first forward of the run must not change; compared in the first backward.
        self._snapshot = snapshot_for_own_loop(run)

    def __iter__(self) -> Iterator[Any]:
        if self.ended:
            raise self._went_over_again("after step.apply() had ended the step")

        # Not at the end of the previous pass: after `measure` its gradients stay available until here.
        if self._pass_ended:
            self._begin_pass()
        elif self._yielded == self._batches.num_micro_batches:
            raise self._went_over_again("before step.apply(): every batch of the pass has had its backward")

        self._check_backward_done()
        self._host_seeds.end()
        for micro in self._feed:
            self._yielded += 1
            self._host_seeds.begin("model", self.index, micro.index)
            self._driver.before_forward(micro, self._progress)
            self._gradients.note()

            # The body of the user's loop runs at this yield, under autocast. It must call `backward` once.
            with self._driver.inner_gradients, self._progress.autocast():
                yield micro.data

            self._check_backward_done()

    @property
    def sample_offset(self) -> int:
        """The place of this batch's first sample in the global batch. An error if the data source has no places."""
        micro = self._progress.micro
        if micro is None:
            raise UserError(
                f"step.sample_offset was read outside of the batches of step {self.number}",
                "",
                "read it in the body of `for batch in step:`, before step.apply()",
            )

        return micro.sample_offset

    @property
    def padding(self) -> bool:
        """True if this batch is padding, with weight 0. It runs only because collectives need every rank."""
        return self._progress.micro is not None and self._progress.micro.padding

    def backward(self, loss_sum: Tensor, weight: Weight, **metrics: Metric) -> None:
        """Backpropagate the SUM of the loss over this batch; `weight` is the number of terms in the sum.

        `loss_sum` and the metrics, which are sums as well, have shape ().
        """
        if self._progress.in_backward:
            raise backward_failed(self.index)

        if self._progress.backwards_done == self._yielded:
            raise self._no_batch_for_backward()

        self._gradients.check("step.backward")
        if self._gradients.is_new:
            self._gradients.is_new = False
            check_not_scaled(loss_sum)

        # Once in a run: the first forward must have left the state as it was, and its loss must be a sum.
        if self._snapshot:
            check_own_loop(self._run, self._snapshot, loss_sum, weight)
            self._snapshot = None

        # Autocast is on in the body of the loop, but must be off in the backward.
        with LET_THROUGH, self._progress.no_autocast():
            loss = Loss(loss_sum, weight, metrics)
            loss = self._run.hooks.before_backward(loss)
            self._reduced = self._driver.finish_micro_batch(loss, self._progress)

        self._host_seeds.end()

        # The gradients are reduced, and the loop may do anything now, but `apply` needs them.
        if self._reduced:
            self._gradients.note()
            self._run.runtime.heartbeat.beat("user code")

    def apply(self, *optimizers: torch.optim.Optimizer) -> StepResult | None:
        """Divide by the global weight, clip, and step the optimizers.

        If there are several, pass those to step; the gradients of the others are dropped. Return the newest known
        result: on a GPU it may be that of the previous step.
        """
        self._check_pass("step.apply()")
        indices = self._indices(optimizers)
        assert self._reduced is not None, "`_check_pass` has seen the last backward"
        reduced = self._reduced.drop_missing()

        # Only these optimizers are stepped, so the gradients of all other parameters are dropped.
        if indices is not None:
            reduced = reduced.drop_others(self._run.trained_model.optimizers.parameter_ids(indices))
            if not reduced.parameters:
                raise UserError(
                    f"step {self.number} has no gradient for any parameter of the optimizer in step.apply(optimizer)",
                    "the loss does not depend on them",
                    "pass the optimizer of the parameters that the loss depends on",
                    cause="unused",
                )

        self.result = self._run.stepper.apply(self._progress, reduced, indices)
        self._end_pass()
        return self.result

    def measure(self) -> StepResult:
        """End a pass without an update. Until the next pass begins, p.grad is the gradient of the mean loss.

        The result holds the norm of this gradient over all ranks. The last pass of a step must end with `apply`.
        """
        self._check_pass("step.measure()")
        if self._progress.ends_step:
            raise UserError(
                f"step.measure() was called in the last of {self._passes} passes over step {self.number}",
                "a step ends with step.apply()",
                f"add a pass over the batches: run.steps(dataset, passes={self._passes + 1})",
            )

        # On a GPU the outcome of the previous update may be late.
        self._run.requests.accept_late(note_source=False)
        assert self._reduced is not None, "`_check_pass` has seen the last backward"
        self.result = self._run.stepper.measure(self._progress, self._reduced.drop_missing())
        self._end_pass()
        return self.result

    def check_ended(self) -> None:
        """Raise if the user's loop goes on to the next step without `apply`."""
        if self.ended:
            return

        # Loops with other tools often apply only after several batches.
        several = self._passes > 1
        in_pass = f" in pass {self.passes_done + 1} of {self._passes}" if several else ""
        raise UserError(
            f"step {self.number} ended without step.apply(){in_pass}",
            "",
            "call step.apply() after the loop over its batches"
            + (
                ", once per pass"
                if several
                else "; to accumulate gradients over several batches, make global_batch as "
                "large as all of them, and set micro_batch to the size of one"
            ),
        )

    def _begin_pass(self) -> None:
        """Begin a pass: its sums start at 0, and all gradients are cleared."""
        self._yielded = 0
        self._reduced = None
        self._pass_ended = False
        self._feed = iter(self._batches)
        self._progress = self._run.stepper.new_progress(self._batches, self.passes_done, self._passes)
        self._gradients.forget()
        self._driver.begin_pass()

    def _end_pass(self) -> None:
        """End a pass. The last one ends the step."""
        self._pass_ended = True
        self.passes_done += 1
        if self.passes_done < self._passes:
            # Each pass has its own control word, and its requests must not be lost.
            self._run.requests.accept(self.result)
        else:
            # End the step here, not after the body of the loop, so that the rest of the body sees the new step count.
            self.ended = True
            self._host_seeds.end_step(self.index, self._run.runtime.collectives.any)
            self.result = self._run.end_step(self._batches, self.result)

        self._run.runtime.heartbeat.beat("user code")

    def _check_pass(self, call: str) -> None:
        """Raise unless every batch of the current pass has had its backward."""
        if self.ended or self._progress is not self._run.progress:
            raise UserError(
                f"{call} was called on step {self.number}, which has ended",
                "",
                "call apply() once per step, before the next one begins; to go over its batches more than once, "
                "run.steps(dataset, passes=2)",
            )

        # Without the last backward, which includes the all-reduce, the other ranks would wait.
        if self._progress.in_backward:
            raise backward_failed(self.index)

        done = 0 if self._pass_ended else self._progress.backwards_done
        if done != self._batches.num_micro_batches:
            raise UserError(
                f"{call} was called after {done} of {self._batches.num_micro_batches} batches of the step",
                "",
                "iterate over all batches first: for batch in step: ... step.backward(loss_sum, weight)",
            )

        self._gradients.check(call)

    def _indices(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[int] | None:
        """Return the indices of the optimizers to step, or None for all of them."""
        known = self._run.trained_model.optimizers.all
        if len(known) == 1 and not optimizers:
            return None

        if not optimizers:
            raise UserError(
                f"step.apply() must name the optimizers to step, because there are {len(known)}",
                "a GAN's discriminator must not learn from the generator's loss",
                "step.apply(optimizer) steps one of them and drops the gradients of the others; or pass all of them",
            )

        # By identity: these must be the objects that `run.setup` returned.
        index_of = {id(optimizer): index for index, optimizer in enumerate(known)}
        indices = [index_of.get(id(optimizer)) for optimizer in optimizers]
        if None in indices:
            raise UserError(
                "step.apply(optimizer) got something other than the optimizers of run.setup",
                "",
                "pass what run.setup returned: model, first, second = run.setup(model, first, second)",
            )

        # If all are named, no gradient is dropped.
        distinct = {index for index in indices if index is not None}
        return sorted(distinct) if len(distinct) < len(known) else None

    def _check_backward_done(self) -> None:
        """Raise unless every batch so far has had its backward: the ranks must be in the same micro-batch."""
        if self._progress.in_backward:
            raise backward_failed(self.index)

        if self._progress.backwards_done != self._yielded:
            raise self._backward_count_error("0 times")

    def _no_batch_for_backward(self) -> UserError:
        """Return the error for a backward without a batch: every batch so far has had one."""
        if self._yielded and not self._pass_ended:
            return self._backward_count_error("twice")

        return UserError(
            f"step.backward was called outside of the batches of step {self.number}",
            "",
            "call it in the body of `for batch in step:`, once per batch",
        )

    def _backward_count_error(self, times: str) -> UserError:
        return UserError(
            f"step.backward was called {times} for batch {self._yielded - 1} of step {self.number}",
            "",
            "call step.backward exactly once per batch; pass weight=0 if a batch should not count",
        )

    def _went_over_again(self, when: str) -> UserError:
        return UserError(
            f"the loop went over the batches of step {self.number} again, {when}",
            "",
            f"announce the number of passes: run.steps(dataset, passes={self._passes + 1}); each of them ends with "
            "step.apply() or step.measure()",
        )
