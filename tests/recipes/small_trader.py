"""The smallest agent of the trading recipe, and its rollouts without an engine."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.config import resolve_for
from lockstep.recipes.clstm_ppo import ClstmPpo
from lockstep.targets import make_task
from lockstep.task import SourceContext

TINY = ClstmPpo.presets["tiny"]
SETTINGS = {"clip.norm": 0.5, **{key: value for key, value in TINY.items() if key != "task"}}


def tiny(**options: Any) -> ClstmPpo:
    """Return the preset with other options, made as the command makes it."""
    layers = [("test", {"preset": "tiny", **{f"task.{name}": value for name, value in options.items()}})]
    resolved = resolve_for(ClstmPpo.defaults, ClstmPpo.presets, layers)
    return make_task(ClstmPpo, resolved.config.task)


def attached(task: ClstmPpo, agent: Any, seed: int = 0) -> Any:
    """Return the rollouts of a single process, without an engine."""
    device = torch.device("cpu")
    task.source.attach(SourceContext(agent, device, seed, 8, 2, range(4), 1, False, lambda values: values))
    return task.source
