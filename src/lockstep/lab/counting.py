"""Counts the collectives that this rank calls, and their bytes.

It sees the calls below torch.distributed, so it also counts those that DDP and FSDP make by themselves. A grader can
judge traffic instead of trusting what a learner's code says about itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class CountedCollective:
    """One call: its name as in torch.distributed (all_reduce, ...), and the bytes of its largest side."""

    name: str
    bytes: int


NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}


class CountCollectives(TorchDispatchMode):
    """A context in which every collective of this thread is written down, those of DDP and FSDP as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CountedCollective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and write it down if it is a collective."""
        if func.namespace == "c10d" and func._opname in NAMES:
            largest = max(_bytes(argument) for argument in args)
            self.calls.append(CountedCollective(NAMES[func._opname], largest))

        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        """Return how often this collective was called."""
        return sum(call.name == name for call in self.calls)

    def bytes(self, name: str | None = None) -> int:
        """Return the bytes of all calls, or of those of one collective."""
        return sum(call.bytes for call in self.calls if name in (None, call.name))


def _bytes(argument: object) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(_bytes(item) for item in argument)
    return 0
