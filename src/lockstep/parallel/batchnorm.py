"""BatchNorm over the micro-batches of all ranks, on request: torch's SyncBatchNorm in the place of every BatchNorm."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError
from lockstep.runtime.context import Runtime

ASKED = "ddp.sync_batchnorm=true"


def synchronise_batchnorm(model: nn.Module, runtime: Runtime) -> None:
    """In place; parameters and names stay. One process sees its whole micro-batch anyway."""
    if runtime.world.alone:
        return
    if not any(isinstance(child, _BatchNorm) for module in model.modules() for child in module.children()):
        raise UserError(ASKED, f"no BatchNorm inside {type(model).__name__}", "leave ddp.sync_batchnorm out")
    if runtime.device.type != "cuda":
        raise UserError(
            ASKED,
            f"{runtime.device.type} as the device; torch has SyncBatchNorm for GPUs only",
            "use GroupNorm or LayerNorm, which need no other rank; or type device=cuda",
        )
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
