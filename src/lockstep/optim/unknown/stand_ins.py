"""Steps optimizers that do not support DTensors, with plain tensors ("stand-ins") in place of sharded parameters.

Code that reads `p.grad.norm().item()`, multiplies matrices or assigns to an index gives wrong results on a DTensor, or
fails. So only optimizers that are known to be correct get DTensors. One that is known to update every element
independently (`OptimizerTraits.elementwise`) gets this rank's shards. All others (Muon, Adafactor, LAMB) get full
parameters, gathered one after another, so that at most one exists in full at a time.

The optimizer's state is stored as DTensors, as with any other optimizer, so checkpoints save it in shards.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.runtime.shards import dtensor_like, full_tensor, shard_of, to_local

Groups = list[dict[str, Any]]


def step_with_stand_ins(optimizer: torch.optim.Optimizer, gather: bool) -> None:
    """Step the optimizer on all shards of this rank, or with `gather` on one full parameter at a time (collective)."""
    groups = optimizer.param_groups
    attributes = {key: value for key, value in vars(optimizer).items() if isinstance(value, int | float | str | None)}

    stepped_groups: list[dict[str, Any]] = [dict(group) for group in groups]
    if gather:
        for number, group in enumerate(groups):
            for p in [p for p in group["params"] if p.grad is not None]:
                # Reset attributes such as a step count, so that every call looks like the first of this update.
                vars(optimizer).update(attributes)
                (stepped_groups[number],) = _step(optimizer, [{**group, "params": [p]}], gather)
    else:
        stepped_groups = _step(optimizer, stepped_groups, gather)

    for group, settings in zip(groups, stepped_groups, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def _step(optimizer: torch.optim.Optimizer, groups: Groups, gather: bool) -> Groups:
    """Step the optimizer with these groups only, and plain tensors in them. Return the groups as the step left them."""
    original_groups = optimizer.param_groups
    original_state = optimizer.state
    stand_ins = {p: _plain_parameter(p, gather) for group in groups for p in group["params"]}

    # The state of the stand-ins, and whatever else the optimizer keeps in its state.
    temporary_state: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in original_state.items():
        if key in stand_ins:
            temporary_state[stand_ins[key]] = {name: _plain(item, gather) for name, item in value.items()}
        else:
            temporary_state[key] = value

    # The step sees only the stand-ins.
    optimizer.state = temporary_state
    optimizer.param_groups = [{**group, "params": [stand_ins[p] for p in group["params"]]} for group in groups]
    try:
        optimizer.step()
        stepped_groups = optimizer.param_groups
    finally:
        optimizer.param_groups = original_groups
        optimizer.state = original_state

    # Copy the results into the parameters and their state. A stand-in without `gather` shares the shard's memory.
    for p, stand_in in stand_ins.items():
        if gather and isinstance(p, DTensor):
            to_local(p.detach()).copy_(_local_shard(stand_in.detach(), p))

        if stand_in in temporary_state:
            new_state = temporary_state[stand_in].items()
            original_state[p] = {key: _laid_out(value, p, stand_in, gather) for key, value in new_state}

    return stepped_groups


def _plain_parameter(p: nn.Parameter, gather: bool) -> nn.Parameter:
    """Return a plain parameter with its gradient: a view of the shard, the gathered one if `gather`, or `p` itself."""
    if not isinstance(p, DTensor):
        return p

    stand_in = nn.Parameter(_plain(p.detach(), gather), p.requires_grad)
    if p.grad is not None:
        stand_in.grad = _plain(p.grad, gather)
    return stand_in


def _plain(value: Any, gather: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    return full_tensor(value) if gather else to_local(value)


def _laid_out(value: Any, p: nn.Parameter, stand_in: Tensor, gather: bool) -> Any:
    """Return a value of the optimizer's state for storage: a tensor with the parameter's shape is sharded like it."""
    if not (isinstance(p, DTensor) and isinstance(value, Tensor) and value.dim() and value.shape == stand_in.shape):
        return value
    return dtensor_like(_local_shard(value, p).clone() if gather else value, p)


def _local_shard(full: Tensor, p: DTensor) -> Tensor:
    shard = shard_of(p)
    return full[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.local.shape, strict=True))]
