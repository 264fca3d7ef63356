"""A call's arguments or results, taken apart into tensors and the rest, and put together again.

The rest is a value that can be compared and used as a key: two calls with equal rests and tensors of equal shapes do
the same work. What might hold tensors out of sight is refused, not guessed at.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

TENSOR = "a tensor"
CONSTANTS = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, range)


class Opaque(Exception):
    """A value that cannot be looked into; the text names its type."""


def take_apart(value: Any) -> tuple[list[Tensor], Hashable]:
    """Its tensors in a fixed order, and everything else."""
    tensors: list[Tensor] = []
    rest = _take(value, tensors)
    try:
        hash(rest)
    except TypeError as error:
        raise Opaque(str(error)) from error
    return tensors, rest


def put_together(tensors: list[Tensor], rest: Any) -> Any:
    return _put(rest, iter(tensors))


def _take(value: Any, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if isinstance(value, Tensor):
        if kind not in (Tensor, nn.Parameter):
            raise Opaque(f"a {kind.__name__}")
        tensors.append(value)
        return TENSOR
    if value is None or isinstance(value, CONSTANTS):
        return "constant", kind, value  # with its type: 1, 1.0 and True are equal
    if kind in (dict, OrderedDict):
        return "mapping", kind, (*value,), (*(_take(part, tensors) for part in value.values()),)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "fields", kind, (*(_take(part, tensors) for part in value),)
    if kind in (list, tuple, torch.Size):
        return "sequence", kind, (*(_take(part, tensors) for part in value),)
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        names = [field.name for field in dataclasses.fields(value)]
        return "dataclass", kind, (*names,), (*(_take(getattr(value, name), tensors) for name in names),)
    if kind in SUPPORTED_NODES:  # somebody told torch how to take it apart
        parts, context = SUPPORTED_NODES[kind].flatten_fn(value)
        return "node", kind, context, (*(_take(part, tensors) for part in parts),)
    raise Opaque(f"a {kind.__name__}")


def _put(rest: Any, tensors: Iterator[Tensor]) -> Any:
    if rest == TENSOR:
        return next(tensors)
    what, kind, *inside = rest
    if what == "constant":
        return inside[0]
    parts = [_put(part, tensors) for part in inside[-1]]
    if what == "mapping":
        return kind(zip(inside[0], parts, strict=True))
    if what == "fields":
        return kind(*parts)
    if what == "sequence":
        return kind(parts)
    if what == "node":
        return SUPPORTED_NODES[kind].unflatten_fn(parts, inside[0])
    made = object.__new__(kind)  # as it was, not as its __init__ would make it
    for name, part in zip(inside[0], parts, strict=True):
        object.__setattr__(made, name, part)
    return made
