"""Settings whose values are names in a registry, and the check of these names before any process starts.

The configuration cannot know the names: it lies below the registries. None of these modules imports torch, so that a
misspelt name is reported at once. `check_attributes` refuses a name that a task's class may still have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lockstep.checkpoint.storage.stores import check_url
from lockstep.config import Layer
from lockstep.config.settings import flatten
from lockstep.errors import ConfigError, UserError, unknown_name
from lockstep.observe.sinks import SINKS, check_sinks
from lockstep.optim import registry
from lockstep.optim.schedule import SCHEDULES
from lockstep.user_classes import is_class_name

REGISTRIES: dict[str, Collection[str]] = {
    "lr.schedule": SCHEDULES,
    "optimizer": registry.NAMES,
    "log.sinks": SINKS,
}

# Settings that also take a user's class, as MODULE:CLASS.
USER_CLASSES = ("log.sinks",)


def check_names(layers: Sequence[Layer]) -> None:
    """Refuse names that are in no registry, all of them at once. The layers must be valid otherwise."""
    # Later layers win, as when the settings are resolved.
    settings: dict[str, Any] = {}
    for _, values in layers:
        settings |= flatten(values)

    # A setting is one name or a list of names.
    problems = []
    for key, known in REGISTRIES.items():
        value = settings.get(key) or []
        names = [value] if isinstance(value, str) else value
        problems += [
            unknown_name(key, name, known, is_list=isinstance(value, list))
            for name in names
            if name not in known and not (key in USER_CLASSES and is_class_name(name))
        ]

    if problems:
        raise ConfigError(problems)

    # Beyond the names: what an optimizer is known to be, packages that a sink needs, and the parts of a URL.
    if settings.get("exact") is True:
        registry.check_exact(settings.get("optimizer") or registry.OWN)

    check_sinks(settings.get("log.sinks") or [])
    if url := settings.get("checkpoint.store"):
        check_url(url)


def check_attributes(task: Any) -> None:
    """Refuse a task with an attribute by its old name, which would be ignored."""
    name = type(task).__name__
    if isinstance(getattr(task, "lasting", None), tuple | list):
        raise UserError(
            f"{name}.lasting is now called fixed_settings",
            f"lasting = {task.lasting!r}, which has no effect",
            f"rename it to fixed_settings in the class {name}",
        )
