"""ZeRO-1: the state of the optimizers is sharded over the ranks by whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.context import Runtime
from lockstep.runtime.shards import balance


class ShardedOptimizers(Optimizers):
    """Every rank holds the optimizer state of some parameters, updates these, and broadcasts them.

    DDP reduces the gradients as usual. Whole parameters are assigned to ranks, balanced by size. In a checkpoint each
    rank saves the state of the parameters that it owns.
    """

    sharded = True

    def __init__(self, optimizers: Any, model: nn.Module, runtime: Runtime):
        super().__init__(optimizers, model)
        self.refuse_coupled("under zero1 a rank")
        self._runtime = runtime

        parameters = self.parameters()
        ranks = range(runtime.world.size)
        owners = balance([p.nbytes for p in parameters], [ranks] * len(parameters))
        self._owned: list[list[nn.Parameter]] = [[] for _ in ranks]
        for p, owner in zip(parameters, owners, strict=True):
            self._owned[owner].append(p)

        owned = {id(p) for p in self._owned[runtime.world.rank]}
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in owned]

            # Some optimizers, such as Adagrad, create their state in the constructor.
            for p in [p for p in optimizer.state if id(p) not in owned]:
                del optimizer.state[p]

    def _after_step(self) -> None:
        """Broadcast every rank's parameters. Collective: every rank must step."""
        with torch.no_grad():
            for owner, parameters in enumerate(self._owned):
                # A flat buffer has one dtype.
                for dtype in dict.fromkeys(p.dtype for p in parameters):
                    self._broadcast([p for p in parameters if p.dtype == dtype], owner)

    def _broadcast(self, parameters: list[nn.Parameter], owner: int) -> None:
        """Send updated parameters from the rank that has updated them to the others, as one tensor."""
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self._runtime.collectives.broadcast_([flat], owner)
        if owner != self._runtime.world.rank:
            # Not a flat view of the parameter: it may lie in memory in another order (channels_last).
            received = flat.split([p.numel() for p in parameters])
            values = [part.view(p.shape) for part, p in zip(received, parameters, strict=True)]
            torch._foreach_copy_([p.detach() for p in parameters], values)
