"""Precision: the dtypes in which a run stores, computes, reduces and optimizes, and the loss scale of fp16.

Every value of `precision` except `auto` is one record in PRECISIONS. The defaults of a record mean float32 throughout,
so each one states only its differences.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lockstep.config import RunConfig, ScalerConfig
from lockstep.errors import UserError, pip_install


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. By default everything stays in the model's own float32."""

    # The dtype of matrix products under autocast; float32 means that there is no autocast.
    compute: torch.dtype = torch.float32

    # How updates of parameters that are stored in bfloat16 are rounded: `master`, `stochastic` or `compensated` (see
    # optim/bf16_masters.py). None: parameters are stored, and gradients reduced, in the model's own dtype.
    rounding: str | None = None

    # Whether the loss is multiplied by a dynamic scale.
    needs_scaler: bool = False

    # Whether linear layers inside blocks are converted to float8.
    float8: bool = False

    # Whether float32 matrix products and convolutions may use TF32 on a GPU.
    allows_tf32: bool = True

    # The relative rounding error of one operation, if it differs from the dtype's.
    own_eps: float | None = None

    # For the banner: the compute dtype, if `compute` alone does not describe it.
    compute_text: str = ""

    # For the banner: the optimizer's dtypes, if parameters are stored in bfloat16.
    optimizer_text: str = "float32"

    # Raises a UserError if this precision cannot be used. None: it can always be used.
    check: Callable[[RunConfig, torch.device], None] | None = None

    # `choose_precision` sets these two.
    name: str = ""
    device_type: str = "cpu"

    @property
    def casts(self) -> bool:
        """True if the forward runs under autocast."""
        return self.compute in (torch.bfloat16, torch.float16)

    @property
    def stores_bf16(self) -> bool:
        """True if parameters and gradients are stored in bfloat16."""
        return self.rounding is not None

    @property
    def loses_bits(self) -> bool:
        """True if something is computed in fewer bits than float32 has."""
        return self.casts or self.own_eps is not None

    def eps(self, stored: torch.dtype) -> float:
        """Return the relative rounding error of one operation on parameters of the dtype `stored`."""
        return self.own_eps or torch.finfo(self.compute if self.casts else stored).eps

    @cached_property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """A function that returns the context manager for a forward: torch.autocast, or nullcontext without a cost."""
        return partial(torch.autocast, self.device_type, dtype=self.compute) if self.casts else nullcontext

    @cached_property
    def no_autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """The same for a backward inside that context: its dtypes follow from the forward, so autocast must be off."""
        return partial(torch.autocast, self.device_type, enabled=False) if self.casts else nullcontext

    def set_tf32(self) -> None:
        """Set torch's global switches for TF32 on a GPU. Only an explicit precision=fp32 switches TF32 off."""
        if self.device_type == "cuda":
            torch.set_float32_matmul_precision("high" if self.allows_tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.allows_tf32

    def contract(self, stored: torch.dtype) -> str:
        """Return a line for the banner about all dtypes. `stored` is the dtype of the parameters."""
        own = _dtype_name(stored)
        if stored == torch.float64 and not self.casts:
            return "everything float64"

        # Gradients of bfloat16 parameters are summed in float32 and rounded once.
        compute = self.compute_text or _dtype_name(self.compute)
        if self.stores_bf16:
            return f"stored {own}, computed {compute}, reduced float32, optimizer {self.optimizer_text}"

        return f"stored {own}, computed {compute}, reduced {own}, optimizer {own}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choose_precision(config: RunConfig, device: torch.device) -> Precision:
    """Return the precision of a run. `auto` means bf16 on a GPU that supports it, else fp16, and fp32 on a CPU.

    A precision that is set by name is never changed silently: it is used or refused.
    """
    name = config.precision
    if name == "auto" and device.type != "cuda":
        name = "fp32"
    elif name == "auto":
        name = "bf16" if _has_bf16(device) else "fp16"

    precision = PRECISIONS[name]
    if precision.check:
        precision.check(config, device)

    return replace(precision, name=name, device_type=device.type)


# ---- when a precision cannot be used ----


def _check_tf32(config: RunConfig, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"precision=tf32 cannot be used on {device.type}, which has no TF32", "", "set precision=fp32")


def _has_bf16(device: torch.device) -> bool:
    """Return whether a GPU computes in bf16. Before Ampere torch emulates it, which is slower than fp32."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def _check_bf16(config: RunConfig, device: torch.device) -> None:
    if device.type == "cuda" and not _has_bf16(device):
        raise UserError(
            f"precision={config.precision} cannot be used: {torch.cuda.get_device_name(device)} has no bf16",
            "",
            "set precision=fp16",
        )


def _check_fp8(config: RunConfig, device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"precision=fp8 cannot be used on {device.type}, which has no float8", "", "set precision=bf16")

    # float8 tensor cores need compute capability 8.9 (Ada) or 9.0 (Hopper).
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise UserError(
            f"precision=fp8 cannot be used on {torch.cuda.get_device_name(device)}, compute capability {major}.{minor};"
            " 8.9 is needed",
            "",
            "set precision=bf16",
        )

    _refuse_sharded_layers(config)

    if find_spec("torchao") is None:
        raise UserError("precision=fp8 cannot be used: torchao is not installed", "", pip_install("fp8"))

    if config.compile is False:
        raise UserError(
            "precision=fp8 with compile=false would be slow",
            "without compilation, conversions to float8 cost more than they save",
            "leave compile out, or set precision=bf16",
        )


def _check_bf16_storage(config: RunConfig, device: torch.device) -> None:
    _check_bf16(config, device)
    _refuse_sharded_layers(config)
    if config.fsdp.offload:
        raise UserError(
            f"precision={config.precision} with fsdp.offload=true is not supported",
            "parameters that are stored in bf16 cannot be kept in host memory",
            "leave fsdp.offload out, or set precision=bf16",
        )

    if config.ddp.hook not in ("none", "bf16"):
        raise UserError(
            f"precision={config.precision} with ddp.hook={config.ddp.hook} is not supported",
            "gradients are already stored in bfloat16",
            "set ddp.hook=bf16 (sums in bfloat16), or ddp.hook=none (sums in float32)",
        )


def _refuse_sharded_layers(config: RunConfig) -> None:
    # tp and pp can be set as a strategy or as an axis of a mesh.
    sharding = [f"strategy={config.strategy}"] if config.strategy_record.axis else []
    axes = {"tp": config.mesh.tp, "pp": config.mesh.pp}
    sharding += [f"mesh.{axis}={size}" for axis, size in axes.items() if size and size > 1]
    if sharding:
        raise UserError(
            f"precision={config.precision} with {sharding[0]} is not supported",
            "layers or stages are on several ranks",
            "set precision=bf16, or strategy=fsdp without a mesh",
        )


# ---- the table ----

PRECISIONS = {
    "fp32": Precision(allows_tf32=False),
    "tf32": Precision(own_eps=2.0**-10, compute_text="tf32", check=_check_tf32),  # 10 bits of a float32
    "bf16": Precision(torch.bfloat16, check=_check_bf16),
    "fp16": Precision(torch.float16, needs_scaler=True),
    "fp8": Precision(torch.bfloat16, float8=True, compute_text="float8 in blocks, else bfloat16", check=_check_fp8),
    "bf16-master": Precision(
        torch.bfloat16,
        rounding="master",
        optimizer_text="float32 on float32 master weights",
        check=_check_bf16_storage,
    ),
    "bf16-pure-stochastic": Precision(
        torch.bfloat16,
        rounding="stochastic",
        optimizer_text="float32, new weights rounded up or down at random",
        check=_check_bf16_storage,
    ),
    "bf16-pure-compensated": Precision(
        torch.bfloat16,
        rounding="compensated",
        optimizer_text="float32, rounding errors of weights kept in bfloat16",
        check=_check_bf16_storage,
    ),
}


# ---- the model ----


def cast_parameters_(module: nn.Module, precision: Precision) -> None:
    """Convert parameters to bfloat16 in place, if `precision` stores them in bfloat16."""
    if not precision.stores_bf16:
        return

    for name, p in module.named_parameters():
        if p.dtype == torch.float32:
            p.data = p.data.to(torch.bfloat16)
        elif p.requires_grad and p.dtype != torch.bfloat16:
            raise UserError(
                f"precision={precision.name} needs a model in float32; the model has {name!r} in "
                f"{_dtype_name(p.dtype)}",
                "",
                "build the model in float32",
            )


def for_model(precision: Precision, setting: str, model: nn.Module) -> Precision:
    """Return the precision to use for this model. `setting` is the value in the configuration.

    Autocast does not cast float64. So `auto` becomes fp32 for a float64 model, and a named precision is refused.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    in_float64 = [name for name, p in trainable if p.dtype == torch.float64]
    if not in_float64 or not precision.casts or precision.stores_bf16:
        return precision

    if setting != "auto":
        raise UserError(
            f"precision={precision.name} has no effect on a model in float64",
            f"{len(in_float64)} trainable parameters are in float64, first {in_float64[0]!r}; autocast does not cast "
            "them",
            "build the model with model.float(); or set precision=fp32, which computes in the model's own float64",
        )

    fp32 = replace(PRECISIONS["fp32"], name="fp32", device_type=precision.device_type)
    return fp32 if len(in_float64) == len(trainable) else precision


def check_storage(model: nn.Module) -> None:
    """Refuse trainable weights below float32, because they would silently lose small updates."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    half = [name for name, p in trainable if p.dtype in (torch.bfloat16, torch.float16)]
    if half:
        raise UserError(
            f"{len(half)} trainable parameters are stored in half precision, first {half[0]!r}; they must be float32",
            "they are the master weights: updates below 1/256 of a weight would round away",
            "build the model with model.float(); precision=bf16 computes in bf16 from float32 weights, and "
            "precision=bf16-master stores bf16 copies of them",
            cause="half-precision",
        )


def check_batchnorm(model: nn.Module, precision: Precision) -> None:
    """Refuse BatchNorm on a CPU, where torch's kernels do not support float32 statistics with bfloat16 weights."""
    kind = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in model.named_modules() if isinstance(module, kind) and module.affine]
    if names and precision.device_type == "cpu":
        raise UserError(
            f"precision={precision.name} cannot be used with BatchNorm ({names[0]!r}) on a CPU",
            "its statistics stay in float32, which torch's CPU kernels do not support with bf16 weights",
            "use GroupNorm, or set precision=bf16",
        )


# ---- the loss scale of fp16 ----


class DynamicScaler:
    """The fp16 loss scale: large enough that small gradients do not underflow, lowered when any rank overflows.

    It needs no communication. Gradients are summed over ranks before they are checked, so all ranks see the same
    overflows and compute the same scale. The scale is part of the control word, so every step checks that it is equal.
    """

    VERSION = 1

    def __init__(self, config: ScalerConfig | None = None):
        self.config = config or ScalerConfig()
        self.value = float(self.config.initial)
        # Steps since the last overflow or growth.
        self.clean_steps = 0
        self.overflows_left = self.config.hysteresis
        # The typical weight of a step, once it is known. It converts `value`, which is meant for means, to our sums.
        self.reference_weight: float | None = None

    @property
    def factor_on_sums(self) -> float:
        """The factor on the loss sum of a micro-batch."""
        return self.value / (self.reference_weight or 1.0)

    def update(self, overflowed: bool) -> None:
        """Adapt the scale to the outcome of a step. All ranks call it with the same outcome."""
        config = self.config
        if overflowed:
            self.clean_steps = 0
            self.overflows_left -= 1

            # Hysteresis: lower the scale only after several overflows.
            if self.overflows_left <= 0:
                self.value = max(self.value * config.backoff, config.minimum)
                self.overflows_left = config.hysteresis

            return

        # Try a larger scale from time to time, because only an overflow reveals the limit.
        self.clean_steps += 1
        if self.clean_steps >= config.interval:
            self.value = min(self.value * config.growth, config.maximum)
            self.clean_steps = 0
            self.overflows_left = config.hysteresis

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.VERSION,
            "scale": self.value,
            "clean_steps": self.clean_steps,
            "overflows_left": self.overflows_left,
            "unit_weight": self.reference_weight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("version") != self.VERSION:
            raise UserError(
                f"the state of the loss scaler is of version {state.get('version')!r}, not {self.VERSION}",
                "",
                "resume with the version of Lockstep that wrote it, or start with a fresh scaler",
            )

        self.value = float(state["scale"])
        self.clean_steps = int(state["clean_steps"])
        self.overflows_left = int(state["overflows_left"])
        self.reference_weight = state["unit_weight"]
