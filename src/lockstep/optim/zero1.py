"""ZeRO-1: every rank keeps the optimizer state of some parameters, updates those, and broadcasts them.

Gradients come from DDP as always. In a checkpoint each rank saves the state of its own parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.context import Runtime


class ShardedOptimizers(Optimizers):
    """Optimizers whose parameters are dealt to the ranks by their bytes, each as a whole."""

    def __init__(self, made: Any, model: nn.Module, runtime: Runtime):
        super().__init__(made, model)
        self._runtime = runtime
        self._owned = deal_by_bytes(self.parameters(), runtime.world.size)
        own = {id(p) for p in self._owned[runtime.world.rank]}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in own]
            # Some optimizers, such as Adagrad, set up their state in the constructor.
            for p in [p for p in optimizer.state if id(p) not in own]:
                del optimizer.state[p]

    def step(self, number: int, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Step this rank's parameters, then broadcast them. Collective: every rank must call it.

        The arguments are those of `Optimizers.step`.
        """
        super().step(number, divisor, skip)
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                # A flat buffer has one dtype.
                for dtype in dict.fromkeys(p.dtype for p in parameters):
                    self._broadcast([p for p in parameters if p.dtype == dtype], owner)

    def _broadcast(self, parameters: list[nn.Parameter], owner: int) -> None:
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self._runtime.collectives.broadcast_([flat], owner)
        if owner != self._runtime.world.rank:
            parts = flat.split([p.numel() for p in parameters])
            torch._foreach_copy_([p.detach().view(-1) for p in parameters], list(parts))


def deal_by_bytes(parameters: list[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Deal parameters to `count` ranks, about the same number of bytes for each.

    The largest comes first, and goes to the rank with the fewest bytes. Every rank computes the same deal.
    """
    owned: list[list[nn.Parameter]] = [[] for _ in range(count)]
    loads = [0] * count
    # The sort is stable: parameters of equal size stay in the order of the model.
    for p in sorted(parameters, key=lambda p: -p.nbytes):
        owner = loads.index(min(loads))
        owned[owner].append(p)
        loads[owner] += p.nbytes
    return owned
