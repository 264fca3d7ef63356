"""A stage whose parameters are cut over its copies: torch's FSDP2 inside a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lockstep.parallel.blocks import without_shared
from lockstep.parallel.fsdp.driver import prepare


def shard_stage(
    stage: nn.Module,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    held: Collection[nn.Parameter],
    mesh: DeviceMesh,
    keep: bool,
) -> int:
    """Block by block, then the rest of what is `held` here. `keep`: parameters stay whole until the backward has ended.
    Every micro-batch's gradients are cut at once and added to this rank's part. How many blocks are gathered alone."""
    names = dict(model.named_parameters(remove_duplicate=False))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=not keep)
    alone = without_shared(blocks, stage)
    for block in alone:
        shard(block)
    shard(stage, ignored_params=set(stage.parameters()) - set(held))
    prepare(stage)
    _tie_again(model, names)
    return len(alone)


def _tie_again(model: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
    """A parameter that another stage uses too has a name there, in a module that has not been cut."""
    now = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(before): now[name] for name, before in names.items() if now[name] is not before}
    for name, before in names.items():
        if now[name] is before and id(before) in replaced:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, replaced[id(before)])
