"""precision=fp8: the matrix products inside blocks run in float8 (torchao), with one scale per tensor.

The layers outside the blocks, the first and the last ones, stay in bfloat16: they lose most by fewer bits, and are the
smaller part of the work.
"""

from __future__ import annotations

from torch import nn

from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks

MULTIPLE = 16  # float8 matrix units take dimensions that are multiples of this


def compute_in_float8(model: nn.Module, named: list[str] | None) -> None:
    """Convert the linear layers of the blocks. Parameters keep their names, dtypes and objects."""
    from torchao.float8 import convert_to_float8_training  # pyrefly: ignore[missing-import]

    # torchao decides per module; ids, since a module may have several names.
    blocks = find_blocks(model, named)
    chosen = {id(module) for block in blocks for module in block.modules() if _fits(module)}
    if not chosen:
        raise UserError(
            f"precision=fp8 finds no layer to convert in {type(model).__name__}",
            f"no block has an nn.Linear whose features are multiples of {MULTIPLE}",
            "type precision=bf16, or name the classes of the blocks: blocks=[Block]",
        )

    convert_to_float8_training(model, module_filter_fn=lambda module, name: id(module) in chosen)


def _fits(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
