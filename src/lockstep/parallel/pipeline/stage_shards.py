"""Shard the parameters of stages over their replicas: torch's FSDP2 inside a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import nn
from torch.distributed.fsdp import fully_shard

from lockstep.config import RunConfig
from lockstep.parallel.blocks import without_shared
from lockstep.parallel.fsdp.driver import describe_blocks, prepare
from lockstep.parallel.mesh import Axes
from lockstep.parallel.pipeline.stages import Stage


def shard_stages(
    stages: Sequence[Stage], model: nn.Module, held: Collection[str], config: RunConfig, axes: Axes
) -> dict[str, str]:
    """Shard this rank's `stages` block by block, then the rest of the tensors that are `held` here, by name.

    The gradients of every micro-batch are reduced and scattered at once, and added to this rank's shard. Collective.
    Returns a banner line about the blocks of all ranks.
    """
    owned = {p for name, p in model.named_parameters() if name in held}
    shard = partial(fully_shard, mesh=axes.devices["dp"], reshard_after_forward=not config.sharing.keeps_gathered)
    counts = [0, 0]  # blocks, and those that are gathered alone

    for stage in stages:
        # By all names, to find the parameters again that sharding replaces.
        originals = dict(model.named_parameters(remove_duplicate=False))
        blocks = stage.own_blocks(model, config.blocks)
        alone = without_shared(blocks, stage)
        counts[0] += len(blocks)
        counts[1] += len(alone)

        for block in alone:
            shard(block)
        # Placeholders of other stages have no memory to shard.
        shard(stage, ignored_params=set(stage.parameters()) - owned)
        prepare(stage)
        _tie_again(model, originals)

    of_ranks = axes.along("pp").gather_json(counts)
    return describe_blocks(sum(count for count, _ in of_ranks), sum(alone for _, alone in of_ranks))


def _tie_again(model: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """Give a sharded parameter also to the modules of other stages that use it.

    Sharding replaces a parameter in the modules that it walks through, and in no others. `originals` holds the
    parameters before sharding.
    """
    current = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(p): current[name] for name, p in originals.items() if current[name] is not p}
    for name, original in originals.items():
        if current[name] is original and id(original) in replaced:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, replaced[id(original)])
