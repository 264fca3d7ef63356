"""Options of a task as a dataclass: one documented field for each keyword argument of the task's constructor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def takes_fields_of(options: type[Options]) -> Callable[[Callable[[Any, Options], None]], Callable[..., None]]:
    """Decorate a constructor `__init__(self, options)` so that it is called with the fields of `options` as keywords.

    `lockstep train` reads the names, types and defaults of a task's options from the signature of its constructor.
    The decorated constructor has the signature that it would have if every field were written out.
    """

    def decorate(init: Callable[[Any, Options], None]) -> Callable[..., None]:
        @functools.wraps(init)
        def with_keywords(self: Any, **given: Any) -> None:
            init(self, options(**given))

        # `inspect.signature` of the task's class, too, returns this instead of looking at the function.
        with_keywords.__signature__ = _signature(options)  # pyrefly: ignore[missing-attribute]
        return with_keywords

    return decorate


def _signature(options: type[Any]) -> inspect.Signature:
    """Return the signature of a method with the fields of `options`, all of which have defaults, as keywords."""
    types = get_type_hints(options)
    keywords = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
        for each in fields(options)
    ]
    return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *keywords])
