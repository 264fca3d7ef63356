"""Mixed-precision training as an object: `training_step(batch)` in a loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint.run_state import RunState
from lockstep.checkpoint.state_tree import digest
from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.checkpoints import load_state, save_state
from lockstep.data.loader import to_device
from lockstep.engine.checks import check_different
from lockstep.engine.step import Stepper
from lockstep.errors import UserError
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.apply import apply
from lockstep.precision import DynamicScaler, check_storage, choose
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime, choose_device
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.preemption import PreemptionNotice
from lockstep.runtime.world import World
from lockstep.task import Loss, MicroBatch, StepBatches, StepResult

LossFn = Callable[[Any, Any], Any]  # (model, batch) -> Loss, or the mean loss of the batch


class TrainingStep(NamedTuple):
    loss: Tensor  # this rank's mean over the batch, without gradient
    result: StepResult | None  # of the newest optimizer step whose outcome is known; None within an accumulation


class AMPTrainer:
    """One process. Autocast, loss scale, clipping and skipping are the core's Stepper's; so is every number."""

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: LossFn | None = None,
    ):
        """Without `loss_fn` the model itself must return its loss: a scalar, `.loss`, or a mapping with "loss"."""
        self.config, self.loss_fn = config or AMPConfig(), loss_fn
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
        self._make_stepper(own_rate=optimizer is not None)

    # ---- what a distributed trainer does differently ----

    def setup(self) -> Runtime:
        """The device of this process, and who else there is."""
        return alone_or_among(World(), choose_device(self.config.device, World()), "none")

    def settings(self) -> dict[str, Any]:
        """More of the core's settings."""
        return {}

    # ---- training ----

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """The model on its device; what to call from now on. The constructor has done it for its own model."""
        if hasattr(self, "driver"):
            raise UserError("wrap_model", "a trainer that has its model", "make one trainer for each model you train")
        self.driver = apply(model, self.config.run_config(**self.settings()), self.runtime)
        return self.driver.module

    def training_step(self, batch: Any) -> TrainingStep:
        """Forward and backward; with the last of `gradient_accumulation_steps` also exchange, unscale, clip, step."""
        loss, result = self._take(batch)
        return TrainingStep(loss.total.detach() / loss.weight, result)

    def train_epoch(self, loader: Iterable[Any]) -> float:
        """All batches of all ranks, however unevenly they are dealt. The mean loss over all of them.

        A rank that has none left repeats its last one with weight 0 until the others are done.
        """
        batches = iter(loader)
        batch = last = next(batches, None)
        if batch is None:
            raise UserError("train_epoch(loader)", "a loader without a batch", "give every rank at least one batch")
        self._check_dealt(batch)
        sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        result = None
        while result is None or not result.exhausted:
            upcoming = next(batches, None)
            loss, result = self._take(last, padding=batch is None, exhausted=upcoming is None)
            if batch is not None:
                sums += torch.stack([loss.total.detach().double(), torch.as_tensor(loss.weight).to(sums)])
            batch, last = upcoming, last if upcoming is None else upcoming
        self.stepper.settle()  # on a GPU one more outcome is on its way: it must not end the next epoch
        total, weight = self.runtime.collectives.sum_(sums).tolist()
        return total / weight

    def _check_dealt(self, first: Any) -> None:
        """A loader that knows nothing of ranks gives every rank the same samples, and nothing else would show it."""
        check_different(
            self.runtime.collectives.gather_json(digest(first)),
            "make the loader with DDPManager.get_dataloader(dataset, ...), or with a DistributedSampler",
        )

    @property
    def scaler(self) -> DynamicScaler | None:
        """The fp16 loss scale; None in other precisions."""
        return self.stepper.scaler

    @property
    def steps(self) -> int:
        """Optimizer steps that were applied."""
        return self.stepper.counters.applied

    # ---- keeping ----

    def save_checkpoint(self, path: str | Path, rank: int = 0) -> Path:
        """Weights, optimizer, scale and counters below the folder `path`: whole or not at all."""
        return save_state(self._state(), self.runtime, Path(path), writer=rank)

    def load_checkpoint(self, path: str | Path) -> int:
        """The newest whole checkpoint below `path`, or exactly this one, on every rank. Its step."""
        return load_state(self._state(), self.runtime, Path(path))

    # ---- inside ----

    def _make_stepper(self, own_rate: bool) -> None:
        settings = self.config.run_config(**self.settings(), **({"lr.peak": None} if own_rate else {}))
        self.optimizers = Optimizers(self.optimizer, self._module)
        rate = LearningRate(settings.lr, self.optimizers.all, self.config.total_steps or 1, 1)
        precision = choose(settings, self.runtime.device)
        self.stepper = Stepper(self.driver, self.optimizers, rate, precision, settings, self.runtime, 1)
        self._share: StepBatches | None = None  # of the optimizer step that is under way
        self._sized = False

    def _state(self) -> RunState:
        if self._share is not None:
            raise UserError(
                "a checkpoint between two optimizer steps",
                f"{self.stepper.control.backwards_done} of {self.config.gradient_accumulation_steps} batches of a step",
                "save after the step's last batch",
            )
        self.stepper.settle()
        return RunState(self._module, self.optimizers, self.stepper, _NoSource(), {}, keep_frozen=True)

    def _take(self, batch: Any, padding: bool = False, exhausted: bool = False) -> tuple[Loss, StepResult | None]:
        """One batch of an optimizer step. `exhausted`: this rank has no other after it."""
        count, samples = self.config.gradient_accumulation_steps, _samples(batch)
        if self._share is None:
            self._begin(samples * count)
        assert self._share is not None
        self._share.exhausted = exhausted
        batch = to_device(batch, self.runtime.device)
        place = self.runtime.world.rank * count + self.stepper.control.backwards_done
        self.stepper.before_forward(MicroBatch(batch, place, samples, padding=padding))
        with self.stepper.context.precision.autocast():
            loss = self._loss(batch, samples)
        self.stepper.backward(loss)
        if self.stepper.control.backwards_done < count:
            return loss, None
        self._share = None
        return loss, self.stepper.apply()

    def _begin(self, samples: int) -> None:
        if not self._sized:  # the fp16 scale of sums is laid out for a usual step, the same on all ranks
            mine = torch.tensor(float(samples), dtype=torch.float64, device=self.runtime.device)
            self.stepper.context.global_batch, self._sized = int(self.runtime.collectives.sum_(mine)), True
        self._share = StepBatches(self.config.gradient_accumulation_steps, [], samples)
        self.stepper.begin(self._share)

    def _loss(self, batch: Any, samples: int) -> Loss:
        found = self.loss_fn(self.model, batch) if self.loss_fn else self._called(batch)
        if isinstance(found, Loss):
            return found
        if isinstance(found, Mapping):
            found = found.get("loss")
        elif not isinstance(found, Tensor):
            found = getattr(found, "loss", None)
        if not isinstance(found, Tensor) or found.numel() != 1:
            # Never a made-up loss: a trainer that goes on without one seems to train.
            raise UserError(
                "a loss for the batch",
                f"{type(found).__name__ if not isinstance(found, Tensor) else tuple(found.shape)} from "
                + ("loss_fn(model, batch)" if self.loss_fn else f"{type(self._module).__name__}(batch)"),
                "return the mean loss of the batch as one number, or lockstep.Loss(sum, weight); or pass loss_fn=",
            )
        return Loss(found * samples, samples)  # a mean over samples, as the sum it stands for

    def _called(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, list | tuple) else self.model(batch)


class _NoSource:
    """The batches are the caller's: there is no position of ours to keep."""

    def take(self) -> StepBatches:
        raise NotImplementedError

    def commit(self, share: StepBatches, result: StepResult | None) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def alone_or_among(world: World, device: torch.device, backend: str) -> Runtime:
    """A Runtime without the launcher's signs of life, and without a hand on signals: the loop is the caller's."""
    return Runtime(
        world, device, backend, Collectives(world, device), torch.get_num_threads(), Heartbeat(), PreemptionNotice()
    )


def _samples(batch: Any) -> int:
    """The length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    found = next((_samples(part) for part in parts if isinstance(part, Tensor | Mapping | list | tuple)), None)
    if found is None:
        raise UserError("a batch of samples", f"a {type(batch).__name__} without a tensor", "pass tensors")
    return found
