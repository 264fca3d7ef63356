"""Digests of any state, and those of frozen parameters, which a checkpoint may hold in place of their values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.runtime.shards import as_bytes, checksums, full_tensor


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


class FrozenDigests:
    """Computes the digests of frozen parameters once (with checkpoint.frozen=false).

    It computes them again if a parameter has changed after all, for example of a teacher whose weights
    are an average of the model's.

    A digest copies the full tensor to the host. Whether it has changed is seen from torch's count of in-place
    changes, and from a checksum on the device, because a change through `.data` is not counted.
    """

    def __init__(self, parameters: Mapping[str, Tensor], on_any_rank: Callable[[bool], bool]):
        """`on_any_rank` returns whether a value is true on any rank. Only sharded parameters need it."""
        self._parameters = dict(sorted(parameters.items()))
        self._on_any_rank = on_any_rank
        self._is_sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        self._seen: list[tuple[int, int]] | None = None
        self._digests: dict[str, str] = {}

    def current(self) -> dict[str, str]:
        """Return the digests by name. Collective if parameters are sharded."""
        if not self._parameters:
            return {}

        parameters = self._parameters.values()
        seen = list(zip(checksums(parameters), (p._version for p in parameters), strict=True))
        changed = seen != self._seen
        if self._on_any_rank(changed) if self._is_sharded else changed:
            self._digests = {name: digest(full_tensor(p)) for name, p in self._parameters.items()}
            self._seen = seen

        return dict(self._digests)
