"""Find where a model can be split, by tracing its forward: between blocks that are each called once.

The model runs once, on two samples, on the CPU. The output of every block is detached from the autograd graph. So the
graph of the next block's output shows which parameters that block needs, and whether it also needs the outputs of
blocks before the previous one; if so, there is no split in between. As a final test, every stage runs with NaN for all
parameters that it will not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.call_arguments import OpaqueValue, flatten, unflatten
from lockstep.parallel.call_state import StateSnapshot, leaves_reached
from lockstep.parallel.driver import Autocast
from lockstep.parallel.pipeline.auto_split.forward_stage import BlockInterceptor, ForwardStage, TracedOutput
from lockstep.parallel.pipeline.stages import WHAT_TO_WRITE, ModelInput, balance, placeholder, too_few_splits


def split_forward(
    model: nn.Module, blocks: Sequence[nn.Module], arguments: ModelInput, count: int, autocast: Autocast
) -> tuple[list[ForwardStage], list[list[Tensor]]]:
    """Return `count` stages with about the same number of parameters, and the tensors that each stage uses.

    arguments: (args, kwargs) of the model for two samples
    autocast: autocast with the precision of the run
    """
    interceptor = BlockInterceptor(blocks)
    with StateSnapshot(model):
        trace = _Trace(model, interceptor)
        trace.run(arguments, autocast)

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

        _dry_run(model, stages, used, arguments, autocast)

    return stages, used


class _Trace:
    """Records one forward of the model.

    Segment n of the forward ends with the output of the n-th block called. The last segment follows all blocks.
    """

    def __init__(self, model: nn.Module, interceptor: BlockInterceptor):
        self.model = model
        self.interceptor = interceptor

        self.order: list[int] = []  # the numbers of the blocks, in the order of their calls
        self.outputs: list[TracedOutput] = []
        self.needs: list[set[int]] = []  # for each segment, the ids of the parameters that it uses
        self.changed: list[set[int]] = []  # for each segment, the ids of buffers outside blocks that it writes into
        self.closed: set[int] = set()  # segments after which no split is possible

        # By id, the detached outputs and their segments. Holding the tensors ensures that no id is reused.
        self._detached: dict[int, tuple[Tensor, int]] = {}
        inside = {id(buffer) for block in interceptor.blocks for buffer in block.buffers()}
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if id(buffer) not in inside]

    def run(self, arguments: ModelInput, autocast: Autocast) -> None:
        args, kwargs = arguments
        with ExitStack() as stack, torch.enable_grad(), autocast(), self.interceptor.handled_by(self._handle):
            # Unfreeze all parameters for the trace: the autograd graph contains only those that require a gradient.
            for p in self.model.parameters():
                if p.is_floating_point() and not p.requires_grad:
                    stack.callback(p.requires_grad_, False)
                    p.requires_grad_(True)

            try:
                output = self.model(*args, **kwargs)
            except UserError:  # from the handler
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
    autocast: Autocast,
) -> None:
    """Run every stage with NaN for all parameters that it will not have, and check that its output has no NaN."""
    passed: Any = None  # the output of the previous stage

    for number, (stage, tensors) in enumerate(zip(stages, used, strict=True)):
        try:
            with torch.no_grad(), autocast(), ExitStack() as stack:
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
