"""Forget what a block computed, and compute it again when its gradients are due: memory for time.

full        of every block only its input is kept
selective   the results of matrix products and attention are kept as well: what is computed again is cheap
every-K     every K-th block, from the first one on
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.blocks import class_to_name, find_blocks

_ATEN = torch.ops.aten
# Not every build of torch has every kernel.
_COSTLY = {
    getattr(_ATEN, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_ATEN, name)
}


def recompute_blocks(model: nn.Module, config: RunConfig) -> None:
    """In place: classes, and the names of parameters, stay as they are."""
    if config.remat == "none":
        return
    blocks = find_blocks(model, config.blocks)
    if not blocks:
        part = class_to_name(model)
        raise UserError(
            f"remat={config.remat}",
            f"{type(model).__name__} has no list of equal modules, so it is not clear what to compute again",
            f"name the classes of its parts, such as blocks=[{part}]" if part else "type remat=none",
        )
    for block in recomputed(blocks, config.remat):
        _check_counts_nothing(block, config.remat)
        original = vars(block).get("forward")  # somebody may have replaced it before us
        # A partial, not a closure: in a copy of the model it belongs to the copied block.
        block.forward = partial(_forward, block, original, config.remat == "selective")


def recomputed(blocks: list[nn.Module], remat: str) -> list[nn.Module]:
    """Those of the model's blocks."""
    if not remat.startswith("every-"):
        return blocks
    every = int(remat.removeprefix("every-"))
    if every == 1:
        raise UserError(f"remat={remat}", "all blocks, for which there is a word", "type remat=full")
    if every > len(blocks):
        fix = f"type remat=every-{len(blocks)}, or less" if len(blocks) > 1 else "type remat=full"
        raise UserError(f"remat={remat}", f"a model with {len(blocks)} block{'s' * (len(blocks) > 1)}", fix)
    return blocks[::every]


def _forward(block: nn.Module, original: Callable[..., Any] | None, selective: bool, *args: Any, **kwargs: Any) -> Any:
    run = original or partial(type(block).forward, block)
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    options: dict[str, Any] = {}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)
    # The generators go back to where they were: dropout must drop the same elements again. torch looks for devices,
    # whose generators these are, among the positional arguments only: so all are passed as such.
    call = partial(_call, run, len(args), tuple(kwargs))
    return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True, **options)


def _call(run: Callable[..., Any], count: int, names: tuple[str, ...], *values: Any) -> Any:
    return run(*values[:count], **dict(zip(names, values[count:], strict=True)))


def _keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Attention with dropout is computed again: leaving it out would shift the random numbers of what follows."""
    if op in _COSTLY and not _dropout(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _dropout(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    return given.get("dropout_p", 0.0)


def _check_counts_nothing(block: nn.Module, remat: str) -> None:
    """Running statistics would take in every batch twice."""
    for name, module in block.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            where = f"{type(block).__name__}.{name}" if name else type(block).__name__
            raise UserError(
                f"remat={remat}",
                f"{where} is a {type(module).__name__}, whose running statistics would count every batch twice",
                "use GroupNorm or LayerNorm, name blocks without it (blocks=[...]), or type remat=none",
            )
