"""Digests of frozen parameters, which a checkpoint holds in place of their values (checkpoint.frozen=false)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.state.state_tree import digest
from lockstep.runtime.layout import checksums, full_tensor


class FrozenDigests:
    """Computes digests once, and again if a parameter has changed after all, like a teacher that follows the model.

    A digest copies the full tensor to the host. Whether it has changed is told by torch's count of changes in place,
    and by a checksum on the device, because a change through `.data` is not counted.
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
