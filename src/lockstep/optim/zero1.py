"""ZeRO-1: every rank keeps the optimizer's state of its own part of the parameters, updates those, and passes them on.

Gradients come from DDP as always. What is saved is the state of some parameters, not of all, on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.context import Runtime


class ShardedOptimizers(Optimizers):
    def __init__(self, made: Any, model: nn.Module, runtime: Runtime):
        super().__init__(made, model)
        self._runtime = runtime
        self._owned = deal_by_bytes(self.parameters(), runtime.world.size)
        mine = {id(p) for p in self._owned[runtime.world.rank]}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in mine]
            for p in [p for p in optimizer.state if id(p) not in mine]:  # some set it up at once
                del optimizer.state[p]

    def step(self, divisor: Tensor | None = None, skip: Tensor | None = None) -> None:
        super().step(divisor, skip)
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                for dtype in dict.fromkeys(p.dtype for p in parameters):
                    self._pass_on([p for p in parameters if p.dtype == dtype], owner)

    def _pass_on(self, parameters: list[nn.Parameter], owner: int) -> None:
        """All at once, from their owner to everybody."""
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self._runtime.collectives.broadcast_([flat], owner)
        if owner != self._runtime.world.rank:
            parts = flat.split([p.numel() for p in parameters])
            torch._foreach_copy_([p.detach().view(-1) for p in parameters], list(parts))


def deal_by_bytes(parameters: list[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Whole parameters, about equally many bytes for each; the same deal on every rank."""
    owned: list[list[nn.Parameter]] = [[] for _ in range(count)]
    loads = [0] * count
    for p in sorted(parameters, key=lambda p: -p.nbytes):  # a stable sort: equals stay in the order of the model
        owner = loads.index(min(loads))
        owned[owner].append(p)
        loads[owner] += p.nbytes
    return owned
