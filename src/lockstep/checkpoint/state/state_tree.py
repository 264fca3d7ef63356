"""Encode state (nested dicts and lists of tensors and numbers) as named tensors and plain JSON, and back. No pickle."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.manifest import FLOATS
from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives

# Plain state, as it is in the manifest.
JsonDict = dict[str, Any]

# A dict with one of these keys, and no other, encodes a value that JSON cannot represent. They are part of the file
# format (see CONTRIBUTING).
_MARKERS = {"$tensor", "$on_device", "$array", "$tuple", "$items", "$float"}


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

        case np.ndarray() if value.dtype != object:
            tensors[name] = torch.from_numpy(np.array(value))
            return {"$array": name}

        case np.generic() if not isinstance(value.item(), np.generic):
            return pack(value.item(), name, tensors)

        case None | bool() | str():
            return value

        case int():
            # Subclasses, such as enums, become plain numbers.
            return int(value)

        case float():
            # Strict JSON has no NaN and no infinity.
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}

        case list():
            return [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]

        case tuple():
            return {"$tuple": pack(list(value), name, tensors)}

        case dict():
            return _pack_dict(value, name, tensors)

    raise UserError(
        f"{name} cannot be saved: a {type(value).__name__} is neither a tensor nor a plain value",
        "",
        "let its state_dict() return only tensors, numbers, strings, lists and dicts: a checkpoint holds no pickle",
    )


def _pack_dict(value: dict[Any, Any], name: str, tensors: MutableMapping[str, Tensor]) -> JsonDict:
    if all(isinstance(key, str) for key in value) and not _MARKERS & value.keys():
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
        case {"$float": text}:
            return FLOATS[text]
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


def gather_state(collectives: Collectives, state: Any) -> list[Any]:
    """Return the `state` of every rank, by rank: nested plain values, tensors and arrays. Collective; no pickle."""
    if collectives.world.alone:
        return [state]

    tensors: dict[str, Tensor] = {}
    packed = pack(state, "state", tensors)
    by_rank = collectives.gather_json([packed, list(tensors)])
    tensors_by_rank = collectives.gather_tensors(list(tensors.values()))

    states = []
    for (packed, names), received in zip(by_rank, tensors_by_rank, strict=True):
        # Received on the device of the collectives. `unpack` returns to the device what was not on the CPU.
        host = {name: tensor.cpu() for name, tensor in zip(names, received, strict=True)}
        states.append(unpack(packed, host.__getitem__, collectives.device))

    return states
