"""Encode state (nested dicts and lists of tensors and numbers) as named tensors and plain JSON, and back. No pickle.

Further below: the names of a model's state dict, and digests of any state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.manifest import FLOATS
from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.layout import as_bytes, local

# Plain state, as it is in the manifest.
JsonDict = dict[str, Any]

# A dict with one of these keys, and no other, encodes a value that JSON cannot represent. They are part of the file
# format (see CONTRIBUTING).
_MARKERS = {"$tensor", "$on_device", "$array", "$tuple", "$items", "$float"}


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
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


def _pack_dict(value: dict[Any, Any], name: str, tensors: dict[str, Tensor]) -> JsonDict:
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


def is_extra(name: str) -> bool:
    """Whether a key of a state dict holds the result of a module's `get_extra_state`, which may be any object."""
    return name.rpartition(".")[2] == "_extra_state"


def frozen_names(model: nn.Module) -> set[str]:
    """Return all names of the frozen parameters; tied ones have several."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the aliases of the tied tensors in a state dict: {other name: first name}."""
    return aliases_of({name: identity(value) for name, value in state.items() if not is_extra(name)})


def aliases_of(identities: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: first name with the same identity}, without the first names themselves."""
    first_names: dict[Any, str] = {}
    first_of = {name: first_names.setdefault(identity, name) for name, identity in identities.items()}
    return {name: first for name, first in first_of.items() if first != name}


def identity(tensor: Tensor) -> Any:
    """Return a key that is equal for two tensors that share all their memory."""
    tensor = local(tensor)

    # An empty shard has no data pointer, but it has a storage object.
    if tensor.numel() == 0:
        return tensor.untyped_storage()._cdata

    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def digest(data: Any) -> str:
    """Return a digest of all tensors and values in `data`, nested in any way."""
    sha = hashlib.sha256()
    _feed(sha, data)
    return sha.hexdigest()


def _feed(sha: Any, data: Any) -> None:
    match data:
        case Tensor():
            sha.update(f"{data.dtype}{tuple(data.shape)}".encode())

            # Every rank holds a different shard of a DTensor, so only its dtype and shape count.
            if not isinstance(data, DTensor):
                sha.update(as_bytes(data.cpu()).numpy().tobytes())

        case np.ndarray() if data.dtype != object:
            # Not its repr, which omits digits, and the middle of a large array.
            sha.update(f"{data.dtype}{data.shape}".encode())
            sha.update(data.tobytes())

        case Mapping():
            # Sorted, since ranks may have filled it in different orders.
            for key in sorted(data, key=str):
                sha.update(str(key).encode())
                _feed(sha, data[key])

        case list() | tuple() | np.ndarray():
            for value in data:
                _feed(sha, value)

        case set() | frozenset():
            # Sorted, since the order of strings in a set differs between processes.
            _feed(sha, sorted(data, key=repr))

        case _ if type(data).__repr__ is object.__repr__:
            # The default repr contains an address, so use the class and the attributes.
            sha.update(type(data).__qualname__.encode())
            _feed(sha, getattr(data, "__dict__", {}))

        case _:
            sha.update(repr(data).encode())
