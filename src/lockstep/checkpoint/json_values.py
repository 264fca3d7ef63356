"""The plain values of a checkpoint as strict JSON.

JSON has no NaN and no infinity: such a number becomes `{"$float": "nan"}`. A dict of the user that could be
mistaken for this (one key, which begins with "$") gets one more "$", and loses it again when it is read.
"""

from __future__ import annotations

import json
import math
from typing import Any

from lockstep.errors import UserError

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(value: Any, where: str = "values") -> Any:
    """A copy that JSON can say. What it cannot say is an error that names the place."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise _unsayable(f"the key {strange[0]!r} of {where}", strange[0])
        inner = {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
        return {f"${key}": item for key, item in inner.items()} if _marked(inner) else inner
    raise _unsayable(where, value)


def from_json(value: Any) -> Any:
    """What `to_json` was given, tuples as lists. ValueError where the encoding is wrong."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _marked(value):
        return {key: from_json(item) for key, item in value.items()}
    [(key, item)] = value.items()
    if key.startswith("$$"):
        return {key[1:]: from_json(item)}
    if key != "$float" or not isinstance(item, str) or item not in _NAMES:
        raise ValueError(f"{key} = {str(item)[:40]!r} stands for no number")
    return _NAMES[item]


def parse(data: bytes) -> Any:
    """Strict JSON: no NaN, and no key twice. ValueError or RecursionError where it is not that."""
    return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse)


def canonical(value: Any) -> bytes:
    """The one way to write `value`, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _marked(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unsayable(where: str, value: object) -> UserError:
    return UserError(
        f"save {where} in a checkpoint",
        f"a {type(value).__name__}, which JSON cannot say",
        "keep state in tensors, numbers, strings, lists and dicts with string keys",
    )
