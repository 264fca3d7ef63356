"""Drivers that run one micro-batch after another: all but the pipeline.

A subclass sums gradients over the ranks. `SingleDriver` below has nothing to sum. `FlatReduceDriver` in ddp/driver.py
is a small example for replicas, and `ShardedDriver` in sharded.py is the base class for sharded parameters.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from lockstep.parallel.batchnorm.buffers import broadcast_buffers
from lockstep.parallel.batchnorm.statistics import add_running_statistics
from lockstep.parallel.driver import Driver, DriverSetup, LossFn, RankRole, Reduced, trainable
from lockstep.parallel.exact.norms import exact_norms
from lockstep.parallel.exact.reducers import SingleReducer
from lockstep.parallel.gradients import no_gradient
from lockstep.parallel.inner_gradients import (
    TORCH_ENGINE,
    InnerGradient,
    InnerGradients,
    refuse_backward,
    refuse_second_backward,
)
from lockstep.parallel.parameter_hooks.hooks import register_hooks
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepParts
from lockstep.runtime.control_word import ControlWord, ControlWordCodec
from lockstep.task import Loss, MicroBatch, StepBatches

if TYPE_CHECKING:
    from lockstep.parallel.compiled.compiler import Compiler


class MicroBatchDriver(Driver):
    """Runs one micro-batch after another. Every rank can call the model by itself.

        begin_pass                  clears the gradients
        for each micro-batch
            before_forward          seeds the generators
            the task's loss         under autocast; a custom loop runs its own forward here, and calls the rest itself
            finish_micro_batch      records the loss
                _run_backward       adds to the gradients; in the last micro-batch it may also reduce
                finish_reduction    only in the last micro-batch: reduces what the backwards have not

    A subclass defines `finish_reduction`, and may override `_run_backward`.
    """

    to_sum = 1.0  # see `Reduced`
    compiler: Compiler | None = None  # the part that compiles the model, if there is one

    def __init__(
        self,
        model: nn.Module,
        setup: DriverSetup,
        role: RankRole | None = None,
        codec: ControlWordCodec | None = None,
    ):
        """Construct the driver of a model that is already in its place. The user's hooks are left to the subclass.

        role: `setup.role` with what the strategy adds to it; None: it adds nothing
        codec: packs control words; None: in float64
        """
        super().__init__(model, role or setup.role, trainable(model), StepParts(overlapping=False))
        config, self.runtime = setup.config, setup.runtime
        self.codec = codec or ControlWordCodec(self.runtime.device, torch.float64)

        self._names = list(self.parameters)
        self._full_norms = exact_norms if config.exact else full_norms
        self._autocast = setup.precision.autocast  # for evaluations; a step's `progress` has its own

        self.inner_gradients = InnerGradients(self.before_inner_gradient)
        self._recomputes_once = config.remat == "selective"

        self._statistics = add_running_statistics(self.parts, model, setup.dp_group, log_event=setup.log_event)

        # Whether every step begins with rank 0's buffers on all ranks, which only replicas can.
        self._broadcasts_buffers = config.ddp.broadcast_buffers and not self.runtime.world.alone

    # ---- for evaluations, checkpoints and checks ----

    def evaluate(self, loss_fn: LossFn, data: Any) -> Loss | None:
        with self._autocast():
            return loss_fn(self.model, data)

    def many_forwards(self) -> AbstractContextManager[str | None]:
        """Return a context for many small forwards without gradients. It yields a warning for the user, or None.

        Every rank that runs these forwards must enter it. An error on one rank ends it on all of them.
        """
        return nullcontext()

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._full_norms(tensors)

    def sync_buffers(self) -> None:
        self._statistics.combine()
        self._broadcast_buffers()
        self._statistics.forget()

    def _broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        broadcast_buffers(dict(self.model.named_buffers()), self.runtime.collectives)

    def reshard(self) -> None:
        """Do nothing: full parameters are not gathered."""

    # ---- gradients that the user's loss computes itself ----

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        """Prepare for a gradient that the user's loss computes itself, or refuse it with a UserError."""
        refuse_backward(inner, self.leaf_names())
        if self._recomputes_once:
            refuse_second_backward(inner, self.leaf_names())

    def leaf_names(self) -> dict[int, str]:
        """Return the names of the trainable parameters by the id of the leaf tensor in the autograd graph."""
        return {id(p): name for name, p in self.parameters.items()}

    # ---- the steps ----

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, progress: PassProgress) -> Reduced:
        self.begin_pass()
        reduced = None

        for micro in batches.micro_batches:
            self.before_forward(micro, progress)
            with self.inner_gradients, progress.autocast():
                loss = loss_fn(self.model, micro.data)

            reduced = self.finish_micro_batch(loss, progress)  # outside autocast, as torch recommends

            # None of these may stay in memory while the next micro-batch is read.
            del micro, loss
            progress.release_data()

        assert reduced is not None, "a pass without its last micro-batch"
        return reduced

    def begin_pass(self) -> None:
        """Begin a pass over the micro-batches of a step: clear the gradients of the previous pass."""
        for parameter in self.parameters.values():
            parameter.grad = None

        # A backward may have raised: `AMPTrainer` on one rank then begins the step again.
        for part in self.parts:
            part.begin_pass()

        if self._broadcasts_buffers:
            self.sync_buffers()

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        """Prepare for the forward of a micro-batch, whose data have arrived."""
        progress.before_forward(micro)
        for part in self.parts:
            part.before_forward(micro, progress)

    def finish_micro_batch(self, loss: Loss, progress: PassProgress) -> Reduced | None:
        """Record the loss and backpropagate its sum. The last micro-batch of a pass reduces; the others return None."""
        grad_output = progress.begin_backward(loss)
        for part in self.parts:
            part.before_backward(loss, progress)

        # After the loss is recorded, because the control word carries the weights of all micro-batches.
        control_word = None
        if progress.is_last_micro_batch:
            for part in self.parts:
                part.before_all_reduce()

            control_word = progress.control_word()

        self._run_backward(loss.total, progress.constant(grad_output, loss.total.dtype), control_word)
        for part in self.parts:
            part.after_backward(progress)

        reduced = None
        if control_word is not None:
            reduced = self._make_reduced(control_word)
            for part in self.parts:
                part.end_pass(progress)

        progress.end_backward()
        return reduced

    def _make_reduced(self, control_word: ControlWord) -> Reduced:
        """Finish the reduction of a pass, and return its gradients with their norms and the summed control word."""
        packed, norms = self.finish_reduction(control_word)
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        names = self._names

        # Usually every parameter has a gradient, and there is no need to build another list of names.
        if len(parameters) < len(names):
            names = [name for name, p in self.parameters.items() if p.grad is not None]

        return Reduced(parameters, names, norms, packed, self.codec, self.to_sum)

    def _run_backward(self, total: Tensor, grad_output: Tensor, control_word: ControlWord | None) -> None:
        """Backpropagate `total * grad_output` (both scalars).

        Override it to reduce gradients while the backward runs. In the last backward of a pass `control_word` is this
        rank's, which may be reduced with them; in the others it is None.
        """
        backward_unchecked((total,), (grad_output,))

    @abstractmethod
    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        """Reduce over ranks, after the last backward of a pass, whatever the backwards have not reduced.

        Return the summed control word [LENGTH], and the norm of each gradient that this pass has.
        """

    def _norms_of_gradients(self) -> Tensor:
        """Return the norms for `finish_reduction`: [gradients]. Raise if there is no gradient."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not grads:
            raise no_gradient()

        return torch.stack(self.norms(grads))


def runs_whole_model(driver: Driver) -> TypeGuard[MicroBatchDriver]:
    """Return `RankRole.runs_whole_model`. This function tells the type checker which driver it is, too."""
    return driver.role.runs_whole_model


class SingleDriver(MicroBatchDriver):
    """Runs the model in one process, where there is nothing to sum over ranks."""

    def __init__(self, model: nn.Module, setup: DriverSetup):
        super().__init__(model, setup)
        register_hooks(setup.hooks, self.parameters)

        self._exact_reducer = self.parts.add(SingleReducer(self.parameters)) if setup.config.exact else None

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        if self._exact_reducer:
            self._exact_reducer.reduce()

        return self.codec.pack(control_word), self._norms_of_gradients()


def full_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, which this rank holds in full."""
    if not tensors:
        return []

    # Squares overflow in float16 and lose precision in bfloat16. Either all trained parameters are stored in half
    # precision, or none is (precision.py).
    half = tensors[0].dtype in (torch.bfloat16, torch.float16)
    return [*torch._foreach_norm(tensors, 2, torch.float32 if half else None)]


def backward_unchecked(outputs: tuple[Tensor, ...], grad_outputs: tuple[Tensor, ...]) -> None:
    """Backpropagate as `torch.autograd.backward` does, without its checks of types and shapes.

    They took 11 of 33 us for the smallest graph (torch 2.13, one CPU core), in every micro-batch: more than 5 % of the
    step of a small model. Here they are known to hold.
    """
    # The first output is the loss. If it is a subclass of Tensor, torch's function may call a backward of that class.
    if type(outputs[0]) is not Tensor:
        torch.autograd.backward(outputs, grad_outputs)
        return

    TORCH_ENGINE(
        outputs,
        grad_outputs,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
