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
from lockstep.engine.exact import LOSS_GRID, WEIGHT_GRID, check_weight, on_grid
from lockstep.engine.optim import Clipping, LearningRate
from lockstep.engine.optimizers import Optimizers
from lockstep.engine.selfcheck import check_loss
from lockstep.engine.skips import SkipPolicy, gradient_trouble, spike_trouble
from lockstep.engine.spikes import SpikeWatch
from lockstep.observe.metrics import ExactSums, Sums
from lockstep.parallel.drivers import Driver, Pipelined
from lockstep.parallel.layout import local
from lockstep.parallel.word import Word
from lockstep.precision import DynamicScaler, Precision
from lockstep.runtime.context import Runtime
from lockstep.runtime.seeds import derive, seed_host, seed_torch
from lockstep.task import Loss, MicroBatch, Share, StepResult

STEP_MODULUS = 4096  # step numbers are compared modulo this, so that float32 carries them exactly


@dataclass
class Counters:
    step: int = 0  # transactions begun and ended, applied or not
    applied: int = 0  # optimizer steps: what the schedule runs on


class Piece(NamedTuple):
    """A micro-batch that this rank has gone through: which samples. What they cost is in the step's sums."""

    index: int
    epoch: int
    ids: Any


@dataclass(frozen=True)
class _Pending:
    """A step whose outcome still lies on the GPU."""

    step: int
    row: Tensor  # (gradient norm, packed word), on its way to pinned host memory
    arrived: torch.cuda.Event
    norms: Tensor
    used: list[str]
    sums: Sums
    pieces: list[Piece]
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
        self.clipping = Clipping(config.clip)
        self.skips = SkipPolicy(config.nonfinite, config.spike)
        self.spikes = SpikeWatch(config.spike)
        whole = driver.replicated or optimizers.masters is not None  # those divide parts of gradients, too
        self.folds = optimizers.folds and whole and not self.clipping.changes_elements
        optimizers.now = lambda: self.counters.step
        self.counters = Counters()
        self.sums = self._no_sums()
        self.lr = learning_rate.at(0)
        self.before_update: Callable[[], None] = lambda: None  # a snapshot may still be being taken
        self.before_exchange: Callable[[], None] = lambda: None  # somebody may be measuring this rank's own work
        self.stop_requested = self.save_requested = self.save_failed = False
        self.taken: list[Piece] = []  # of the step that runs
        self.settled: tuple[list[Piece], Sums] = [], self.sums  # of the one whose outcome came last
        self.metrics_seen: set[str] = set()  # on this rank
        self.metrics_known: set[str] = set()  # on all ranks: what the log may show
        self.new_metrics = False  # some rank has seen one that is not known yet
        # On a GPU the host reads the outcome one step late, so it never waits for the device. fp16 must know at once
        # (the scale of the next step depends on it), and so must optimizers that cannot skip by themselves.
        on_cuda = runtime.device.type == "cuda" and driver.replicated
        self.late = on_cuda and self.scaler is None and self.folds and optimizers.skips_by_itself
        self._pending: _Pending | None = None
        self._numbers: dict[tuple[float, torch.dtype], Tensor] = {}

    def step(self, share: Share, loss_of: Callable[[Any, Any], Loss]) -> StepResult | None:
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

    def _run_pipeline(self, pipeline: Pipelined, share: Share, loss_of: Callable[[Any, Any], Loss]) -> None:
        """All micro-batches at once: what `prepare` and `backward` do for one comes when the pipeline calls."""

        def begin(micro: MicroBatch, stage: int) -> None:
            self._micro = micro
            self.runtime.pulse.beat("compute", self.counters.step)
            place = (stage,) if stage else ()  # the first stage draws what a single process would
            self._seed("model", micro.index, *place)

        def finish(micro: MicroBatch, loss: Loss) -> Tensor:
            start = self._note(loss)  # which may put another total in its place: a fault on purpose
            return loss.total * start

        micros = list(share)
        if self.scaler and self.scaler.unit_weight is None:  # the first stages must know the scale before the loss
            self._micro = micros[0]
            loss = pipeline.forward(loss_of, micros[0].data)
            self.scaler.unit_weight = self._usual_weight(0.0 if loss is None else loss.weight)
        pipeline.run(micros, loss_of, begin, finish)
        self.backwards_done = share.count
        self.runtime.pulse.beat("exchange")
        pipeline.exchange(self._word())

    def begin(self, share: Share) -> None:
        self.driver.begin()
        self._share, self.backwards_done, self._weight = share, 0, 0.0
        self._step_sums = Sums()
        self.taken = []
        self._loss: float | Tensor = 0.0

    @property
    def padding(self) -> bool:
        return self._micro.padding

    def prepare(self, micro: MicroBatch) -> None:
        self._micro = micro
        self.runtime.pulse.beat("compute", self.counters.step)
        self._seed("model", micro.index)
        self.driver.note(micro, self._share.total)
        self.driver.arm(last=self.backwards_done + 1 == self._share.count)

    def backward(self, loss: Loss) -> None:
        start = self._note(loss)
        self.backwards_done += 1
        last = self.backwards_done == self._share.count
        if last:
            self.runtime.pulse.beat("exchange")
            self.before_exchange()
        self.driver.backward(loss.total, self._number(start, loss.total.dtype), self._word() if last else None)

    def _note(self, loss: Loss) -> float:
        """Add up what the micro-batch cost. What its gradient starts with."""
        check_loss(loss)
        if self.scaler and self.scaler.unit_weight is None:
            self.scaler.unit_weight = self._usual_weight(loss.weight)
        if loss.metrics:
            self.metrics_seen.update(loss.metrics)
        if kind := faults.fire("loss", self.counters.step):
            loss.total = loss.total * float(kind)
        if not self._micro.padding and self.driver.speaks:
            if self.config.exact and (self.counters.step == 0 or not _on_gpu(loss.weight)):
                check_weight(float(loss.weight))  # on a GPU the host would wait for it: once
            self._weight = self._weight + self._as_number(loss.weight, WEIGHT_GRID)
            self._step_sums.add(loss)
            micro = self._micro
            self.taken.append(Piece(micro.index, micro.epoch, micro.ids))
            if self.spikes.on:
                self._loss = self._loss + self._as_number(loss.total.detach(), LOSS_GRID)
        return 0.0 if self._micro.padding else self._scale()

    def apply(self) -> StepResult | None:
        """Divide once, clip, and step: everything that changes the size of a gradient is one factor."""
        assert self.backwards_done == self._share.count, "apply() before the last micro-batch"
        self.runtime.pulse.beat("update")
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
        to_mean = driver.gradient_factor / (weight * self._scale()) if weight else math.nan
        length = float(norm) * to_mean
        limit = self.spikes.limit()
        if applied := math.isfinite(length) and not self._spiked(word, limit):
            self._update(parameters, grads, to_mean * self.clipping.coefficient(length))
            self.counters.applied += 1
            self.sums.merge(self._step_sums)
        self.settled = self.taken, self._step_sums
        return self._settle(step, word, length, applied, norms, used, limit)

    def settle(self) -> StepResult | None:
        """The outcome of the last step, if it is still on its way."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        pending.arrived.synchronize()  # host waits for the device: one step late, or at the very end
        length, *values = pending.row.tolist()
        word = self.driver.codec.unpack(values)
        applied = math.isfinite(length) and not self._spiked(word, pending.loss_limit)
        self.settled = pending.pieces, pending.sums
        if applied:
            self.sums.merge(pending.sums)
        else:
            self.counters.applied -= 1  # it was counted on trust
        return self._settle(pending.step, word, length, applied, pending.norms, pending.used, pending.loss_limit)

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
        skip, limit = ~torch.isfinite(length), self.spikes.limit()
        if limit < math.inf:
            skip = skip | (self.driver.codec.mean_loss(packed) > limit)
        self.before_update()
        self.optimizers.step((1.0 / coefficient).float(), skip.float())
        self.counters.applied += 1
        previous = self.settle()
        row = torch.cat([length.reshape(1), packed.double()]).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._pending = _Pending(step, row, arrived, norms, used, self._step_sums, self.taken, limit)
        return previous

    def _word(self) -> Word:
        return Word(
            weight=self._weight,
            stop=int(self.stop_requested),
            exhausted=int(self._share.exhausted),
            step=self.counters.step % STEP_MODULUS,
            scale=math.log2(self.scaler.value) if self.scaler else 0.0,
            new_metrics=int(not self.metrics_seen <= self.metrics_known),
            save=int(self.save_requested),
            leave=int(self.runtime.notice.signal is not None),
            save_failed=int(self.save_failed),
            loss=self._loss,
        )

    def _settle(
        self, step: int, word: Word, length: float, applied: bool, norms: Tensor, used: list[str], loss_limit: float
    ) -> StepResult:
        ranks, weight = self.runtime.world.size, float(word.weight)
        if word.step != ranks * (step % STEP_MODULUS):
            raise RuntimeError(f"the ranks have fallen out of step: their step numbers add up to {word.step}")
        if self.scaler and abs(word.scale / ranks - math.log2(self.scaler.value)) > 1e-3:
            raise RuntimeError(f"the ranks' loss scales differ: here {self.scaler.value}")
        self.new_metrics = self.new_metrics or word.new_metrics > 0
        trouble = None
        if weight and not applied:
            finite = math.isfinite(length)
            trouble = spike_trouble(_mean_loss(word), loss_limit) if finite else gradient_trouble(norms, used)
        result = StepResult(
            step=step,
            applied=applied,
            weight=weight,
            grad_norm=length,
            stop=word.stop > 0,
            exhausted=word.exhausted == ranks,
            save=word.save > 0,
            leave=word.leave > 0,
            save_failed=word.save_failed > 0,
            trouble=trouble,
        )
        if weight == 0:  # nothing to learn in this step, and nothing wrong with it
            self.skips.empty(result)
            return result
        before = self._scale()
        if self.scaler and (applied or not math.isfinite(length)):  # a loss spike says nothing about the scale
            self.scaler.update(overflowed=not applied)
        if applied:
            self.skips.applied()
            if self.spikes.on:
                self.spikes.add(_mean_loss(word))
        else:
            self.skips.skip(result, scale_lowered=self._scale() < before)
        return result

    def state_dict(self) -> dict[str, Any]:
        assert self._pending is None, "an outcome is still on its way"
        return {
            "counters": asdict(self.counters),
            "skips": self.skips.state_dict(),
            "spikes": self.spikes.state_dict(),
            "scaler": self.scaler.get_state() if self.scaler else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counters = Counters(**state["counters"])
        self.skips.load_state_dict(state["skips"])
        self.spikes.load_state_dict(state["spikes"])
        if self.scaler and state["scaler"]:
            self.scaler.load_state(state["scaler"])
        self.sums, self._pending = self._no_sums(), None  # of steps that are being undone
        self.lr = self.learning_rate.at(self.counters.applied)

    def _spiked(self, word: Word, limit: float) -> bool:
        return self.spikes.on and _mean_loss(word) > limit

    def _used_names(self) -> list[str]:
        """The parameters that have a gradient in this step."""
        pairs = zip(self.driver.names, self.driver.parameters, strict=True)
        return [name for name, p in pairs if p.grad is not None]

    def _scale(self) -> float:
        """What backward starts with: 1, or for fp16 the loss scale."""
        return self.scaler.value / (self.scaler.unit_weight or 1.0) if self.scaler else 1.0

    def _usual_weight(self, weight: Any) -> float:
        """The weight of a usual step, as a power of two; found once, at the first micro-batch, equal on all ranks.

        We backpropagate sums, while loss scales are thought of for means: the fp16 scale is divided by this.
        """
        silent = self._micro.padding or not self.driver.speaks or (self.config.exact and self._micro.index > 0)
        counts = [0.0, 0.0] if silent else [float(weight), float(self._micro.samples)]
        mine = torch.tensor(counts, dtype=torch.float64, device=self.runtime.device)
        total, samples = self.runtime.collectives.sum_(mine).tolist()
        return 2.0 ** round(math.log2(max(1.0, total / max(1.0, samples) * self.global_batch)))

    def _number(self, value: float, dtype: torch.dtype) -> Tensor:
        """A constant on the device, made once."""
        key = value, dtype
        if key not in self._numbers:
            self._numbers[key] = torch.tensor(value, dtype=dtype, device=self.runtime.device)
        return self._numbers[key]

    def _as_number(self, value: Any, grid: float) -> float | Tensor:
        number = value.detach().double() if _on_gpu(value) else float(value)
        return on_grid(number, grid) if self.config.exact else number

    def _seed(self, stream: str, *keys: int) -> None:
        value = derive(self.config.seed, stream, self.counters.step, *keys)
        seed_torch(value, self.runtime.device)
        if self.config.exact:
            seed_host(value)

    def _no_sums(self) -> Sums:
        return ExactSums(self.runtime.collectives) if self.config.exact else Sums()


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _mean_loss(word: Word) -> float:
    return float(word.loss) / float(word.weight) if word.weight else 0.0
