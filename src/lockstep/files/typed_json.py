"""JSON of other processes and machines, checked field by field before it becomes an object.

pydantic's `TypeAdapter` could do this, and is faster: the heartbeat of a node with 8 ranks takes 20 us instead of 100.
But importing it takes 60 ms, and what a host of a job runs first (`clusters/tether.py`) needs nothing else of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# How deep dicts and lists may be nested.
DEEPEST = 50


def load_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError for invalid JSON, and for JSON that is nested too deep to walk through."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None

    return not_too_deep(value)


def not_too_deep(value: Any) -> Any:
    """Return the value. Raise ValueError if its dicts and lists are nested deeper than DEEPEST."""
    # Level by level, without recursion, which deep nesting would exhaust.
    level = [value]

    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item

        level = inner
        if not level:
            return value

    raise ValueError("nested too deep")


def parse(kind: Any, value: Any) -> Any:
    """Return decoded JSON as a `kind`.

    A kind is a dataclass, a list, a dict, a plain type, a `Literal` of plain values, a `StrEnum`, or one of these
    `| None`.
    Raise ValueError for a wrong type, an unknown field, or a missing field that has no default.
    """
    base, arguments, has_fields = _taken_apart(kind)
    if base is Literal:
        if value not in arguments:
            raise ValueError(f"{str(value)[:200]!r} instead of one of {arguments}")

        return value

    # `kind | None`: the only kind of union. The union of a `Literal` is typing's own.
    if base in (UnionType, Union):
        return None if value is None else parse(arguments[0], value)

    if isinstance(base, type) and issubclass(base, StrEnum):
        return base(parse(str, value))

    if has_fields:
        types = _field_types(base)
        try:
            return kind(**{name: parse(types[name], field) for name, field in value.items()})
        except (AttributeError, KeyError, TypeError):
            # No object at all, an unknown field, or a missing one.
            raise ValueError(f"not a valid {kind.__name__}: {str(value)[:200]}") from None

    # Every int is a valid float. A bool is an int to Python, but not to us.
    accepted: Any = (int, float) if base is float else base
    if not isinstance(value, accepted) or isinstance(value, bool) != (base is bool):
        raise ValueError(f"{str(value)[:200]!r} instead of a value of type {base.__name__}")

    if base is list and arguments:
        return [parse(arguments[0], item) for item in value]

    # JSON has only text for keys.
    if base is dict and arguments:
        return {arguments[0](key): parse(arguments[1], item) for key, item in value.items()}

    return value


def encode_kind(value: Any) -> str:
    """Return a dataclass as JSON, with the name of its class under "kind": see `parse_kind`."""
    return json.dumps({"kind": type(value).__name__, **asdict(value)})


def parse_kind(kinds: Mapping[str, type], text: str | bytes) -> Any:
    """Return the dataclass that `encode_kind` has encoded, if it is one of `kinds`. Raise ValueError if it is not."""
    values: Any = json.loads(text)
    kind = kinds.get(str(values.pop("kind", None))) if isinstance(values, dict) else None
    if kind is None:
        raise ValueError("not a JSON object of a known kind")

    return parse(kind, values)


# Resolving annotations and taking types apart takes longer than parsing a message.
_field_types = cache(get_type_hints)


@cache
def _taken_apart(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return the type without its arguments, its arguments, and whether it is a dataclass."""
    base = get_origin(kind) or kind
    return base, get_args(kind), is_dataclass(base)
