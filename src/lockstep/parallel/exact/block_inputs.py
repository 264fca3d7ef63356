"""Add the gradients of a block's inputs inside the block first, in every layout.

If several blocks read one tensor, as those of a decoder read the encoder's output, its gradient is a sum over all
places that read it. FSDP puts a node of its own around the inputs of a block, so there the places inside each block are
added first: (k1 + v1) + (k2 + v2). Without that node they are added one after another: ((k1 + v1) + k2) + v2, which
has other bits. So exact mode puts a node around the same inputs wherever it runs, and FSDP's, next to it, has nothing
left to add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.parallel.blocks import blocks_without_shared_parameters, find_blocks


def group_input_gradients(model: nn.Module, config: RunConfig) -> None:
    """Put a node around the inputs of each module that fsdp shards as a unit: the blocks, and the model itself."""
    for module in [*blocks_without_shared_parameters(find_blocks(model, config.blocks), model), model]:
        # First of all hooks, as FSDP's is: what a hook of the user computes from the inputs belongs to the block.
        module.register_forward_pre_hook(_group_inputs, prepend=True, with_kwargs=True)


class BlockInputs(torch.autograd.Function):
    """Passes several tensors through unchanged.

    Like FSDP's node it gives an input that nothing has used a gradient of zeros, if another one of them has a gradient.
    torch's errors call the node by the name of this class.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _group_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if not torch.is_grad_enabled():
        return None

    inputs: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        inputs.append(tensor)
        return tensor

    _replace((args, kwargs), collect)
    if not inputs:
        return None

    # A single input needs no common node, and a view may be changed in place, as it may without exact mode.
    outputs = iter(BlockInputs.apply(*inputs) if len(inputs) > 1 else [inputs[0].view_as(inputs[0])])
    return _replace((args, kwargs), lambda _: next(outputs))


def _replace(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with every tensor that requires a gradient replaced. What holds none stays the same object.

    It looks into the containers that FSDP looks into: dictionaries, lists, tuples and dataclasses.
    """
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad else value

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        after = {name: _replace(item, change) for name, item in before.items()}
        changed = {name: item for name, item in after.items() if item is not before[name]}
        return dataclasses.replace(value, **changed) if changed else value

    if isinstance(value, dict):
        entries = {key: _replace(item, change) for key, item in value.items()}
        return entries if any(entries[key] is not item for key, item in value.items()) else value

    if isinstance(value, list | tuple):
        items = [_replace(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    return value
