"""What is stored, computed, reduced and optimized in which number format; the fp16 loss scale all ranks agree on."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig, ScalerConfig
from lockstep.errors import UserError
from lockstep.runtime.context import Runtime

# Formats whose parameters and gradients are stored in bfloat16, and how updates too small for it are not lost.
WAYS = {"bf16-master": "kept", "bf16-pure-stochastic": "stochastic", "bf16-pure-compensated": "compensated"}
_OPTIMIZER = {
    "kept": "float32 on float32 master weights",
    "stochastic": "float32, new weights rounded up or down at random",
    "compensated": "float32, what rounding a weight cuts off kept in bfloat16",
}


@dataclass(frozen=True)
class Precision:
    """The dtype contract of a run. Parameters, gradients and optimizer state stay in the model's own fp32, unless
    another way to store them was asked for by name."""

    name: str
    compute: torch.dtype
    device_type: str

    @property
    def way(self) -> str | None:
        """How bfloat16 parameters are updated; None: parameters are stored as they come."""
        return WAYS.get(self.name)

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
        compute = str(self.compute).removeprefix("torch.")
        compute = {"tf32": "tf32", "fp8": "float8 in blocks, else bfloat16"}.get(self.name, compute)
        if self.way:
            return f"stored {own}, computed {compute}, reduced float32, optimizer {_OPTIMIZER[self.way]}"
        return f"stored {own}, computed {compute}, reduced {own}, optimizer {own}"


def choose(config: RunConfig, device: torch.device) -> Precision:
    """bf16 where the hardware has it, fp32 on a CPU; what was asked for by name is never changed silently."""
    on_cuda = device.type == "cuda"
    name = config.precision
    if name == "auto":
        name = "fp32" if not on_cuda else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    elif name == "tf32" and not on_cuda:
        raise UserError("precision=tf32", f"a run on {device.type}, which has no TF32", "type precision=fp32")
    elif name.startswith("bf16") and on_cuda and not torch.cuda.is_bf16_supported():
        raise UserError(f"precision={name}", f"{torch.cuda.get_device_name(device)} has no bf16", "type precision=fp16")
    elif name == "fp8":
        check_fp8(config, device)
    if name in WAYS:
        _check_way(config)
    compute = torch.float16 if name == "fp16" else torch.float32 if name in ("fp32", "tf32") else torch.bfloat16
    return Precision(name, compute, device.type)


def check_fp8(config: RunConfig, device: torch.device) -> None:
    """Matrix units for float8 came with compute capability 8.9 (Ada, Hopper)."""
    if device.type != "cuda":
        raise UserError("precision=fp8", f"a run on {device.type}, which has no float8", "type precision=bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        found = (
            f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}; 8.9 is needed"
        )
        raise UserError("precision=fp8", found, "type precision=bf16")
    _check_whole_layers(config)
    if find_spec("torchao") is None:
        raise UserError("precision=fp8", "torchao is not installed", "pip install 'lockstep-train[fp8]'")
    if config.compile is False:
        raise UserError(
            "precision=fp8 with compile=false",
            "conversions to float8 that cost more than they save unless they are compiled",
            "leave compile out, or type precision=bf16",
        )


def _check_whole_layers(config: RunConfig) -> None:
    cutting = [f"strategy={config.strategy}"] if config.strategy in ("tp", "pp") else []
    cutting += [f"mesh.{axis}={size}" for axis in ("tp", "pp") if (size := getattr(config.mesh, axis)) and size > 1]
    if cutting:
        raise UserError(
            f"precision={config.precision} with {cutting[0]}",
            "layers or stages on several ranks, for which this format is not made",
            "type precision=bf16, or strategy=fsdp without a mesh",
        )


def _check_way(config: RunConfig) -> None:
    asked = f"precision={config.precision}"
    _check_whole_layers(config)
    if config.fsdp.offload:
        raise UserError(
            f"{asked} with fsdp.offload=true",
            "parameters in host memory, for which this way of storing them is not made",
            "leave fsdp.offload out, or type precision=bf16",
        )
    if config.ddp.hook not in ("none", "bf16"):
        raise UserError(
            f"{asked} with ddp.hook={config.ddp.hook}",
            "gradients that are stored in bfloat16 already",
            "type ddp.hook=bf16 (they are added in bfloat16), or ddp.hook=none (they are added in float32)",
        )


def store(module: nn.Module, precision: str) -> None:
    """Parameters as `precision` wants them stored: for most, as they are. They stay the same objects."""
    if precision not in WAYS:
        return
    for name, p in module.named_parameters():
        if p.dtype == torch.float32:
            p.data = p.data.to(torch.bfloat16)
        elif p.requires_grad and p.dtype != torch.bfloat16:
            own = str(p.dtype).removeprefix("torch.")
            raise UserError(f"precision={precision}", f"{name!r} in {own}", "build the model in float32")


def check_storage(model: nn.Module) -> None:
    """Trainable weights below fp32 swallow small updates without a word: refuse them, unless asked for by name."""
    low = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if low:
        raise UserError(
            "trainable parameters are the master weights and must be stored in float32",
            f"{len(low)} stored in half precision, first {low[0]!r}: updates below 1/256 of a weight would round away",
            "build the model with model.float(); precision=bf16 computes in bf16 from float32 weights, and "
            "precision=bf16-master stores bf16 ones beside them",
        )


def check_statistics(model: nn.Module, precision: Precision) -> None:
    """torch's CPU kernels do not take running statistics in float32 beside weights in bfloat16."""
    kind = nn.modules.batchnorm._BatchNorm
    found = [name for name, module in model.named_modules() if isinstance(module, kind) and module.affine]
    if found and precision.device_type == "cpu":
        raise UserError(
            f"precision={precision.name} on a CPU",
            f"BatchNorm ({found[0]!r}), whose statistics stay in float32",
            "use GroupNorm, or type precision=bf16",
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


# What a backward starts with: 1, or for fp16 the loss scale, on which all ranks agree.


class LossScale:
    def __init__(self, scaler: DynamicScaler | None, runtime: Runtime):
        self.scaler, self.runtime = scaler, runtime

    @property
    def value(self) -> float:
        return self.scaler.value / (self.scaler.unit_weight or 1.0) if self.scaler else 1.0

    @property
    def logarithm(self) -> float:
        """What travels in the control word, for the ranks to compare."""
        return math.log2(self.scaler.value) if self.scaler else 0.0

    @property
    def unknown(self) -> bool:
        """Before the first micro-batch: nobody knows what a usual step weighs."""
        return self.scaler is not None and self.scaler.unit_weight is None

    def find_unit(self, weight: Any, samples: int, global_batch: int, silent: bool) -> None:
        """The weight of a usual step, as a power of two; found once, from the first micro-batches of all ranks that are
        not `silent`, equal on all of them.

        We backpropagate sums, while loss scales are thought of for means: the fp16 scale is divided by this.
        """
        assert self.scaler is not None
        counts = [0.0, 0.0] if silent else [float(weight), float(samples)]
        mine = torch.tensor(counts, dtype=torch.float64, device=self.runtime.device)
        total, seen = self.runtime.collectives.sum_(mine).tolist()
        self.scaler.unit_weight = 2.0 ** round(math.log2(max(1.0, total / max(1.0, seen) * global_batch)))

    def check_equal(self, logarithms: float, ranks: int) -> None:
        """`logarithms`: their sum over all ranks."""
        if self.scaler and abs(logarithms / ranks - self.logarithm) > 1e-3:
            raise RuntimeError(f"the ranks' loss scales differ: here {self.scaler.value}")
