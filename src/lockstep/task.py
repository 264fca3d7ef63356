"""The contract between the user and the engine: a Task says what to train, Lockstep decides how.

A loss is a **sum with a weight**. Nothing here depends on ranks, devices or precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

# A weight on the device costs no synchronisation; a number is the same on every device.
Weight = int | float | Tensor

# A sum, or a sum with its own weight.
Metric = Tensor | float | tuple[Tensor | float, Weight]


# ---- what a task computes ----


@dataclass(slots=True)
class Loss:
    """The loss of one micro-batch.

    `total` () is the SUM over the micro-batch's terms, `weight` the number of those terms (tokens, samples, ...).
    Lockstep adds both over micro-batches and ranks, and divides once.
    `metrics` are sums as well, each divided by the loss's weight, or by its own if it is a pair `(sum, weight)`.
    """

    total: Tensor
    weight: Weight
    metrics: dict[str, Metric] = field(default_factory=dict)

    @classmethod
    def sum(cls, total: Tensor, n: Weight, metrics: dict[str, Metric] | None = None) -> Loss:
        """Return the loss of `n` terms from their sum: what `Loss(total, n)` does, by name."""
        return cls(total, n, metrics or {})

    @classmethod
    def mean(cls, mean: Tensor, n: Weight, metrics: dict[str, Metric] | None = None) -> Loss:
        """Return the loss of `n` terms from their mean, such as `.loss` of a Hugging Face model and `n` tokens.

        The mean of no terms is NaN; with `n` 0 the total is 0, and so is its gradient.
        """
        if isinstance(n, Tensor):
            nothing = n == 0
            total = torch.where(nothing, torch.nan_to_num(mean) * 0.0, mean * n)
        else:
            total = mean * n if n else torch.nan_to_num(mean) * 0.0
        return cls(total, n, metrics or {})


# ---- where its batches come from ----


@dataclass(slots=True)
class MicroBatch:
    """The data of one forward and backward."""

    data: Any
    index: int  # among the micro-batches of the whole global step, not of this rank
    samples: int
    epoch: int = 0
    ids: Any = ()  # which samples (int64); empty if the source does not say
    padding: bool = False  # it only fills up this rank's number of micro-batches, so its weight must be 0
    first: int = 0  # position of its first sample in the global step, if the source has one


@dataclass(slots=True)
class StepBatches:
    """The work of one rank in one global step: `count` micro-batches, read lazily."""

    count: int
    micro_batches: Iterable[MicroBatch]
    samples: int  # in the whole global step, all ranks together (for a stream, an estimate)
    total: int | None = None  # micro-batches of the whole global step, if the source has counted them
    exhausted: bool = False  # this rank's stream has ended
    span: tuple[int, int] | None = None  # positions in the endless order of samples, if the source has them

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step, the same on every rank."""

    # What happened.
    step: int  # counts all steps from 0, including skipped ones
    applied: bool  # False: neither the optimizer nor the schedule advanced
    weight: float  # of all ranks together
    grad_norm: float  # of the gradient of the mean loss, before clipping
    skip_reason: str | None = None  # why it was skipped; None if it was applied, or had weight 0

    # What the ranks agreed on, through the step's control word.
    stop: bool = False  # some rank requested a stop
    exhausted: bool = False  # every rank's stream has ended
    save: bool = False  # a checkpoint is due
    preempt: bool = False  # some rank is preempted: save and exit
    save_failed: bool = False  # some rank could not write its file of the checkpoint
    new_metrics: bool = False  # some rank saw a metric that not all ranks have seen


@runtime_checkable
class BatchSource(Protocol):
    """Where micro-batches come from: a dataset, a stream, a rollout. Its state holds no rank and no world size.

    A source may also have: `attach(context)`, called before the first step (see SourceContext), and `close()`, called
    after the last; `upcoming()`, which a resumed run compares; and for `policy=rewind`, `pass_over(span)`, which skips
    these positions from now on, and `passed_over`, the spans skipped so far.
    """

    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next step."""

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        """Mark `batches` as used. `result` is the newest one known (on a GPU, the previous step's)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a BatchSource needs to know about the run.

    A source with a method `attach(context)` is given it before the first step, and before its state is restored.
    `attach` moves this rank's data to its device, and returns a line about the data for the banner.
    """

    # What to compute with.
    model: nn.Module  # as this rank holds it, not wrapped: for forwards without gradients
    device: torch.device
    seed: int
    global_batch: int
    micro_batch: int

    # This rank among the others.
    mine: range  # this rank's micro-batches of a global step
    ranks: int
    collective_forwards: bool  # a forward waits for the other ranks: all must run the same number of them
    add: Callable[[Tensor], Tensor]  # all-reduces a tensor in place (sum); collective


# ---- the task ----


class Task:
    """What to train. Subclass it, or write a class with the same methods.

    The constructor's keyword arguments are the task's options:
    `lockstep train my.py:MyTask task.width=512` calls `MyTask(width=512)`.
    """

    # What a loss weight of 1 counts, such as "token": shown in rates. By default rates count samples.
    unit: str = "sample"
    # Values of the run's configuration that suit this task; files and the command line override them.
    defaults: dict[str, Any] = {}
    # Named sets of values, chosen by `preset=tiny`, for example.
    presets: dict[str, dict[str, Any]] = {}
    # Settings that a resumed run must keep, such as "global_batch", because the task's own state depends on them.
    lasting: tuple[str, ...] = ()
    # Names of the model's buffers that training changes: `exact` is then refused before the first step.
    changing_buffers: tuple[str, ...] = ()
    # What to do if a checkpoint holds only digests of the frozen weights, and they differ from the model's.
    frozen_advice: str = "build the model with the same frozen weights"

    # ---- required ----

    def model(self) -> nn.Module:
        """Return a new model.

        Trainable weights may be random: ranks start with equal ones. Frozen weights must be equal on all ranks.
        """
        raise NotImplementedError(f"{type(self).__name__}.model() must return an nn.Module")

    def data(self) -> Any:
        """Return a map-style or iterable dataset, or a BatchSource.

        `Sampled(dataset, sampler)` is a map-style dataset with a custom sampler.
        """
        raise NotImplementedError(f"{type(self).__name__}.data() must return a dataset")

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the SUM of the loss over `batch`, and its weight. Call `model(...)` itself, not a part of it."""
        raise NotImplementedError(f"{type(self).__name__}.loss(model, batch) must return lockstep.Loss(sum, weight)")

    # ---- optional ----

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        """Return fused AdamW that decays matrices, and no vectors (biases, norms)."""
        trainable = [p for p in model.parameters() if p.requires_grad]

        # Decay is for matrices and embeddings; biases and norms would only lose their scale.
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, fused=True)

    def scheduler(self, optimizer: Any) -> Any:
        """Return what sets the learning rates, or None for the settings under `lr`.

        `optimizer` is what `optimizer(model)` returned, or a list of several. A torch LRScheduler is stepped after each
        applied step, a function of the step (from 0) returns a share of the optimizer's own rate.
        """
        return None

    def tensor_plan(self, model: nn.Module) -> dict[str, Any] | None:
        """For mesh.tp, return how layers are sharded: {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.

        Values are "colwise", "rowwise", "gathered", or a torch ParallelStyle. None: by the usual names of layers.
        """
        return None

    def stages(self, model: nn.Module) -> list[nn.Module] | None:
        """For mesh.pp, return the model as modules that are called in order, each with the output of the one before.

        Stage boundaries lie between them. None: the parts of an nn.Sequential, or between the model's blocks.
        """
        return None

    def eval_data(self) -> Any:
        """Return a map-style dataset to evaluate on, or None for no evaluation."""
        return None

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of an evaluation batch; the model is in eval mode, without gradients."""
        return self.loss(model, batch)

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch of samples."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def before_batch(self, micro: MicroBatch) -> None:
        """Prepare for `micro`; called before each training loss.

        For tasks that keep state from step to step for every position of the global batch: `micro.first` is the
        position of the first sample, on whichever rank it runs.
        """

    def after_step(self, model: nn.Module, step: int) -> None:
        """Update what follows the parameters, such as a moving average; called on every rank after every step."""

    def state_dict(self) -> dict[str, Any]:
        """Return extra state for checkpoints (a moving average, a curriculum): nested tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called on resume."""

    def show(self, model: nn.Module) -> str | None:
        """Return text for the end of a run, printed by rank 0: a generated sample, a table, ..."""
        return None
