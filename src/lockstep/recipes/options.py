"""A warning about options of a recipe that have no effect beside its other options."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """Options that have an effect only with some values of the option `of`.

    They count if `of` is one of `values`, or, without `values`, if it is none of `never`. `found` says what the
    recipe has instead of them.
    """

    options: tuple[str, ...]
    of: str
    values: tuple[Any, ...] = ()
    never: tuple[Any, ...] = ()
    found: str = ""

    def applies(self, value: Any) -> bool:
        """Whether the options count when `of` has this value."""
        if self.values:
            return value in self.values
        return value not in self.never


def warn_unused(owner: type, rules: Iterable[OnlyWith], given: Mapping[str, Any], prefix: str = "task.") -> None:
    """Warn, once for each rule, about the options in `given` that were changed and have no effect.

    `owner` is the class whose constructor has the defaults; `given` may hold more than its options (`locals()`).
    """
    parameters = inspect.signature(owner).parameters

    for rule in rules:
        if rule.applies(given[rule.of]):
            continue
        changed = [
            f"{prefix}{name}={given[name]}"
            for name in rule.options
            if name in parameters and given[name] != parameters[name].default
        ]
        if changed:
            switch = f"{prefix}{rule.of}={given[rule.of]}"
            # The third frame is the code that makes the object: warn_unused, the constructor, its caller.
            warnings.warn(f"{', '.join(changed)}: no effect with {switch} ({rule.found})", stacklevel=3)
