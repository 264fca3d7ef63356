"""Adapters of peft: only they are trained, saved and exported; the base model is frozen.

A folder with adapter_config.json and adapter_model.safetensors is what `PeftModel.from_pretrained` opens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.errors import UserError
from lockstep.hf.local import package

CONFIG = "adapter_config.json"


def config_of(lora: Any, task_type: str | None) -> Any:
    """Return peft's config: a LoraConfig with these options, or the config itself. True: all defaults."""
    peft = package("peft")
    if lora is not True and not isinstance(lora, Mapping):
        return lora

    options = {} if lora is True else dict(lora)
    try:
        return peft.LoraConfig(task_type=task_type, **options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"task.lora={options} is not accepted by peft.LoraConfig", str(error), "see peft.LoraConfig for its options"
        ) from None


def add(model: nn.Module, lora: Any, task_type: str | None) -> nn.Module:
    """Freeze `model` and add trainable adapters to it."""
    try:
        # The adapters' dtype is left to `precision`.
        return package("peft").get_peft_model(model, config_of(lora, task_type), autocast_adapter_dtype=False)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(
            f"peft cannot add adapters to {type(model).__name__}",
            str(error),
            f"name its layers: task.lora.target_modules=[{', '.join(linear[:4])}]",
        ) from None


def write_config(folder: Path, lora: Any, task_type: str | None, base: Path | None) -> None:
    """Write adapter_config.json, which names the base model by its absolute path."""
    config = config_of(lora, task_type)
    config.base_model_name_or_path = str(base.resolve()) if base else ""
    config.inference_mode = True
    config.save_pretrained(str(folder))
