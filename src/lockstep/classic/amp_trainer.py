"""Mixed-precision training as an object: `training_step(batch)` in your loop.

The loop stays yours; the step is the engine's. So accumulation, clipping, the loss scale, checkpoints and the check of
the gradients are those of `lockstep train`, under the names of this class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint.state.digests import digest
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.state.stateful import RegisteredState
from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.checkpoints import CheckpointCalls, load_state, save_state
from lockstep.data.transfer import to_device
from lockstep.engine.step import Stepper
from lockstep.errors import UserError
from lockstep.observe.metrics import Interval, Sums
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.schedule import ScheduleRate
from lockstep.parallel.apply import parallelize
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.parallel.progress import StepContext
from lockstep.precision import DynamicScaler, check_storage, choose_precision
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime, choose_device
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.host.threads import Threads
from lockstep.runtime.preemption import PreemptionNotice
from lockstep.runtime.world import World
from lockstep.start_check.data import check_different
from lockstep.task import BatchSource, Loss, MicroBatch, StepBatches, StepResult

# (model, batch) -> Loss, or the mean loss of the batch.
LossFn = Callable[[Any, Any], Any]


class TrainingStep(NamedTuple):
    # This rank's mean over the batch, without gradient.
    loss: Tensor

    # The newest optimizer step whose outcome is known; None within an accumulation.
    result: StepResult | None


class AMPTrainer:
    """A trainer of one process. Autocast, loss scale, clipping and skipping are done by the engine's Stepper."""

    # Which of the trainers on these ranks it is, and how long a rank waits for another one: at most, and in
    # `load_checkpoint` for one that has not called it.
    number = 0
    time_limit = timedelta(minutes=30)
    arrival_limit = timedelta(seconds=10)

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: LossFn | None = None,
    ):
        """Without `loss_fn` the model itself must return its loss: a scalar, `.loss`, or a mapping with "loss"."""
        self.config = config or AMPConfig()
        self.loss_fn = loss_fn

        # In this order: the optimizer must see the parameters where the driver put them.
        check_storage(model)
        self.runtime = self.setup()
        self.model = self.wrap_model(model)
        self._module = model

        self.optimizer = optimizer or torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.optimizers = Optimizers(self.optimizer, model)

        # The learning rate of the caller's optimizer stays. A constant rate does not depend on how long training takes.
        more = {"lr.peak": None} if optimizer is not None else {}
        settings = self.config.run_config(**self.settings(), **more)

        rate = ScheduleRate(settings.lr, self.optimizers.all, self.config.total_steps or 1, 1)
        rate.advice = "set learning_rate, lr_schedule and warmup_steps in AMPConfig, and step no scheduler yourself"

        context = StepContext(settings, self.runtime, self.precision, 1, reports_loss=self.driver.role.reports_loss)

        self.stepper = Stepper(context, self.driver, self.optimizers, rate, Interval(Sums(), context.metric_names))

        self._checkpoint_calls = CheckpointCalls(self.runtime.world, self.number)

        # The optimizer step that has begun, if any, and whether the size of a usual step is known.
        self._open_step: StepBatches | None = None
        self._sized = False

    # ---- what a distributed trainer does differently ----

    def setup(self) -> Runtime:
        """Return the device of this process and its ranks."""
        return make_runtime(World(), choose_device(self.config.device, World()), "none")

    def settings(self) -> dict[str, Any]:
        """Return engine settings that the AMPConfig does not have."""
        return {}

    def wrap_own(self, model: nn.Module) -> nn.Module:
        """Return `trainer.model`."""
        return model

    def wrap_other(self, model: nn.Module) -> nn.Module:
        """Return what to call in place of a model that the trainer does not train."""
        return model

    # ---- training ----

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return what to call in place of `model`, on the trainer's device.

        The constructor calls it for the trainer's own model, and it returns the same for it ever after. Another model
        is prepared in the same way, but the trainer does not train it: its optimizer and its step are yours.
        """
        if not hasattr(self, "driver"):
            settings = self.config.run_config(**self.settings())
            self.precision = choose_precision(settings, self.runtime.device)
            driver = parallelize(model, settings, self.runtime, self.precision)
            assert runs_whole_model(driver), "an AMPConfig has no setting for a pipeline"
            self.driver = driver
            return self.wrap_own(model)

        if model is self._module or model is self.model:
            return self.model

        return self.wrap_other(model.to(self.runtime.device))

    def training_step(self, batch: Any) -> TrainingStep:
        """Run forward and backward; the last of `gradient_accumulation_steps` calls also steps the optimizer.

        You may catch an error of the forward, such as out of memory, and go on with another batch. After an error of
        the backward, a single process begins the optimizer step anew, without the batches that it had; with several
        processes the next call raises.
        """
        loss, result = self._micro_step(batch)
        return TrainingStep(loss.total.detach() / loss.weight, result)

    def train_epoch(self, loader: Iterable[Any]) -> float:
        """Train on all batches of all ranks, however unevenly they are sharded. Return the mean loss over all.

        A rank that runs out repeats its last batch with weight 0 until the others are done.
        """
        batches = iter(loader)
        batch = next(batches, None)
        if batch is None:
            raise UserError(
                "train_epoch(loader) was called with a loader that has no batch on this rank",
                "",
                "give every rank at least one batch",
            )

        # Nothing else would show that every rank has the same samples.
        check_different(
            self.runtime.collectives.all_gather_json(digest(batch)),
            "make the loader with DDPManager.get_dataloader(dataset, ...), or with a DistributedSampler",
        )

        # Loss and weight, added up on the device.
        sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        result = None
        padding = False

        # One batch is read ahead: with its last batch a rank announces to the others that it has no more.
        while result is None or not result.exhausted:
            upcoming = next(batches, None)
            loss, result = self._micro_step(batch, padding, exhausted=upcoming is None)

            # A rank that has run out of batches repeats its last one, which does not count.
            if not padding:
                sums += torch.stack([loss.total.detach().double(), torch.as_tensor(loss.weight).to(sums)])

            padding = upcoming is None
            batch = batch if padding else upcoming

        # On a GPU one outcome is still pending: it must not end the next epoch.
        self.stepper.read_late_outcome()
        total, weight = self.runtime.collectives.all_reduce_(sums).tolist()
        return total / weight

    @property
    def scaler(self) -> DynamicScaler | None:
        """The fp16 loss scale; None in other precisions."""
        return self.stepper.scaler

    @property
    def steps(self) -> int:
        """Optimizer steps that were applied."""
        return self.stepper.steps_applied

    # ---- checkpoints ----

    def save_checkpoint(self, path: str | Path, rank: int = 0) -> Path:
        """Save weights, optimizer, scale and counters below the folder `path`, atomically.

        Only `rank` writes. Call it on all ranks, and it returns when the checkpoint is committed, or raises everywhere
        if it failed; or on that rank alone (`if rank == 0: ...`), which holds everything.
        """
        state = self._state()
        step = self.stepper.steps_done
        return save_state(state, step, self._checkpoint_calls, Path(path), rank, self.time_limit)

    def load_checkpoint(self, path: str | Path) -> int:
        """Load the newest intact checkpoint below `path`, or exactly this one. Return its step.

        Call it on every rank: it returns when all have read, or raises on all. On rank 0 alone it returns after some
        seconds; but the next training step raises, because the ranks would train different weights.
        """
        state = self._state()
        return load_state(state, self.stepper, self._checkpoint_calls, Path(path), self.time_limit, self.arrival_limit)

    # ---- inside ----

    def _state(self) -> RunState:
        if self._open_step is not None:
            done, count = self.stepper.progress.backwards_done, self.config.gradient_accumulation_steps
            raise UserError(
                f"a checkpoint cannot be saved or loaded within an optimizer step, after {done} of {count} batches",
                "",
                "save or load after the last batch of the step",
            )

        self.stepper.read_late_outcome()
        source = _NoSource()
        return RunState(self._module, self.optimizers, self.stepper, source, RegisteredState(), keep_frozen=True)

    def _micro_step(self, batch: Any, padding: bool = False, exhausted: bool = False) -> tuple[Loss, StepResult | None]:
        """Run one batch of an optimizer step. `exhausted`: this rank has no batch after it."""
        count = self.config.gradient_accumulation_steps
        samples = _samples(batch)

        if not self._sized:
            # The fp16 scale of a sum follows from the size of a usual step, which must be the same on all ranks.
            total = torch.tensor(float(samples * count), dtype=torch.float64, device=self.runtime.device)
            self.stepper.context.global_batch = int(self.runtime.collectives.all_reduce_(total))
            self._sized = True

        # A caller may have caught an error of the last backward, which has left a part of the gradients.
        if self._open_step is not None and self.stepper.progress.in_backward:
            self._abandon_step()

        # The first micro-batch of an optimizer step begins the step.
        if self._open_step is None:
            self._open_step = StepBatches(count, [], samples * count)
            self.stepper.new_progress(self._open_step)
            self._checkpoint_calls.begin_step()
            self.driver.begin_pass()

        self._open_step.exhausted = exhausted

        batch = to_device(batch, self.runtime.device)

        # Ranks number their micro-batches one after the other, so that no two draw the same random numbers.
        progress = self.stepper.progress
        index = self.runtime.world.rank * count + progress.backwards_done
        self.driver.before_forward(MicroBatch(batch, index, samples, padding=padding), progress)
        with progress.autocast():
            loss = self._loss(batch, samples)

        reduced = self.driver.finish_micro_batch(loss, progress)
        if reduced is None:
            return loss, None

        self._open_step = None
        self.stepper.set_flags(loaded=False)  # the control word of this step has carried it
        return loss, self.stepper.apply(progress, reduced)

    def _abandon_step(self) -> None:
        """Drop the batches of an optimizer step in which a backward has raised: the next one begins it anew."""
        if not self.runtime.world.alone:
            raise UserError(
                f"the backward of a batch has raised in optimizer step {self.stepper.steps_done + 1}, and "
                "training_step was called again",
                "the other ranks may be waiting in the all-reduce of that step, so this one cannot begin it anew",
                "let the error end the process; if memory was short, make the batches smaller and raise "
                "gradient_accumulation_steps",
            )

        self._open_step = None

    def _loss(self, batch: Any, samples: int) -> Loss:
        """Return the loss as a sum with a weight, from whatever the model or `loss_fn` returns."""
        loss = self.loss_fn(self._module, batch) if self.loss_fn else self._call(batch)
        if isinstance(loss, Loss):
            return loss

        if isinstance(loss, Mapping):
            loss = loss.get("loss")
        elif not isinstance(loss, Tensor):
            loss = getattr(loss, "loss", None)

        # Never make up a loss: a trainer without one would only seem to train.
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            maker = "loss_fn(model, batch)" if self.loss_fn else f"{type(self._module).__name__}(batch)"
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{maker} must return a loss for the batch; it returned {what}",
                "",
                "return the mean loss of the batch as one number, or lockstep.Loss(total, weight); or pass loss_fn=",
            )

        # The mean over samples becomes the sum that it stands for.
        return Loss(loss * samples, samples)

    def _call(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self._module(**batch)

        return self._module(*batch) if isinstance(batch, list | tuple) else self._module(batch)


class _NoSource(BatchSource):
    """The batches are the caller's, so a checkpoint has no position in the data. Only its state is asked for."""

    def take(self) -> StepBatches:
        raise AssertionError("the caller has the batches")

    def commit(self, batches: StepBatches, result: StepResult | None) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_runtime(world: World, device: torch.device, backend: str) -> Runtime:
    """Return a Runtime without the launcher's heartbeat and signal handlers: the loop is the caller's."""
    return Runtime(
        world,
        device,
        backend,
        Collectives(world, device),
        Threads(torch.get_num_threads(), ""),
        Heartbeat(),
        PreemptionNotice(),
    )


def _samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)

    if isinstance(batch, Mapping):
        parts = batch.values()
    else:
        parts = batch if isinstance(batch, list | tuple) else ()

    for part in parts:
        if isinstance(part, Tensor | Mapping | list | tuple):
            return _samples(part)

    raise UserError(f"the batch, a {type(batch).__name__}, has no tensor to count samples by", "", "pass tensors")
