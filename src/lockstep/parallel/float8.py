"""precision=fp8: the matrix products inside blocks in float8, by torchao, with a scale for each tensor.

The first and the last layers stay in bfloat16: they are the ones that suffer, and the smaller part of the work.
"""

from __future__ import annotations

from torch import nn

from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks

MULTIPLE = 16  # of what the matrix units take


def compute_in_float8(model: nn.Module, named: list[str] | None) -> None:
    """Parameters keep their names, their format and their objects; only how they are multiplied changes."""
    from torchao.float8 import convert_to_float8_training  # pyrefly: ignore[missing-import]

    blocks = find_blocks(model, named)
    chosen = {id(module) for block in blocks for module in block.modules() if _fits(module)}
    if not chosen:
        raise UserError(
            "precision=fp8",
            f"no block with an nn.Linear whose features are multiples of {MULTIPLE}",
            "type precision=bf16, or name the classes of the blocks: blocks=[Block]",
        )
    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in chosen)


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
