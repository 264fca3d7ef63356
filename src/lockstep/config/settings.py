"""Settings, which are values with their sources; and values as nested mappings or by dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from lockstep.config.schema import KEYS, RENAMED, SECTIONS, RunConfig
from lockstep.config.value_types import ConfigSection


class Setting(NamedTuple):
    key: str  # dotted
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.key} = {typed(self.value)} ({self.source})"


def typed(value: Any) -> str:
    """Return a value as a user would type it after `key=`."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str, skipkeys=True)


# ---- nested and dotted ----


def nested(config: BaseModel, only_set: bool = False) -> dict[str, Any]:
    """Return nested values as they are (`model_dump` would take apart objects that a user put under `task`)."""
    names = [name for name in type(config).model_fields if not only_set or name in config.model_fields_set]
    values = {name: getattr(config, name) for name in names}
    return {name: nested(v, only_set) if isinstance(v, ConfigSection) else v for name, v in values.items()}


def walk(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf. A mapping whose names cannot be part of a dotted key is one value."""
    for name, value in items:
        key = f"{prefix}{name}"
        # `optimizer` is often mistaken for a section: the error then names the keys inside it.
        may_hold_keys = key not in KEYS or key == "optimizer"
        inner = value if isinstance(value, Mapping) and may_hold_keys else {}
        spelled = inner and all(isinstance(n, str) and n and "." not in n for n in inner)
        if spelled or (key in SECTIONS and isinstance(value, Mapping)):
            yield from walk(inner.items(), f"{key}.")
        else:
            yield key, value


def flatten(values: Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    """{"lr": {"peak": 1}} -> {"lr.peak": 1}"""
    mapping = nested(values) if isinstance(values, RunConfig) else values
    return dict(walk(mapping.items()))


def under_new_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings, or their sources, by key: an older version may have saved a key under a former name."""
    return {RENAMED.get(key, key): value for key, value in saved.items()}
