"""One optimizer step, as a transaction: all ranks apply it, or none does.

    begin      no gradients yet
    prepare    per micro-batch: seed its random stream, tell the driver whether it is the last
    backward   per micro-batch: the SUM's gradient; with the last one the exchange, and the control word in it
    apply      one factor = 1 / global weight x 1 / loss scale x clipping; finite -> optimizer, else skip

No strategy and no recipe is named here; of the device only whether its outcome must be waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import faults
from lockstep.config import RunConfig
from lockstep.engine.checks import check_loss
from lockstep.engine.determinism import LOSS_GRID, WEIGHT_GRID, check_weight, on_grid
from lockstep.engine.outcome import STEP_MODULUS, Gradient, Outcomes
from lockstep.observe.metrics import ExactSums, Sums
from lockstep.optim.clip import Clipping
from lockstep.optim.optimizers import Optimizers
from lockstep.optim.schedule import LearningRate
from lockstep.parallel.driver import Driver, Pipelined
from lockstep.precision import DynamicScaler, LossScale, Precision
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.layout import local
from lockstep.runtime.seeds import derive, seed_host, seed_torch
from lockstep.task import Loss, MicroBatch, StepBatches, StepResult


@dataclass
class Counters:
    step: int = 0  # transactions begun and ended, applied or not
    applied: int = 0  # optimizer steps: what the schedule runs on


@dataclass(frozen=True)
class _Pending:
    """A step whose outcome still lies on the GPU."""

    step: int
    row: Tensor  # (gradient norm, packed word), on its way to pinned host memory
    arrived: torch.cuda.Event
    norms: Tensor
    used: list[str]
    tally: StepTotals
    loss_limit: float


class Stepper:
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
        self.driver, self.optimizers, self.learning_rate = driver, optimizers, learning_rate
        self.precision, self.config, self.runtime = precision, config, runtime
        self.global_batch = global_batch
        self.scaler = DynamicScaler(config.scaler) if precision.needs_scaler else None
        self.scale = LossScale(self.scaler, runtime)
        self.outcomes = Outcomes(config, self.scale, runtime.world.size)
        self.skips = self.outcomes.skips
        self.clipping = Clipping(config.clip)
        whole = driver.replicated or optimizers.masters is not None  # those divide parts of gradients, too
        self.folds = optimizers.folds and whole and not self.clipping.changes_elements
        optimizers.now = lambda: self.counters.step
        self.counters = Counters()
        self.sums = self._no_sums()
        self.lr = learning_rate.at(0)
        self.before_update: Callable[[], None] = lambda: None  # a snapshot may still be being taken
        self.before_exchange: Callable[[], None] = lambda: None  # somebody may be measuring this rank's own work
        self.stop_requested = self.save_requested = self.save_failed = False
        self.tally = self.settled = StepTotals()  # of the step that runs; of the one whose outcome came last
        self.metrics_seen: set[str] = set()  # on this rank
        self.metrics_known: set[str] = set()  # on all ranks: what the log may show
        self.new_metrics = False  # some rank has seen one that is not known yet
        # On a GPU the host reads the outcome one step late, so it never waits for the device. fp16 must know at once
        # (the scale of the next step depends on it), and so must optimizers that cannot skip by themselves.
        on_cuda = runtime.device.type == "cuda" and driver.replicated
        self.late = on_cuda and self.scaler is None and self.folds and optimizers.skips_by_itself
        self._pending: _Pending | None = None
        self._numbers: dict[tuple[float, torch.dtype], Tensor] = {}

    def step(self, share: StepBatches, loss_of: Callable[[Any, Any], Loss]) -> StepResult | None:
        """The whole transaction; returns the newest settled result (on a GPU the previous step's)."""
        self.begin(share)
        if self.driver.pipeline is not None:
            self._run_pipeline(self.driver.pipeline, share, loss_of)
            return self.apply()
        for micro in share:
            self.prepare(micro)
            with self.precision.autocast():
                loss = loss_of(self.driver.call, micro.data)
            self.backward(loss)
        return self.apply()

    def _run_pipeline(self, pipeline: Pipelined, share: StepBatches, loss_of: Callable[[Any, Any], Loss]) -> None:
        """All micro-batches at once: what `prepare` and `backward` do for one comes when the pipeline calls."""

        def begin(micro: MicroBatch, stage: int) -> None:
            self._micro = micro
            self.runtime.heartbeat.beat("compute", self.counters.step)
            place = (stage,) if stage else ()  # the first stage draws what a single process would
            self._seed("model", micro.index, *place)

        def finish(micro: MicroBatch, loss: Loss) -> Tensor:
            start = self._note(loss)  # which may put another total in its place: a fault on purpose
            return loss.total * start

        micros = list(share)
        if self.scale.unknown:  # the first stages must know it before the loss
            self._micro = micros[0]
            loss = pipeline.forward(loss_of, micros[0].data)
            self._find_unit(0.0 if loss is None else loss.weight)
        pipeline.run(micros, loss_of, begin, finish)
        self.backwards_done = share.count
        self.runtime.heartbeat.beat("exchange")
        pipeline.exchange(self._word())

    def begin(self, share: StepBatches) -> None:
        self.driver.begin()
        self._share, self.backwards_done = share, 0
        self.tally = StepTotals(self.config.exact, self.outcomes.spikes.on)

    @property
    def padding(self) -> bool:
        return self._micro.padding

    def prepare(self, micro: MicroBatch) -> None:
        self._micro = micro
        self.runtime.heartbeat.beat("compute", self.counters.step)
        self._seed("model", micro.index)
        self.driver.note(micro, self._share.total)
        self.driver.arm(last=self.backwards_done + 1 == self._share.count)

    def backward(self, loss: Loss) -> None:
        start = self._note(loss)
        self.backwards_done += 1
        last = self.backwards_done == self._share.count
        if last:
            self.runtime.heartbeat.beat("exchange")
            self.before_exchange()
        self.driver.backward(loss.total, self._number(start, loss.total.dtype), self._word() if last else None)

    def _note(self, loss: Loss) -> float:
        """Add up what the micro-batch cost. What its gradient starts with."""
        check_loss(loss)
        if self.scale.unknown:
            self._find_unit(loss.weight)
        if loss.metrics:
            self.metrics_seen.update(loss.metrics)
        if kind := faults.fire("loss", self.counters.step):
            loss.total = loss.total * float(kind)
        if not self._micro.padding and self.driver.speaks:
            self.tally.add(loss, self._micro, first_step=self.counters.step == 0)
        return 0.0 if self._micro.padding else self.scale.value

    def apply(self) -> StepResult | None:
        """Divide once, clip, and step: everything that changes the size of a gradient is one factor."""
        assert self.backwards_done == self._share.count, "apply() before the last micro-batch"
        self.runtime.heartbeat.beat("update")
        driver, packed = self.driver, self.driver.word()
        parameters = [p for p in driver.parameters if p.grad is not None]
        grads: list[Tensor] = [p.grad for p in parameters]  # pyrefly: ignore[bad-assignment]
        everywhere = len(grads) == len(driver.names) or driver.pipeline is not None  # whose norms are of all stages
        used = driver.names if everywhere else self._used_names()
        norms = driver.norms(grads)
        norm = torch.linalg.vector_norm(norms)
        self.lr = self.learning_rate.set(self.counters.applied)
        if self.config.exact:  # whatever draws from now on must not go on where this rank's last forward ended
            self._seed("update")
        step, self.counters.step = self.counters.step, self.counters.step + 1
        if self.late:
            return self._apply_late(step, norm, norms, packed, used)
        word = driver.codec.unpack(packed.tolist())  # on a GPU the host waits here, and for the norm
        weight = float(word.weight)
        to_mean = driver.gradient_factor / (weight * self.scale.value) if weight else math.nan
        length, limit = float(norm) * to_mean, self.outcomes.spikes.limit()
        if applied := self.outcomes.good(word, length, limit):
            self._update(parameters, grads, to_mean * self.clipping.coefficient(length))
            self.counters.applied += 1
        return self._settle(step, word, Gradient(length, norms, used, limit), applied, self.tally)

    def settle(self) -> StepResult | None:
        """The outcome of the last step, if it is still on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.arrived.synchronize()  # host waits for the device: one step late, or at the very end
        length, *values = pending.row.tolist()
        word = self.driver.codec.unpack(values)
        applied = self.outcomes.good(word, length, pending.loss_limit)
        if not applied:
            self.counters.applied -= 1  # it was counted on trust
        gradient = Gradient(length, pending.norms, pending.used, pending.loss_limit)
        return self._settle(pending.step, word, gradient, applied, pending.tally)

    def _update(self, parameters: list, grads: list[Tensor], coefficient: float) -> None:
        self.before_update()
        if self.folds:
            self.optimizers.step(torch.tensor(1.0 / coefficient, device=self.runtime.device), None)
            return
        here = grads if self.driver.replicated else [local(grad) for grad in grads]
        if here:  # a stage may have nothing to train
            torch._foreach_mul_(here, coefficient)
        if here and self.clipping.changes_elements:
            self.clipping.clip_elements_([p.detach() for p in parameters], grads, self.driver.lengths)
        self.optimizers.step()

    def _apply_late(self, step: int, norm: Tensor, norms: Tensor, packed: Tensor, used: list[str]) -> StepResult | None:
        """The same arithmetic as in `apply`, left to the device; the optimizer skips by itself."""
        to_mean = self.driver.gradient_factor / self.driver.codec.weight(packed)
        length = norm * to_mean  # weight 0: 0 x inf = nan, so nothing is applied
        coefficient = to_mean * self.clipping.coefficient_on_device(length)
        skip, limit = ~torch.isfinite(length), self.outcomes.spikes.limit()
        if limit < math.inf:
            skip = skip | (self.driver.codec.mean_loss(packed) > limit)
        self.before_update()
        self.optimizers.step((1.0 / coefficient).float(), skip.float())
        self.counters.applied += 1
        previous = self.settle()
        row = torch.cat([length.reshape(1), packed.double()]).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = _Pending(step, row, arrived, norms, used, self.tally, limit)
        return previous

    def _word(self) -> ControlWord:
        return ControlWord(
            weight=self.tally.weight,
            stop=int(self.stop_requested),
            exhausted=int(self._share.exhausted),
            step=self.counters.step % STEP_MODULUS,
            scale=self.scale.logarithm,
            new_metrics=int(not self.metrics_seen <= self.metrics_known),
            save=int(self.save_requested),
            leave=int(self.runtime.notice.signal is not None),
            save_failed=int(self.save_failed),
            loss=self.tally.loss,
        )

    def _settle(self, step: int, word: ControlWord, gradient: Gradient, applied: bool, tally: StepTotals) -> StepResult:
        self.settled = tally
        if applied:
            self.sums.merge(tally.sums)
        self.new_metrics = self.new_metrics or word.new_metrics > 0
        return self.outcomes.settle(step, word, gradient, applied)

    def state_dict(self) -> dict[str, Any]:
        assert self._pending is None, "an outcome is still on its way"
        return {"counters": asdict(self.counters), **self.outcomes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters = Counters(**state["counters"])
        self.outcomes.load_state_dict(state)
        self.sums, self._pending = self._no_sums(), None  # of steps that are being undone
        self.lr = self.learning_rate.at(self.counters.applied)

    def _used_names(self) -> list[str]:
        """The parameters that have a gradient in this step."""
        pairs = zip(self.driver.names, self.driver.parameters, strict=True)
        return [name for name, p in pairs if p.grad is not None]

    def _find_unit(self, weight: Any) -> None:
        micro = self._micro
        silent = micro.padding or not self.driver.speaks or (self.config.exact and micro.index > 0)
        self.scale.find_unit(weight, micro.samples, self.global_batch, silent)

    def _number(self, value: float, dtype: torch.dtype) -> Tensor:
        """A constant on the device, made once."""
        key = value, dtype
        if key not in self._numbers:
            self._numbers[key] = torch.tensor(value, dtype=dtype, device=self.runtime.device)
        return self._numbers[key]

    def _seed(self, stream: str, *keys: int) -> None:
        value = derive(self.config.seed, stream, self.counters.step, *keys)
        seed_torch(value, self.runtime.device)
        if self.config.exact:
            seed_host(value)

    def _no_sums(self) -> Sums:
        return ExactSums(self.runtime.collectives) if self.config.exact else Sums()


# What the micro-batches of one step have cost on this rank: its part of the control word, and of the log.


class Piece(NamedTuple):
    """A micro-batch that this rank has gone through: which samples. What they cost is in the step's sums."""

    index: int
    epoch: int
    ids: Any


class StepTotals:
    """`exact`: sums that do not depend on their order. `with_loss`: the word carries the loss too."""

    def __init__(self, exact: bool = False, with_loss: bool = False):
        self._exact, self._with_loss = exact, with_loss
        self.weight: float | Tensor = 0.0
        self.loss: float | Tensor = 0.0
        self.sums = Sums()
        self.pieces: list[Piece] = []

    def add(self, loss: Loss, micro: MicroBatch, first_step: bool) -> None:
        if self._exact and (first_step or not _on_gpu(loss.weight)):
            check_weight(float(loss.weight))  # on a GPU the host would wait for it: once
        self.weight = self.weight + self._as_number(loss.weight, WEIGHT_GRID)
        self.sums.add(loss)
        self.pieces.append(Piece(micro.index, micro.epoch, micro.ids))
        if self._with_loss:
            self.loss = self.loss + self._as_number(loss.total.detach(), LOSS_GRID)

    def _as_number(self, value: Any, grid: float) -> float | Tensor:
        number = value.detach().double() if _on_gpu(value) else float(value)
        return on_grid(number, grid) if self._exact else number


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"
