"""Replicas that exchange all gradients at once, after the last backward. Slower than DDP's buckets, which travel while
backward runs, but nothing is expected of the graph: parameters may be unused on some ranks, in some micro-batches, or
everywhere."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.parallel.driver import SingleDriver
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord


class FlatDriver(SingleDriver):
    """A single process, as far as forward and backward go; then the sum over all of them."""

    def __init__(self, model: nn.Module, runtime: Runtime, broadcast_buffers: bool = False):
        super().__init__(model, runtime.device)
        self.runtime, self._broadcasts_buffers = runtime, broadcast_buffers
        runtime.collectives.broadcast_([p.detach() for p in self.parameters])
        self.sync_buffers()

    def begin(self) -> None:
        super().begin()
        if self._broadcasts_buffers:
            self.sync_buffers()

    def sync_buffers(self) -> None:
        self.runtime.collectives.broadcast_(list(self.model.buffers()))

    def _reduce(self, word: ControlWord) -> None:
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.float64)
        packed = torch.cat([self.codec.pack(word, times=1.0), used.to(self.runtime.device)])
        self.runtime.collectives.sum_(packed)
        self._word, users = packed[:LENGTH], packed[LENGTH:].tolist()
        # Unused by everybody: no gradient at all, so that the optimizer leaves it alone, as in a single process.
        live = [p for p, count in zip(self.parameters, users, strict=True) if count > 0]
        for dtype in dict.fromkeys(p.dtype for p in live):  # in one order on all ranks, which a set would not keep
            group = [p for p in live if p.dtype == dtype]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            flat = torch.cat([grad.flatten() for grad in grads])
            wide = torch.promote_types(dtype, torch.float32)  # what is stored in less is rounded once
            flat = self.runtime.collectives.sum_(flat.to(wide)).to(dtype)
            for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
                p.grad = part.view_as(p)
