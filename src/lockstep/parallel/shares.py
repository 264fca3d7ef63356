"""How the ranks share the model, in one line for the first screen."""

from __future__ import annotations

from collections import Counter

from torch import nn

from lockstep.config import RunConfig
from lockstep.parallel.blocks import class_name, class_to_name, find_blocks
from lockstep.parallel.fsdp import CUT, count_copies
from lockstep.parallel.mesh import Mesh
from lockstep.parallel.remat import recomputed
from lockstep.parallel.tensor import is_cut_along_tp
from lockstep.runtime.world import World


def about_strategy(model: nn.Module, config: RunConfig, mesh: Mesh, world: World) -> str | None:
    """`fsdp: 4 blocks of Layer, cut over 2 ranks`. None: whole copies, about which there is nothing to tell."""
    if config.strategy == "ddp" and mesh.plain:
        return None
    if world.alone:
        return f"{config.strategy}: one process, so nothing is cut"
    words = _computation(model, config, mesh)
    if config.strategy in CUT:
        words.append(_cut(model, config, mesh, world))
    elif config.strategy == "zero1":
        words.append(f"optimizer state cut over {world.size} ranks")
    elif mesh.data_size > 1:
        words.append(f"{mesh.data_size} copies")
    return f"{config.strategy}: {'; '.join(words)}"


def about_remat(model: nn.Module, config: RunConfig) -> str:
    """`full: 4 blocks of Layer`"""
    blocks = find_blocks(model, config.blocks)
    again = recomputed(blocks, config.remat)
    of_all = f" (of {len(blocks)})" * (len(again) < len(blocks))
    return f"{config.remat}: {_in_words(again)}{of_all}"


def _computation(model: nn.Module, config: RunConfig, mesh: Mesh) -> list[str]:
    """What pp and tp cut."""
    words = []
    ranks, ways = mesh.sizes["pp"], mesh.sizes["tp"]
    if ranks > 1:
        from lockstep.parallel.pipeline import SCHEDULES  # torch's pipelines take a moment to import

        stages = ranks * (config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1])
        words.append(f"{stages} stages over {ranks} ranks")
    if ways > 1:
        cut = sum(any(is_cut_along_tp(p) for p in module.parameters(recurse=False)) for module in model.modules())
        words.append(f"{cut} layers{' of the first stage' * (ranks > 1)} cut over {ways} ranks")
    return words


def _cut(model: nn.Module, config: RunConfig, mesh: Mesh, world: World) -> str:
    """What fsdp, fsdp-grads and hsdp cut."""
    copies = count_copies(config.fsdp, world) if config.strategy == "hsdp" else 1
    ranks = mesh.data_size // copies
    if ranks == 1:
        if copies > 1:
            return f"{copies} copies on one rank each, so nothing is cut (type strategy=ddp, or strategy=fsdp)"
        return "one group of ranks with samples of its own, so nothing more is cut (mesh.dp is 1)"
    over = f"cut over {ranks} ranks" + f", {copies} copies" * (copies > 1)
    if blocks := find_blocks(model, config.blocks):
        return f"{_in_words(blocks)}, {over}"
    part = class_to_name(model)
    named = f" (name some, such as blocks=[{part}])" if part else ""
    return f"no blocks, {over}: the whole model is gathered at once, which saves little{named}"


def _in_words(blocks: list[nn.Module]) -> str:
    """`4 blocks of Layer, 2 of Encoder`"""
    counts = Counter(class_name(block) for block in blocks)
    (first, number), *rest = counts.items()
    blocks_of_first = f"{number} block{'s' * (number > 1)} of {first}"
    return ", ".join([blocks_of_first, *(f"{count} of {name}" for name, count in rest)])
