"""The configuration of an AMPTrainer, and its translation into the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.config import RunConfig, ScalerConfig, resolve
from lockstep.errors import ConfigError, UserError

PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class AMPConfig:
    """Mixed precision, and everything else about a step. The constructor refuses wrong values."""

    # False trains everything in float32.
    enabled: bool = True

    # float16, bfloat16 or float32; only float16 has a loss scale.
    dtype: str = "float16"
    scaler: ScalerConfig = field(default_factory=ScalerConfig)

    # One loss scale for the whole training, in place of `scaler`.
    static_scale: float | None = None

    # Measured after the loss scale is taken out.
    max_grad_norm: float | None = 1.0

    # Calls of training_step for one optimizer step.
    gradient_accumulation_steps: int = 1

    # For the AdamW that a trainer makes if it gets no optimizer.
    learning_rate: float = 1e-3
    weight_decay: float = 0.01

    # A name in SCHEDULES. All but "constant" need `total_steps`, counted in optimizer steps.
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None

    max_skipped_in_a_row: int = 5

    # auto, cpu or cuda.
    device: str = "auto"

    @property
    def precision(self) -> str:
        return PRECISIONS.get(self.dtype, self.dtype) if self.enabled else "fp32"

    def __post_init__(self) -> None:
        """Raise every problem at once."""
        problems = []
        if self.gradient_accumulation_steps < 1:
            problems.append(
                UserError(
                    f"gradient_accumulation_steps={self.gradient_accumulation_steps} is less than 1",
                    "",
                    "use 1 for a step with every batch",
                )
            )

        if self.lr_schedule != "constant" and self.total_steps is None:
            problems.append(
                UserError(
                    f"lr_schedule={self.lr_schedule} needs total_steps",
                    "",
                    "set total_steps to the optimizer steps of the training",
                )
            )

        # The engine checks the rest, under its own names for these settings.
        try:
            self.run_config()
        except ConfigError as error:
            problems += error.problems

        if problems:
            raise ConfigError(problems)

    def run_config(self, **more: Any) -> RunConfig:
        """Return the same as settings of a run; error messages use the names of these settings."""
        scaler = {name: getattr(self.scaler, name) for name in ScalerConfig.model_fields}
        if self.static_scale is not None:
            # A scale whose bounds are equal never moves.
            scaler |= dict.fromkeys(("initial", "minimum", "maximum"), self.static_scale)

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
