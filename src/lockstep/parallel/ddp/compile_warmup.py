"""Compile forward and backward on all replicas before the first gradient all-reduce.

Otherwise the backward would be compiled while other ranks already wait in the first all-reduce, which might time out.
With the warm-up, ranks that finish early wait at a barrier of the store instead, for at most `hang.first`.

The warm-up runs only inside a step, which every rank reaches. A call elsewhere (on rank 0 only, to print a shape) does
not trigger it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.call_arguments import OpaqueValue, flatten
from lockstep.parallel.call_chain import CallChain, Link
from lockstep.parallel.call_state import StateSnapshot, TrialCall
from lockstep.runtime.context import Runtime


def warm_up_compile(model: nn.Module, config: RunConfig, runtime: Runtime) -> None:
    """Install the warm-up on a compiled model, in place.

    If a forward is collective (fsdp, tp, SyncBatchNorm), no warm-up is needed: the ranks compile in step anyway.
    """
    synchronised = any(map(is_synchronised, model.modules()))
    collective = not config.strategy_record.local_forward or config.uses_axis("tp") or synchronised
    if not collective and not runtime.world.alone:
        CallChain.of(model).install("warmup", CompileWarmup(model, runtime, timedelta(seconds=config.hang.first)))


class CompileWarmup(Link):
    """The link of a model's call chain that compiles before the first training forward.

    Compiling takes minutes, and not equally many on all ranks. It must be over before the first collective, whose
    timeout is shorter than that.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, timeout: timedelta):
        self.model = model
        self.runtime = runtime
        self.timeout = timeout
        self._pending = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        heartbeat = self.runtime.heartbeat
        if self._pending and torch.is_grad_enabled() and heartbeat.phase == "compute":
            # Only once, even if the trial fails.
            self._pending = False
            heartbeat.beat("compile")
            self._trial(args, kwargs)

            heartbeat.beat("collective")
            heartbeat.set_detail("compiled")

            # A barrier of the store, because the timeout of a collective is shorter.
            if not self.runtime.store_barrier("compiled", self.timeout):
                seconds = f"{self.timeout.total_seconds():.0f}"
                raise UserError(
                    f"some ranks had not compiled the model after {seconds} s (hang.first={seconds})",
                    "all ranks must have compiled it before their first gradient all-reduce",
                    "set hang.first=3600, or compile=false",
                )

            heartbeat.beat("compute")

        return self.inner(*args, **kwargs)

    def _trial(self, args: Any, kwargs: Any) -> None:
        """Compile forward and backward by running both once, without side effects."""
        device = self.runtime.device
        generators = torch.cuda.default_generators if device.type == "cuda" else [torch.default_generator]

        # Frozen parameters get no gradient and need no compiled code for it.
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        # If the arguments are opaque, or a second set of gradients does not fit into memory, there is no trial and the
        # call is compiled later, when it first runs.
        with StateSnapshot(self.model, generators[device.index or 0]), suppress(OpaqueValue, torch.OutOfMemoryError):
            tensors, spec = flatten((args, kwargs))
            trial = TrialCall(self.inner, parameters, tensors, spec, device.type)
            trial.forward()
            # Any gradient will do, since only the compiled code is needed.
            trial.backward([torch.ones_like(output) for output in trial.differentiable])
