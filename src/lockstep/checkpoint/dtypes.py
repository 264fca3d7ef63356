"""The formats of elements that a checkpoint can hold: torch's name and the name in the file."""

from __future__ import annotations

import torch

from lockstep.errors import UserError

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}


def name_of(tensor: torch.Tensor, called: str) -> str:
    """The file's name for the format of `tensor`, or an error that names the tensor."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.dtype not in NAMES:
        found = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        fix = "keep it as a dense tensor of bool, integers or floats (a complex one with torch.view_as_real)"
        raise UserError(f"save the tensor {called!r} in a checkpoint", found, fix)
    return NAMES[tensor.dtype]
