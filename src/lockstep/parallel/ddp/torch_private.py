"""The private members of torch's DDP that Lockstep uses. No other module knows them (torch 2.11 to 2.15).

DDP's public options neither choose the order in which parameters fill the buckets, nor keep the buckets of the first
step, nor leave out parameters. torch.compile asks it which DDP is in its forward, and freeing a DDP may hang.
`BUFFERS_OPTION` is public, but its name depends on torch's version.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The option that broadcasts buffers before every forward; torch 2.13 renamed it.
BUFFERS_OPTION = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class FixedBucketsDDP(DistributedDataParallel):
    """DDP that assigns parameters to buckets once and for all, from the last parameter to the first.

    torch would assign them again after the first step, and a resumed run would differ in its last bits: with three or
    more ranks, the position of a gradient in its bucket determines the order in which the ranks are added.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()
        free_group_last(self)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Reverse the parameters: buckets then fill in about the order in which gradients are computed."""
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


def leave_out(module: nn.Module, names: Sequence[str]) -> None:
    """Let DDP neither reduce nor broadcast these parameters and buffers. Call it before DDP is constructed."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def split_graphs(ddp: DistributedDataParallel | None) -> None:
    """Let torch.compile split what it compiles from now on at the buckets of `ddp`, and not at all if that is None.

    A compiled backward returns all its gradients at its end. Split, it returns those of one bucket after another, which
    are reduced while it goes on. torch does this for what it compiles inside DDP's own forward.
    """
    DistributedDataParallel._active_ddp_module = ddp


def free_group_last(ddp: DistributedDataParallel) -> None:
    """Keep the process group until the C++ parts of `ddp` are freed, so that freeing them cannot hang.

    This works around pytorch/pytorch#56297. If the process group is destroyed while `ddp` is alive, its reducer has the
    last reference to the group, and frees it while it holds the GIL. With gloo that waits for threads which may need
    the GIL themselves, to release the tensors of the last collective. Python's own reference to a group releases the
    GIL, so that one has to be the last. torch 2.14 has a fix: tests/unit/parallel/ddp/test_torch_private.py shows it.
    """
    # The logger has a reference to the reducer. At exit these references stay: `ddp` may live longer than that.
    for part in (ddp.reducer, ddp.logger):
        finalizer = weakref.finalize(part, lambda group: None, ddp.process_group)
        finalizer.atexit = False  # pyrefly: ignore[missing-attribute]
