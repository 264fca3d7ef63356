"""The words of `pretrain.py` and `evaluate.py`: what may be typed, and what is said of it."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from lockstep.errors import UserError
from lockstep.recipes.hrm.task import HRM

CLOSE = 0.85  # so much like a name that nothing else can be meant; global_batch, a key of any run, is less like ours


def help_text(usage: str, keys: Mapping[str, Any]) -> str:
    """Every key with the value it has if nobody types it."""
    options = {f"task.{name}": each.default for name, each in inspect.signature(HRM).parameters.items()}
    lines = [f"  {name:28} {_typed(value)}" for name, value in keys.items()]
    more = [f"  {name:28} {_typed(value)}" for name, value in options.items() if name.removeprefix("task.") not in keys]
    rest = "Settings of any run are typed likewise, such as log.every=10: see docs/configuration.md."
    return "\n".join([usage, "", *lines, "", "Options of the task:", *more, "", rest])


def check_names(values: Mapping[str, Any], own: Collection[str]) -> None:
    """A key that is nearly one of `own` would be taken for a setting of the run, and refused with other advice."""
    for key, value in values.items():
        near = difflib.get_close_matches(key, own, n=1, cutoff=CLOSE)
        if key not in own and near:
            raise UserError(f"{key}={_typed(value)}", f"there is no key {key}", f"type {near[0]}={_typed(value)}")


def in_own_words(text: str, options: Collection[str] = ()) -> str:
    """What a run says, as it is typed here: settings have no dashes, and some options of the task have a name here."""
    text = re.sub(r"--resume (?=\S)", "resume=", text).replace("type another run_dir", "type another run_name")
    return re.sub(rf"\btask\.({'|'.join(options)})=", r"\1=", text) if options else text


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
