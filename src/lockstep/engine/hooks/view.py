"""The view of a run that hooks, callbacks and custom loops get. `RunView` in task.py documents its names."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.observe.metrics import check_metric_name, detached
from lockstep.task import MicroBatch, Number, Weight

if TYPE_CHECKING:
    from lockstep.engine.run import Run
    from lockstep.engine.setup import RunBuilder


class BuiltRunView:
    """A `RunView` of the run that a RunBuilder makes. Before the run exists, only a few names can be used."""

    def __init__(self, builder: RunBuilder):
        self.rank = builder.runtime.world.rank
        self.world_size = builder.runtime.world.size
        self.is_main = builder.runtime.is_main
        self.device = builder.runtime.device
        self.run_dir = builder.folder.path

        self._builder = builder

    # ---- where the run is ----

    @property
    def steps_done(self) -> int:
        return self._started("steps_done").steps_done

    @property
    def steps_applied(self) -> int:
        return self._started("steps_applied").stepper.steps_applied

    @property
    def epoch(self) -> float | None:
        return self._started("epoch").plan.epochs_after(self.steps_done)

    @property
    def lr(self) -> float:
        return float(self._started("lr").stepper.lr)

    # ---- the model and the optimizers ----

    @property
    def model(self) -> nn.Module:
        return self._started("model").driver.model

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._started("optimizers").trained_model.optimizers.all

    # ---- requests of a hook ----

    def log(self, name: str, value: Number, weight: Weight = 1) -> None:
        """Add to a metric of the next log line: a sum of `weight` terms, or one value."""
        run = self._started("log()")
        if not isinstance(name, str):
            raise UserError(
                f"run.log({name!r}, ...): the name of a metric is a text", "", f"run.log({str(name)!r}, ...)"
            )

        check_metric_name(name)

        # Tensors of one element may stay on the GPU: the host does not wait for them here.
        for number in (value, weight):
            is_one = isinstance(number, Tensor) and number.numel() == 1 and not number.is_complex()
            if not isinstance(number, Real) and not is_one:
                raise UserError(
                    f"run.log({name!r}, value, weight) takes two numbers; it got a {type(number).__name__}",
                    f"of {number.dtype}, shape {tuple(number.shape)}" if isinstance(number, Tensor) else "",
                    f"run.log({name!r}, values.sum(), weight=len(values))",
                )

        run.log.add_metric(name, detached(value), detached(weight))

    def stop(self, reason: str | None = None) -> None:
        """End the run after the next step, on all ranks, even if only this one calls it."""
        self._started("stop()").requests.request_stop(reason, by_user=True)

    def save(self) -> None:
        """Save a checkpoint after the next step, on all ranks, even if only this one calls it."""
        self._started("save()").checkpoints.decision.request()

    def agree(self, value: bool) -> bool:
        """Return True on every rank if `value` is true on any. Collective: every rank must call it."""
        return self._builder.runtime.collectives.any(bool(value), "run.agree()")

    def sync_buffers(self) -> None:
        """Combine BatchNorm's running statistics over the ranks: see `RunView`. Collective."""
        run = self._started("sync_buffers()")
        if self._micro_batch() is not None:
            raise UserError(
                f"run.sync_buffers() was called inside step {run.steps_done + 1}",
                "its micro-batches would change the buffers of each rank again",
                "call it in after_step(run, result), or after step.apply()",
            )

        run.driver.sync_buffers()

    # ---- the global batch ----

    @property
    def sample_offset(self) -> int:
        """The place of this micro-batch's first sample in the global batch: see `RunView`."""
        micro = self._micro_batch()
        return micro.sample_offset if micro else 0

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, with a gradient: see `RunView`. Collective, except in evaluations."""
        run = self._builder.run
        if run is None or run.gathering.batches_are_whole:
            return rows

        micro = self._micro_batch()
        if micro is not None:
            run.gathering.used = True
            _check_global_batch(run)

        # The rows of padding count nowhere, so it contributes none.
        padding = micro is not None and micro.padding
        return run.gathering.gather(rows, run.runtime.collectives, padding)

    @property
    def row_offset(self) -> int:
        """The first of this rank's rows in the result of the last `all_gather`: see `RunView`."""
        run = self._builder.run
        if run is None or run.gathering.batches_are_whole:
            return 0

        offset = run.gathering.row_offset
        if offset is None:
            raise UserError(
                "run.row_offset was read before run.all_gather(rows) was called in this micro-batch",
                "it says where this rank's rows begin in the result",
                "call run.all_gather(rows) first, and read run.row_offset after it",
            )

        return offset

    def _micro_batch(self) -> MicroBatch | None:
        """Return the micro-batch whose forward is running in a step, if any."""
        run = self._builder.run
        if run is None or run.gathering.batches_are_whole:
            return None

        return run.progress.micro

    def _started(self, name: str) -> Run:
        """Return the Run, or raise if it does not exist yet. `name` is the attribute that the user's code reads."""
        run = self._builder.run
        if run is None:
            raise UserError(
                f"run.{name} was {'called' if name.endswith(')') else 'read'} before the first step",
                "",
                "call it inside `for step in run.steps(...)`",
            )

        return run


def _check_global_batch(run: Run) -> None:
    """Raise if the ranks' current micro-batches are not the global batch, or if its gradients would not be exact."""
    ranks = run.driver.role.data_world.size
    if ranks != run.runtime.world.size:
        raise UserError(
            "run.all_gather cannot be used with tensor or pipeline parallelism (mesh.tp, mesh.pp)",
            "several ranks have the same samples there",
            "set strategy=ddp or strategy=fsdp",
        )

    if run.plan.global_num_micro_batches > ranks:
        # Rounded up: with one micro-batch of this size for each rank, the batch is whole.
        size = -(-run.plan.global_batch // ranks)
        raise UserError(
            f"run.all_gather sees one micro-batch of each rank, and the global batch has "
            f"{run.plan.global_num_micro_batches} on {ranks} of them",
            "the loss would depend on how the batch is split",
            f"set micro_batch={size}, so that each rank has one; or train on more ranks",
            cause="gathered",
        )

    if run.config.exact:
        raise UserError(
            "run.all_gather cannot be used with exact=true",
            "the gradients of gathered rows are added in an order that depends on the number of ranks",
            "leave exact out: the result then depends on the number of ranks by rounding only",
        )
