"""Encode state (nested dicts and lists of tensors and numbers) as named tensors and plain JSON, and back. No pickle.

`CapturedTensor` is such a tensor, with what decides when it is copied and which rank writes it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.manifest import float_from_json, float_to_json
from lockstep.errors import UserError

# Plain state, as it is in the manifest.
JsonDict = dict[str, Any]

# A dict with one of these keys, and no other key, encodes a value that JSON cannot represent. The keys are part of the
# file format (see CONTRIBUTING).
MARKERS = {"$tensor", "$on_device", "$array", "$tuple", "$items", "$float"}


def pack(value: Any, name: str, tensors: MutableMapping[str, Tensor]) -> Any:
    """Return a copy of `value` as strict JSON. Its tensors are added to `tensors`, under names that begin with `name`.

    This is the only encoder of what a manifest holds as `values`.
    """
    # Names may collide: {"a": {"b": ...}, "a.b": ...} has two tensors with the same name.
    while name in tensors:
        name += "'"

    match value:
        case Tensor():
            # Record whether it was on the CPU: an optimizer's step count stays there while its model is on a GPU.
            tensors[name] = value.detach()
            return {"$tensor" if value.device.type == "cpu" else "$on_device": name}

        case np.ndarray() if (tensor := _tensor_of(value)) is not None:
            tensors[name] = tensor
            return {"$array": name}

        case np.generic() if not isinstance(value.item(), np.generic):
            return pack(value.item(), name, tensors)

        case None | bool() | str():
            return value

        case int():
            # Subclasses, such as enums, become plain numbers.
            return int(value)

        case float():
            return float_to_json(float(value))

        case list():
            return [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]

        case tuple():
            return {"$tuple": pack(list(value), name, tensors)}

        case dict():
            return _pack_dict(value, name, tensors)

    raise UserError(
        f"{name} cannot be saved: a {type(value).__name__} is neither a tensor nor a plain value",
        f"an array of {value.dtype}" if isinstance(value, np.ndarray) else "",
        "let its state_dict() return only tensors, numbers, strings, lists and dicts: a checkpoint holds no pickle",
    )


def _tensor_of(array: np.ndarray) -> Tensor | None:
    """Return a copy of an array as a tensor; None if torch has no such tensors: of text, of dates, of objects."""
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except TypeError:
        return None


def _pack_dict(value: dict[Any, Any], name: str, tensors: MutableMapping[str, Tensor]) -> JsonDict:
    if all(isinstance(key, str) for key in value) and not MARKERS & value.keys():
        return {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}

    # Some keys are not strings, or one of them is a marker.
    pairs = [
        [pack(key, f"{name}.key{i}", tensors), pack(item, f"{name}.{i}", tensors)]
        for i, (key, item) in enumerate(value.items())
    ]
    return {"$items": pairs}


def unpack(value: Any, read: Callable[[str], Tensor], device: torch.device) -> Any:
    """Undo `pack`. `read(name)` returns a tensor. Tensors that were not on the CPU are moved to `device`."""
    # A user's dict with one of these keys was encoded as "$items", so these dicts come from `pack`.
    match value:
        case {"$tensor": name}:
            return read(name)
        case {"$on_device": name}:
            return read(name).to(device)
        case {"$array": name}:
            return read(name).numpy()
        case {"$float": _}:
            return float_from_json(value)
        case {"$tuple": items}:
            return tuple(unpack(item, read, device) for item in items)
        case {"$items": pairs}:
            return {unpack(key, read, device): unpack(item, read, device) for key, item in pairs}
        case dict():
            return {key: unpack(item, read, device) for key, item in value.items()}
        case list():
            return [unpack(item, read, device) for item in value]
        case _:
            return value


# ---- tensors of a run's state ----


class CapturedTensor(NamedTuple):
    """A tensor of the state. It is neither copied nor gathered."""

    tensor: Tensor

    # The parameter or buffer to which the tensor belongs: the tensor is the parameter itself, its average, or a part of
    # the optimizer's state for it. None: the tensor belongs to no parameter.
    parameter: str | None = None

    # The stateful object to whose state the tensor belongs. It may differ between ranks: rank 0's is saved, unless it
    # is a DTensor.
    stateful: str | None = None

    # Whether the tensor may be copied while training continues, because it changes only after `Update.wait_for_copy`.
    # The model is copied at once: a forward may change its buffers, and the user's code its parameters.
    copy_later: bool = False


def pack_into(
    tensors: dict[str, CapturedTensor],
    value: Any,
    name: str,
    *,
    parameter: str | None = None,
    stateful: str | None = None,
    copy_later: bool = False,
) -> Any:
    """Encode `value` as `pack` does, and add the tensors in it to `tensors`."""
    # `pack` adds to the first of the two, and avoids the names in both.
    added: dict[str, Any] = {}
    names: ChainMap[str, Any] = ChainMap(added, tensors)
    packed = pack(value, name, names)
    tensors.update({key: CapturedTensor(tensor, parameter, stateful, copy_later) for key, tensor in added.items()})
    return packed
