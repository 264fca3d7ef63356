"""The lab: generated data, small models and the checks that the scripts in `lab/` share, and the grader of exercises.

Scripts write `from lockstep.lab import Checks, run_ranks`. Importing this package imports nothing else, torch least of
all, because the command `lockstep` imports it: a name's module is loaded when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.lab.checks import Checks as Checks
    from lockstep.lab.counting import CountCollectives as CountCollectives
    from lockstep.lab.predictions import Question as Question
    from lockstep.lab.predictions import ask as ask
    from lockstep.lab.predictions import reveal as reveal
    from lockstep.lab.ranks import backend as backend
    from lockstep.lab.ranks import device as device
    from lockstep.lab.ranks import run_ranks as run_ranks
    from lockstep.lab.workload.data import MarkovText as MarkovText
    from lockstep.lab.workload.data import ShapeClass as ShapeClass
    from lockstep.lab.workload.models import gpt as gpt
    from lockstep.lab.workload.models import gpt_tiny as gpt_tiny
    from lockstep.lab.workload.models import language_loss as language_loss
    from lockstep.lab.workload.models import mlp_wide as mlp_wide
    from lockstep.lab.workload.models import resnet18 as resnet18
    from lockstep.lab.workload.models import resnet50 as resnet50
    from lockstep.lab.workload.models import resnet_tiny as resnet_tiny

# Name -> the module that defines it.
_HOMES = {
    "Checks": "checks",
    "CountCollectives": "counting",
    "MarkovText": "workload.data",
    "ShapeClass": "workload.data",
    "gpt": "workload.models",
    "gpt_tiny": "workload.models",
    "language_loss": "workload.models",
    "mlp_wide": "workload.models",
    "resnet18": "workload.models",
    "resnet50": "workload.models",
    "resnet_tiny": "workload.models",
    "Question": "predictions",
    "ask": "predictions",
    "reveal": "predictions",
    "backend": "ranks",
    "device": "ranks",
    "run_ranks": "ranks",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep.lab' has no attribute {name!r}", name=name)
    return getattr(importlib.import_module(f"lockstep.lab.{_HOMES[name]}"), name)
