"""Checks for `exact`, beyond the order of additions (see parallel/exact).

No result may depend on the rank that computes it. Everything that determines the bits (threads, torch's version, the
device) must be the same on every rank and after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config.changes import Change
from lockstep.errors import UserError
from lockstep.optim.optimizers import Optimizers
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.task import BatchSource

ORDER_SETTINGS = ("micro_batch", "global_batch", "blocks")  # these determine the order in which gradients are added


class Exactness(StepPart):
    """Checks that one run keeps the promise of `exact`.

    Its state in a checkpoint describes the platform, and a resumed run compares it with its own.
    """

    slot = "exact"

    def __init__(self, model: nn.Module, optimizers: Optimizers, runtime: Runtime, changing: Sequence[str] = ()):
        """`changing` is the task's `changing_buffers`."""
        # Refuse problems that are already known. Changes by a forward show only after the first step: see `end_step`.
        _check_changing(model, changing)
        _check_batchnorm(model)

        self.model = model
        self.platform = _agreed_platform(runtime)
        self._changes: list[Change] = []  # changes of the platform since the loaded checkpoint
        self._unfused = _switch_off_fused(optimizers)
        self._first_buffers: dict[str, Tensor] = {}  # copies from before the first step of this process

    def begin(self, source: BatchSource, plan: Plan, changed_settings: list[Change]) -> str:
        """Check the source and return a line for the banner, which names what has changed since the checkpoint."""
        if source.step_order is None:
            raise UserError(
                f"exact=true cannot be used with data from a {type(source).__name__}",
                "which samples make up a micro-batch would depend on the number of ranks",
                "return a dataset with a length and __getitem__; or leave exact out",
            )

        # Clone the buffers only now, after a resume may have restored them.
        self._first_buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

        ranks = plan.global_num_micro_batches
        text = f"the same bits on 1 to {ranks} ranks, with {self.platform['threads']} CPU thread(s) each"
        if self._unfused:
            text += "; fused optimizers step without their fused kernels"

        # Changes of other settings, such as the learning rate, are meant to change the bits and are not reported here.
        order_changes = [change for change in changed_settings if change.key in ORDER_SETTINGS]
        changes = [*self._changes, *order_changes]
        if changes:
            text += f"; NOT the same bits as before, because this has changed: {', '.join(map(str, changes))}"

        return text

    def end_step(self, progress: PassProgress) -> None:
        """Check after the first step of this process that no buffer changed.

        Buffers that a forward changes (running statistics, counters) depend on the samples that a rank saw. Those of
        rank 0 are saved and used in evaluations, so the result would depend on the number of ranks.
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
        # The user can restore the number of threads. Other changes of the platform are reported in the banner.
        threads = self.platform["threads"]
        if state["threads"] != threads:
            raise UserError(
                f"exact=true with {threads} CPU threads per rank cannot resume a run with {state['threads']}",
                "kernels add in a different order with a different number of threads",
                f"set threads={state['threads']}",
            )

        self._changes = [Change(key, state[key], now) for key, now in self.platform.items() if state[key] != now]


def _check_changing(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse the task's `changing_buffers`, which `exact` does not allow, and names in it that are not buffers."""
    known = [name for name, _ in model.named_buffers()]

    # A string is a sequence too, of letters.
    changing = [] if isinstance(names, str) else list(names)

    # Because the task declares the buffer, it is refused before the first step rather than after it.
    for name in changing:
        if name in known:
            raise _changing_buffer(f"the buffer {name!r} changes in training", "the task's changing_buffers says so")

    if isinstance(names, str):
        problem = "is a string, not a tuple of names"
    elif changing:
        problem = f"names {changing[0]!r}, which is no buffer of the model"
    else:
        return

    raise UserError(
        f"changing_buffers={names!r} in the task {problem}",
        "",
        f"name some of these, as a tuple: {', '.join(known) or 'the model has no buffers'}",
    )


def _check_batchnorm(model: nn.Module) -> None:
    """Refuse a BatchNorm whose running statistics would change in training."""
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
    """Return a description of the platform, after checking that it is the same on all ranks. Collective."""
    # torch chooses kernels by the device's model and the CPU's instruction set, and versions have different kernels.
    device = runtime.device
    local = {
        "threads": runtime.threads.count,
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }

    # Every rank compares with rank 0, so all of them raise the same error.
    first, *others = runtime.collectives.all_gather_json(local)
    for rank, other in enumerate(others, start=1):
        for key, value in first.items():
            if other[key] != value:
                raise UserError(
                    f"exact=true needs equal ranks, and {key} is {value} on rank 0 and {other[key]} on rank {rank}",
                    "",
                    "run on machines of one kind, with one version of torch; or set exact=false",
                )

    return local


def _switch_off_fused(optimizers: Optimizers) -> bool:
    """Switch off the fused kernels of all optimizers, and return whether there were any.

    On a CPU, fused kernels round the last elements of a tensor differently from the others, so the result would depend
    on how a tensor is sharded. Without them the algorithm is the same.
    """
    groups = [group for optimizer in optimizers.all for group in optimizer.param_groups]
    fused = [group for group in groups if group.get("fused")]
    for group in fused:
        group["fused"] = False

    # Only fused kernels divide the gradients and skip the step by themselves.
    optimizers.divides_gradients = False
    optimizers.skips_on_device = False
    return bool(fused)
