"""The run folder: where a run leaves everything it knows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config import Resolved, to_yaml
from lockstep.errors import UserError
from lockstep.launch.local import new_run_dir
from lockstep.runtime.context import Runtime


def open_run_dir(asked: str | None, name: str, runtime: Runtime) -> Path:
    """The folder, made by rank 0 and agreed by all: the default name holds a time, which differs between ranks."""
    mine = str(asked or new_run_dir(name)) if runtime.is_main else None
    path = Path(runtime.collectives.gather_json(mine)[0])
    if runtime.collectives.any(runtime.is_main and (path / "metrics.jsonl").exists()):
        raise UserError(
            f"run_dir={path}",
            "a folder that already holds a run",
            "type another run_dir, or remove this one; without run_dir every run gets a folder of its own",
        )
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run_dir={path}",
            f"{error.strerror}: {error.filename}",
            "type run_dir=FOLDER, one that you may write to",
        ) from error
    return path


def write_head(run_dir: Path, resolved: Resolved, plan: dict[str, Any]) -> None:
    """What is known before the first step."""
    (run_dir / "config.yaml").write_text(to_yaml(resolved.config))
    (run_dir / "config.sources.json").write_text(json.dumps(resolved.sources, indent=2))
    (run_dir / "plan.json").write_text(json.dumps(plan, indent=2))


def finite(value: Any) -> Any:
    """JSON has no NaN: a number that is none becomes null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_weights(run_dir: Path, model: nn.Module) -> None:
    """Under the model's own names; tied weights are stored once."""
    from safetensors.torch import save_model

    save_model(model, str(run_dir / "model.safetensors"))


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    (run_dir / "summary.json").write_text(json.dumps(finite(summary), indent=2))
