"""One optimizer step, as a transaction: all ranks apply it, or none does.

    control = self._new_control(batches)                                 sums and counts start at 0
    reduced = self.driver.forward_backward(batches, loss_fn, control)    sums over micro-batches and ranks
    scale   = 1 / (global weight x loss scale)                           the only division
    finite and no spike?  optimizer.step(scale x clipping) : skip        the same answer on every rank

No strategy and no recipe is named here. Of the device, only whether the host waits for the outcome: on a GPU it reads
the outcome one step late, while the device itself decides whether to skip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import RunConfig
from lockstep.engine.control import StepContext, StepControl
from lockstep.engine.outcome import GradientStats, Outcomes
from lockstep.observe.metrics import ExactSums, Sums
from lockstep.optim.clip import Clipping
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.driver import Driver, Reduced
from lockstep.precision import DynamicScaler, LossScale, Precision
from lockstep.runtime.context import Runtime
from lockstep.runtime.layout import local
from lockstep.task import Loss, MicroBatch, StepBatches, StepResult


@dataclass
class Counters:
    step: int = 0  # transactions begun and ended, applied or not
    applied: int = 0  # optimizer steps: what the schedule runs on


@dataclass(frozen=True)
class Pending:
    """A step whose outcome is still on its way from the GPU."""

    step: int
    row: Tensor  # [1 + LENGTH]: gradient norm and packed control word, in pinned host memory
    arrived: torch.cuda.Event
    reduced: Reduced
    control: StepControl
    loss_limit: float


class Stepper:
    """Runs optimizer steps on this rank, in lockstep with all others."""

    def __init__(
        self,
        driver: Driver,
        optimizers: Optimizers,
        learning_rate: LearningRate,
        precision: Precision,
        config: RunConfig,
        runtime: Runtime,
        global_batch: int,
    ):
        scale = LossScale(DynamicScaler(config.scaler) if precision.needs_scaler else None, runtime)
        self.driver = driver
        self.learning_rate = learning_rate
        self.outcomes = Outcomes(config, scale, runtime.world.size)
        self.context = StepContext(
            config,
            runtime,
            precision,
            scale,
            global_batch,
            reports_loss=driver.placement.reports_loss,
            word_has_loss=self.outcomes.spikes.on,
        )
        self.update = Update(optimizers, Clipping(config.clip), driver, runtime.device)
        self.counters = Counters()
        self.sums = self._no_sums()  # of the steps applied since the last log line
        self.lr = learning_rate.at(0)
        self._control: StepControl | None = None  # of the running step
        self._settled: StepControl | None = None  # of the step whose outcome came last
        self._pending: Pending | None = None

        # On a GPU the host reads the outcome one step late, so it never waits for the device. fp16 must know at once
        # (the scale of the next step depends on it), and so must optimizers that cannot skip by themselves.
        self.late = runtime.device.type == "cuda" and scale.scaler is None and self.update.skips_on_device

    # ---- the whole step, for our loop ----

    def step(self, batches: StepBatches, loss_fn: Callable[[Any, Any], Loss]) -> StepResult | None:
        """Run the whole transaction. Returns the newest settled result (on a GPU, the previous step's)."""
        control = self._new_control(batches)
        reduced = self.driver.forward_backward(batches, loss_fn, control)
        return self._apply(control, reduced)

    # ---- one micro-batch at a time, for a loop that the user writes (the run refuses one in a pipeline) ----

    def begin(self, batches: StepBatches) -> None:
        self._new_control(batches)
        self.driver.begin()

    def before_forward(self, micro: MicroBatch) -> None:
        self.driver.before_forward(micro, self.control)

    def backward(self, loss: Loss) -> None:
        self.driver.backward(loss, self.control)

    def apply(self) -> StepResult | None:
        return self._apply(self.control, self.driver.reduced())

    @property
    def control(self) -> StepControl:
        """The running step."""
        assert self._control is not None, "no step has begun"
        return self._control

    @property
    def settled(self) -> StepControl:
        """The step whose outcome came last."""
        assert self._settled is not None, "no outcome is known yet"
        return self._settled

    # ---- the outcome ----

    def _apply(self, control: StepControl, reduced: Reduced) -> StepResult | None:
        """Divide once, clip and step: everything that changes the size of a gradient is one factor."""
        config, runtime = self.context.config, self.context.runtime
        assert control.backwards_done == control.batches.count, "apply() before the last micro-batch"
        control.release()
        runtime.heartbeat.beat("update")
        norm = torch.linalg.vector_norm(reduced.norms)
        limit = self.outcomes.spikes.limit()
        self.lr = self.learning_rate.set(self.counters.applied)
        if config.exact:
            control.seed("update")  # what draws from now on must not depend on this rank's last forward
        self.counters.step += 1
        if self.late:
            return self._apply_late(control, reduced, norm, limit)

        # On a GPU the host waits here for the control word and the norm.
        word = reduced.codec.unpack(reduced.packed.tolist())
        grad_norm, factor = math.nan, math.nan
        if word.weight:
            grad_norm, factor = self._scale(reduced, float(norm), float(word.weight))
        if applied := self.outcomes.accept(word, grad_norm, limit):
            self.update.step(reduced, factor, self.counters.step)
            self.counters.applied += 1
        return self._settle(control, word, GradientStats(grad_norm, reduced.norms, reduced.names, limit), applied)

    def _apply_late(self, control: StepControl, reduced: Reduced, norm: Tensor, limit: float) -> StepResult | None:
        """Leave everything to the device, where the optimizer skips by itself. Returns the previous step's result."""
        weight = reduced.codec.weight(reduced.packed)
        grad_norm, factor = self._scale(reduced, norm, weight)  # weight 0: 0 x inf = nan, so nothing is applied
        skip = ~torch.isfinite(grad_norm)
        if limit < math.inf:
            skip = skip | (reduced.codec.mean_loss(reduced.packed) > limit)
        self.update.step_on_device(factor, skip, self.counters.step)
        self.counters.applied += 1  # on trust: corrected when the outcome arrives

        previous = self.settle()
        row = torch.cat([grad_norm.reshape(1), reduced.packed.double()]).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = Pending(control.step, row, arrived, reduced, control, limit)
        return previous

    def _scale(self, reduced: Reduced, norm: Any, weight: Any) -> tuple[Any, Any]:
        """Return the norm of the mean's gradient, and the one factor that gradients are multiplied by.

        `norm` and `weight` are numbers, or tensors on the device.
        """
        # Without a loss scale the weight is not multiplied by 1: on a device that would be a kernel in every step.
        divisor = weight if self.scaler is None else weight * self.context.loss_scale.value
        to_mean = reduced.factor / divisor
        grad_norm = norm * to_mean
        return grad_norm, to_mean * self.update.clipping.coefficient(grad_norm)

    def settle(self) -> StepResult | None:
        """Return the outcome of the last step, if it is still on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.arrived.synchronize()  # the host waits for the device: one step late, or at the very end
        grad_norm, *values = pending.row.tolist()
        word = pending.reduced.codec.unpack(values)
        applied = self.outcomes.accept(word, grad_norm, pending.loss_limit)
        if not applied:
            self.counters.applied -= 1
        stats = GradientStats(grad_norm, pending.reduced.norms, pending.reduced.names, pending.loss_limit)
        return self._settle(pending.control, word, stats, applied)

    def _settle(self, control: StepControl, word: Any, stats: GradientStats, applied: bool) -> StepResult:
        self._settled = control
        if applied:
            self.sums.merge(control.sums)
        self.context.metrics.new |= word.new_metrics > 0
        return self.outcomes.settle(control.step, word, stats, applied)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        assert self._pending is None, "an outcome is still on its way"
        return {"counters": asdict(self.counters), **self.outcomes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters = Counters(**state["counters"])
        self.outcomes.load_state_dict(state)
        # Sums and a pending outcome belong to steps that are being undone.
        self.sums = self._no_sums()
        self._pending = None
        self.lr = self.learning_rate.at(self.counters.applied)

    @property
    def scaler(self) -> DynamicScaler | None:
        """The loss scale of fp16; None in other precisions."""
        return self.context.loss_scale.scaler

    def _new_control(self, batches: StepBatches) -> StepControl:
        self._control = StepControl(self.context, batches, self.counters.step)
        return self._control

    def _no_sums(self) -> Sums:
        return ExactSums(self.context.runtime.collectives) if self.context.config.exact else Sums()


class Update:
    """Multiplies gradients by the step's factor, clips elements if asked, and steps the optimizers."""

    def __init__(self, optimizers: Optimizers, clipping: Clipping, driver: Driver, device: torch.device):
        self.optimizers = optimizers
        self.clipping = clipping
        self.before: list[Callable[[], None]] = []  # called before parameters change: a snapshot may be under way
        self._driver = driver
        self._device = device

        # Fused optimizers multiply inside their one pass over the gradients, if these are full tensors (or are copied
        # to full float32 masters first) and nothing needs them at their true size before.
        full = driver.placement.replicated or optimizers.masters is not None
        self.fused = optimizers.divides_gradients and full and not clipping.changes_elements
        self.skips_on_device = driver.placement.replicated and self.fused and optimizers.skips_by_itself

    def step(self, reduced: Reduced, factor: float, number: int) -> None:
        """Apply the `number`-th step. The host knows already that it is to be applied."""
        self._wait()
        if self.fused:
            self.optimizers.step(number, torch.tensor(1.0 / factor, device=self._device))
            return

        grads = reduced.grads
        here = grads if self._driver.placement.replicated else [local(grad) for grad in grads]
        if here:  # a pipeline stage may have nothing to train
            torch._foreach_mul_(here, factor)
            if self.clipping.changes_elements:
                self.clipping.clip_elements_([p.detach() for p in reduced.parameters], grads, self._driver.norms)
        self.optimizers.step(number)

    def step_on_device(self, factor: Tensor, skip: Tensor, number: int) -> None:
        """Apply the `number`-th step unless `skip` is true on the device."""
        self._wait()
        self.optimizers.step(number, (1.0 / factor).float(), skip.float())

    def _wait(self) -> None:
        for wait in self.before:
            wait()
