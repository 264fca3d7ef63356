"""Rematerialisation (activation checkpointing): drop a block's activations and recompute them in the backward.

full        keep only the input of every block
selective   also keep the outputs of matrix products and attention: recomputing the rest is cheap
every-K     recompute every K-th block, starting with the first
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
from lockstep.errors import UserError, plural
from lockstep.parallel.blocks import find_blocks, suggest_block_class
from lockstep.parallel.caches import refuse_kv_cache

_COSTLY_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# Not every build of torch has every kernel.
_COSTLY = {getattr(torch.ops.aten, name).default for name in _COSTLY_NAMES if hasattr(torch.ops.aten, name)}


def checkpoint_activations(model: nn.Module, config: RunConfig) -> None:
    """Replace the forward of the blocks that `remat` selects, in place: classes and parameter names do not change."""
    if config.remat == "none":
        return

    blocks = find_blocks(model, config.blocks)
    if not blocks:
        part = suggest_block_class(model)
        raise UserError(
            f"remat={config.remat} finds no blocks in {type(model).__name__} to recompute",
            "it has no ModuleList or Sequential whose members all have the same class",
            f"name the classes of its blocks, such as blocks=[{part}]" if part else "set remat=none",
        )

    for block in blocks_to_recompute(blocks, config.remat):
        _check_no_running_statistics(block, config.remat)
        # A partial, not a closure: deepcopy of the model then binds the copied block. If other code has already
        # replaced this block's `forward`, it is an attribute of the instance.
        block.forward = partial(_forward, block, vars(block).get("forward"), config.remat)


def blocks_to_recompute(blocks: list[nn.Module], remat: str) -> list[nn.Module]:
    if not remat.startswith("every-"):
        return blocks

    # config/ has checked that a number follows.
    every = int(remat.removeprefix("every-"))
    if every == 1:
        raise UserError("remat=every-1 would recompute all blocks, as remat=full does", "", "set remat=full")

    if every > len(blocks):
        raise UserError(
            f"remat={remat} needs at least {every} blocks",
            f"the model has {plural(len(blocks), 'block')}",
            f"set remat=every-{len(blocks)}, or less" if len(blocks) > 1 else "set remat=full",
        )

    return blocks[::every]


def _forward(block: nn.Module, original: Callable[..., Any] | None, remat: str, *args: Any, **kwargs: Any) -> Any:
    run = original or partial(type(block).forward, block)

    # Without gradients, torch keeps no activations anyway.
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)

    if not torch.compiler.is_compiling():  # dynamo cannot trace this check
        refuse_kv_cache(block, (*args, *kwargs.values()), remat)

    # Pass `context_fn` only if it is needed: torch.compile takes any, even torch's default, for a selective checkpoint.
    options: dict[str, Any] = {}
    is_selective = remat == "selective"
    if is_selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)

    # torch restores the generators for the recomputation, so that dropout drops the same elements again. It looks for
    # their devices among the positional arguments only, so all arguments are passed by position.
    call = partial(_call, run, is_selective, len(args), tuple(kwargs))
    return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True, **options)


def _call(run: Callable[..., Any], is_selective: bool, count: int, names: tuple[str, ...], *values: Any) -> Any:
    """Call `run` with the first `count` values as positional arguments, the others as keyword arguments `names`."""
    # Autocast keeps the weights that it has converted, so a second call of a block converts none. Its recomputation
    # would: torch looks up each operation of a selective checkpoint, and refuses one that the forward did not have.
    if is_selective and not torch.compiler.is_compiling():
        torch.clear_autocast_cache()

    return run(*values[:count], **dict(zip(names, values[count:], strict=True)))


def _keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of costly operations, except attention with dropout.

    If the recomputation skipped such attention, later operations would draw other random numbers than in the forward.
    """
    if op not in _COSTLY:
        return CheckpointPolicy.PREFER_RECOMPUTE

    # `dropout_p` may be passed by position or by name.
    named_args = dict(zip([argument.name for argument in op._schema.arguments], args, strict=False)) | kwargs
    return CheckpointPolicy.PREFER_RECOMPUTE if named_args.get("dropout_p") else CheckpointPolicy.MUST_SAVE


def _check_no_running_statistics(block: nn.Module, remat: str) -> None:
    for name, module in block.named_modules():
        # The recomputation would update the running statistics a second time.
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            where = f"{type(block).__name__}.{name}" if name else type(block).__name__
            raise UserError(
                f"remat={remat} would make {where} count every batch twice",
                f"it is a {type(module).__name__} with running statistics, inside a block that is recomputed",
                "use GroupNorm or LayerNorm, name blocks without it (blocks=[...]), or set remat=none",
            )
