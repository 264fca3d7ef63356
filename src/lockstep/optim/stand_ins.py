"""Steps of optimizers that do not know DTensors: they get plain tensors in place of sharded parameters.

Code that reads `p.grad.norm().item()`, multiplies matrices or writes through an index has other results on a DTensor,
or none. So only optimizers that are known to be right there see them. Of the others (`optim/trial.py` tells which is
which), one that treats every element alike gets this rank's shards, and one that needs whole parameters (Muon,
Adafactor, LAMB) gets them gathered, one after another, so that a single one exists in full at a time.

The state of a sharded parameter is kept as DTensors, like that of any other optimizer: it is saved in shards.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.runtime.layout import full_tensor, like, local, shard_of

Groups = list[dict[str, Any]]


def step_with_stand_ins(optimizer: torch.optim.Optimizer, whole: bool) -> None:
    """Step the optimizer on this rank's shards at once, or on one `whole` parameter after another (collective)."""
    groups = optimizer.param_groups
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, int | float | str | None)}

    # Each step on a single parameter is the first of this update for what the optimizer counts.
    used: list[dict[str, Any]] = [dict(group) for group in groups]
    if whole:
        for number, group in enumerate(groups):
            for p in [p for p in group["params"] if p.grad is not None]:
                vars(optimizer).update(own)
                (used[number],) = _step(optimizer, [{**group, "params": [p]}], whole)
    else:
        used = _step(optimizer, used, whole)

    for group, settings in zip(groups, used, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def _step(optimizer: torch.optim.Optimizer, groups: Groups, whole: bool) -> Groups:
    """Let the optimizer see nothing but these groups, with plain tensors in them. Return the groups as it left them."""
    own_groups, own_state = optimizer.param_groups, optimizer.state
    stand_ins = {p: _plain_parameter(p, whole) for group in groups for p in group["params"]}
    lent: defaultdict[Any, Any] = defaultdict(dict, {k: v for k, v in own_state.items() if k not in stand_ins})
    for p, stand_in in stand_ins.items():
        if p in own_state:
            lent[stand_in] = {key: _plain(value, whole) for key, value in own_state[p].items()}

    optimizer.state = lent
    optimizer.param_groups = [{**group, "params": [stand_ins[p] for p in group["params"]]} for group in groups]
    try:
        optimizer.step()
        used = optimizer.param_groups
    finally:
        optimizer.param_groups, optimizer.state = own_groups, own_state

    for p, stand_in in stand_ins.items():
        if whole and isinstance(p, DTensor):
            local(p.detach()).copy_(_own_shard(stand_in.detach(), p))
        if stand_in in lent:
            own_state[p] = {key: _laid_out(value, p, stand_in, whole) for key, value in lent[stand_in].items()}
    return used


def _plain_parameter(p: nn.Parameter, whole: bool) -> nn.Parameter:
    """Return the parameter, or one that shares the memory of its shard, or a gathered one; each with its gradient."""
    if not isinstance(p, DTensor):
        return p

    stand_in = nn.Parameter(_plain(p.detach(), whole), p.requires_grad)
    if p.grad is not None:
        stand_in.grad = _plain(p.grad, whole)
    return stand_in


def _plain(value: Any, whole: bool) -> Any:
    if not isinstance(value, DTensor):
        return value
    return full_tensor(value) if whole else local(value)


def _laid_out(value: Any, p: nn.Parameter, stand_in: Tensor, whole: bool) -> Any:
    """Return a value of the optimizer's state as it is kept: a tensor of the parameter's shape is sharded like it."""
    if not (isinstance(p, DTensor) and isinstance(value, Tensor) and value.dim() and value.shape == stand_in.shape):
        return value
    return like(_own_shard(value, p).clone() if whole else value, p)


def _own_shard(full: Tensor, p: DTensor) -> Tensor:
    shard = shard_of(p)
    return full[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.local.shape, strict=True))]
