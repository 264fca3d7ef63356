"""A stage whose parameters are cut over its copies: torch's FSDP2 inside a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_stage(
    stage: nn.Module,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    held: Collection[nn.Parameter],
    mesh: DeviceMesh,
    keep: bool,
) -> None:
    """Block by block, then the rest of what is `held` here. `keep`: parameters stay whole until the backward has ended.
    Every micro-batch's gradients are cut at once and added to this rank's part."""
    names = dict(model.named_parameters(remove_duplicate=False))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=not keep)
    for block in _with_weights_of_their_own(blocks, stage):
        shard(block)
    shard(stage, ignored_params=set(stage.parameters()) - set(held))
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
    _tie_again(model, names)


def _tie_again(model: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
    """A parameter that another stage uses too has a name there, in a module that has not been cut."""
    now = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(before): now[name] for name, before in names.items() if now[name] is not before}
    for name, before in names.items():
        if now[name] is before and id(before) in replaced:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, replaced[id(before)])


def _with_weights_of_their_own(blocks: Sequence[nn.Module], stage: nn.Module) -> list[nn.Module]:
    """A parameter is cut with one part only: blocks that share one are left to the stage as a whole."""
    owners: dict[int, set[int]] = {}
    for module in stage.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(id(module))
    inside = {id(block): {id(module) for module in block.modules()} for block in blocks}
    return [block for block in blocks if all(owners[id(p)] <= inside[id(block)] for p in block.parameters())]
