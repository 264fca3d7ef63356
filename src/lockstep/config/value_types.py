"""How a key of the configuration is declared, and the types of values that pydantic does not have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def key(default: Any, about: str, *, example: Any = None, **limits: Any) -> Any:
    """Declare one key: its default, its meaning with its unit, and an example of a value if that helps."""
    return Field(default, description=about, examples=None if example is None else [example], **limits)


class ConfigSection(BaseModel):
    """A group of keys: frozen, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _remat(value: Any) -> str:
    if value is None:
        return "none"
    if not re.fullmatch(r"none|full|selective|every-[1-9]\d*", str(value)):
        raise PydanticCustomError("remat", "Input should be 'none', 'full', 'selective' or 'every-2'")
    return value


def _goal(value: Any) -> str:
    if not re.fullmatch(r"\S+ (>=|<=) [-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", str(value)):
        raise PydanticCustomError("goal", "Input should be a metric, >= or <=, and a number: 'accuracy >= 0.9'")
    return value


# Keys of a rule of `optim.groups` that are not options of the optimizer.
GROUP_KEYS = ("match", "lr", "lr_scale")


def _group(value: Any) -> dict[str, Any]:
    known = isinstance(value, Mapping) and isinstance(value.get("match"), str) and len(value) > 1
    if not known or ("lr" in value and "lr_scale" in value):
        raise PydanticCustomError(
            "group",
            "Input should have a pattern (match), at least one option, and not both lr and lr_scale",
        )

    for key in ("lr", "lr_scale"):
        rate = value.get(key, 0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 0:
            raise PydanticCustomError("group", "Input should have a number of 0 or more as its lr or lr_scale")

    return dict(value)


# These undo YAML's reading of the words `none` and `off` as null and false.
NONE_WORD = BeforeValidator(lambda value: "none" if value is None else value)
OFF_WORD = BeforeValidator(lambda value: "off" if value is False else value)

Remat = Annotated[str, BeforeValidator(_remat)]
Goal = Annotated[str, BeforeValidator(_goal)]
Group = Annotated[dict[str, Any], BeforeValidator(_group)]
LoadBalance = Annotated[Literal["none", "auto"] | list[Annotated[float, Field(gt=0)]], NONE_WORD]
PathText = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
# Causes (see causes.py) that the check at the start of a run finds, and that a user may intend.
LossTrait = Literal[
    "mean-of-means",
    "mean-for-sum",
    "loss-weight",
    "penalty",
    "batch-coupled",
    "changed-in-forward",
    "randomness",
    "nondeterminism",
    "carried-state",
    "average",
    "schedule",
    "gradient",
    "rank-in-loss",
]
LossCheck = Annotated[Literal["all", "off"] | LossTrait | list[LossTrait], OFF_WORD]
PrecisionName = Literal[
    "auto", "fp32", "tf32", "bf16", "fp16", "fp8", "bf16-master", "bf16-pure-stochastic", "bf16-pure-compensated"
]
