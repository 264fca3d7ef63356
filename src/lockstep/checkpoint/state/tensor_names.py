"""The names in a model's state dict: extra state, frozen parameters, and the other names of tied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lockstep.runtime.shards import to_local


def is_extra(name: str) -> bool:
    """Return whether a key of a state dict holds the result of a module's `get_extra_state`: any object."""
    return name.rpartition(".")[2] == "_extra_state"


def frozen_names(model: nn.Module) -> set[str]:
    """Return all names of the frozen parameters; tied ones have several."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def aliases_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the aliases of the tied tensors in a state dict: {other name: first name}."""
    return aliases_by_key({name: storage_key(value) for name, value in state.items() if not is_extra(name)})


def aliases_by_key(keys: Mapping[str, Any]) -> dict[str, str]:
    """Return {name: first name with an equal key}, without the first names themselves."""
    first_names: dict[Any, str] = {}
    first_of = {name: first_names.setdefault(key, name) for name, key in keys.items()}
    return {name: first for name, first in first_of.items() if first != name}


def storage_key(tensor: Tensor) -> Any:
    """Return a key that is equal for two tensors that share all their memory."""
    tensor = to_local(tensor)

    # An empty shard has no data pointer, but it has a storage object.
    if tensor.numel() == 0:
        return tensor.untyped_storage()._cdata

    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
