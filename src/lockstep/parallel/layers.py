"""Replace single layers of a model, as precision=fp8 and ddp.sync_batchnorm=true ask."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks
from lockstep.runtime.context import Runtime

FLOAT8_MULTIPLE = 16  # float8 matrix units take dimensions that are multiples of this


def compute_in_float8(model: nn.Module, named: list[str] | None) -> None:
    """Compute the matrix products inside blocks in float8 (torchao), with one scale per tensor.

    The layers outside the blocks (the first and the last ones) stay in bfloat16: they suffer most from fewer bits, and
    are the smaller part of the work. The parameters stay the same objects, with their names and dtypes.
    """
    from torchao.float8 import convert_to_float8_training  # pyrefly: ignore[missing-import]

    # By id, since a module may have several names.
    chosen = {id(module) for block in find_blocks(model, named) for module in block.modules() if _fits_float8(module)}
    if not chosen:
        raise UserError(
            f"precision=fp8 finds no layer to convert in {type(model).__name__}",
            f"no block has an nn.Linear whose features are multiples of {FLOAT8_MULTIPLE}",
            "type precision=bf16, or name the classes of the blocks: blocks=[Block]",
        )

    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in chosen)


def _fits_float8(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and module.in_features % FLOAT8_MULTIPLE == 0
        and module.out_features % FLOAT8_MULTIPLE == 0
    )


def synchronise_batchnorm(model: nn.Module, runtime: Runtime) -> None:
    """Replace every BatchNorm by torch's SyncBatchNorm, in place; parameters and names stay.

    Its statistics are those of the micro-batches of all ranks. One process needs no replacement.
    """
    if runtime.world.alone:
        return

    # torch converts submodules, never the model itself.
    if not any(isinstance(module, _BatchNorm) for module in model.modules() if module is not model):
        raise UserError(
            f"ddp.sync_batchnorm=true, but {type(model).__name__} contains no BatchNorm",
            "",
            "leave ddp.sync_batchnorm out",
        )

    if runtime.device.type != "cuda":
        raise UserError(
            f"ddp.sync_batchnorm=true needs GPUs; the device is {runtime.device.type}",
            "torch has SyncBatchNorm for GPUs only",
            "use GroupNorm or LayerNorm, which need no other rank; or type device=cuda",
        )

    nn.SyncBatchNorm.convert_sync_batchnorm(model)
