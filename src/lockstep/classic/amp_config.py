"""What an AMPTrainer should do, and how that is said to the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.config import RunConfig, ScalerConfig, resolve
from lockstep.errors import ConfigError, UserError

PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class AMPConfig:
    """Mixed precision, and what belongs to every step with it. Wrong values are refused when it is made."""

    enabled: bool = True  # False: everything in float32
    dtype: str = "float16"  # or bfloat16, float32; only float16 has a loss scale
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    static_scale: float | None = None  # one loss scale for ever, instead of `scaler`
    max_grad_norm: float | None = 1.0  # of the gradient after the scale is taken out
    gradient_accumulation_steps: int = 1  # calls of training_step for one optimizer step
    learning_rate: float = 1e-3  # of the optimizer that a trainer makes if it gets none
    weight_decay: float = 0.01
    lr_schedule: str = "constant"  # or linear, cosine, wsd
    warmup_steps: int = 0
    total_steps: int | None = None  # optimizer steps; a schedule that falls needs it
    max_skipped_in_a_row: int = 5
    device: str = "auto"  # or cpu, cuda

    def __post_init__(self) -> None:
        self.validate()

    @property
    def precision(self) -> str:
        return PRECISIONS.get(self.dtype, self.dtype) if self.enabled else "fp32"

    def validate(self) -> bool:
        """True, or every problem at once."""
        problems = []
        if self.gradient_accumulation_steps < 1:
            asked = f"gradient_accumulation_steps={self.gradient_accumulation_steps}"
            problems.append(UserError(asked, "less than 1", "type 1 for a step with every batch"))
        if self.lr_schedule != "constant" and self.total_steps is None:
            problems.append(
                UserError(f"lr_schedule={self.lr_schedule}", "no total_steps", "say when the rate has fallen")
            )
        try:
            self.run_config()
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return True

    def run_config(self, **more: Any) -> RunConfig:
        """The same in the core's words, which are the ones its complaints use."""
        scaler = {name: getattr(self.scaler, name) for name in ScalerConfig.model_fields}
        if self.static_scale is not None:  # it cannot leave its limits
            scaler |= {"initial": self.static_scale, "minimum": self.static_scale, "maximum": self.static_scale}
        values = {
            "precision": self.precision,
            "device": self.device,
            "compile": False,
            "scaler": scaler,
            "clip.norm": self.max_grad_norm,
            "nonfinite.max_in_a_row": self.max_skipped_in_a_row,
            "lr.peak": self.learning_rate,
            "lr.schedule": self.lr_schedule,
            "lr.warmup": self.warmup_steps,
            "steps": self.total_steps,
            **more,
        }
        return resolve([("AMPConfig", values)]).config
