"""Replicas that reduce all gradients at once, after the last backward.

Slower than DDP's buckets, which are reduced while backward runs, but nothing is expected of the graph: parameters may
be unused on some ranks, in some micro-batches, or everywhere.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.parallel.driver import SingleDriver, broadcast_model
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord


class UnusedParametersDriver(SingleDriver):
    """A single process as far as forward and backward go; then one sum over all ranks."""

    def __init__(self, model: nn.Module, runtime: Runtime, broadcast_buffers: bool = False):
        super().__init__(model, runtime.device)
        self.runtime = runtime
        self.broadcasts_buffers = broadcast_buffers
        broadcast_model(model, runtime.collectives)

    def sync_buffers(self) -> None:
        self.runtime.collectives.broadcast_(list(self.model.buffers()))

    def _reduce(self, word: ControlWord) -> None:
        # The first sum carries the control word and says which parameters any rank has used.
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float64)
        packed = torch.cat([self.codec.pack(word, times=1.0), used.to(self.runtime.device)])
        self.runtime.collectives.sum_(packed)
        self._word = packed[:LENGTH]

        # Unused on all ranks: no gradient at all, so that the optimizer leaves it alone, as in a single process.
        live = [p for p, users in zip(self.parameters, packed[LENGTH:].tolist(), strict=True) if users > 0]

        # One sum for each dtype, in the same order on all ranks (a set would not keep it).
        for dtype in dict.fromkeys(p.dtype for p in live):
            self._sum_gradients([p for p in live if p.dtype == dtype], dtype)

    def _sum_gradients(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([grad.flatten() for grad in grads])

        # Half-precision gradients are added in float32 and rounded once.
        flat = self.runtime.collectives.sum_(flat.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
