"""Options of tasks: constructors with many of them, and the checks that several recipes share.

A task with many options keeps them as documented fields of frozen dataclasses, one for each topic. The command line
stays flat: `task.width=512` is the keyword argument `width` of the constructor, whichever dataclass holds the field.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_type_hints

from lockstep.errors import ConfigError, UserError, unknown_name

Constructor = Callable[..., None]


def takes_options(*groups: type[Any]) -> Callable[[Constructor], Constructor]:
    """Decorate `__init__(self, one: One, two: Two)`: callers pass the fields of One and Two as keyword arguments."""
    group_of = {field.name: group for group in groups for field in dataclasses.fields(group)}

    def decorate(init: Constructor) -> Constructor:
        @functools.wraps(init)
        def constructor(self: Any, **options: Any) -> None:
            values: dict[type[Any], dict[str, Any]] = {group: {} for group in groups}
            for name, value in options.items():
                if name not in group_of:
                    raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")

                values[group_of[name]][name] = value

            init(self, *(group(**chosen) for group, chosen in values.items()))

        # `lockstep.targets` checks names and types of `task.*` against this signature.
        constructor.__signature__ = _flat_signature(groups)  # pyrefly: ignore[missing-attribute]
        return constructor

    return decorate


def _flat_signature(groups: tuple[type[Any], ...]) -> inspect.Signature:
    """Return the signature of a method whose keyword arguments are the fields of all groups."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for group in groups:
        kinds = get_type_hints(group)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=kinds[field.name]
            )
            for field in dataclasses.fields(group)
        ]

    return inspect.Signature(parameters)


def check_options(
    values: Mapping[str, Any],
    more: Iterable[UserError],
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
    smallest: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Raise every problem at once: `more`, unknown choices, and numbers below the smallest allowed."""
    unknown = [
        unknown_name(f"task.{name}", values[name], known)
        for name, known in choices.items()
        if values[name] not in known
    ]

    # None stands for a default that is chosen later.
    too_small = [
        UserError(f"task.{name}={values[name]} is less than {least}", "", f"set task.{name}={least} or more")
        for name, least in smallest.items()
        if values[name] is not None and values[name] < least
    ]

    problems = [*unknown, *too_small, *more]
    if problems:
        raise ConfigError(problems)


def uneven_heads(width: int, heads: int) -> Iterator[UserError]:
    """Yield a problem unless every head gets the same even number of channels, as rotary positions need."""
    if heads < 1 or width % (2 * heads):
        fix = f"task.width={-(-width // (2 * heads)) * 2 * heads}" if heads >= 1 else "task.heads=1 or more"
        yield UserError(
            f"task.width={width} cannot be divided among task.heads={heads}",
            "each head needs the same even number of channels",
            f"set {fix}",
        )


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


def warn_unused(
    owner: type, rules: Iterable[OnlyWith], options: Mapping[str, Any], prefix: str = "task.", stacklevel: int = 4
) -> None:
    """Warn, once for each rule, about options that were changed and have no effect.

    `owner` is the class whose constructor has the defaults; `options` may hold more than it takes.
    """
    parameters = inspect.signature(owner).parameters

    for rule in rules:
        value = options[rule.of]
        if value in rule.values if rule.values else value not in rule.never:
            continue

        changed = [
            f"{prefix}{name}={options[name]}"
            for name in rule.options
            if name in parameters and options[name] != parameters[name].default
        ]
        if changed:
            # The fourth frame is the code that makes a task: warn_unused, the constructor, its decorator, its caller.
            warnings.warn(
                f"{', '.join(changed)}: no effect with {prefix}{rule.of}={value} ({rule.found})", stacklevel=stacklevel
            )
