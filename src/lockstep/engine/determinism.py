"""What `exact` asks of a run beyond the order of additions: nothing in it that depends on who computes, and the same
surroundings on every rank and in every part of the run."""

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

WEIGHT_GRID = 2.0**32  # weights count in steps of 1/this: below 2^21 a step their sums are exact in any order
LOSS_GRID = 2.0**20  # losses, where they are watched for spikes: exact below 2^33


ROUNDING = 1e-6  # of a weight: what its grid may change
CUT = ("micro_batch", "global_batch")  # settings that decide which gradients are added


def on_grid(value: float | Tensor, grid: float) -> Any:
    """The nearest multiple of 1/grid."""
    if isinstance(value, Tensor):
        return torch.round(value.double() * grid) / grid
    return round(value * grid) / grid if math.isfinite(value) else value


def check_weight(weight: float) -> None:
    """A weight that the grid changes would train another model."""
    if abs(on_grid(weight, WEIGHT_GRID) - weight) > ROUNDING * weight:
        raise UserError(
            f"exact=true with a weight of {weight:.3g}",
            "weights count in multiples of 2^-32 there, and this one would be changed",
            "multiply the loss and its weight by one large number, which changes nothing else: 1e6, for instance",
        )


class Exactness:
    """Of one run. A checkpoint keeps what decides about bits beside the program: it must be as it was."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, runtime: Runtime, changing: Sequence[str] = ()):
        """`changing`: the buffers that the task says its training changes."""
        _check_changing(model, changing)
        _check_batchnorm(model)
        self.model = model
        self.here = _surroundings(runtime)
        self._changes: list[Change] = []  # since the checkpoint that was loaded
        self._unfused = _step_one_by_one(optimizers)
        self._buffers: dict[str, Tensor] = {}  # as the first step of this process finds them

    def begin(self, source: BatchSource, plan: Plan, settings: list[Change]) -> str:
        """With the data known. `settings`: those that a resumed run has changed. What is told before the first step."""
        if not isinstance(source, MapSource):
            raise UserError(
                "exact=true",
                f"data from a {type(source).__name__}: which samples make up a micro-batch follows the number of ranks",
                "return a dataset with a length and __getitem__; or leave exact out",
            )
        self._buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        changes = [*self._changes, *(setting for setting in settings if setting.key in CUT)]
        told = [f"the same bits on 1 to {plan.micro_batches} ranks, with {self.here['threads']} CPU thread(s) each"]
        told += ["fused optimizers step without their fused kernels"] if self._unfused else []
        told += [f"NOT the bits of before, since this has changed: {', '.join(map(str, changes))}"] if changes else []
        return "; ".join(told)

    def end_step(self) -> None:
        """After the first step, look at the buffers. Those that a forward changes (running statistics, counters) follow
        what a rank has seen; rank 0's are saved and evaluated, so they would carry the number of ranks into the
        result."""
        for name, before in self._buffers.items():
            if not torch.equal(self.model.get_buffer(name).detach(), before):
                raise _changing_buffer(name, "changed in the first step; it follows the samples that a rank has seen")
        self._buffers = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.here)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["threads"] != self.here["threads"]:
            raise UserError(
                f"exact=true with {self.here['threads']} CPU threads per rank",
                f"a checkpoint of a run with {state['threads']}: kernels add in another order with another number",
                f"type threads={state['threads']}",
            )
        self._changes = [Change(key, state[key], now) for key, now in self.here.items() if state[key] != now]


def _check_changing(model: nn.Module, names: Sequence[str]) -> None:
    """`names`: a task's `changing_buffers`."""
    known = [name for name, _ in model.named_buffers()]
    wrong = "a text, not a tuple of names" if isinstance(names, str) else None
    for name in names if wrong is None else ():
        if name in known:
            raise _changing_buffer(name, "changes in training, as the task says")
        wrong = f"no buffer {name!r} in the model"
    if wrong is not None:
        raise UserError(
            f"changing_buffers={names!r} in the task",
            wrong,
            f"name some of these, as a tuple: {', '.join(known) or 'the model has no buffers'}",
        )


def _changing_buffer(name: str, what: str) -> UserError:
    return UserError(
        "exact=true with a model whose buffers stay as they are in training",
        f"the buffer {name!r} {what}",
        "keep such numbers in the task, or compute them from the step; or leave exact out",
    )


def _surroundings(runtime: Runtime) -> dict[str, Any]:
    """The same on all ranks, or a refusal."""
    device = runtime.device
    here = {
        "threads": runtime.threads,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    everybody = runtime.collectives.gather_json(here)
    for rank, theirs in enumerate(everybody):
        for key, value in everybody[0].items():
            if theirs[key] != value:
                raise UserError(
                    "exact=true, which needs ranks that compute alike",
                    f"{key} is {value} on rank 0 and {theirs[key]} on rank {rank}",
                    "run on machines of one kind, with one version of torch; or type exact=false",
                )
    return here


def _check_batchnorm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            raise UserError(
                "exact=true with a model whose buffers stay as they are in training",
                f"{name or type(model).__name__} is a {type(module).__name__}: its running statistics follow the "
                "samples that a rank has seen",
                "use GroupNorm; or pass track_running_stats=False, which leaves the statistics of each micro-batch",
            )


def _step_one_by_one(optimizers: Optimizers) -> bool:
    """Fused optimizers round the last elements of a tensor otherwise than the others (on a CPU), so what they do
    depends on where a tensor is cut. The same algorithms without that: whether there was anything to change."""
    fused = [group for optimizer in optimizers.all for group in optimizer.param_groups if group.get("fused")]
    for group in fused:
        group["fused"] = False
    optimizers.folds = optimizers.skips_by_itself = False
    return bool(fused)
