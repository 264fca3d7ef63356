"""Where values come from: files, the command line, and the objects of a Python caller."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import yaml_dialect
from lockstep.config.resolve import Layer, check, leaves_of, nearest, nest, usual
from lockstep.config.schema import KEYS, RunConfig, nested
from lockstep.config.values import typed
from lockstep.errors import ConfigError, UserError


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a .yaml, .yml or .json file."""
    path = Path(path)
    asked = f"the configuration file {path}"
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(asked, "it is neither YAML nor JSON by its name", "name it .yaml, .yml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else yaml_dialect.load(text)
    except OSError as error:
        fix = f"check the path; it is looked up from {Path.cwd()}"
        raise UserError(asked, f"it cannot be read: {error.strerror}", fix) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        reason = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error).splitlines()[0]
        fix = f"mend {path}" + (f", line {line}" if line else "")
        raise UserError(asked, reason + (f" in line {line}" if line else ""), fix) from None
    if values is not None and not isinstance(values, dict):
        found = f"its top level is a {type(values).__name__}"
        raise UserError(asked, found, "write lines such as `steps: 1000`")
    return values or {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key} is set twice")
        values[key] = value
    return values


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """`lr.peak=1e-3 task.sizes=[1,2] clip.norm=null` -> nested values."""
    problems: list[UserError] = []
    values = _overrides(args, problems)
    if problems:
        raise ConfigError(problems)
    return values


def read_layers(files: Sequence[str], overrides: Sequence[str]) -> list[Layer]:
    """The layers of a command, weakest first. Whatever is wrong with any of them is raised at once."""
    layers: list[Layer] = []
    problems: list[UserError] = []
    for path in files:
        try:
            layers.append((f"file {path}", read_file(path)))
        except UserError as error:
            problems.append(error)
    layers.append(("command line", _overrides(overrides, problems)))
    check(layers, problems)
    return layers


def _overrides(args: Sequence[str], problems: list[UserError]) -> dict[str, Any]:
    """Nested values of the sound arguments; the others are appended to `problems`."""
    items = []
    for arg in args:
        try:
            items.append(_override(arg))
        except UserError as problem:
            problems.append(problem)
    return nest(leaves_of(items, "command line", problems))


def _override(arg: str) -> tuple[str, Any]:
    key, equals, text = (part.strip() for part in arg.partition("="))
    asked = f"{arg} (command line)"
    if not equals:
        name = next(iter(nearest(key, KEYS)), "steps")
        raise UserError(asked, "there is no = in it", f"type key=value, such as {name}={typed(usual(name))}")
    if not key:
        raise UserError(asked, "there is no key before the =", "type key=value, such as steps=1000")
    if not text:  # most often an unset shell variable
        fix = f"type {key}=null to unset it, or {key}=\"''\" for an empty text"
        raise UserError(asked, "there is no value after the =", fix)
    if text.casefold() == "none":
        return key, None
    try:
        return key, yaml_dialect.load(text) if text[0] in "[{'\"" else yaml_dialect.word(text)
    except yaml.YAMLError:
        found = "the value is no complete list, mapping or quoted text"
        raise UserError(asked, found, f"close it, or quote a text: {key}=\"'...'\"") from None


def from_object(obj: Any) -> dict[str, Any]:
    """Nested values of what a Python caller has: None, a dict, a RunConfig, a file's path, a Hydra config."""
    omegaconf = sys.modules.get("omegaconf")  # whoever holds such an object has imported it
    if omegaconf is not None and omegaconf.OmegaConf.is_config(obj):
        obj = omegaconf.OmegaConf.to_container(obj, resolve=True, throw_on_missing=True)
    if obj is None:
        return {}
    if isinstance(obj, RunConfig):
        return nested(obj, only_set=True)  # a default that nobody chose must not beat a task's own
    if isinstance(obj, (str, os.PathLike)):
        return read_file(obj)
    if not isinstance(obj, Mapping):
        fix = "pass a dict, a RunConfig, the path of a file, or nothing"
        raise UserError("a configuration", f"an object of type {type(obj).__name__}", fix)
    problems: list[UserError] = []
    leaves = leaves_of(obj.items(), "argument", problems)
    if problems:
        raise ConfigError(problems)
    return nest(leaves)
