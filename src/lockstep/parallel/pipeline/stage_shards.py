"""Shard the parameters of a stage over its replicas: torch's FSDP2 inside a pipeline."""

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
    """Shard `stage` block by block, then the rest of what is `held` here. Returns how many blocks are gathered alone.

    `keep`: parameters stay gathered until the backward has ended. The gradients of every micro-batch are reduced and
    scattered at once, and added to this rank's shard.
    """
    # By all names, to find the parameters again that sharding replaces.
    names = dict(model.named_parameters(remove_duplicate=False))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=not keep)
    alone = without_shared(blocks, stage)

    for block in alone:
        shard(block)

    # Placeholders of other stages have no memory to shard.
    shard(stage, ignored_params=set(stage.parameters()) - set(held))
    prepare(stage)
    _tie_again(model, names)
    return len(alone)


def _tie_again(model: nn.Module, names: Mapping[str, nn.Parameter]) -> None:
    """Give a sharded parameter to the modules of other stages that use it too, which were not sharded.

    `names` holds the parameters before sharding.
    """
    now = dict(model.named_parameters(remove_duplicate=False))
    # Sharding replaces a parameter in the modules that it walks through, and in no others.
    replaced = {id(before): now[name] for name, before in names.items() if now[name] is not before}
    for name, before in names.items():
        if now[name] is before and id(before) in replaced:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, replaced[id(before)])
