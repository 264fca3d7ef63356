"""Lockstep: train any PyTorch model on one process or many, and get the same model.

Importing this package imports nothing else: a name's module is loaded when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockstep._version import __version__

if TYPE_CHECKING:
    from lockstep.api import RunResult as RunResult
    from lockstep.api import fit as fit
    from lockstep.api import start as start
    from lockstep.config import RunConfig as RunConfig
    from lockstep.data.samplers import Mixture as Mixture
    from lockstep.data.samplers import Sampled as Sampled
    from lockstep.data.streams.shards import Shards as Shards
    from lockstep.data.streams.shards import read_jsonl as read_jsonl
    from lockstep.data.streams.shards import read_lines as read_lines
    from lockstep.data.streams.shards import read_tar as read_tar
    from lockstep.errors import ConfigError as ConfigError
    from lockstep.errors import UserError as UserError
    from lockstep.losses import linear_cross_entropy as linear_cross_entropy
    from lockstep.parallel.calls.chain import run_eagerly as run_eagerly
    from lockstep.precision import DynamicScaler as DynamicScaler
    from lockstep.task import BatchSource as BatchSource
    from lockstep.task import EvalData as EvalData
    from lockstep.task import Loss as Loss
    from lockstep.task import MicroBatch as MicroBatch
    from lockstep.task import RunView as RunView
    from lockstep.task import SourceContext as SourceContext
    from lockstep.task import StepBatches as StepBatches
    from lockstep.task import StepResult as StepResult
    from lockstep.task import Task as Task

# Public name -> the module that defines it.
_HOMES = {
    "RunConfig": "config",
    "RunResult": "api",
    "fit": "api",
    "start": "api",
    "Mixture": "data.samplers",
    "Sampled": "data.samplers",
    "Shards": "data.streams.shards",
    "read_jsonl": "data.streams.shards",
    "read_lines": "data.streams.shards",
    "read_tar": "data.streams.shards",
    "ConfigError": "errors",
    "UserError": "errors",
    "linear_cross_entropy": "losses",
    "run_eagerly": "parallel.calls.chain",
    "DynamicScaler": "precision",
    "BatchSource": "task",
    "EvalData": "task",
    "Loss": "task",
    "MicroBatch": "task",
    "RunView": "task",
    "StepBatches": "task",
    "StepResult": "task",
    "SourceContext": "task",
    "Task": "task",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(f"lockstep.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
