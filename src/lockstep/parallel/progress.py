"""The progress of one pass over the batches of a step: the current micro-batch, the losses so far, the control word.

A step has one pass, unless a custom loop asks for several. A driver executes the model on each micro-batch. Everything
else about the pass is here: seeding each micro-batch, the `grad_output` of its backward, and the control word, which is
reduced together with the last gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.observe.metrics import MetricNames, Term, metric_terms
from lockstep.parallel.exact.grid import LOSS_GRID, WEIGHT_GRID, check_representable, on_grid
from lockstep.precision import DynamicScaler, Precision
from lockstep.runtime.context import EventLogger, Runtime, log_nothing
from lockstep.runtime.control_word import ControlWord, step_mark
from lockstep.runtime.seeds import derive, seed_host, seed_torch
from lockstep.task import Loss, MicroBatch, Number, StepBatches, Weight


@dataclass
class StepContext:
    """Everything that all steps of a run share."""

    config: RunConfig
    runtime: Runtime
    precision: Precision
    global_batch: int
    reports_loss: bool = True  # False if another rank of the same tp or pp group reports the same losses
    reads_loss: bool = False  # the user's code reads `StepResult.loss`
    log_event: EventLogger = log_nothing  # logs skipped steps, and the samples to blame for them

    # Derived from these.
    scaler: DynamicScaler | None = field(init=False)  # the loss scale of fp16; None in other precisions
    sends_loss: bool = field(init=False)  # whether the control word includes the loss

    # What changes during the run.
    flags: dict[str, int] = field(default_factory=dict)  # `Flags` of every control word, by name
    metric_names: MetricNames = field(default_factory=MetricNames)  # those of the log's `Interval`
    constants: dict[tuple[float, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scaler = DynamicScaler(self.config.scaler) if self.precision.needs_scaler else None
        self.sends_loss = self.reads_loss or self.config.spike.policy != "off"


class PassProgress:
    """One pass over the batches of a step on this rank, from its first micro-batch to the control word."""

    def __init__(self, context: StepContext, batches: StepBatches, step: int, pass_index: int = 0, passes: int = 1):
        self.batches = batches
        self.step = step  # its index, as everywhere
        self.pass_index = pass_index  # among the passes of the step
        self.passes = passes  # their number

        self.micro: MicroBatch | None = None  # the current one
        self.backwards_done = 0
        self.in_backward = False  # a backward has begun and has not ended: it runs, or it has raised

        # The micro-batches so far without their data, their losses in the same order, and their metrics. Losses and
        # metrics are detached from the graph, and those on a GPU stay there.
        self.micro_batches: list[MicroBatch] = []
        self.losses: list[tuple[Number, Weight]] = []
        self.metrics: list[Term] = []

        # These return the context managers for forward and loss, and for the backward.
        self.autocast = context.precision.autocast
        self.no_autocast = context.precision.no_autocast

        self._context = context
        self._weight: float | Tensor = 0.0
        self._loss: float | Tensor = 0.0

    @property
    def ends_step(self) -> bool:
        """Whether this is the last pass of the step: usually it is the only one."""
        return self.pass_index + 1 == self.passes

    @property
    def pass_count(self) -> int:
        """The number of passes so far in the run, including this one: each has its own update, or a skip."""
        return self.step * self.passes + self.pass_index + 1

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the current micro-batch is this rank's last one of the pass."""
        return self.backwards_done + 1 == self.batches.num_micro_batches

    @property
    def needs_reference_weight(self) -> bool:
        """Whether the fp16 scaler still lacks the typical weight of a step."""
        scaler = self._context.scaler
        return scaler is not None and scaler.reference_weight is None

    def before_forward(self, micro: MicroBatch, stage: int = 0) -> None:
        """Begin a micro-batch. Its random numbers depend on (seed, step, micro-batch), never on the rank."""
        self.micro = micro
        self._context.runtime.heartbeat.beat("compute", self.step)

        # The first stage of a pipeline draws the same numbers as a single process would.
        keys = (micro.index, stage) if stage else (micro.index,)
        self.seed("model", *keys)

    def begin_backward(self, loss: Loss) -> float:
        """Record the loss of the only micro-batch in flight, and return the `grad_output` for its backward."""
        if self.in_backward:
            raise backward_failed(self.step)

        grad_output = self.record(loss)
        self.in_backward = True
        return grad_output

    def end_backward(self) -> None:
        """End the backward of a micro-batch. After the last one, the gradients are reduced."""
        self.in_backward = False
        self.backwards_done += 1

    def end_all_backwards(self) -> None:
        """End the backwards of a pipeline, which has all micro-batches in flight."""
        self.backwards_done = self.batches.num_micro_batches

    def release_data(self) -> None:
        """Drop the data of the current micro-batch, which nothing needs any more."""
        self.micro = None

    def record(self, loss: Loss) -> float:
        """Record the loss and return the `grad_output` for its backward: the loss scale, or 0 for padding."""
        context, micro = self._context, self.micro
        assert micro is not None

        check_total(loss)
        weight = checked_weight(loss.weight)

        if context.scaler is not None and self.needs_reference_weight:
            self.find_reference_weight(micro, weight)

        if loss.metrics and not loss.metrics.keys() <= context.metric_names.seen:
            context.metric_names.see(loss.metrics)

        # Padding runs only because collectives need every rank: its weight and its gradient are 0.
        if micro.padding:
            return 0.0

        if context.reports_loss:
            self._add(loss, weight, micro)

        return context.scaler.factor_on_sums if context.scaler else 1.0

    def find_reference_weight(self, micro: MicroBatch, weight: Any) -> None:
        """Set the typical weight of a step, as a power of two. Collective: every rank must call it once.

        The fp16 loss scale assumes a mean loss; we backpropagate a sum, so we divide the scale by a typical weight:
        that of the first micro-batch of the global step, so that the scale does not depend on the number of ranks.
        """
        context = self._context
        assert context.scaler is not None

        # All other ranks contribute 0, as do stages without a loss. A pipeline has not checked the weight before.
        is_first = micro.index == 0 and not micro.padding and context.reports_loss
        counts = [float(checked_weight(weight)), float(micro.num_samples)] if is_first else [0.0, 0.0]

        # The host waits for the sums, shape [2]. This happens once, in the first step.
        sums = torch.tensor(counts, dtype=torch.float64, device=context.runtime.device)
        total, samples = context.runtime.collectives.all_reduce_(sums).tolist()

        # The weight of a sample times the samples of a step. A power of two only shifts exponents, so it rounds
        # nothing.
        per_step = total / max(1.0, samples) * context.global_batch
        context.scaler.reference_weight = 2.0 ** round(math.log2(max(1.0, per_step)))

    def control_word(self) -> ControlWord:
        """Return this rank's control word. Call it before the first collective of the reduction.

        Gradients may be reduced during the last backward, so for most drivers that is before this backward.
        """
        context = self._context
        context.runtime.heartbeat.beat("all-reduce")
        return ControlWord(
            weight=self._weight,
            exhausted=int(self.batches.exhausted),
            step=step_mark(self.step),
            scale=math.log2(context.scaler.value) if context.scaler else 0.0,
            new_metrics=int(bool(context.metric_names.unshared)),
            preempt=int(context.runtime.notice.signal is not None),
            loss=self._loss,
            **context.flags,
        )

    def constant(self, value: float, dtype: torch.dtype) -> Tensor:
        """Return a scalar tensor on the device. It is cached: a new one in every step would cost a copy."""
        constants = self._context.constants
        if (value, dtype) not in constants:
            constants[value, dtype] = torch.tensor(value, dtype=dtype, device=self._context.runtime.device)

        return constants[value, dtype]

    def seed(self, stream: str, *keys: int) -> None:
        """Seed torch's generators for this step, and with `exact` also those of Python and NumPy."""
        config = self._context.config
        value = derive(config.seed, stream, self.step, *keys)
        seed_torch(value, self._context.runtime.device)
        if config.exact:
            seed_host(value)

    def _add(self, loss: Loss, weight: Weight, micro: MicroBatch) -> None:
        """Add the loss of `micro` to those of the pass. `weight` is its weight, without a graph."""
        # Reading a weight on the GPU makes the host wait, so there only the first step is checked.
        if self._context.config.exact:
            on_gpu = isinstance(weight, Tensor) and weight.is_cuda
            if self.step == 0 or not on_gpu:
                check_representable(float(weight))

        # Losses on a GPU are only collected in a list: adding them would launch one more kernel per micro-batch.
        total = loss.total.detach() if loss.total.is_cuda else loss.total.item()

        # First what may raise: a loss is recorded as a whole, or not at all.
        terms = [*metric_terms(loss)] if loss.metrics else None
        self.micro_batches.append(MicroBatch(None, micro.index, micro.num_samples, micro.epoch, micro.ids))
        self.losses.append((total, weight))
        if terms:
            self.metrics += terms

        # The control word needs these sums.
        self._weight = self._weight + self._as_float64(weight, WEIGHT_GRID)
        if self._context.sends_loss:
            self._loss = self._loss + self._as_float64(total, LOSS_GRID)

    def _as_float64(self, value: Any, grid: float) -> float | Tensor:
        """Return the value as float64. `exact` rounds it to a grid, so that sums do not depend on the order."""
        on_gpu = isinstance(value, Tensor) and value.is_cuda
        number = value.double() if on_gpu else float(value)
        return on_grid(number, grid) if self._context.config.exact else number


def backward_failed(step: int) -> UserError:
    """Return the error for a pass that goes on after one of its backwards has raised."""
    return UserError(
        f"a backward of step {step + 1} has raised, and the step cannot go on",
        "the loss is counted, and its gradients may be added in part, so that a second backward would count it twice",
        "let the error end the run, which resumes from its last checkpoint; if memory was short, set a smaller "
        "micro_batch, or micro_batch=auto",
    )


# ---- what a loss may be ----


def check_total(loss: Loss) -> None:
    """Raise unless the loss is a Loss, with a total that can be backpropagated."""
    if not isinstance(loss, Loss):
        raise UserError(
            f"loss() must return lockstep.Loss(total, weight); it returned a {type(loss).__name__}",
            "",
            "return lockstep.Loss(total, weight=...): the SUM over the micro-batch, and how many terms it has",
        )

    if not isinstance(loss.total, Tensor):
        raise UserError(
            f"the total of a loss must be a tensor with a gradient; it is a {type(loss.total).__name__}",
            "",
            "remove .item() or float(): Loss(per_sample_loss.sum(), weight=len(batch))",
        )

    if loss.total.dim() != 0 or not loss.total.requires_grad:
        raise UserError(
            f"the loss must be one number with a gradient, the SUM over the micro-batch; it has the shape "
            f"{tuple(loss.total.shape)} and requires_grad={loss.total.requires_grad}",
            "",
            "return Loss(per_sample_loss.sum(), weight=len(batch)), computed with gradients on",
        )


def checked_weight(weight: Any) -> Weight:
    """Return the weight of a loss without its graph, or raise if it is not one finite number of at least 0."""
    # A graph would keep the activations of the step alive until the log line.
    is_tensor = isinstance(weight, Tensor)
    if is_tensor:
        weight = weight.detach()

    # Plain numbers first: isinstance(x, SupportsFloat) is many times slower.
    is_number = weight.numel() == 1 if is_tensor else isinstance(weight, (int, float, SupportsFloat))
    if not is_number:
        shape = f" {tuple(weight.shape)}" if is_tensor else ""
        raise UserError(
            f"the weight of a loss is the number of its terms; it cannot be a {type(weight).__name__}{shape}",
            "",
            "return Loss(total, weight=len(batch)), or the number of tokens: mask.sum()",
        )

    # A weight on the GPU is not checked here, because the host would wait for it: `OutcomeHandler.check` looks at the
    # sum.
    if not (is_tensor and weight.is_cuda) and not 0 <= float(weight) < math.inf:
        raise wrong_weight(weight)

    return weight


def wrong_weight(weight: Weight) -> UserError:
    return UserError(
        f"the weight of a loss is the number of its terms; it cannot be {weight}",
        "",
        "return a finite weight of 0 or more",
    )
