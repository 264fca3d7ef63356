"""Make every strategy add the gradients of a block's inputs inside the block first, as FSDP does.

If several blocks read the same tensor (decoder layers read the encoder's output), its gradient is a sum over all
operations that read it. FSDP inserts an autograd node at the inputs of each block, so under FSDP the terms of each
block are added first: (k1 + v1) + (k2 + v2). Without that node, autograd adds them one after another:
((k1 + v1) + k2) + v2, which has other bits. So exact mode inserts a node at the same inputs under every strategy.
Under FSDP, its node directly follows ours and has nothing left to add.
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
    """Insert a node at the inputs of each module that fsdp shards as a unit: the blocks, and the model itself."""
    blocks = find_blocks(model, config.blocks)
    for module in [*blocks_without_shared_parameters(blocks, model), model]:
        # Before all other hooks, like FSDP's hook: what a user's hook computes from the inputs is inside the block.
        module.register_forward_pre_hook(_group_inputs, prepend=True, with_kwargs=True)


class BlockInputs(torch.autograd.Function):
    """Passes several tensors through unchanged.

    As with FSDP's node, an unused input gets a gradient of zeros if another input of the block has a gradient. The name
    of this class appears in torch's errors.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _group_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Return the arguments with their tensors passed through one node, or None to leave them as they are."""
    if not torch.is_grad_enabled():
        return None

    # The same walk twice: first to collect the tensors, then to put the results in their places.
    inputs: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        inputs.append(tensor)
        return tensor

    _replace((args, kwargs), collect)
    if not inputs:
        return None

    # A single input needs no common node. Unlike the output of a Function, a view of it may be changed in place.
    nodes = BlockInputs.apply(*inputs) if len(inputs) > 1 else [inputs[0].view_as(inputs[0])]
    outputs = iter(nodes)
    return _replace((args, kwargs), lambda _: next(outputs))


def _replace(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with every tensor that requires a gradient replaced. A value without one stays the same object.

    It looks into the same containers as FSDP: dictionaries, lists, tuples and dataclasses.
    """
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad else value

    # A container is copied only if something in it was replaced.
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
