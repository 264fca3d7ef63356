"""Reads layers of values from files, from the command line and from the objects of a Python caller.

A layer is a pair of a source, such as a file or the command line, and the values that it gives. Nothing is merged here
and nothing is checked against the schema: `resolve.py` does both, so that an error can name the layer that it comes
from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import yaml_dialect
from lockstep.config.resolve import Layer, check, nearest, nest, settings_of, usual
from lockstep.config.schema import KEYS, RunConfig
from lockstep.config.settings import flatten, nested, typed
from lockstep.errors import ConfigError, UserError

# ---- files ----


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values of a .yaml, .yml or .json file."""
    path = Path(path)
    named = f"the configuration file {path}"
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"{named} is neither YAML nor JSON by its name", "", "name it .yaml, .yml or .json")

    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else yaml_dialect.load(text)
    except OSError as error:
        raise UserError(
            f"{named} cannot be read", f"{error.strerror}", f"check the path; it is looked up from {Path.cwd()}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # PyYAML's errors have a mark, json's a line number, the others neither.
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        reason = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error).splitlines()[0]

        raise UserError(
            f"{named} is not valid",
            f"{reason} in line {line}" if line else reason,
            f"correct {path}, line {line}" if line else f"correct {path}",
        ) from None

    if values is not None and not isinstance(values, dict):
        raise UserError(
            f"{named} must hold keys with values",
            f"a {type(values).__name__} at its top level",
            "write lines such as `steps: 1000`",
        )

    return values or {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys; json would keep the last value."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key} is set twice")

        values[key] = value

    return values


def read_layers(files: Sequence[str], overrides: Sequence[str]) -> list[Layer]:
    """Return the layers of a command, weakest first. All problems of all layers are raised at once.

    `overrides` are words such as `lr.peak=1e-3`, `task.sizes=[1,2]` and `clip.norm=null`.
    """
    layers: list[Layer] = []
    problems: list[UserError] = []

    # A file that cannot be read must not hide the problems of the others.
    for path in files:
        try:
            layers.append((f"file {path}", read_file(path)))
        except UserError as problem:
            problems.append(problem)

    items = []
    for arg in overrides:
        try:
            items.append(_override(arg))
        except UserError as problem:
            problems.append(problem)

    layers.append(("command line", nest(settings_of(items, "command line", problems))))
    check(layers, problems)
    return layers


def _override(arg: str) -> tuple[str, Any]:
    key, equals, text = (part.strip() for part in arg.partition("="))
    shown = f"{arg} (command line)"
    if not equals:
        name = next(iter(nearest(key, KEYS)), "steps")
        raise UserError(f"{shown} has no =", "", f"write key=value, such as {name}={typed(usual(name))}")

    if not key:
        raise UserError(f"{shown} has no key before the =", "", "write key=value, such as steps=1000")

    if not text:  # most often an unset shell variable
        raise UserError(
            f"{shown} has no value after the =", "", f"set {key}=null to unset it, or {key}=\"''\" for an empty text"
        )

    # A Python user types `none` for null. Only brackets and quotes begin more than a plain word, so that
    # `task.text=a: b` is text and not a mapping.
    if text.casefold() == "none":
        return key, None

    try:
        return key, yaml_dialect.load(text) if text[0] in "[{'\"" else yaml_dialect.word(text)
    except yaml.YAMLError:
        raise UserError(
            f"{shown} is not a complete list, mapping or quoted text", "", f"close it, or quote a text: {key}=\"'...'\""
        ) from None


def words_not_read(words: Sequence[str], config: RunConfig) -> list[str]:
    """Return those of a script's `words` that are settings, as `lockstep train` reads them, and are not in `config`.

    A script may read such words itself and pass them on: then they are in `config`.
    """
    values = flatten(config)
    unread = []
    for word in words:
        if word.partition("=")[0].strip() not in KEYS:
            continue

        # Words that `lockstep train` would refuse are the script's own.
        with suppress(UserError):
            key, value = _override(word)
            if values.get(key) != value:
                unread.append(word)

    return unread


def from_object(obj: Any) -> dict[str, Any]:
    """Return the nested values of what a caller passed: None, a dict, a RunConfig, a file's path, a Hydra config."""
    omegaconf = sys.modules.get("omegaconf")  # it is there if `obj` is one of its objects
    if omegaconf is not None and omegaconf.OmegaConf.is_config(obj):
        obj = omegaconf.OmegaConf.to_container(obj, resolve=True, throw_on_missing=True)

    match obj:
        case None:
            return {}
        case RunConfig():
            # A default must not override a task's own value.
            return nested(obj, only_set=True)
        case str() | os.PathLike():
            return read_file(obj)
        case Mapping():
            problems: list[UserError] = []
            settings = settings_of(obj.items(), "argument", problems)
            if problems:
                raise ConfigError(problems)

            return nest(settings)

    raise UserError(
        f"a configuration cannot be an object of type {type(obj).__name__}",
        "",
        "pass a dict, a RunConfig, the path of a file, or nothing",
    )
