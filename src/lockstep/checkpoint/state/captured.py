"""The tensors of a run's state, with what decides when each is copied and which rank writes it."""

from __future__ import annotations

from collections import ChainMap
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.checkpoint.state.state_tree import pack


class CapturedTensor(NamedTuple):
    """A tensor of the state. It is neither copied nor gathered."""

    tensor: Tensor

    # The parameter or buffer to which it belongs: it is that, its average, or in the state that an optimizer keeps for
    # it. None: it belongs to none.
    parameter: str | None = None

    # The stateful object in whose state it is. It may differ between ranks: unless it is a DTensor, rank 0's is saved.
    owner: str | None = None

    # Whether it may be copied while training continues, because it changes only after `Update.wait_for_copy`. The model
    # is copied at once: a forward may change its buffers, and the user's code its parameters.
    copy_later: bool = False


def pack_into(
    tensors: dict[str, CapturedTensor],
    value: Any,
    name: str,
    *,
    parameter: str | None = None,
    owner: str | None = None,
    copy_later: bool = False,
) -> Any:
    """Encode `value` as `pack` does, and add the tensors in it to `tensors`."""
    # `pack` adds to the first of the two, and avoids the names in both.
    added: dict[str, Any] = {}
    names: ChainMap[str, Any] = ChainMap(added, tensors)
    packed = pack(value, name, names)
    tensors.update({key: CapturedTensor(tensor, parameter, owner, copy_later) for key, tensor in added.items()})
    return packed
