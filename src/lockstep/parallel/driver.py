"""The Driver: what the engine, evaluations and checkpoints know of a strategy.

A pipeline has many micro-batches in flight. All other drivers run one after another: they are `MicroBatchDriver`s.
Custom loops, `AMPTrainer`, the hook `show` and the checks at the start call the model themselves, and need one of
those: they ask `runs_whole_model` (micro_batches.py).

    SingleDriver        micro_batches.py      one process
    DDPDriver           ddp/driver.py         replicas, reduced in buckets while the backward runs
    FlatReduceDriver    ddp/driver.py         replicas, reduced after the last backward
    FSDPDriver          fsdp/driver.py        sharded parameters, gathered for each block
    TensorDriver        tensor/driver.py      sharded layers
    PipelineDriver      pipeline/driver.py    stages
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.checkpoint.state.reshard import ParameterHolders
from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.gradients import no_gradient
from lockstep.parallel.mesh import Axes
from lockstep.parallel.parameter_hooks.hooks import ParameterHooks
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepParts
from lockstep.precision import Precision
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import EventLogger, Runtime, log_nothing
from lockstep.runtime.control_word import ControlWordCodec
from lockstep.runtime.shards import full_tensor
from lockstep.runtime.world import World
from lockstep.task import Loss, StepBatches

LossFn = Callable[[Any, Any], Loss]  # called with the model and the data of a micro-batch


@dataclass(frozen=True)
class RankRole:
    """What a rank does in a run: on which data it trains, how it runs the model, and what it holds of it."""

    # The data: ranks with the same rank in the data world train on the same samples.
    data_world: World = field(default_factory=World)
    round_robin: bool = False  # micro-batches are assigned to these ranks round-robin, not in contiguous ranges
    reports_loss: bool = True  # whether this rank's loss and weight count: true on one of the ranks with the same data

    # The forwards.
    collective_forwards: bool = False  # in training they wait for other ranks, which must run as many; see apply.py
    pipeline_depth: int = 1  # micro-batches in flight: the number of pipeline ranks

    # The parameters and buffers.
    replicated: bool = True  # every rank holds every parameter in full, and can evaluate by itself
    holders: ParameterHolders = field(default_factory=ParameterHolders)

    # Lines about the layout for the banner, by name.
    banner: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs_whole_model(self) -> bool:
        """Whether the driver is a MicroBatchDriver, and this rank can call the model: always, except in a pipeline."""
        return self.pipeline_depth == 1


class Reduced(NamedTuple):
    """The gradients of a pass, reduced over micro-batches and ranks. Multiplied by `to_sum`, they are sums."""

    parameters: list[nn.Parameter]  # this rank's parameters that have a gradient
    names: list[str]  # parameter names, one for each norm; in a pipeline, of all stages
    norms: Tensor  # [len(names)]: L2 norm of each full gradient as reduced, the same bits on every rank
    packed_word: Tensor  # [LENGTH]: the summed control word
    codec: ControlWordCodec
    to_sum: float  # the number of ranks if the driver leaves means over ranks, else 1

    def drop_others(self, ids: Collection[int]) -> Reduced:
        """Drop the gradients of all parameters except those with these ids. Not for a pipeline."""
        indices = [index for index, p in enumerate(self.parameters) if id(p) in ids]
        for p in self.parameters:
            if id(p) not in ids:
                p.grad = None

        return self._replace(
            parameters=[self.parameters[index] for index in indices],
            names=[self.names[index] for index in indices],
            norms=self.norms[indices],
        )

    def drop_missing(self) -> Reduced:
        """Drop the parameters whose gradient a custom loop has set to None after the last backward."""
        left = {id(p) for p in self.parameters if p.grad is not None}
        if not left:
            raise no_gradient()

        return self if len(left) == len(self.parameters) else self.drop_others(left)


def register_nothing(name: str, stateful: Any) -> None:
    """Default for `DriverSetup.register`: nothing is saved."""


@dataclass(frozen=True)
class DriverSetup:
    """The arguments of all drivers, besides the model. The record of a strategy names the driver factory."""

    config: RunConfig
    runtime: Runtime
    precision: Precision
    role: RankRole = RankRole()  # what follows from the mesh and the model; a driver adds what its strategy does
    axes: Axes | None = None  # None: dp is the only axis
    log_event: EventLogger = log_nothing  # receives what is found later, while the model runs
    task: Any = None  # the user's task, which may say how the model is sharded or split
    compiled: bool = False  # whether the model will be compiled; a driver that splits it compiles the parts
    data: Callable[[], Any] | None = None  # returns samples, to run the model with
    hooks: Mapping[str, ParameterHooks] = field(default_factory=dict)  # by parameter name; the driver must call them
    register: Callable[[str, Any], None] = register_nothing  # saves an object of the driver's with every checkpoint

    @property
    def dp_group(self) -> Collectives:
        """The ranks that hold the same layers, or shards of the same, and train on different samples."""
        return self.axes.along("dp") if self.axes else self.runtime.collectives


@dataclass(eq=False, repr=False)
class Driver(ABC):
    """Executes the steps of a model. The constructor of a subclass first puts the model where its strategy wants it."""

    model: nn.Module  # the user's own, which the task calls
    role: RankRole
    parameters: dict[str, nn.Parameter]  # the trainable parameters by name, in the model's order
    parts: StepParts  # what takes part in the steps; features of the run are added when it is set up

    @abstractmethod
    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, progress: PassProgress) -> Reduced:
        """Run the micro-batches of this rank and reduce their gradients, with the control word, over all ranks."""

    @abstractmethod
    def evaluate(self, loss_fn: LossFn, data: Any) -> Loss | None:
        """Return the loss of one batch, without gradients; None on ranks that do not compute it."""

    @abstractmethod
    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the L2 norm of each full tensor. `tensors` are sharded like the parameters."""

    def full_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the full tensor of the model's parameter or buffer `name`. Collective: every rank must call it."""
        return full_tensor(tensor)

    @abstractmethod
    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks, before evaluating or saving.

        BatchNorm's running statistics are combined over the ranks; all other buffers are copied from rank 0.
        """

    @abstractmethod
    def reshard(self) -> None:
        """Drop full parameters that were gathered from shards, because the shards are about to change."""


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, in the model's order."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UserError(
            f"{type(model).__name__} has no parameter with requires_grad=True: there is nothing to train",
            "",
            "unfreeze the parameters to train (requires_grad=True) before you pass the model to Lockstep",
        )

    return found


def broadcast_model(model: nn.Module, collectives: Collectives) -> None:
    """Copy rank 0's trainable parameters and buffers to all ranks. Frozen parameters must already be equal."""
    collectives.broadcast_([p.detach() for p in model.parameters() if p.requires_grad])
    collectives.broadcast_(list(model.buffers()))
