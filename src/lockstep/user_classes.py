"""Modules and classes that a user names: a sink, or a store for the tensors of checkpoints, as MODULE:CLASS."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lockstep.errors import UserError

# A dotted module and a class in it.
CLASS_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"


def is_class_name(text: str) -> bool:
    return re.fullmatch(CLASS_NAME, text) is not None


def import_module(name: str, what: str, fix: str) -> ModuleType:
    """Import a module that the user has named. If there is none, raise a UserError that begins with `what`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import inside the module that fails is another matter.
        if error.name and not f"{name}.".startswith(f"{error.name}."):
            raise

        raise UserError(f"{what}: there is no module {error.name}", "", fix) from None


def import_class(setting: str, name: str, methods: Sequence[str]) -> type[Any]:
    """Import MODULE:CLASS. Raises a UserError if there is no such class, or if it lacks one of the `methods`.

    An import runs code: `name` must come from the user's settings, never from a file of a checkpoint. `setting` is
    what the user typed, for the message.
    """
    module_name, _, class_name = name.partition(":")
    advice = "use MODULE:CLASS with an installed module, or with one next to your task"
    module = import_module(module_name, setting, advice)

    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        raise UserError(f"{setting}: the module {module_name} has no class {class_name}", "", "correct the name")

    missing = [method for method in methods if not callable(getattr(kind, method, None))]
    if missing:
        raise UserError(
            f"{setting}: the class {class_name} lacks {', '.join(missing)}",
            "",
            f"give it the methods {', '.join(methods)}: CONTRIBUTING.md has an example",
        )

    return kind
