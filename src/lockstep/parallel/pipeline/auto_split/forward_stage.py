"""A stage that runs its part of a model's own forward, which is not rewritten for that.

Every rank of a pipeline has the same samples, so each can call the forward with them. The calls of blocks are
intercepted. Blocks of earlier stages do not run: the last of them returns what was received, the others NaN. After the
last block of a stage the forward is left. What lies between blocks (masks, positions, a condition) every stage computes
for itself, up to where it leaves. Where it lacks the weights, the result is NaN; trace.py has made sure that nothing
depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.call_arguments import OpaqueValue, flatten, unflatten
from lockstep.parallel.pipeline.auto_split.intercept import BlockInterceptor
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, ModelInput, Stage


class _LeaveForward(BaseException):
    """Raised at the end of a stage. Not an Exception, so that no `except` in the model catches it."""

    def __init__(self, passed: tuple[Tensor, ...]):
        self.passed = passed


@dataclass(frozen=True)
class OutputSpec:
    """What a block returns: tensors of known shapes and dtypes, and the rest."""

    like: tuple[Tensor, ...]  # on the meta device
    rest: Any

    @staticmethod
    def of(output: Any) -> OutputSpec:
        tensors, rest = flatten(output)
        return OutputSpec(tuple(torch.empty_like(tensor, device="meta") for tensor in tensors), rest)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return such an output made of `tensors`."""
        return unflatten(list(tensors), self.rest)

    def build_nan(self, received: Sequence[Tensor], received_spec: OutputSpec) -> Any:
        """Return such an output full of NaN.

        The micro-batch may have other sizes than the traced one. `received`, whose traced output was `received_spec`,
        shows which: a dimension that was equal to one of its dimensions then is equal to it now.
        """
        made = []
        for number, tensor in enumerate(self.like):
            twin = number if number < len(received) else 0
            # The output at the same position is the likeliest to have the same sizes.
            traced = received_spec.like[twin]
            here = received[twin]
            sizes = list(tensor.shape)

            for dim in range(min(tensor.dim(), traced.dim())):
                if sizes[dim] == traced.shape[dim]:
                    sizes[dim] = here.shape[dim]

            # NaN wherever possible: should it be used after all, that shows.
            value = float("nan") if tensor.is_floating_point() else 0
            made.append(torch.full(sizes, value, dtype=tensor.dtype, device=here.device))

        return self.build(made)


class ForwardStage(Stage):
    """The stage that runs blocks `first` to `last` of a model, and what lies around them."""

    def __init__(
        self,
        model: nn.Module,
        interceptor: BlockInterceptor,
        outputs: Sequence[OutputSpec],
        first: int,
        last: int,
        foreign_buffers: Sequence[str] = (),
    ):
        """`outputs` has the spec of each block. `foreign_buffers` names buffers outside the blocks that the code of
        another stage writes into. That code may run here too, and must not count twice.
        """
        super().__init__()
        self.model = model
        self.first = first
        self.last = last
        self._interceptor = interceptor
        self._outputs = outputs
        self._foreign_buffers = list(foreign_buffers)
        self._ends_model = last == len(interceptor.blocks) - 1

    @property
    def blocks(self) -> list[nn.Module]:
        return self._interceptor.blocks[self.first : self.last + 1]

    def own_blocks(self, model: nn.Module, named: Sequence[str] | None) -> list[nn.Module]:
        return self.blocks

    def mutable_buffers(self) -> list[Tensor]:
        """Return all buffers but those of other stages' blocks: code outside the blocks may run in any stage."""
        mine = {id(buffer) for block in self.blocks for buffer in block.buffers()}
        of_blocks = {id(buffer) for block in self._interceptor.blocks for buffer in block.buffers()}
        return [buffer for buffer in self.model.buffers() if id(buffer) not in of_blocks - mine]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile block by block: compiled code cannot leave a forward in its middle."""
        for number in range(self.first, self.last + 1):
            self._interceptor.compile(number)

    def forward(self, given: ModelInput, received: Sequence[Tensor] | None) -> Any:
        """Return what the model returns, or a tuple for the next stage."""
        self._received_used = received is None
        args, kwargs = given
        handler = partial(self._handle, received or ())

        try:
            with self._protected_buffers(), self._interceptor.handled_by(handler):
                output = self.model(*args, **kwargs)
        except _LeaveForward as leave:
            output = leave.passed
            left_early = True
        else:
            left_early = False

        # A forward that skips the block at the end of the stage, or the one whose output was received.
        if left_early == self._ends_model or not self._received_used:
            skipped = self.last if self._received_used else self.first - 1
            raise UserError(
                f"the forward of {type(self.model).__name__} did not call block {skipped}, where the pipeline is split",
                "a stage can end only after a block that every forward calls",
                WHAT_TO_WRITE,
            )

        return output

    def _handle(self, received: Sequence[Tensor], number: int, call: Callable[[], Any]) -> Any:
        """Decide what block `number` returns."""
        # Blocks of this stage run, and those after it are never reached.
        if number >= self.first:
            output = call()
            if number == self.last and not self._ends_model:
                # Nothing after this block belongs to the stage.
                raise _LeaveForward(self._to_next_stage(output))
            return output

        # Blocks of earlier stages do not run, and what they return is not used.
        if number < self.first - 1:
            return self._outputs[number].build_nan(received, self._outputs[self.first - 1])

        # The last block before this stage: its output has been received.
        self._received_used = True
        # Cloned, since the model may write into it.
        return self._outputs[number].build([tensor.clone() for tensor in received])

    def _to_next_stage(self, output: Any) -> tuple[Tensor, ...]:
        try:
            return tuple(flatten(output)[0])
        except OpaqueValue as opaque:
            raise UserError(
                f"block {self.last} returns {opaque}, which cannot be passed to the next stage",
                "a stage must pass on plain tensors; a DTensor is sharded",
                'in tensor_plan(model) write "rowwise" or "gathered" for the last layer of a block; '
                "or list the stages in stages(model)",
            ) from None

    @contextmanager
    def _protected_buffers(self) -> Iterator[None]:
        """Let copies take the place of buffers that other stages change.

        Copies, not values put back: a backward may still need what was written.
        """
        places = [name.rpartition(".") for name in self._foreign_buffers]
        slots = [(self.model.get_submodule(module)._buffers, own) for module, _, own in places]
        originals = [buffers[own] for buffers, own in slots]

        for (buffers, own), original in zip(slots, originals, strict=True):
            assert original is not None
            buffers[own] = original.clone()

        try:
            yield
        finally:
            for (buffers, own), original in zip(slots, originals, strict=True):
                buffers[own] = original
