"""The first call of a compiled model, with other ranks: everything is compiled before anybody waits for a gradient.

Otherwise the backward is compiled inside the first exchange, where ranks that are done sooner wait in a collective with
a limit of its own. Here they meet over the store, with the patience for what was never done before (`hang.first`).

Only inside a step: that is where every rank comes to. A call elsewhere (on rank 0 only, to print a shape) is plain.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.cudagraph.captures import Trip
from lockstep.parallel.surroundings import SourceContext
from lockstep.parallel.trees import Opaque, take_apart
from lockstep.runtime.context import Runtime


def compile_together(model: nn.Module, config: RunConfig, runtime: Runtime) -> None:
    """In place, for a compiled model. Where a forward needs the other ranks, they compile in step anyway."""
    alike = config.strategy in ("ddp", "zero1") and (config.mesh.tp or 1) == 1 and not config.ddp.sync_batchnorm
    if alike and not runtime.world.alone:
        call = model._compiled_call_impl or model._call_impl  # a model may compile its parts only
        model._compiled_call_impl = FirstCall(model, call, runtime, timedelta(seconds=config.hang.first))


class FirstCall:
    """Stands where torch looks for the compiled call of a module. `call`: what was there."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], runtime: Runtime, patience: timedelta):
        self.model, self.call, self.runtime, self.patience = model, call, runtime, patience
        self._cold = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        heartbeat = self.runtime.heartbeat
        if self._cold and torch.is_grad_enabled() and heartbeat.phase == "compute":
            self._cold = False
            heartbeat.beat("compile")
            self._there_and_back(args, kwargs)
            heartbeat.beat("agree")
            heartbeat.set_detail("compiled")
            self._meet()
            heartbeat.beat("compute")
        return self.call(*args, **kwargs)

    def _there_and_back(self, args: Any, kwargs: Any) -> None:
        """Once more than asked for, without a trace: only to have it compiled."""
        device = self.runtime.device
        on_cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if on_cuda else torch.default_generator
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        # What raises is compiled when it is needed: a second set of gradients did not fit, or the call is of a
        # strange kind.
        with SourceContext(self.model, generator), suppress(Opaque, torch.OutOfMemoryError):
            tensors, rest = take_apart((args, kwargs))
            trip = Trip(self.call, parameters, tensors, rest, device.type)
            trip.forward()
            trip.backward([torch.ones_like(output) for output in trip.differentiable])

    def _meet(self) -> None:
        if not self.runtime.meet("compiled", self.patience):
            raise UserError(
                "all ranks have compiled the model before their first exchange",
                f"some had not after {self.patience.total_seconds():.0f} s",
                "type hang.first=3600, or compile=false",
            )
