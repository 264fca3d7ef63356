"""ddp.sync_batchnorm=true: torch's SyncBatchNorm in place of every BatchNorm, over the micro-batches of all ranks."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError
from lockstep.runtime.context import Runtime


def synchronise_batchnorm(model: nn.Module, runtime: Runtime) -> None:
    """Replace the BatchNorm modules in place; parameters and names stay. One process needs no replacement."""
    if runtime.world.alone:
        return

    # torch converts children, never the model itself.
    children = [child for module in model.modules() for child in module.children()]
    if not any(isinstance(child, _BatchNorm) for child in children):
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
