"""Arguments of the form `key=value`, for the commands of this recipe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import UserError


def overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` arguments. A value is a number, true, false or null where it reads like one, else text.

    `config=F.yaml` stands for the values of a file. Other arguments override them, in whatever order they are given.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise UserError(f"the argument {argument!r} is not key=value", "", "give arguments such as lr=1e-4")

        # A value that is not JSON is text.
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text

    path = values.pop("config", None)
    return values if path is None else _values_of_file(path) | values


def _values_of_file(path: str) -> dict[str, Any]:
    """Read a YAML file of keys. Nested keys are joined: `task: {width: 64}` is task.width=64."""
    values = {}
    try:
        # A list or a text instead of keys has no items(): an AttributeError.
        for key, value in yaml.safe_load(Path(path).read_text()).items():
            if isinstance(value, dict):
                values |= {f"{key}.{inner}": inner_value for inner, inner_value in value.items()}
            else:
                values[key] = value
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"config={path} cannot be read", f"{type(error).__name__}: {error}", "give a YAML file of keys"
        ) from error

    return values
