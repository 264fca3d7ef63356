"""Split a model into stages: list its layers, choose where to split, and move the tensors of each stage.

The parameters of a stage may be sharded over its replicas with torch's FSDP2.
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
from lockstep.parallel.fsdp.sharding import configure_sharding, describe_blocks
from lockstep.parallel.mesh import Axes

WHAT_TO_WRITE = (
    "give the task `def stages(self, model): return [Front(model), *model.blocks, Back(model)]`: modules that are "
    "called in turn, each with the output of the previous one; or build the model as an nn.Sequential"
)
ModelInput = tuple[tuple[Any, ...], dict[str, Any]]  # (args, kwargs) that the task passes to the model


class Stage(nn.Module):
    """One stage of a pipeline.

    A stage runs either consecutive layers of a list (`SequentialStage`), or a part of the model's own forward
    (`auto_split.ForwardStage`). `stage(arguments, received)` returns the tensors for the next stage; the
    last stage returns the model's output. `arguments` are the arguments of the model, and `received` are the tensors
    from the previous stage (None in the first stage).
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
    """Return the modules between which the model may be split: those that the task `listed`, or else the layers of an
    nn.Sequential. Return None if there is neither.
    """
    layers = list(listed) if listed is not None else _flatten_sequential(model)
    wrong = [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]
    if wrong:
        raise UserError(f"stages(model) must return a list of modules; it contains a {wrong[0]}", "", WHAT_TO_WRITE)

    # The model is not an nn.Sequential.
    if listed is None and layers == [model]:
        return None

    _check_complete(model, layers)
    return layers


def _flatten_sequential(module: nn.Module) -> list[nn.Module]:
    if type(module).forward is not nn.Sequential.forward:
        return [module]

    # Not children(), which yields a layer that occurs twice (a shared ReLU) only once.
    children = [child for child in module._modules.values() if child is not None]
    return [layer for child in children for layer in _flatten_sequential(child)]


def _check_complete(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    # A parameter that stages(model) creates would have no name, no optimizer and no checkpoint.
    known = {id(p) for p in model.parameters()}
    foreign = [name for layer in layers for name, p in layer.named_parameters() if id(p) not in known]
    if foreign:
        raise UserError(
            f"stages(model) contains {foreign[0]!r}, a parameter that the model does not have",
            "",
            "create every parameter in model(), and only arrange modules in stages(model)",
        )

    # A trainable parameter that is in no stage would never get a gradient.
    listed = {id(p) for layer in layers for p in layer.parameters()}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in listed]
    if missing:
        raise UserError(
            f"stages(model) leaves out {len(missing)} trainable parameters, first {missing[0]!r}",
            "",
            "add the module that uses it to the list that stages(model) returns, or freeze it",
        )


def split_layers(layers: Sequence[nn.Module], count: int) -> list[list[nn.Module]]:
    """Split the layers into `count` consecutive runs, so that the largest run has as few parameters as possible."""
    if len(layers) < count:
        raise too_few_splits(count, len(layers))

    ends = balance([sum(p.numel() for p in layer.parameters()) for layer in layers], count)
    return [list(layers[start:end]) for start, end in pairwise([0, *ends])]


def too_few_splits(count: int, possible: int, why: str = "") -> UserError:
    return UserError(
        f"the model cannot be split into {count} stages",
        f"it can be split into {possible}{why}",
        f"use at most {possible} stages (mesh.pp x pp.stages_per_rank), or list more modules in stages(model)",
    )


def balance(sizes: Sequence[int], count: int) -> list[int]:
    """Split `sizes` into `count` runs so that the largest run is as small as possible. Returns the end of each run."""
    # cumulative[n]: the sum of the first n sizes. 1 is added to each, since a layer without parameters also takes time.
    cumulative = [0, *accumulate(size + 1 for size in sizes)]

    # best[n]: for the best split of the first n sizes, the size of its largest run, and the ends of its runs. Each
    # iteration adds one run, and every run has at least one size.
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
    """Return the stages that use each parameter and buffer, under all its names. `used`: the tensors of each stage."""
    ids = [{id(tensor) for tensor in tensors} for tensors in used]
    by_name = {}
    for name, tensor in named_tensors(model):
        by_name[name] = tuple(stage for stage, stage_ids in enumerate(ids) if id(tensor) in stage_ids)

    return by_name


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers, under all their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def keep_only(model: nn.Module, materialized: Collection[str], device: torch.device) -> None:
    """Move the tensors whose names are in `materialized` to the device, and replace all others with placeholders.

    A placeholder has the tensor's name, shape and dtype, so that the model has the same structure on every rank. Its
    value is NaN, so that its use can be detected.
    """
    # Without duplicates: a tied parameter has several names, but is moved once.
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(device) if name in materialized else placeholder(parameter, device)

    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        module, _, buffer_name = name.rpartition(".")
        buffers = model.get_submodule(module)._buffers
        buffers[buffer_name] = buffer.to(device) if name in materialized else placeholder(buffer, device)


def placeholder(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype, full of NaN, that takes the memory of one element."""
    # Integers have no NaN, so the use of an integer placeholder is not detected.
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


# ---- FSDP inside stages ----


def shard_stages(
    stages: Sequence[Stage],
    model: nn.Module,
    held: Collection[str],
    config: RunConfig,
    axes: Axes,
) -> dict[str, str]:
    """Shard this rank's `stages` block by block, then their other tensors. `held`: the names of this rank's tensors.

    The gradients of every micro-batch are reduce-scattered at once, and added to this rank's shard. Returns a banner
    line about the blocks of all ranks. Collective.
    """
    owned = {p for name, p in model.named_parameters() if name in held}
    shard = partial(
        fully_shard,
        mesh=axes.device_mesh["dp"],
        reshard_after_forward=config.strategy_record.reshard_after_forward,
    )
    counts = [0, 0]  # all blocks, and the blocks without shared parameters

    for stage in stages:
        # Under all names, so that `_tie_again` finds the parameters that sharding replaced.
        originals = dict(model.named_parameters(remove_duplicate=False))
        blocks = stage.own_blocks(model, config.blocks)
        separate = blocks_without_shared_parameters(blocks, stage)
        counts[0] += len(blocks)
        counts[1] += len(separate)

        for block in separate:
            shard(block)

        # Placeholders of other stages have no memory to shard.
        shard(stage, ignored_params=set(stage.parameters()) - owned)
        configure_sharding(stage)
        _tie_again(model, originals)

    counts_by_rank = axes.along("pp").all_gather_json(counts)
    total = sum(count for count, _ in counts_by_rank)
    return describe_blocks(total, sum(separate for _, separate in counts_by_rank))


def _tie_again(model: nn.Module, originals: Mapping[str, nn.Parameter]) -> None:
    """Tie the modules of other stages to the sharded parameters again.

    Sharding a stage replaces a parameter only in the modules of this stage. `originals` holds the parameters before it.
    """
    current = dict(model.named_parameters(remove_duplicate=False))
    replaced = {id(p): current[name] for name, p in originals.items() if current[name] is not p}

    # A parameter that was replaced under one name, but not under this one, belongs to another stage as well.
    for name, original in originals.items():
        if current[name] is original and id(original) in replaced:
            module, _, parameter_name = name.rpartition(".")
            setattr(model.get_submodule(module), parameter_name, replaced[id(original)])
