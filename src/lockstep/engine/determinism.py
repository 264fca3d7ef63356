"""What `exact` requires of a run beyond the order of additions.

Nothing in the run may depend on which rank computes it, and everything that determines the bits (threads, torch, the
device) must be the same on every rank and after every resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.checkpoint.run_state import Change
from lockstep.data.sources import MapSource
from lockstep.errors import UserError
from lockstep.optim.optimizers import Optimizers
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.task import BatchSource

# Sums of multiples of a power of two are exact in any order, as long as they stay below 2^53 of these units.
# So the device can sum control words. Log lines hold numbers of any size: `ExactSums` adds those on the host.
WEIGHT_GRID = 2.0**32  # weights are multiples of 1/this: their sums are exact below 2^21 a step
LOSS_GRID = 2.0**20  # losses, where they are watched for spikes: exact below 2^33

MAX_ROUNDING = 1e-6  # relative: how much its grid may change a weight
ORDER_SETTINGS = ("micro_batch", "global_batch", "blocks")  # that decide which gradients are added, in which order


def on_grid(value: float | Tensor, grid: float) -> Any:
    """Return the nearest multiple of 1/grid. `value` is a number, or a tensor of any shape."""
    if isinstance(value, Tensor):
        return torch.round(value.double() * grid) / grid
    return round(value * grid) / grid if math.isfinite(value) else value


def check_weight(weight: float) -> None:
    """Check that the grid does not change the weight: that would train another model."""
    if abs(on_grid(weight, WEIGHT_GRID) - weight) > MAX_ROUNDING * weight:
        raise UserError(
            f"exact=true cannot represent a weight of {weight:.3g}",
            "weights are multiples of 2^-32 there, and this one would be changed",
            "multiply the loss and its weight by one large number, which changes nothing else: 1e6, for instance",
        )


class Exactness:
    """Guards the promise of `exact` in one run.

    Its state in a checkpoint is what determines the bits outside the program: a resumed run compares it.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, runtime: Runtime, changing: Sequence[str] = ()):
        """`changing` names the buffers that training changes, as the task says."""
        _check_changing(model, changing)
        _check_batchnorm(model)
        self.model = model
        self.platform = _agreed_platform(runtime)
        self._changes: list[Change] = []  # since the checkpoint that was loaded
        self._unfused = _step_unfused(optimizers)
        self._first_buffers: dict[str, Tensor] = {}  # as the first step of this process finds them

    def begin(self, source: BatchSource, plan: Plan, changed_settings: list[Change]) -> str:
        """Check the source and return a line for the banner. A resumed run may have `changed_settings`."""
        if not isinstance(source, MapSource):
            raise UserError(
                f"exact=true cannot be used with data from a {type(source).__name__}",
                "which samples make up a micro-batch would depend on the number of ranks",
                "return a dataset with a length and __getitem__; or leave exact out",
            )

        # They are cloned only now, since resuming may have restored them.
        self._first_buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

        text = f"the same bits on 1 to {plan.micro_batches} ranks, with {self.platform['threads']} CPU thread(s) each"
        if self._unfused:
            text += "; fused optimizers step without their fused kernels"

        # Other settings may also change, such as the learning rate: the bits then differ because they are meant to.
        changes = [*self._changes, *(change for change in changed_settings if change.key in ORDER_SETTINGS)]
        if changes:
            text += f"; NOT the bits of before, since this has changed: {', '.join(map(str, changes))}"
        return text

    def end_step(self) -> None:
        """Check after the first step of this process that no buffer changed.

        Buffers that a forward changes (running statistics, counters) depend on the samples that a rank saw.
        Rank 0's are saved and evaluated, so they would carry the number of ranks into the result.
        """
        for name, before in self._first_buffers.items():
            if not torch.equal(self.model.get_buffer(name).detach(), before):
                raise _changing_buffer(
                    f"the buffer {name!r} changed in the first step", "it depends on the samples that a rank has seen"
                )
        self._first_buffers = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.platform)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Only the number of threads can be set back. Other changes are reported in the banner.
        threads = self.platform["threads"]
        if state["threads"] != threads:
            raise UserError(
                f"exact=true with {threads} CPU threads per rank cannot resume a run with {state['threads']}",
                "kernels add in another order with another number of threads",
                f"type threads={state['threads']}",
            )

        self._changes = [Change(key, state[key], now) for key, now in self.platform.items() if state[key] != now]


def _check_changing(model: nn.Module, names: Sequence[str]) -> None:
    """Check the task's `changing_buffers`: buffers of the model, and with `exact` there must be none."""
    known = [name for name, _ in model.named_buffers()]
    changing = [] if isinstance(names, str) else list(names)

    # Declaring such a buffer lets the task be refused before the first step rather than after it.
    for name in changing:
        if name in known:
            raise _changing_buffer(f"the buffer {name!r} changes in training", "the task's changing_buffers says so")

    if changing or isinstance(names, str):
        misspelt = f"names {changing[-1]!r}, which is no buffer of the model" if changing else ""
        raise UserError(
            f"changing_buffers={names!r} in the task {misspelt or 'is a string, not a tuple of names'}",
            "",
            f"name some of these, as a tuple: {', '.join(known) or 'the model has no buffers'}",
        )


def _check_batchnorm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        # In eval mode, or without running statistics, a forward changes no buffer.
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise UserError(
                f"exact=true needs buffers that training does not change, and {name or type(model).__name__} is a "
                f"{type(module).__name__}",
                "its running statistics depend on the samples that a rank has seen",
                "use GroupNorm; or pass track_running_stats=False, which leaves the statistics of each micro-batch",
            )


def _changing_buffer(problem: str, reason: str) -> UserError:
    return UserError(
        f"exact=true needs buffers that training does not change, and {problem}",
        reason,
        "keep such numbers in the task, or compute them from the step; or leave exact out",
    )


def _agreed_platform(runtime: Runtime) -> dict[str, Any]:
    """Return what determines the bits outside the program, after checking that it is the same on all ranks."""
    # Kernels are chosen by the device's model and the CPU's instruction set and change with torch's version.
    device = runtime.device
    own = {
        "threads": runtime.threads.count,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }

    first, *others = runtime.collectives.gather_json(own)
    for rank, other in enumerate(others, start=1):
        for key, value in first.items():
            if other[key] != value:
                raise UserError(
                    f"exact=true needs equal ranks, and {key} is {value} on rank 0 and {other[key]} on rank {rank}",
                    "",
                    "run on machines of one kind, with one version of torch; or type exact=false",
                )

    return own


def _step_unfused(optimizers: Optimizers) -> bool:
    """Switch fused kernels off and return whether there were any.

    On a CPU they round the last elements of a tensor differently from the others, so that the result would depend on
    where a tensor is sharded. Without them the algorithm is the same.
    """
    fused = [group for optimizer in optimizers.all for group in optimizer.param_groups if group.get("fused")]
    for group in fused:
        group["fused"] = False

    # Only fused kernels divide the gradients and skip the step by themselves.
    optimizers.divides_gradients = False
    optimizers.skips_by_itself = False
    return bool(fused)
