"""Which tensor of a source goes into which tensor of the model. What does not fit is refused, or decided by patterns.

Every rank computes the same match, from names and shapes alone: nothing is read yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from lockstep.checkpoint.init_from.sources import WeightSource
from lockstep.checkpoint.state.tensor_names import aliases_in, is_extra
from lockstep.config.sections import WeightsConfig
from lockstep.errors import UserError, plural

SHOWN = 8  # names of a list in an error


@dataclass(frozen=True)
class Match:
    """What happens to the tensors of a model, by name."""

    taken: dict[str, str]  # model name -> name in the source
    tied: dict[str, str]  # other name of a taken tensor -> its own name in the source: the two must be equal
    reshaped: list[str]  # model names of taken tensors whose shape differs
    kept: list[str]  # model names that keep the values with which the model was constructed
    unused: list[str]  # names in the source


def match(state: Mapping[str, Tensor], source: WeightSource, settings: WeightsConfig) -> Match:
    """Match names and shapes. Raise one UserError that lists everything that does not fit."""
    tensors = {name: tensor for name, tensor in state.items() if not is_extra(name)}
    renamed = _renamed(source, settings)

    taken, tied = _match_names(tensors, renamed)

    unused = [original for name, original in renamed.items() if name not in tensors]
    extra = [name for name in unused if not _any_match(name, settings.allow_extra)]

    # A tensor of another shape is taken if allow_reshape says so, and counts as missing if allow_missing does.
    reshaped = [name for name in taken if tuple(tensors[name].shape) != source.shape(taken[name])]
    for name in list(reshaped):
        if _any_match(name, settings.allow_missing) and not _any_match(name, settings.allow_reshape):
            reshaped.remove(name)
            unused.append(taken.pop(name))

    # Another name of a tied tensor is not missing: the tensor was found under its first name.
    other_names = aliases_in(tensors)
    missing = [name for name in tensors if name not in taken and name not in other_names]
    _check_kinds(tensors, taken, source)

    problems = {
        "allow_missing": [name for name in missing if not _any_match(name, settings.allow_missing)],
        "allow_extra": extra,
        "allow_reshape": [name for name in reshaped if not _any_match(name, settings.allow_reshape)],
    }
    if any(problems.values()):
        raise _mismatch_error(problems, tensors, taken, source)

    return Match(taken, tied, reshaped, missing, unused)


def _match_names(tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return `taken` and `tied` of a Match.

    Tied tensors are one tensor: the source may have it under any of its names, or under all of them.
    """
    # All names of each tensor, by its first one.
    first_of = aliases_in(tensors)
    names_of: dict[str, list[str]] = {name: [name] for name in tensors if name not in first_of}
    for other, first in first_of.items():
        names_of[first].append(other)

    # Any name of a tensor will do. Its other names must hold the same values, which is checked when they are read.
    taken: dict[str, str] = {}
    tied: dict[str, str] = {}

    for first, names in names_of.items():
        present = [name for name in names if name in renamed]
        if present:
            taken[first] = renamed[present[0]]
            tied |= {name: renamed[name] for name in present[1:]}

    return taken, tied


def _check_kinds(tensors: Mapping[str, Tensor], taken: Mapping[str, str], source: WeightSource) -> None:
    """Refuse to read whole numbers as floating point, or the other way round."""
    retyped = [name for name in taken if tensors[name].is_floating_point() != source.is_floating_point(taken[name])]
    if retyped:
        raise UserError(
            f"init_from={source.location} holds {plural(len(retyped), 'tensor')} of another kind of number",
            f"{_listed(retyped)}: whole numbers on one side, floating point on the other, as in a quantized file",
            "use a file with floating-point weights",
        )


def _renamed(source: WeightSource, settings: WeightsConfig) -> dict[str, str]:
    """Return {name after `weights.rename`: name in the source}."""
    renamed: dict[str, str] = {}
    used: set[str] = set()

    for original in source.names():
        name = original

        # All patterns are applied, one after the other.
        for pattern, replacement in settings.rename.items():
            try:
                name, count = re.subn(pattern, replacement, name)
            except re.error as error:
                raise UserError(
                    f"weights.rename has {pattern!r}: {replacement!r}, which is not a regular expression with its "
                    "replacement",
                    str(error),
                    "write a backslash before characters that stand for themselves; see Python's re.sub",
                ) from None

            used |= {pattern} if count else set()

        if name in renamed:
            raise UserError(
                f"weights.rename gives two tensors of {source.location} the name {name!r}",
                f"{renamed[name]!r} and {original!r}",
                "make the patterns more specific",
            )

        renamed[name] = original

    # A pattern without effect is a typo, most likely.
    idle = [pattern for pattern in settings.rename if pattern not in used]
    if idle:
        raise UserError(
            f"weights.rename has a pattern that matches no name in {source.location}: {idle[0]!r}",
            f"its names are {_listed(list(source.names()))}",
            "correct the pattern, a regular expression, or leave it out",
        )

    return renamed


def _any_match(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of the shell-like patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _mismatch_error(
    problems: Mapping[str, list[str]], tensors: Mapping[str, Tensor], taken: Mapping[str, str], source: WeightSource
) -> UserError:
    """Return the error for weights that do not fit: what is wrong, and the settings that would accept it."""
    shapes = [
        f"{name} {list(source.shape(taken[name]))} -> {list(tensors[name].shape)}" for name in problems["allow_reshape"]
    ]
    lists = {
        "missing in the file": problems["allow_missing"],
        "extra in the file": problems["allow_extra"],
        "of another shape (file -> model)": shapes,
    }
    found = "; ".join(f"{len(names)} {where}: {_listed(names)}" for where, names in lists.items() if names)

    # If names differ only by what comes first, a renaming is the better answer.
    rename = _prefix(problems["allow_missing"], problems["allow_extra"])

    # Patterns must not match the names that fit.
    others = {
        "allow_missing": tensors.keys() - set(problems["allow_missing"]),
        "allow_extra": set(source.names()) - set(problems["allow_extra"]),
        "allow_reshape": tensors.keys() - set(problems["allow_reshape"]),
    }

    allowed = [
        f"'weights.{key}={json.dumps(_patterns(names, others[key]))}'" for key, names in problems.items() if names
    ]

    fixes = [f"'weights.rename={json.dumps(rename)}'"] if rename else allowed
    about = "the names differ only in their beginning" if rename else "if that is right"
    return UserError(
        f"the weights of init_from={source.location} do not fit the model", found, f"{about}: {' '.join(fixes)}"
    )


def _prefix(missing: Sequence[str], extra: Sequence[str]) -> dict[str, str] | None:
    """Return a renaming that turns extra names into missing ones by a change of their beginning; None if none does."""
    for wanted in missing:
        for name in extra:
            if name.endswith(f".{wanted}"):
                return {f"^{re.escape(name.removesuffix(wanted))}": ""}

            if wanted.endswith(f".{name}"):
                return {"^": wanted.removesuffix(name)}

    return None


def _patterns(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return patterns for these names, if there are many: as few as possible, none of which matches one of `others`."""
    if len(names) <= 3:
        return list(names)

    found: set[str] = set()
    for name in names:
        # The shortest prefix, up to a point, that no other name has.
        prefixes = [f"{name[:place]}." for place, letter in enumerate(name) if letter == "."]
        alone = (prefix for prefix in prefixes if not any(other.startswith(prefix) for other in others))
        prefix = next(alone, None)
        found.add(f"{prefix}*" if prefix else name)

    return sorted(found)


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
