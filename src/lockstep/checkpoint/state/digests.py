"""Digests of any state, and of frozen parameters, for which a checkpoint may hold digests in place of values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.runtime.shards import as_bytes, checksums, full_tensor

# The part of a repr that says where the object is: `<Image.Image image mode=RGB size=8x8 at 0x7F12A0>`.
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def digest(data: Any) -> str:
    """Return a digest of all tensors and values in `data`, nested in any way.

    The kind of each part, and its length or shape, are hashed before its contents: [1, 23] and [12, 3] differ. Of an
    object whose contents are not known, only the class counts.
    """
    sha = hashlib.sha256()

    # The digest of a single tensor is part of the file format (`FrozenDigests`). It has no kind.
    if isinstance(data, Tensor):
        _feed_tensor(sha, data)
    else:
        _feed(sha, data)

    return sha.hexdigest()


def _feed_tensor(sha: Any, tensor: Tensor) -> None:
    sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())

    # Every rank holds a different shard of a DTensor, so only its dtype and shape count.
    if not isinstance(tensor, DTensor):
        sha.update(as_bytes(tensor.cpu()).numpy().tobytes())


def _feed(sha: Any, data: Any) -> None:
    match data:
        case Tensor():
            sha.update(b"dtensor:" if isinstance(data, DTensor) else b"tensor:")
            _feed_tensor(sha, data)

        case np.ndarray() if data.dtype != object:
            # Not its repr, which omits digits, and the middle of a large array.
            sha.update(f"array:{data.dtype}{data.shape}".encode())
            sha.update(data.tobytes())

        case Mapping():
            # Sorted, since ranks may have filled it in different orders.
            keys = sorted(data, key=repr)
            _feed_items(sha, "mapping", [item for key in keys for item in (key, data[key])])

        case list():
            _feed_items(sha, "list", data)

        case tuple():
            _feed_items(sha, "tuple", data)

        case np.ndarray():
            _feed_items(sha, f"objects{data.shape}", data.ravel().tolist())

        case set() | frozenset():
            # Sorted, since the order of strings in a set differs between processes.
            _feed_items(sha, "set", sorted(data, key=repr))

        case _ if _holds_array(data):
            # A PIL image, for example, whose repr has an address.
            _feed_items(sha, "array of", [type(data).__qualname__, _array_of(data)])

        case _ if type(data).__repr__ is object.__repr__:
            # The default repr contains an address, so use the class and the attributes.
            _feed_items(sha, "object", [type(data).__qualname__, getattr(data, "__dict__", {})])

        case _:
            # A repr tells 1 from 1.0, True and "1". If it has an address, it differs between processes.
            text = repr(data)
            if not isinstance(data, str | bytes) and ADDRESS.search(text):
                text = type(data).__qualname__

            encoded = text.encode(errors="surrogatepass")
            sha.update(b"value:%d:" % len(encoded))
            sha.update(encoded)


def _holds_array(data: Any) -> bool:
    """Return whether an object gives its contents as an array. A numpy scalar does not need it: its repr is exact."""
    kind = type(data)
    return not isinstance(data, np.generic) and (hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"))


def _array_of(data: Any) -> np.ndarray | None:
    try:
        return np.asarray(data)
    except Exception:  # the object's own code
        return None


def _feed_items(sha: Any, kind: str, items: Sequence[Any]) -> None:
    sha.update(f"{kind}:{len(items)}:".encode())
    for item in items:
        _feed(sha, item)


class FrozenDigests:
    """Computes the digests of frozen parameters once (with checkpoint.frozen=false).

    It computes them again if a parameter has changed after all: the weights of a teacher may be an average of the
    model's weights.

    A digest copies the full tensor to the host. A change is noticed without that: by torch's count of in-place changes,
    and by a checksum on the device, because torch does not count a change through `.data`.
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
        if self._is_sharded:
            # All ranks compute a digest together: each holds a shard.
            changed = self._on_any_rank(changed)

        if changed:
            self._digests = {name: digest(full_tensor(p)) for name, p in self._parameters.items()}
            self._seen = seen

        return dict(self._digests)
