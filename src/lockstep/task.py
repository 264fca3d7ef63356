"""The contract between the user and the engine: a Task defines what to train, Lockstep decides how.

A loss is a **sum with a weight**. Nothing here depends on ranks, devices or precision.

Everywhere in the code, `step` is the index of a step, from 0, and `steps_done` is how many have ended, skipped ones
included. Between two steps, `steps_done` is the index of the next one. Records and messages give a step the number of
steps that are done when it has ended, its index + 1, under the key `step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.config import extend
from lockstep.errors import UserError
from lockstep.runtime.autograd_graph import autograd_nodes
from lockstep.runtime.control_word import Flags

# A tensor on the device costs no synchronisation.
Number = int | float | Tensor
Weight = Number  # the number of terms of a loss

# A sum, or a sum with its own weight.
Metric = Tensor | float | tuple[Tensor | float, Weight]


# ---- losses ----


@dataclass(slots=True)
class Loss:
    """The loss of one micro-batch.

    `total` () is the SUM over the terms of the micro-batch, and `weight` is the number of terms (tokens, samples, ...).
    Lockstep adds both over micro-batches and ranks, and divides once.
    `metrics` are sums as well. Each is divided by the loss's weight, or by its own weight if it is a pair
    `(sum, weight)`.
    `outputs` is for metrics that are not sums, see `Task.eval_metrics`: the arguments of their `update`, a tuple for
    all of them or a dict of tuples by name. Only evaluations use it.
    """

    total: Tensor
    weight: Weight
    metrics: dict[str, Metric] = field(default_factory=dict)
    outputs: Any = None

    @classmethod
    def mean(cls, mean: Tensor, weight: Weight, metrics: dict[str, Metric] | None = None) -> Loss:
        """Return the loss of `weight` terms, given their mean: for `.loss` of a Hugging Face model, their tokens.

        With a weight of 0 the mean is NaN, but the total is 0, and so is its gradient. If the weight is a tensor, the
        gradient is 0 only if the mean's own backward is finite, as cross_entropy's is; otherwise pass the sum.
        """
        # The sum over an empty list is a plain 0.
        if not isinstance(mean, Tensor):
            raise UserError(
                f"the mean of a loss must be a tensor with a gradient; it is a {type(mean).__name__}",
                f"Loss.mean({mean!r}, ...)",
                "for a batch without terms, return Loss((pred * 0).sum(), weight=0), where pred is what the model "
                "returned; otherwise remove .item() or float()",
            )

        if isinstance(weight, Tensor):
            total = torch.where(weight == 0, torch.nan_to_num(mean) * 0.0, mean * weight)
        else:
            total = mean * weight if weight else _zero_of(mean)

        return cls(total, weight, metrics or {})


def _zero_of(mean: Tensor) -> Tensor:
    """Return 0 with the graph of `mean`, in which all gradients are 0, even where the mean was divided by 0.

    The graph stays as it is, because collectives in the backward need every rank.
    """
    # Not at the leaves: their nodes belong to the parameters, and outlive this graph.
    for node in autograd_nodes([mean.grad_fn]):
        if not hasattr(node, "variable"):
            node.register_prehook(_zeros)

    return torch.nan_to_num(mean) * 0.0


def _zeros(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


# ---- batches ----


@dataclass(slots=True)
class MicroBatch:
    """The data of one forward and backward."""

    data: Any
    index: int  # among all micro-batches of the global step, not only this rank's
    num_samples: int
    epoch: int = 0
    ids: Any = ()  # ids of the samples (int64); empty if the source has no ids
    padding: bool = False  # runs only because collectives need every rank; its weight must be 0
    offset: int | None = None  # of its first sample in the global batch; None if the source does not know it

    @property
    def sample_offset(self) -> int:
        """Where its first sample is in the global batch, the same on any number of ranks. An error if not known."""
        if self.offset is None:
            raise UserError(
                "sample_offset was read, and the data source has no places in the global batch",
                "a map-style dataset has them without data.balance; a stream, if its position is saved and it has one "
                "virtual shard; a source of your own, if it passes MicroBatch(..., offset=...)",
                "to find this rank's rows in the result of run.all_gather, use run.row_offset; to keep state for each "
                "place, use a map-style dataset",
            )

        return self.offset


@dataclass(slots=True)
class StepBatches:
    """This rank's micro-batches of one global step. Iterating over them may read them."""

    num_micro_batches: int  # the number on this rank
    micro_batches: Iterable[MicroBatch]  # from the source; `Run.step_batches` wraps it
    global_num_samples: int  # the samples of all ranks together (for a stream, an estimate)
    global_num_micro_batches: int | None = None  # the number on all ranks together, if known
    exhausted: bool = False  # whether this rank's stream has ended
    step: int = 0  # the index of the step, set by `Run.step_batches`
    span: tuple[int, int] | None = None  # positions [start, stop) in the endless sequence of samples, if there are any

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step, the same on every rank."""

    # What happened.
    step: int  # the index of the step, from 0; skipped steps have one too
    applied: bool  # False: neither the optimizer nor the schedule advanced
    weight: float  # the loss weight, summed over all ranks
    grad_norm: float  # of the gradient of the mean loss, before clipping
    skip_reason: str | None = None  # why it was skipped; None if it was applied, or had weight 0
    # The mean loss of the step over all ranks. None if the weight is 0, or if nothing in the run can read it: a task
    # without hooks and callbacks does not pay for it.
    loss: float | None = None

    # From the step's control word.
    exhausted: bool = False  # every rank's stream has ended
    flags: Flags = field(default_factory=Flags)  # how many ranks have set each flag: stop, save, ...


class BatchSource(ABC):
    """A source of micro-batches: a dataset, a stream, a rollout. Derive a class from it, and return one from `data()`.

    Four methods must be written. The engine calls the others, too, and by default they do nothing or return nothing;
    only `skip` has no default. The last ones are for a dataset whose samples Lockstep can read one by one.
    """

    # ---- required ----

    @abstractmethod
    def take(self) -> StepBatches:
        """Return this rank's micro-batches of the next step.

        It does not advance the state that is saved: `commit` does. A stream may read on, so the engine does not take a
        step twice.
        """

    @abstractmethod
    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        """Advance past `batches`, whose step has ended.

        `result` is the newest known result. On a GPU it may be that of the previous step, and None in the first. The
        last step has its own.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return a state from which any number of ranks can continue. All ranks call it together; rank 0's is saved."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, which another number of ranks may have saved."""

    # ---- optional ----

    # A line about the data for the banner, or None; `attach` may set it.
    banner: str | None = None

    def attach(self, context: SourceContext) -> None:  # noqa: B027
        """Prepare to make batches by calling the model (a rollout).

        It is called before the first step, and before the state is restored. A pipeline refuses a source that
        overrides it, because no rank there holds the full model.
        """

    def note_result(self, result: StepResult) -> None:  # noqa: B027
        """Note the result of the last step, which became known after its `commit`: on a GPU, before a save."""

    def close(self) -> None:  # noqa: B027
        """End worker processes and close files. Called after the last step."""

    def upcoming(self) -> Any:
        """Return ids of the samples that come next, or None. A resumed run compares them with the saved ones."""
        return None

    def skip(self, span: tuple[int, int]) -> None:
        """Leave out the positions [start, stop) from now on: their step was skipped, and the policy is rewind.

        The positions are those of `StepBatches.span`. For a source that sets these; without this method it is refused
        with that policy.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method skip(span)")

    @property
    def skipped_spans(self) -> Sequence[tuple[int, int]]:
        """All spans that were skipped, for a source with `skip`."""
        return ()

    # ---- a map-style dataset ----

    # Which samples every step has: a `StepOrder` (data/windows.py). None if only the source itself knows.
    step_order: Any = None

    def reading_here(self) -> AbstractContextManager[None]:
        """Return a context for reading samples in this process, though worker processes may read the same dataset."""
        return nullcontext()

    def read_samples(self, epoch: int, ids: Sequence[int]) -> Any:
        """Read these samples in this process, as they are before collate. None if they cannot be read one by one."""
        return None

    def first_sample(self) -> Any:
        """Return a sample, to see how large one is; None if none can be read before the worker processes start."""
        return None


@dataclass(frozen=True, slots=True)
class SourceContext:
    """The argument of `BatchSource.attach`, with which a source can make batches by calling the model."""

    # The model, and the sizes of a step.
    model: nn.Module  # this rank's model: for forwards without gradients
    device: torch.device
    seed: int
    global_batch: int
    micro_batch_size: int

    # This rank and the others.
    mine: range  # indices of this rank's micro-batches in a global step
    ranks: int
    collective_forwards: bool  # forwards contain collectives: all ranks must run the same number of them
    all_reduce: Callable[[Tensor], Tensor]  # sums a tensor over the ranks, in place; collective


# ---- evaluations ----


@dataclass(frozen=True)
class EvalData:
    """A dataset to evaluate on in its own way: `Task.eval_data` may return it in place of a dataset.

    What is left out is as for the other sets: the task's `eval_loss`, `collate` and `eval_metrics`, and the batch size
    of all evaluations.
    """

    dataset: Any
    loss: Callable[[nn.Module, Any], Loss] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Any] | None = None  # torchmetrics, by name
    batch: int | None = None  # samples of a forward

    def __post_init__(self) -> None:
        if self.batch is not None and (not isinstance(self.batch, int) or self.batch < 1):
            raise UserError(
                f"EvalData(batch={self.batch!r}): a batch has a whole number of samples, at least 1",
                "",
                "pass batch=8, or leave it out",
            )


# ---- the run, as hooks see it ----


class RunView(Protocol):
    """The run that hooks and callbacks get. `lockstep.start` yields one too, so your own loop has the same names."""

    # This process and the others.
    rank: int
    world_size: int
    is_main: bool  # whether this is rank 0
    run_dir: Path

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    def steps_done(self) -> int:
        """The number of steps so far, including skipped ones. After a step it includes that step."""

    @property
    def steps_applied(self) -> int:
        """The number of applied steps so far."""

    @property
    def epoch(self) -> float | None:
        """The number of passes over the data so far. None for a stream."""

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained. Its parameters may be DTensors."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers."""

    def log(self, name: str, value: Number, weight: Weight = 1) -> None:
        """Add to a metric of the next log line: a sum of `weight` terms, or one value. All sinks show the mean.

        Sums and weights are added over the calls and over the ranks since the last line, and divided once. No rank has
        to call it.
        """

    def stop(self, reason: str | None = None) -> None:
        """End the run after the next step, on all ranks, even if only this one calls it."""

    def save(self) -> None:
        """Save a checkpoint after the next step, on all ranks, even if only this one calls it."""

    @property
    def sample_offset(self) -> int:
        """The place of this micro-batch's first sample in the global batch; 0 in an evaluation.

        An error if the data source has no places, such as most streams. For the rows of `all_gather`: `row_offset`.
        """

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return the rows (n, ...) of all ranks: (N, ...). In a loss they are the global batch. Collective.

        This rank's rows begin at `run.row_offset`. The result has a gradient, so that a contrastive loss over the
        global batch has the gradient of plain autograd. Every rank must have one micro-batch. On a rank whose batch is
        padding, its rows, which count nowhere, come after the N others. In an evaluation a batch is whole on one rank,
        and is returned as it is.
        """

    @property
    def row_offset(self) -> int:
        """The place of this rank's first row in the result of the last `all_gather` of this micro-batch.

        With any data source; 0 in an evaluation.
        """

    def agree(self, value: bool) -> bool:
        """Return True on every rank if `value` is true on any. Collective: every rank must call it."""

    def sync_buffers(self) -> None:
        """Make the model's buffers equal on all ranks, as evaluations and saves of the run do. Collective.

        Call it between two steps, on every rank, before your own code evaluates, copies or saves the model. BatchNorm's
        running statistics are combined over the ranks; all other buffers are copied from rank 0.
        """


# ---- the task ----


class Task:
    """The definition of what to train. Subclass it, or write a class with the same methods.

    The constructor's keyword arguments are the task's options:
    `lockstep train my.py:MyTask task.width=512` calls `MyTask(width=512)`.
    """

    # The unit of a loss weight of 1, such as "token", for throughput in the log. By default it counts samples.
    unit: str = "sample"
    # Settings of the run that suit this task; files and the command line override them. A subclass inherits the
    # defaults of its base, key by key.
    defaults: dict[str, Any] = {}
    # Named sets of settings, chosen by `preset=tiny`, for example.
    presets: dict[str, dict[str, Any]] = {}
    # Settings that must not change when a run is resumed, because the task's own state depends on them.
    fixed_settings: tuple[str, ...] = ()
    # Names of the model's buffers that training changes: `exact` is then refused before the first step.
    changing_buffers: tuple[str, ...] = ()
    # Advice in the error if a checkpoint holds only digests of the frozen weights, and these differ from the model's.
    frozen_advice: str = "build the model with the same frozen weights"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "defaults" in vars(cls):
            cls.defaults = extend(super(cls, cls).defaults, cls.defaults)

    # ---- required ----

    def model(self) -> nn.Module:
        """Return a new model.

        Trainable weights may be random: Lockstep makes them equal on all ranks. Frozen weights must already be equal.
        """
        raise NotImplementedError(f"{type(self).__name__}.model() must return an nn.Module")

    def data(self) -> Any:
        """Return a map-style or iterable dataset, or a BatchSource.

        `Sampled(dataset, sampler)` is a map-style dataset with a custom sampler.
        """
        raise NotImplementedError(f"{type(self).__name__}.data() must return a dataset")

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the SUM of the loss over `batch`, and its weight. `model` is the one that `model()` made."""
        raise NotImplementedError(f"{type(self).__name__}.loss(model, batch) must return lockstep.Loss(total, weight)")

    # ---- optional ----

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        """Return the optimizer, or a list of them. The default is fused AdamW with weight decay on matrices only."""
        trainable = [p for p in model.parameters() if p.requires_grad]

        # Weight decay is for matrices and embeddings. Biases and norms (vectors) would only lose their scale.
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, fused=True)

    def scheduler(self, optimizer: Any) -> Any:
        """Return a scheduler, a list of them, a function of the step, or None for the settings under `lr`.

        `optimizer` is the result of `optimizer(model)`, or a list of optimizers. A torch LRScheduler is stepped after
        each applied step. A function of the step (from 0) returns a share of the optimizer's own rate.
        """
        return None

    def tensor_plan(self, model: nn.Module) -> dict[str, Any] | None:
        """For mesh.tp, return how to shard layers: {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}.

        Values are "colwise", "rowwise", "gathered", or a torch ParallelStyle. None shards layers by their usual names.
        """
        return None

    def stages(self, model: nn.Module) -> list[nn.Module] | None:
        """For mesh.pp, return the model as a list of modules, each of which is called with the previous one's output.

        Stages are split between them. None splits between the parts of an nn.Sequential, or between the model's blocks.
        """
        return None

    def eval_data(self) -> Any:
        """Return a map-style dataset to evaluate on, several by name ({"val": ..., "test": ...}), or None for none.

        `EvalData(dataset, loss=...)` in place of a dataset evaluates it with a loss or a batch size of its own.
        """
        return None

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of an evaluation batch. It is called in eval mode, without gradients."""
        return self.loss(model, batch)

    def eval_metrics(self) -> dict[str, Any]:
        """Return torchmetrics by name. Each evaluation updates them with the `outputs` of the losses."""
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of these samples."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    # ---- hooks: docs/hooks.md. Each is called on every rank ----

    def before_training(self, run: RunView) -> None:
        """Prepare for training: called once in each process, after a resume, before the first step."""

    def first_steps(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return {name of a trainable parameter: the first step that trains it}, to unfreeze them one by one.

        It is called once. Parameters that are left out are trained from the first step on.
        """
        return {}

    def before_batch(self, run: RunView, micro: MicroBatch) -> None:
        """Prepare for `micro`, before its forward in training. The step's index is `run.steps_done`.

        A task may keep state from step to step for every place in the global batch: `micro.sample_offset` is the place
        of the micro-batch's first sample. It may also replace `micro.data`.
        """

    def before_backward(self, run: RunView, loss: Loss) -> Loss | None:
        """Return another loss for this micro-batch, or None to keep `loss`. The step's index is `run.steps_done`."""

    def after_step(self, run: RunView, result: StepResult | None) -> None:
        """Update state that follows the parameters. Called after every step, before its evaluation and its checkpoint.

        `result` is the newest known result. On a GPU it may be that of the previous step, and None in the first. The
        last step has its own.
        """

    def after_eval(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """React to an evaluation: "loss" and the metrics, the same numbers on every rank."""

    def callbacks(self) -> Sequence[Any]:
        """Return callbacks: objects with any of the hooks above, see `lockstep.callbacks`."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return extra state for checkpoints, such as a moving average: nested tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Called on resume."""

    def write_assets(self, folder: Path) -> None:
        """Write files that belong to the weights, such as a config or a tokenizer, to `folder`: RUN/assets.

        Rank 0 calls it before the first step.
        """

    def show(self, model: nn.Module) -> str | None:
        """Return text for the end of a run, printed by rank 0: a generated sample, a table, ..."""
        return None
