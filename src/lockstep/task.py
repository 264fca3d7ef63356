"""The contract between the user and the engine: a Task says what, Lockstep works out how.

A loss is a **sum with a weight**. Nothing here knows about ranks, devices or precision.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep.config.schema import flatten
from lockstep.config.values import typed
from lockstep.errors import UserError

Weight = int | float | Tensor
Metric = Tensor | float | tuple[Tensor | float, Weight]


@dataclass(slots=True)
class Loss:
    """What one micro-batch cost.

    `total` is the SUM over the micro-batch's terms, `weight` says how many terms those are (tokens, samples, ...).
    Lockstep adds both over micro-batches and ranks, and divides once.
    `metrics` are sums too; one without a weight of its own, `(sum, weight)`, is divided by the loss's weight.
    """

    total: Tensor
    weight: Weight
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(slots=True)
class MicroBatch:
    """One forward/backward. `index` counts the micro-batches of the whole global step, not of this rank."""

    data: Any
    index: int
    samples: int
    epoch: int = 0
    ids: Any = ()  # which samples (int64); empty when the source cannot tell
    padding: bool = False  # only keeps this rank in step with the others: it must weigh nothing
    first: int = 0  # the place of its first sample in the global step, where the source knows it


@dataclass(slots=True)
class StepBatches:
    """What one rank does in one global step: `count` micro-batches, read as they are asked for."""

    count: int
    batches: Iterable[MicroBatch]
    samples: int  # in the whole global step, all ranks together (for a stream, an estimate)
    total: int | None = None  # micro-batches of the whole global step, where the source knows them
    exhausted: bool = False  # this rank's stream has ended
    span: tuple[int, int] | None = None  # positions in the endless order of samples, where the source knows them

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.batches)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one transaction, the same on every rank."""

    step: int  # counts transactions, from 0
    applied: bool  # False: the optimizer did not move, and neither did the schedule
    weight: float  # of all ranks together
    grad_norm: float  # of the weighted mean's gradient, before clipping
    stop: bool = False  # some rank asked to stop
    exhausted: bool = False  # every rank's stream has ended
    save: bool = False  # a checkpoint is due
    leave: bool = False  # some rank was asked to save and go
    save_failed: bool = False  # some rank could not write its part of the checkpoint
    trouble: str | None = None  # why the step was not applied


@runtime_checkable
class BatchSource(Protocol):
    """Where micro-batches come from: a dataset, a stream, a rollout. Its state holds no rank and no world size."""

    def take(self) -> StepBatches: ...

    def commit(self, share: StepBatches, result: StepResult | None) -> None:
        """The share was used. `result` is the newest one known (on a GPU, the previous step's)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a BatchSource with a method `attach(surroundings)` is told before the first step, and before it gets its
    state back. `attach` places what this rank works on, and returns a line about the data."""

    model: nn.Module  # as this rank holds it, not wrapped: for forwards without gradients
    device: torch.device
    seed: int
    global_batch: int
    micro_batch: int
    mine: range  # of the micro-batches of a whole step, those of this rank
    ranks: int
    in_step: bool  # a forward waits for the other ranks: all must run equally many
    add: Callable[[Tensor], Tensor]  # sums a tensor over all ranks, in place; every rank must call it


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """Options that count only with some values of another one, `of`: with those in `values`, or with all but `never`.
    `found` says what is there otherwise. With `refused=False` somebody may still give them beside other values, and
    only those of a preset are left out."""

    options: tuple[str, ...]
    of: str
    values: tuple[Any, ...] = ()
    never: tuple[Any, ...] = ()
    found: str = ""
    refused: bool = True

    def idle(self, given: Mapping[str, Any]) -> list[str]:
        """Of the options in `given`, those that do not count; none where nobody knows what `of` is."""
        if self.of not in given:
            return []
        on = given[self.of] in self.values if self.values else given[self.of] not in self.never
        return [] if on else [name for name in self.options if name in given]


def option_defaults(kind: type[Any], handed_on: bool = False) -> dict[str, Any]:
    """What the options of `kind` are when nobody sets them. `handed_on`: with those that its constructor takes as
    `**options`, which are what the class above has, if nothing comes in between."""
    found: dict[str, Any] = {}
    for owner in (one for one in kind.__mro__ if "__init__" in vars(one)):
        parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        found = {p.name: p.default for p in parameters if p.default is not p.empty} | found
        if not handed_on or all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return found


def refusals(
    kind: type[Any], rules: Iterable[OnlyWith], given: Mapping[str, Any], prefix: str = "task."
) -> dict[str, UserError]:
    """By name, the options in `given` that are not as they are when nobody sets them, and that nobody would read.
    What switches them off is judged only if it is given, or if the constructor of `kind` itself says what it is."""
    known, usual = option_defaults(kind) | dict(given), option_defaults(kind, handed_on=True)
    problems: dict[str, UserError] = {}
    for rule in (rule for rule in rules if rule.refused):
        switch = f"{prefix}{rule.of}"
        on = f"type {switch}={typed(rule.values[0])}" if rule.values else f"give {switch} another value"
        for name in rule.idle(known):
            changed = name in given and (name not in usual or given[name] != usual[name])
            if changed and name not in problems:
                asked = f"{prefix}{name}={typed(given[name])} with {switch}={typed(known[rule.of])}"
                problems[name] = UserError(asked, rule.found, f"leave {prefix}{name} out, or {on}")
    return problems


def without_effect(task: Task, maker: type[Task], given: Mapping[str, Any]) -> list[UserError]:
    """For the constructor of the class `maker`: `without_effect(self, MyTask, locals())`. Who extends a preset has not
    typed what it holds: that is no mistake. And where a subclass has a constructor of its own, only that one knows what
    was typed: nothing is said here."""
    if type(task).__init__ is not maker.__init__:
        return []
    extended = [preset for preset in map(_options_of, task.presets.values()) if _extends(given, preset)]
    problems = refusals(maker, task.option_rules, given)
    return [
        problem
        for name, problem in problems.items()
        if not any(name in preset and preset[name] == given[name] for preset in extended)
    ]


def _options_of(preset: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("task."): value for key, value in flatten(preset).items() if key.startswith("task.")}


def _extends(given: Mapping[str, Any], preset: Mapping[str, Any]) -> bool:
    """Whether most of what the preset holds is given."""
    return 2 * sum(name in given and given[name] == value for name, value in preset.items()) > len(preset)


class Task:
    """Subclass it, or write a class with the same methods. The constructor's keyword arguments are its options:
    `lockstep train my.py:MyTask task.width=512` calls `MyTask(width=512)`."""

    unit: str = "sample"
    """What a loss weight of 1 is, such as "token": shown in rates. As it stands, rates count samples."""
    defaults: dict[str, Any] = {}
    """Values of the run's configuration that suit this task; files and the command line override them."""
    presets: dict[str, dict[str, Any]] = {}
    """Named sets of values: `preset=tiny`."""
    lasting: tuple[str, ...] = ()
    """Settings that a resumed run must keep, such as "global_batch": those that the task's own state goes with."""
    changing_buffers: tuple[str, ...] = ()
    """Buffers of the model that its training changes, by name: `exact` is then refused before the first step."""
    frozen_advice: str = "build the model with the same frozen weights"
    """What to do about a checkpoint that holds only digests of the frozen weights, and of others than the model has."""
    option_rules: tuple[OnlyWith, ...] = ()
    """Options that count only with others. Where they do not, those of a preset are left out, and typed ones refused;
    for those that are given in Python, a constructor calls `without_effect`."""

    def model(self) -> nn.Module:
        raise NotImplementedError(f"{type(self).__name__}.model() must return an nn.Module")

    def data(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.data() must return a dataset")

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The SUM of the loss over `batch`, and its weight. Call `model(...)` itself, not a part of it."""
        raise NotImplementedError(f"{type(self).__name__}.loss(model, batch) must return lockstep.Loss(sum, weight)")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        """AdamW, without weight decay on vectors (biases, norms); fused: one pass over all parameters."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, fused=True)

    def tensor_plan(self, model: nn.Module) -> dict[str, Any] | None:
        """For mesh.tp: which layers are cut, and how: {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, also
        "gathered", or a torch ParallelStyle. None: by the names that layers usually go by."""
        return None

    def stages(self, model: nn.Module) -> list[nn.Module] | None:
        """For mesh.pp: the model as modules that are called one after another, each with what the one before it
        returned; cuts lie between them. None: the parts of an nn.Sequential, or between the model's blocks."""
        return None

    def eval_data(self) -> Any:
        """A map-style dataset, or None: nothing to evaluate."""
        return None

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        return self.loss(model, batch)

    def collate(self, samples: list[Any]) -> Any:
        from torch.utils.data import default_collate

        return default_collate(samples)

    def before_batch(self, micro: MicroBatch) -> None:
        """Called before each training loss, for tasks that keep something from step to step for every place in the
        global batch: `micro.first` is the place of the first sample, whoever runs it."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Called on every rank after every step, with the same parameters: the place for a moving average of them."""

    def state_dict(self) -> dict[str, Any]:
        """What else a checkpoint must hold (a moving average, a curriculum): tensors and plain values, any nesting."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called on resume with what `state_dict` gave."""

    def show(self, model: nn.Module) -> str | None:
        """Text for the end of a run, from rank 0: a generated sample, a table, ..."""
        return None
