"""What is stored, computed, reduced and optimized in which number format; the fp16 loss scale all ranks agree on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig, ScalerConfig
from lockstep.errors import UserError


@dataclass(frozen=True)
class Precision:
    """The dtype contract of a run. Parameters, gradients and optimizer state stay in the model's own fp32."""

    name: str
    compute: torch.dtype
    device_type: str

    @property
    def needs_scaler(self) -> bool:
        return self.name == "fp16"

    @property
    def casts(self) -> bool:
        return self.compute in (torch.bfloat16, torch.float16)

    def autocast(self) -> AbstractContextManager[Any]:
        if not self.casts:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute)

    def contract(self, stored: torch.dtype) -> str:
        """`stored`: the dtype of the parameters, in which gradients are reduced and the optimizer works."""
        own = str(stored).removeprefix("torch.")
        if stored == torch.float64 and not self.casts:
            return "everything float64"
        compute = "tf32" if self.name == "tf32" else str(self.compute).removeprefix("torch.")
        return f"stored {own}, computed {compute}, reduced {own}, optimizer {own}"


def choose(config: RunConfig, device: torch.device) -> Precision:
    """bf16 where the hardware has it, fp32 on a CPU; what was asked for by name is never changed silently."""
    on_cuda = device.type == "cuda"
    name = config.precision
    if name == "auto":
        name = "fp32" if not on_cuda else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    elif name == "tf32" and not on_cuda:
        raise UserError("precision=tf32", f"a run on {device.type}, which has no TF32", "type precision=fp32")
    elif name == "bf16" and on_cuda and not torch.cuda.is_bf16_supported():
        raise UserError("precision=bf16", f"{torch.cuda.get_device_name(device)} has no bf16", "type precision=fp16")
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    return Precision(name, compute, device.type)


def check_storage(model: nn.Module) -> None:
    """Trainable weights below fp32 swallow small updates without a word: refuse them."""
    low = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if low:
        raise UserError(
            "trainable parameters are the master weights and must be stored in float32",
            f"{len(low)} stored in half precision, first {low[0]!r}: updates below 1/256 of a weight would round away",
            "build the model with model.float(); precision=bf16 computes in bf16 from float32 weights",
        )


class DynamicScaler:
    """The fp16 loss scale: large enough that small gradients survive, halved when any rank overflows.

    It holds no tensor and asks no other rank: gradients are summed over ranks before they are judged, so an
    overflow anywhere is an overflow everywhere, and equal inputs give an equal scale. The step compares the
    scales of all ranks once per step all the same (they travel with the gradient).
    """

    VERSION = 1

    def __init__(self, config: ScalerConfig | None = None):
        self.config = config or ScalerConfig()
        self.value = float(self.config.initial)
        self.clean_steps = 0  # since the last overflow or growth
        self.overflows_left = self.config.hysteresis
        self.unit_weight: float | None = None  # what a usual step weighs: we scale sums, `value` is meant for means
        self.history: deque[tuple[float, bool]] = deque(maxlen=100)  # (scale, overflowed) of recent steps

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def unscale(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, 1.0 / self.value)

    def update(self, overflowed: bool) -> None:
        """Once per step, with the outcome that all ranks share."""
        config = self.config
        self.history.append((self.value, overflowed))
        if overflowed:
            self.clean_steps = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:  # hysteresis: a rare overflow need not halve the scale
                self.value = max(self.value * config.backoff, config.minimum)
                self.overflows_left = config.hysteresis
            return
        self.clean_steps += 1
        if self.clean_steps >= config.interval:
            self.value = min(self.value * config.growth, config.maximum)
            self.clean_steps = 0
            self.overflows_left = config.hysteresis

    def get_state(self) -> dict[str, Any]:
        return {
            "version": self.VERSION,
            "scale": self.value,
            "clean_steps": self.clean_steps,
            "overflows_left": self.overflows_left,
            "unit_weight": self.unit_weight,
            "history": [list(entry) for entry in self.history],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state.get("version") != self.VERSION:
            raise UserError(
                "loading the state of a loss scaler",
                f"version {state.get('version')!r}, this code writes version {self.VERSION}",
                "resume with the version of Lockstep that wrote it, or start with a fresh scaler",
            )
        self.value = float(state["scale"])
        self.clean_steps = int(state["clean_steps"])
        self.overflows_left = int(state["overflows_left"])
        self.unit_weight = state["unit_weight"]
        self.history = deque(((float(s), bool(o)) for s, o in state["history"]), maxlen=100)


@contextmanager
def full_precision(precision: Precision) -> Iterator[None]:
    """Backward runs outside autocast: it repeats the forward's types by itself."""
    if not precision.casts:
        yield
        return
    with torch.autocast(precision.device_type, enabled=False):
        yield
