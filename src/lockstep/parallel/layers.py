"""Replace single layers of a model, for precision=fp8 and ddp.sync_batchnorm=true.

A replacement keeps the parameters of the layer that it replaces, and their names, so checkpoints do not change.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError
from lockstep.parallel.batchnorm.sync import HostSyncBatchNorm
from lockstep.parallel.blocks import find_blocks
from lockstep.runtime.context import Runtime

FLOAT8_MULTIPLE = 16  # float8 matrix products need dimensions that are multiples of this


def compute_in_float8(model: nn.Module, named: list[str] | None) -> None:
    """Compute the matrix products inside blocks in float8 (torchao), with one scale per tensor.

    The layers outside the blocks (usually the first and the last) stay in bfloat16: they lose most from fewer bits and
    are a small part of the work. The parameters stay the same objects, with their names and dtypes.
    """
    from torchao.float8 import convert_to_float8_training  # pyrefly: ignore[missing-import]

    # By id, since a module may have several names.
    modules = [module for block in find_blocks(model, named) for module in block.modules()]
    chosen = {id(module) for module in modules if _fits_float8(module)}
    if not chosen:
        raise UserError(
            f"precision=fp8 finds no layer to convert in {type(model).__name__}",
            f"no block has an nn.Linear whose features are multiples of {FLOAT8_MULTIPLE}",
            "set precision=bf16, or name the classes of the blocks: blocks=[Block]",
        )

    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in chosen)


def _fits_float8(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and module.in_features % FLOAT8_MULTIPLE == 0
        and module.out_features % FLOAT8_MULTIPLE == 0
    )


def synchronise_batchnorm(model: nn.Module, runtime: Runtime) -> None:
    """Turn every BatchNorm into a SyncBatchNorm, in place: the modules, their parameters, hooks and names stay.

    A SyncBatchNorm normalises over the micro-batches of all ranks together, so a single process needs none.
    """
    if runtime.world.alone:
        return

    named = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not named:
        raise UserError(
            f"ddp.sync_batchnorm=true, but {type(model).__name__} contains no BatchNorm",
            "",
            "leave ddp.sync_batchnorm out",
        )

    kind = nn.SyncBatchNorm if runtime.device.type == "cuda" else HostSyncBatchNorm
    for name, module in named:
        # SyncBatchNorm's forward would replace a forward that computes more, such as an activation.
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, HostSyncBatchNorm.forward):
            raise UserError(
                f"ddp.sync_batchnorm=true cannot replace {name!r}: a {type(module).__name__} has its own forward",
                "SyncBatchNorm would replace that forward, with everything else that it computes",
                "use nn.BatchNorm and a separate module for the rest, or leave ddp.sync_batchnorm out",
            )

        module.__class__ = kind
        vars(module)["process_group"] = None  # all ranks


def adapt_sync_batchnorm(model: nn.Module, runtime: Runtime, pipelined: bool) -> None:
    """Make the model's own SyncBatchNorm layers work on a CPU, and refuse them in a pipeline, where they would hang."""
    if runtime.world.alone:
        return

    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm):
            continue

        if pipelined:
            raise UserError(
                f"{name!r} is a SyncBatchNorm, which cannot be used in a pipeline (mesh.pp)",
                "its forward waits for all ranks, but the ranks of other stages never call it",
                "use nn.BatchNorm or GroupNorm; or set strategy=ddp",
            )

        if runtime.device.type != "cuda" and module.process_group is None:
            module.__class__ = HostSyncBatchNorm  # pyrefly: ignore[bad-argument-type]
