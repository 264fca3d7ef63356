"""A setting: one value with its dotted key and its source, and how it is typed on a command line."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One value, and where it came from."""

    key: str  # dotted
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.key} = {typed(self.value)} ({self.source})"


def typed(value: Any) -> str:
    """Return a value as one would type it after `key=`."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, default=str, skipkeys=True)
