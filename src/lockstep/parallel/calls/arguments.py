"""Flatten the arguments or results of a call into tensors and a spec, and rebuild them from both.

The spec is hashable and can be compared: two calls with equal specs and tensors of equal shapes do the same work. A
value that might hide tensors is refused (`OpaqueValue`). torch's own pytrees would treat such a value, and every
dataclass, as one opaque leaf.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

TENSOR = "a tensor"  # the spec of a tensor
CONSTANTS = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size, range)


class OpaqueValue(Exception):
    """A value that may contain tensors which `flatten` cannot see. The message names its type."""


def flatten(value: Any) -> tuple[list[Tensor], Hashable]:
    """Return the tensors of `value` in a fixed order, and the spec of everything else."""
    tensors: list[Tensor] = []
    spec = _flatten(value, tensors)

    # Some constants, and some contexts of registered pytree nodes, are not hashable.
    try:
        hash(spec)
    except TypeError as error:
        raise OpaqueValue(str(error)) from error

    return tensors, spec


def _flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    kind = type(value)

    # Copying the elements of a tensor subclass (DTensor, a quantised tensor) would lose its layout.
    if isinstance(value, Tensor):
        if kind not in (Tensor, nn.Parameter):
            raise OpaqueValue(f"a {kind.__name__}")

        tensors.append(value)
        return TENSOR

    # The type is part of the spec, since 1, 1.0 and True are equal.
    if value is None or isinstance(value, CONSTANTS):
        return "constant", kind, value

    # torch's pytree context of a dict is a list of keys, which is not hashable.
    if kind in (dict, OrderedDict):
        return "node", kind, tuple(value), _flatten_all(value.values(), tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", kind, _flatten_all(value, tensors)

    # A Hugging Face ModelOutput is both a dataclass and a mapping; it is registered as a pytree node, handled below.
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        names = tuple(field.name for field in dataclasses.fields(value))
        return "dataclass", kind, names, _flatten_all([getattr(value, name) for name in names], tensors)

    # Lists, tuples and registered types, but not their subclasses, which may keep tensors in other attributes.
    if kind in SUPPORTED_NODES:
        children, context = SUPPORTED_NODES[kind].flatten_fn(value)
        if type(context) is list:  # the keys of a ModelOutput; a list is not hashable
            return "keyed node", kind, tuple(context), _flatten_all(children, tensors)

        return "node", kind, context, _flatten_all(children, tensors)

    raise OpaqueValue(f"a {kind.__name__}")


def _flatten_all(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Hashable, ...]:
    return tuple(_flatten(value, tensors) for value in values)


def unflatten(tensors: Iterable[Tensor], spec: Any) -> Any:
    """Rebuild the value that `flatten` took apart into `tensors` and `spec`."""
    # Tensors were flattened depth first and are handed out in the same order.
    remaining = iter(tensors)
    if spec == TENSOR:
        return next(remaining)

    # A spec is (tag, type, fields...). The last field holds the children; names, keys or a context may come before it.
    tag, kind, *fields = spec
    if tag == "constant":
        return fields[0]

    children = [unflatten(remaining, child) for child in fields[-1]]
    if tag == "node":
        return SUPPORTED_NODES[kind].unflatten_fn(children, fields[0])
    if tag == "keyed node":
        return SUPPORTED_NODES[kind].unflatten_fn(children, list(fields[0]))
    if tag == "namedtuple":
        return kind(*children)

    # Set a dataclass's fields directly: its __init__ might compute other values.
    instance = object.__new__(kind)
    for name, child in zip(fields[0], children, strict=True):
        object.__setattr__(instance, name, child)

    return instance
