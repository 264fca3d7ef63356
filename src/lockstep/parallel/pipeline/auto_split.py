"""Automatic pipeline splits: run a model's own forward in stages, without a list of layers from the user.

This is used only if the task has no `stages(model)` and the model is not an nn.Sequential.

Where a model can be split is found by tracing its forward: between blocks that are each called once. The model runs
once, on two samples, on the CPU. The output of every block is detached from the autograd graph. So the graph of the
next block's output shows which parameters that block needs, and whether it also needs the outputs of blocks before the
previous one; if so, there is no split in between. As a final test, every stage runs with NaN for all parameters that it
will not have.

A stage (`ForwardStage`) runs its part of the model's own forward. All ranks of a pipeline have the same samples, so
each can call it with them. The calls of blocks are intercepted. Blocks of earlier stages do not run: the last of them
returns the received tensors, the others return NaN. The stage leaves the forward after its own last block. Up to there
it runs all code between blocks itself (masks, positions, conditions). Where that code needs weights of other stages,
its result is NaN; the trace has made sure that the output of the stage does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.calls.arguments import OpaqueValue, flatten, unflatten
from lockstep.parallel.calls.chain import CallChain, Link
from lockstep.parallel.calls.state import StateSnapshot, leaves_reached
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, ModelInput, Stage, balance, placeholder, too_few_splits
from lockstep.precision import Precision

Handler = Callable[[int, Callable[[], Any]], Any]  # (number of the block, its call) -> the result of the call
TracedOutput = tuple[list[Tensor], Any]  # a block's flattened output: tensors on the meta device, and the spec


def split_forward(
    model: nn.Module, blocks: Sequence[nn.Module], arguments: ModelInput, count: int, precision: Precision
) -> tuple[list[ForwardStage], list[list[Tensor]]]:
    """Return `count` stages with about the same number of parameters, and the tensors that each stage uses.

    arguments: (args, kwargs) of the model for two samples
    precision: that of the run, on the CPU
    """
    interceptor = BlockInterceptor(blocks)
    with StateSnapshot(model):
        trace = _Trace(model, interceptor)
        trace.run(arguments, precision)

        # From here on, blocks are numbered in the order of their calls.
        interceptor.install([blocks[number] for number in trace.order])

        stages = []
        used = []
        for start, stop in pairwise([0, *trace.choose_stops(count)]):
            tensors = trace.tensors_used(start, stop)
            # Buffers outside the blocks that only other stages update: the code may also run here, without effect.
            foreign = set().union(*trace.changed) - {id(tensor) for tensor in tensors}
            names = [name for name, buffer in model.named_buffers() if id(buffer) in foreign]

            last_block = min(stop, len(trace.order)) - 1
            stages.append(ForwardStage(model, interceptor, trace.outputs, start, last_block, names))
            used.append(tensors)

        _dry_run(model, stages, used, arguments, precision)

    return stages, used


# ---- the trace ----


class _Trace:
    """Records one forward of the model.

    Segment n of the forward ends with the output of the n-th block called. The last segment follows all blocks.
    """

    def __init__(self, model: nn.Module, interceptor: BlockInterceptor):
        self.model = model
        self.interceptor = interceptor

        self.order: list[int] = []  # the numbers of the blocks, in the order of their calls
        self.outputs: list[TracedOutput] = []
        self.needs: list[set[int]] = []  # ids of the parameters that each segment uses
        self.changed: list[set[int]] = []  # ids of buffers outside blocks that each segment writes into
        self.closed: set[int] = set()  # segments after which no split is possible

        # By id, the detached outputs and their segments. Holding the tensors ensures that no id is reused.
        self._detached: dict[int, tuple[Tensor, int]] = {}
        inside = {id(buffer) for block in interceptor.blocks for buffer in block.buffers()}
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if id(buffer) not in inside]

    def run(self, arguments: ModelInput, precision: Precision) -> None:
        args, kwargs = arguments
        with ExitStack() as stack, torch.enable_grad(), precision.autocast(), self.interceptor.handled_by(self._handle):
            # Unfreeze all parameters for the trace: the autograd graph contains only those that require a gradient.
            for p in self.model.parameters():
                if p.is_floating_point() and not p.requires_grad:
                    stack.callback(p.requires_grad_, False)
                    p.requires_grad_(True)

            try:
                output = self.model(*args, **kwargs)
            except UserError:  # raised by the handler
                raise
            except Exception as error:
                raise _cannot_split(self.model, f"its forward failed on the CPU: {_text(error)}") from error

            tensors, _ = _flatten(output, self.model, "it returns")
            self._end_segment(tensors, ())

    def _handle(self, number: int, call: Callable[[], Any]) -> Any:
        block = self.interceptor.blocks[number]
        if number in self.order:
            raise _cannot_split(self.model, f"block {number} ({type(block).__name__}) is called twice")

        self.order.append(number)
        tensors, spec = _flatten(call(), self.model, f"block {number} returns")

        segment = len(self.outputs)
        self._end_segment(tensors, block.parameters())

        # Stages can only pass on floating-point tensors.
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            self.closed.add(segment)

        # Each output becomes a new leaf: the graphs of later segments end there and show that it was used.
        detached = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        self._detached.update({id(tensor): (tensor, segment) for tensor in detached})
        self.outputs.append(([torch.empty_like(tensor, device="meta") for tensor in tensors], spec))
        return unflatten([tensor.clone() for tensor in detached], spec)

    def _end_segment(self, tensors: Sequence[Tensor], own: Iterable[nn.Parameter]) -> None:
        """Record the dependencies of the segment that ends with `tensors`. `own` are the parameters of its block."""
        segment = len(self.needs)
        reached = leaves_reached(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)

        # An output may itself be a leaf (a parameter, for example), without a graph.
        leaves = {id(tensor) for tensor in [*reached, *tensors] if tensor.is_leaf}
        earlier_outputs = leaves & self._detached.keys()
        self.needs.append(leaves - earlier_outputs | {id(p) for p in own})

        # Stages receive only the output of the previous block. So if this segment uses an earlier output, there is no
        # split between that output's block and this one.
        for leaf in earlier_outputs:
            _, source = self._detached[leaf]
            self.closed.update(range(source + 1, segment))

        # Compare values after every segment, since torch has no hook for a write into a buffer.
        changed = [(buffer, before) for buffer, before in self._buffers if not torch.equal(buffer, before)]
        self.changed.append({id(buffer) for buffer, _ in changed})
        for buffer, before in changed:
            before.copy_(buffer)

    def choose_stops(self, count: int) -> list[int]:
        """Return, for each of `count` stages, the first segment after it."""
        # There is no split after the last block: its stage also runs the last segment.
        stops = [n + 1 for n in range(len(self.order) - 1) if n not in self.closed] + [len(self.order) + 1]
        if len(stops) < count:
            raise too_few_splits(count, len(stops), f": {len(self.order)} blocks in {type(self.model).__name__}")

        # The number of parameters between two possible splits. A shared parameter counts where it is used first.
        uncounted = {id(p): p.numel() for p in self.model.parameters()}
        sizes = []
        for start, stop in pairwise([0, *stops]):
            needed = set().union(*self.needs[start:stop])
            sizes.append(sum(uncounted.pop(parameter, 0) for parameter in needed))

        return [stops[end - 1] for end in balance(sizes, count)]

    def tensors_used(self, start: int, stop: int) -> list[Tensor]:
        """Return the tensors that a stage with segments start .. stop - 1 needs.

        A tensor that no segment used is given to all stages, because the next batch may use it.
        """
        used_elsewhere = self._used_by(0, len(self.needs)) - self._used_by(start, stop)
        return [t for t in (*self.model.parameters(), *self.model.buffers()) if id(t) not in used_elsewhere]

    def _used_by(self, start: int, stop: int) -> set[int]:
        buffers = {id(buffer) for block in self.interceptor.blocks[start:stop] for buffer in block.buffers()}
        return buffers.union(*self.needs[start:stop], *self.changed[start:stop])


def _dry_run(
    model: nn.Module,
    stages: Sequence[ForwardStage],
    used: Sequence[Sequence[Tensor]],
    arguments: ModelInput,
    precision: Precision,
) -> None:
    """Run every stage with NaN for all parameters that it will not have, and check that its output has no NaN."""
    passed: Any = None  # the output of the previous stage

    for number, (stage, tensors) in enumerate(zip(stages, used, strict=True)):
        try:
            with torch.no_grad(), precision.autocast(), ExitStack() as stack:
                _hide_others(model, {id(tensor) for tensor in tensors}, stack)
                passed = stage(arguments, passed)
        except Exception as error:
            problem = f"stage {number} failed without the tensors of the other stages: {_text(error)}"
            raise _cannot_split(model, problem) from error

        # NaN in the output shows that the stage uses a tensor of another stage, in a way that the graph did not show.
        if any(bool(tensor.isnan().any()) for tensor in flatten(passed)[0]):
            block = f"block {stage.first - 1}" if number else "the first block"
            raise _cannot_split(
                model, f"the code after {block} depends on more than the output of that block (or on a NaN)"
            )


def _flatten(output: Any, model: nn.Module, subject: str) -> tuple[list[Tensor], Any]:
    """Return `flatten(output)`, or raise an error that begins with `subject`."""
    try:
        return flatten(output)
    except OpaqueValue as opaque:
        raise _cannot_split(model, f"{subject} {opaque}, which may contain tensors that the trace cannot see") from None


def _hide_others(model: nn.Module, own: set[int], stack: ExitStack) -> None:
    """Replace the parameters whose ids are not in `own` with NaN, until `stack` is closed."""
    for p in model.parameters():
        if id(p) not in own:
            stack.callback(setattr, p, "data", p.data)
            p.data = placeholder(p, p.device)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _cannot_split(model: nn.Module, why: str) -> UserError:
    return UserError(f"{type(model).__name__} cannot be split into stages between its blocks", why, WHAT_TO_WRITE)


# ---- the stages ----


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
