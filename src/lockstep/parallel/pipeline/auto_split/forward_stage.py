"""A stage that runs its part of a model's own forward, without rewriting it.

All ranks of a pipeline have the same samples, so each can call the model's forward with them. The calls of blocks are
intercepted. Blocks of earlier stages do not run: the last of them returns the received tensors, the others return NaN.
The stage leaves the forward after its own last block. Up to there it runs all code between blocks itself (masks,
positions, conditions). Where that code needs weights of other stages, its result is NaN; trace.py has made sure that
the output of the stage does not depend on it.
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

Handler = Callable[[int, Callable[[], Any]], Any]  # (number of the block, its call) -> the result of the call
TracedOutput = tuple[list[Tensor], Any]  # a block's flattened output: tensors on the meta device, and the spec


class _LeaveForward(BaseException):
    """Ends the forward of a stage, with its output. A BaseException, so that no `except` in the model catches it."""


def _nan_output(output: TracedOutput, received: Sequence[Tensor], traced_received: Sequence[Tensor]) -> Any:
    """Return an output of the same structure as the traced `output`, full of NaN.

    The micro-batch may have other sizes than the traced batch. They are inferred from the tensors that this stage
    received: if a dimension was equal to the same dimension of `traced_received` in the trace, it is now equal to the
    same dimension of `received`.
    """
    tensors = []
    for index, tensor in enumerate(output[0]):
        # The received tensor at the same position is the most likely to have the same sizes.
        peer = index if index < len(received) else 0
        sizes = list(tensor.shape)

        for dim, (size, traced) in enumerate(zip(sizes, traced_received[peer].shape, strict=False)):
            if size == traced:
                sizes[dim] = received[peer].shape[dim]

        # NaN, so that a wrong use of the tensor is detected.
        value = float("nan") if tensor.is_floating_point() else 0
        tensors.append(torch.full(sizes, value, dtype=tensor.dtype, device=received[peer].device))

    return unflatten(tensors, output[1])


class BlockInterceptor:
    """Passes the calls of blocks to a handler, while one is set.

    Everything else that wraps a block (recomputation, FSDP's gathers, compiled code) runs inside the intercepted call.
    """

    def __init__(self, blocks: Sequence[nn.Module]):
        self.blocks: list[nn.Module] = []
        self.handler: Handler | None = None
        self.install(blocks)

    def install(self, blocks: Sequence[nn.Module]) -> None:
        """Intercept these blocks, numbered in this order, and no others."""
        # The numbers may change: after a trace they follow the order of calls.
        for block in self.blocks:
            CallChain.of(block).remove("intercept")

        self.blocks = list(blocks)
        for number, block in enumerate(self.blocks):
            chain = CallChain.of(block)
            chain.uncompile()  # a trace needs the block's eager autograd graph
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

        # Without a handler (when the backward recomputes a block), the block runs as usual.
        if handler is None:
            return self.inner(*args, **kwargs)
        return handler(self._number, partial(self.inner, *args, **kwargs))


class ForwardStage(Stage):
    """Runs blocks `first` to `last` of a model, and the code around them."""

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

        outputs: the output of each block in the trace
        foreign_buffers: the names of buffers outside the blocks that another stage updates; the code that updates them
            may also run in this stage, and must not have an effect twice
        """
        super().__init__()
        self.model = model
        self.first = first
        self.last = last

        self._interceptor = interceptor
        self._outputs = outputs
        self._foreign_buffers = list(foreign_buffers)

        # The stage with the last block also runs the code after the blocks, and returns the model's output.
        self._blocks = interceptor.blocks[first : last + 1]
        self._ends_model = last == len(interceptor.blocks) - 1

    def own_blocks(self, model: nn.Module, named: Sequence[str] | None) -> list[nn.Module]:
        return self._blocks

    def mutable_buffers(self) -> list[Tensor]:
        """Return all buffers except those of other stages' blocks: code outside the blocks may run in any stage."""
        own = {id(buffer) for block in self._blocks for buffer in block.buffers()}
        in_blocks = {id(buffer) for block in self._interceptor.blocks for buffer in block.buffers()}
        return [buffer for buffer in self.model.buffers() if id(buffer) not in in_blocks - own]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile block by block, because an exception cannot leave a compiled forward in the middle."""
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

        # The forward did not call the last block of this stage, or of the previous stage, whose output was received.
        if left_early == self._ends_model or not self._received_used:
            skipped = self.last if self._received_used else self.first - 1
            raise UserError(
                f"the forward of {type(self.model).__name__} did not call block {skipped}, where the pipeline is split",
                "a stage can end only after a block that every forward calls",
                WHAT_TO_WRITE,
            )

        return output

    def _handle(self, received: Sequence[Tensor], number: int, call: Callable[[], Any]) -> Any:
        # Blocks of this stage run. Later blocks are never reached.
        if number >= self.first:
            output = call()
            if number == self.last and not self._ends_model:
                raise _LeaveForward(self._to_next_stage(output))

            return output

        # Blocks of earlier stages do not run, and nothing in this stage depends on their outputs.
        if number < self.first - 1:
            traced_received, _ = self._outputs[self.first - 1]
            return _nan_output(self._outputs[number], received, traced_received)

        # The output of the last block before this stage was received. Cloned, since the model may write into it.
        self._received_used = True
        return unflatten([tensor.clone() for tensor in received], self._outputs[number][1])

    def _to_next_stage(self, output: Any) -> tuple[Tensor, ...]:
        try:
            return tuple(flatten(output)[0])
        except OpaqueValue as opaque:
            raise UserError(
                f"block {self.last} returns {opaque}, which cannot be passed to the next stage",
                "a stage must pass on plain tensors, not DTensors",
                'in tensor_plan(model) write "rowwise" or "gathered" for the last layer of a block; '
                "or list the stages in stages(model)",
            ) from None

    def _protect_buffers(self, stack: ExitStack) -> None:
        """Replace the buffers that other stages update with copies, until `stack` is closed.

        The values cannot be restored in place instead, because a backward may still need the values that were written.
        """
        for name in self._foreign_buffers:
            module, _, buffer_name = name.rpartition(".")
            buffers = self.model.get_submodule(module)._buffers
            original = self.model.get_buffer(name)

            # Register the callback first, so that the buffer is also restored if the clone fails.
            stack.callback(buffers.__setitem__, buffer_name, original)
            buffers[buffer_name] = original.clone()
