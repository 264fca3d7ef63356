"""What pretrain.py and evaluate.py print: help, and errors that speak of their own keys."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from lockstep.errors import UserError, nearest_name
from lockstep.recipes.hrm import HRM

# A key this similar to one of ours is a misspelling. The setting global_batch is less similar to global_batch_size.
SIMILAR = 0.85


def help_text(usage: str, keys: Mapping[str, Any]) -> str:
    """Return the usage and every key with its default."""
    parameters = inspect.signature(HRM).parameters
    options = {f"task.{name}": parameter.default for name, parameter in parameters.items() if name not in keys}
    return "\n".join(
        [
            usage,
            "",
            *(f"  {name:28} {_typed(value)}" for name, value in keys.items()),
            "",
            "Options of the task:",
            *(f"  {name:28} {_typed(value)}" for name, value in options.items()),
            "",
            "Settings of any run are typed likewise, such as log.every=10: see docs/configuration.md.",
        ]
    )


def check_names(values: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key that is nearly one of `known`: taken for a setting of the run, it would get the wrong advice."""
    for key, value in values.items():
        similar = nearest_name(key, known, cutoff=SIMILAR)
        if key not in known and similar:
            raise UserError(f"{key}={_typed(value)} is not known", "", f"set {similar}={_typed(value)}")


def translate(message: str, own_keys: Collection[str] = ()) -> str:
    """Rewrite a message of a run as its settings are typed here: without dashes, and with our own keys."""
    message = re.sub(r"--resume (?=\S)", "resume=", message)
    message = message.replace("set another run_dir", "set another run_name")
    if own_keys:
        message = re.sub(rf"\btask\.({'|'.join(own_keys)})=", r"\1=", message)

    return message


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
