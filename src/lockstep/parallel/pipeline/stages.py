"""Split a model into stages: list its layers, choose where to split, and place the tensors of each stage.

The parameters of a stage may be sharded over its replicas, by torch's FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.blocks import blocks_without_shared_parameters, find_blocks
from lockstep.parallel.fsdp.driver import describe_blocks, prepare
from lockstep.parallel.mesh import Axes

WHAT_TO_WRITE = (
    "give the task `def stages(self, model): return [Front(model), *model.blocks, Back(model)]`: modules that are "
    "called one after another, each with what the one before it returned; or build the model as an nn.Sequential"
)
ModelInput = tuple[tuple[Any, ...], dict[str, Any]]  # (args, kwargs) that the task passes to the model


class Stage(nn.Module):
    """Computes one stage of a pipeline.

    A stage is either consecutive layers of a list (`SequentialStage`), or a part of the model's own forward
    (`auto_split.forward_stage.ForwardStage`). `stage(arguments, received)` returns what the model returns, or what the
    next stage receives. `arguments` are the model's own; `received` comes from the stage before, and is None in the
    first stage.
    """

    def mutable_buffers(self) -> list[Tensor]:
        """Return the buffers that a forward may write into."""
        return list(self.buffers())

    def own_blocks(self, model: nn.Module, named: Sequence[str] | None) -> list[nn.Module]:
        inside = {id(module) for module in self.modules()}
        return [block for block in find_blocks(model, named) if id(block) in inside]


class SequentialStage(Stage):
    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, arguments: ModelInput, received: Sequence[Tensor] | None) -> Any:
        args, kwargs = arguments if received is None else (received, {})
        value: Any = None

        for layer in self.layers:
            value = layer(*args, **kwargs)

            # A tuple becomes several arguments of the next layer.
            args = value if isinstance(value, tuple) else (value,)
            kwargs = {}

        return value


# ---- lists of layers ----


def list_layers(model: nn.Module, listed: Sequence[nn.Module] | None) -> list[nn.Module] | None:
    """Return the modules between which the model may be split.

    These are what the task `listed`, or else the layers of an nn.Sequential. None: there is no such list, and only
    the model's forward knows what runs after what.
    """
    layers = list(listed) if listed is not None else _flatten_sequential(model)
    wrong = [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]
    if wrong:
        raise UserError(f"stages(model) must return a list of modules; it has a {wrong[0]} in it", "", WHAT_TO_WRITE)

    # The model itself is no nn.Sequential.
    if listed is None and layers == [model]:
        return None

    _check_complete(model, layers)
    return layers


def _flatten_sequential(module: nn.Module) -> list[nn.Module]:
    if type(module).forward is not nn.Sequential.forward:
        return [module]
    # Not children(), which lists a layer that comes twice (one ReLU for all) only once.
    return [layer for child in module._modules.values() if child is not None for layer in _flatten_sequential(child)]


def _check_complete(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    # A parameter that stages(model) creates would have no name, no optimizer and no checkpoint.
    known = {id(p) for p in model.parameters()}
    foreign = [name for layer in layers for name, p in layer.named_parameters() if id(p) not in known]
    if foreign:
        raise UserError(
            f"stages(model) has {foreign[0]!r}, a parameter that the model does not have",
            "",
            "create every parameter in model(), and only arrange them in stages(model)",
        )

    # A trainable parameter in no stage would never get a gradient.
    staged = {id(p) for layer in layers for p in layer.parameters()}
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in staged]
    if forgotten:
        raise UserError(
            f"stages(model) leaves out {len(forgotten)} trainable parameters, first {forgotten[0]!r}",
            "",
            "add the module that uses it to what stages(model) returns, or freeze it",
        )


def split_layers(layers: Sequence[nn.Module], count: int) -> list[list[nn.Module]]:
    """Return `count` runs of consecutive layers. The run with the most parameters has as few as possible."""
    if len(layers) < count:
        raise too_few_splits(count, len(layers))

    ends = balance([sum(p.numel() for p in layer.parameters()) for layer in layers], count)
    return [list(layers[start:end]) for start, end in pairwise([0, *ends])]


def too_few_splits(count: int, possible: int, why: str = "") -> UserError:
    return UserError(
        f"the model cannot be split into {count} stages",
        f"it can be split into {possible}{why}",
        f"use at most {possible} stages (mesh.pp x pp.stages_per_rank), or list more of them in stages(model)",
    )


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Return where each of `count` runs of `sizes` ends, so that the largest run is as small as possible."""
    # cumulative[n]: the first n sizes together. 1 is added to each, since a layer without parameters also takes time.
    cumulative = [0, *accumulate(size + 1 for size in sizes)]

    # best[n]: the largest run when the first n sizes are split as well as possible, and where the runs end. Each round
    # adds one run, and every run has at least one size.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for runs in range(1, count + 1):
        longer = {}
        for end in range(runs, len(sizes) + 1):
            longer[end] = min(
                (max(largest, cumulative[end] - cumulative[start]), [*ends, end])
                for start, (largest, ends) in best.items()
                if start < end
            )

        best = longer

    _, ends = best[len(sizes)]
    return ends


# ---- tensors of stages ----


def stages_by_tensor(model: nn.Module, used: Sequence[Sequence[Tensor]]) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each parameter and buffer, by all its names. `used`: the tensors of each stage."""
    ids = [{id(tensor) for tensor in tensors} for tensors in used]
    by_name = {}
    for name, tensor in named_tensors(model):
        by_name[name] = tuple(number for number, stage_ids in enumerate(ids) if id(tensor) in stage_ids)

    return by_name


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers, under all their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def keep_only(model: nn.Module, held: Collection[str], device: torch.device) -> None:
    """Move the tensors that are `held`, by name, to the device, and replace all others with placeholders.

    A placeholder keeps the tensor's name, shape and dtype, so that every rank still sees the same model. Its value is
    NaN, so that its use shows.
    """
    # A tied parameter has several names, and is moved once.
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(device) if name in held else placeholder(parameter, device)

    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        module, _, own = name.rpartition(".")
        buffers = model.get_submodule(module)._buffers
        buffers[own] = buffer.to(device) if name in held else placeholder(buffer, device)


def placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype, full of NaN, that takes the memory of one element."""
    # Integers have no NaN: their use goes unnoticed.
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


# ---- FSDP inside stages ----


def shard_stages(
    stages: Sequence[Stage], model: nn.Module, held: Collection[str], config: RunConfig, axes: Axes
) -> dict[str, str]:
    """Shard this rank's `stages` block by block, then their other tensors. `held` has the names of this rank's tensors.

    The gradients of every micro-batch are reduced and scattered at once, and added to this rank's shard. Returns a
    banner line about the blocks of all ranks. Collective.
    """
    owned = {p for name, p in model.named_parameters() if name in held}
    shard = partial(
        fully_shard, mesh=axes.device_mesh["dp"], reshard_after_forward=not config.strategy_record.keeps_gathered
    )
    counts = [0, 0]  # blocks, and those that share no parameter

    for stage in stages:
        # By all names, so that `_tie_again` finds what sharding replaced.
        originals = dict(model.named_parameters(remove_duplicate=False))
        blocks = stage.own_blocks(model, config.blocks)
        unshared = blocks_without_shared_parameters(blocks, stage)
        counts[0] += len(blocks)
        counts[1] += len(unshared)

        for block in unshared:
            shard(block)

        # Placeholders of other stages have no memory to shard.
        shard(stage, ignored_params=set(stage.parameters()) - owned)
        prepare(stage)
        _tie_again(model, originals)

    of_ranks = axes.along("pp").gather_json(counts)
    return describe_blocks(sum(count for count, _ in of_ranks), sum(unshared for _, unshared in of_ranks))


def _tie_again(model: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """Give sharded parameters to the modules of other stages that share them.

    Sharding replaces a parameter only in the modules of the stage. `originals` holds the parameters before sharding.
    """
    current = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(p): current[name] for name, p in originals.items() if current[name] is not p}

    # What still is the original, but was replaced under another name, belongs to another stage.
    for name, original in originals.items():
        if current[name] is original and id(original) in replaced:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, replaced[id(original)])
