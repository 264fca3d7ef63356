"""State as it comes (nested dicts and lists of tensors and numbers) <-> named tensors + plain JSON. Never a pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError

# One-key mappings that stand for what JSON cannot say.
TENSOR, ON_DEVICE, ARRAY, TUPLE, ITEMS = "$tensor", "$on_device", "$array", "$tuple", "$items"
_MARKS = {TENSOR, ON_DEVICE, ARRAY, TUPLE, ITEMS}


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON form of `value`; its tensors are put into `tensors`, under names that begin with `name`."""
    while name in tensors:  # {"a": {"b": ...}, "a.b": ...}
        name += "'"
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {TENSOR if value.device.type == "cpu" else ON_DEVICE: name}
    if isinstance(value, np.ndarray) and value.dtype != object:
        tensors[name] = torch.from_numpy(np.array(value))
        return {ARRAY: name}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
            return {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
        pairs = enumerate(value.items())
        return {ITEMS: [[pack(k, f"{name}.key{i}", tensors), pack(v, f"{name}.{i}", tensors)] for i, (k, v) in pairs]}
    raise UserError(
        f"to save {name}",
        f"a {type(value).__name__}, which is neither tensors nor plain values",
        "let its state_dict() return tensors, numbers, text, lists and dicts only: a checkpoint holds no pickle",
    )


def unpack(value: Any, read: Callable[[str], Tensor], device: torch.device) -> Any:
    """The opposite; `read(name)` gives a tensor. What was on a device comes back on `device`."""
    if isinstance(value, list):
        return [unpack(item, read, device) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, inner),) = value.items()
        if mark == TENSOR:
            return read(inner)
        if mark == ON_DEVICE:
            return read(inner).to(device)
        if mark == ARRAY:
            return read(inner).numpy()
        if mark == TUPLE:
            return tuple(unpack(item, read, device) for item in inner)
        if mark == ITEMS:
            return {_key(unpack(k, read, device)): unpack(v, read, device) for k, v in inner}
    return {key: unpack(item, read, device) for key, item in value.items()}


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def digest(data: Any) -> str:
    """Of all tensors in a batch, whatever holds them."""
    sha = hashlib.sha256()
    _feed(sha, data)
    return sha.hexdigest()


def _feed(sha: Any, data: Any) -> None:
    if isinstance(data, DTensor):  # every rank holds another part of it
        sha.update(f"{data.dtype}{tuple(data.shape)}".encode())
    elif isinstance(data, torch.Tensor):
        sha.update(f"{data.dtype}{tuple(data.shape)}".encode())
        sha.update(data.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(data, dict):
        for key in sorted(data, key=str):
            sha.update(str(key).encode())
            _feed(sha, data[key])
    elif isinstance(data, list | tuple):
        for value in data:
            _feed(sha, value)
    else:
        sha.update(repr(data).encode())
