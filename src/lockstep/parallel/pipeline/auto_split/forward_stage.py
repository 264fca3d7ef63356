"""A stage that runs its part of a model's own forward, without rewriting it.

All ranks of a pipeline have the same samples, so each can call the forward with them. The calls of blocks are
intercepted. Blocks of earlier stages do not run: the last of them returns what was received, the others return NaN. The
stage leaves the forward after its own last block. Up to there it computes what lies between blocks itself (masks,
positions, a condition). Where it lacks the weights, the result is NaN; trace.py made sure that nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.call_arguments import OpaqueValue, flatten, unflatten
from lockstep.parallel.call_chain import CallChain, Link
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, ModelInput, Stage

Handler = Callable[[int, Callable[[], Any]], Any]  # (number of the block, its call) -> what the call returns
TracedOutput = tuple[list[Tensor], Any]  # what a block returned: its tensors, on the meta device, and the rest


class _LeaveForward(BaseException):
    """Ends a stage, with what it passes on. Not an Exception, so that no `except` in the model catches it."""


def _nan_output(output: TracedOutput, received: Sequence[Tensor], traced_received: Sequence[Tensor]) -> Any:
    """Return an output like the traced one, full of NaN.

    The micro-batch may have other sizes than the traced one. They follow from what this stage received: a dimension
    that was as long as the same dimension of `traced_received` in the trace is as long as that of `received` now.
    """
    tensors = []
    for number, tensor in enumerate(output[0]):
        # The output at the same position is the likeliest to have the same sizes.
        twin = number if number < len(received) else 0
        sizes = list(tensor.shape)

        for dim, (size, traced) in enumerate(zip(sizes, traced_received[twin].shape, strict=False)):
            if size == traced:
                sizes[dim] = received[twin].shape[dim]

        # NaN wherever possible: if it is used after all, that shows.
        value = float("nan") if tensor.is_floating_point() else 0
        tensors.append(torch.full(sizes, value, dtype=tensor.dtype, device=received[twin].device))

    return unflatten(tensors, output[1])


class BlockInterceptor:
    """Passes every call of a block to a handler, while there is one.

    Everything else that wraps a block (recomputation, FSDP's gathers, compiled code) runs inside the intercepted call.
    """

    def __init__(self, blocks: Sequence[nn.Module]):
        self.blocks: list[nn.Module] = []
        self.handler: Handler | None = None
        self.install(blocks)

    def install(self, blocks: Sequence[nn.Module]) -> None:
        """Intercept these blocks, numbered in this order, and no others."""
        # Numbers may change: after a trace they follow the order of calls.
        for block in self.blocks:
            CallChain.of(block).remove("intercept")

        self.blocks = list(blocks)
        for number, block in enumerate(self.blocks):
            chain = CallChain.of(block)
            chain.uncompile()  # a trace must see the block's autograd graph
            chain.install("intercept", _InterceptedCall(self, number))

    @contextmanager
    def handled_by(self, handler: Handler) -> Iterator[None]:
        self.handler = handler
        try:
            yield
        finally:
            self.handler = None


class _InterceptedCall(Link):
    def __init__(self, interceptor: BlockInterceptor, number: int):
        self._interceptor = interceptor
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = self._interceptor.handler

        # Without a handler (when the backward recomputes a block) the block just runs.
        if handler is None:
            return self.inner(*args, **kwargs)
        return handler(self._number, partial(self.inner, *args, **kwargs))


class ForwardStage(Stage):
    """Runs blocks `first` to `last` of a model, and what lies around them."""

    def __init__(
        self,
        model: nn.Module,
        interceptor: BlockInterceptor,
        outputs: Sequence[TracedOutput],
        first: int,
        last: int,
        foreign_buffers: Sequence[str] = (),
    ):
        """Set up the stage.

        outputs: what each block returned in the trace
        foreign_buffers: names of the buffers outside the blocks that the code of another stage writes into; that code
            may also run here, and must not count twice
        """
        super().__init__()
        self.model = model
        self.first = first
        self.last = last
        self._interceptor = interceptor
        self._outputs = outputs
        self._foreign_buffers = list(foreign_buffers)

        # The stage of the last block also runs what follows the blocks and returns what the model returns.
        self._blocks = interceptor.blocks[first : last + 1]
        self._ends_model = last == len(interceptor.blocks) - 1

    def own_blocks(self, model: nn.Module, named: Sequence[str] | None) -> list[nn.Module]:
        return self._blocks

    def mutable_buffers(self) -> list[Tensor]:
        """Return all buffers except those of other stages' blocks: code outside the blocks may run in any stage."""
        own = {id(buffer) for block in self._blocks for buffer in block.buffers()}
        of_blocks = {id(buffer) for block in self._interceptor.blocks for buffer in block.buffers()}
        return [buffer for buffer in self.model.buffers() if id(buffer) not in of_blocks - own]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile block by block: compiled code cannot leave a forward in its middle."""
        for block in self._blocks:
            CallChain.of(block).compile()  # inside the interception

    def forward(self, arguments: ModelInput, received: Sequence[Tensor] | None) -> Any:
        args, kwargs = arguments
        self._received_used = received is None  # the first stage receives nothing
        left_early = False

        try:
            with ExitStack() as stack, self._interceptor.handled_by(partial(self._handle, received or ())):
                self._protect_buffers(stack)
                output = self.model(*args, **kwargs)
        except _LeaveForward as leave:
            (output,) = leave.args
            left_early = True

        # The forward skipped the block at the end of the stage, or the one whose output was received.
        if left_early == self._ends_model or not self._received_used:
            skipped = self.last if self._received_used else self.first - 1
            raise UserError(
                f"the forward of {type(self.model).__name__} did not call block {skipped}, where the pipeline is split",
                "a stage can end only after a block that every forward calls",
                WHAT_TO_WRITE,
            )

        return output

    def _handle(self, received: Sequence[Tensor], number: int, call: Callable[[], Any]) -> Any:
        # Blocks of this stage run, and those after it are never reached.
        if number >= self.first:
            output = call()
            if number == self.last and not self._ends_model:
                raise _LeaveForward(self._to_next_stage(output))
            return output

        # Blocks of earlier stages do not run, and nobody uses what they return.
        if number < self.first - 1:
            traced_received, _ = self._outputs[self.first - 1]
            return _nan_output(self._outputs[number], received, traced_received)

        # The last block before this stage: its output was received.
        self._received_used = True
        # Cloned, since the model may write into it.
        return unflatten([tensor.clone() for tensor in received], self._outputs[number][1])

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

    def _protect_buffers(self, stack: ExitStack) -> None:
        """Replace the buffers that other stages change with copies, until `stack` ends.

        Restoring the values instead would not do: a backward may still need what was written.
        """
        for name in self._foreign_buffers:
            module, _, own = name.rpartition(".")
            buffers = self.model.get_submodule(module)._buffers
            original = self.model.get_buffer(name)

            # Registered first, so that an error while copying restores it as well.
            stack.callback(buffers.__setitem__, own, original)
            buffers[own] = original.clone()
