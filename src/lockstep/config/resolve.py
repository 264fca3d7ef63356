"""Layers -> one `RunConfig` and the source of each value, or every problem at once with what to type."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import ValidationError

from lockstep.config.conflicts import RIVALS, clashes, idle, impossible, rivals
from lockstep.config.schema import KEYS, SECTIONS, RunConfig, flatten, walk
from lockstep.config.values import Setting, typed
from lockstep.config.yaml_dialect import word
from lockstep.errors import ConfigError, UserError

Layer = tuple[str, Mapping[str, Any]]  # (where the values come from, nested and/or dotted values)


@dataclass(frozen=True)
class Resolved:
    config: RunConfig
    sources: dict[str, str]  # every dotted key, task.* too -> "default" or the name of the layer that set it
    layers: Sequence[Layer] = ()  # what it was made of, weakest first

    def without_options(self) -> Resolved:
        """For a task that was made with options of its own."""
        sources = {key: source for key, source in self.sources.items() if not key.startswith("task.")}
        return replace(self, config=self.config.model_copy(update={"task": {}}), sources=sources)


def resolve(layers: Sequence[Layer], earlier: Sequence[UserError] = ()) -> Resolved:
    """Merge the layers, weakest first, leaf by leaf; raise every problem (`earlier` ones too) at once."""
    defaults = {key: Setting(key, field.default, "default") for key, field in KEYS.items()}
    given = _strongest(layers, defaults, earlier)
    config = RunConfig.model_validate(nest(given))
    return Resolved(config, {key: leaf.source for key, leaf in (defaults | given).items()}, layers)


def check(layers: Sequence[Layer], earlier: Sequence[UserError] = ()) -> None:
    """Raise what is wrong with the layers whatever weaker ones (of a task, say) may add to them."""
    _strongest(layers, {}, earlier)


def resolve_for(
    defaults: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]], layers: Sequence[Layer]
) -> Resolved:
    """`resolve` for a task: its defaults and the chosen preset are the two weakest layers."""
    weakest: list[Layer] = [("task default", defaults)]
    choices = [(source, values["preset"]) for source, values in [*weakest, *layers] if "preset" in values]
    source, name = choices[-1] if choices else ("default", None)
    problems = []
    if isinstance(name, str) and name in presets:
        weakest.append((f"preset {name}", presets[name]))
        if "preset" in presets[name]:
            asked = f"preset = {typed(presets[name]['preset'])} (preset {name})"
            problems = [UserError(asked, "a preset cannot choose a preset", "take the key out of the preset")]
    elif isinstance(name, str):
        near = get_close_matches(name, presets, 1, 0.0)
        found = f"no such preset; the task has {', '.join(presets) or 'none'}"
        fix = f"type preset={near[0] if near else 'null'}"
        problems = [UserError(f"preset = {name} ({source})", found, fix)]
    return resolve([*weakest, *layers], problems)


def describe(config: RunConfig, sources: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """(key, value, where it came from) of every key, for `lockstep config show`."""
    return [(key, value, sources.get(key, "default")) for key, value in flatten(config).items()]


def diff(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, value in a, value in b) where they differ; a task option that one of them lacks is None there."""
    left, right = flatten(a), flatten(b)
    keys = [key for key in left | right if key not in left or key not in right or left[key] != right[key]]
    return [(key, left.get(key), right.get(key)) for key in keys]


# ---- merging --------------------------------------------------------------------------------------------


def leaves_of(items: Iterable[tuple[Any, Any]], source: str, problems: list[UserError]) -> dict[str, Setting]:
    """Nested and dotted keys, mixed as the user likes -> leaves by dotted key. Problems are appended."""
    leaves: dict[str, Setting] = {}
    for key, value in walk(items):
        leaf = Setting(key, value, source)
        if not all(key.split(".")):
            problems.append(UserError(str(leaf), "a part of the key is empty", "type a key such as lr.peak"))
        elif key in leaves:
            problems.append(UserError(f"{leaves[key]} and {leaf}", f"{key} is set twice", f"keep one {key}"))
        else:
            leaves[key] = leaf
    for outer, inner in [(a, b) for a in leaves.values() for b in leaves.values() if _inside(b.key, a.key)]:
        found = f"{outer.key} is given a value and used as a section at once"
        problems.append(UserError(f"{outer} and {inner}", found, f"keep either {outer.key} or {inner.key}"))
        leaves.pop(inner.key, None)
    return leaves


def nest(leaves: Mapping[str, Setting]) -> dict[str, Any]:
    """{"lr.peak": a leaf} -> {"lr": {"peak": its value}}"""
    values: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *parents, last = key.split(".")
        section = values
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = leaf.value
    return values


def _inside(key: str, section: str) -> bool:
    return key.startswith(f"{section}.")


def _strongest(
    layers: Sequence[Layer], defaults: Mapping[str, Setting], earlier: Sequence[UserError]
) -> dict[str, Setting]:
    """The strongest leaf of every key that a layer gives; `defaults` count only in the rules between keys."""
    problems = list(earlier)
    given = _merge(layers, problems)
    refused = _refused(given)
    problems += [_bad_value(given[key], expected) for key, expected in refused.items()]
    sound = {key: leaf for key, leaf in {**defaults, **given}.items() if key not in refused}
    problems += clashes(sound) + impossible(sound) + idle(sound, layers)
    if problems:
        raise ConfigError(problems)
    return given


def _merge(layers: Sequence[Layer], problems: list[UserError]) -> dict[str, Setting]:
    """The strongest leaf of every known key. Problems are appended."""
    parts = [leaves_of(values.items(), source, problems) for source, values in layers]
    known = [*KEYS, *(key for leaves in parts for key in leaves if _inside(key, "task"))]
    merged: dict[str, Setting] = {}
    for leaves in parts:
        problems += [_unknown(leaf, known) for key, leaf in leaves.items() if key not in known]
        leaves = {key: leaf for key, leaf in leaves.items() if key in known}
        problems += rivals(leaves)
        for group in RIVALS:
            setters = [leaves[key] for key in group if key in leaves and leaves[key].value is not None]
            if setters:  # steps on the command line ends the epochs of a file
                merged |= {key: Setting(key, None, setters[0].source) for key in group if key in merged}
        for key in leaves:  # task.a replaces task.a.b of a weaker layer, and the other way round
            merged = {old: v for old, v in merged.items() if not (_inside(old, key) or _inside(key, old))}
        merged |= leaves
    return merged


def _refused(leaves: Mapping[str, Setting]) -> dict[str, str]:
    """The keys whose value has the wrong type or size -> what it should be."""
    refused: dict[str, str] = {}
    try:
        RunConfig.model_validate(nest(leaves))
    except ValidationError as error:
        # No `loc` is a rule between keys, which `clashes` reports with sources.
        for detail in (detail for detail in error.errors(include_url=False) if detail["loc"]):
            parts = 2 if detail["loc"][0] in SECTIONS else 1  # a union adds one more for each of its members
            key = ".".join(map(str, detail["loc"][:parts]))
            should = detail["msg"].removeprefix("Input ")
            if key in refused:
                should = f"{refused[key]} or {should.removeprefix('should be ')}"
            refused[key] = should
    return refused


# ---- problems -------------------------------------------------------------------------------------------

# Names that other tools use -> what to type here.
_ALIASES = {
    "learning_rate": "lr.peak={value}",
    "lr": "lr.peak={value}",
    "batch_size": "global_batch={value} (all ranks together) or local_batch={value} (per rank)",
    "max_steps": "steps={value}",
    "num_epochs": "epochs={value}",
    "gradient_accumulation_steps": "micro_batch=... (samples per backward); the count follows from the batch",
    "fp16": "precision=fp16 (or bf16, fp32, auto)",
    "bf16": "precision=bf16 (or fp16, fp32, auto)",
    "grad_clip": "clip.norm={value}",
    "max_grad_norm": "clip.norm={value}",
    "num_workers": "data.workers={value}",
}


# Values that other tools have for the same thing -> what to type here.
_WORDS = {
    **{"dp": "ddp", "zero2": "fsdp-grads", "zero3": "fsdp", "fsdp2": "fsdp", "full_shard": "fsdp"},
    **{"hybrid_shard": "hsdp", "float32": "fp32", "float16": "fp16", "half": "fp16", "16-mixed": "fp16"},
    **{"bfloat16": "bf16", "bf16-mixed": "bf16"},
}


def nearest(key: str, names: Collection[str]) -> list[str]:
    """The names most like `key`, as a whole or in the last part: `warmpu` is like lr.warmup. Maybe none."""

    def likeness(name: str) -> float:
        pairs = ((key, name), (key.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1]))
        return max(SequenceMatcher(None, a.casefold(), b).ratio() for a, b in pairs)

    scores = {name: likeness(name) for name in names}
    best = max(scores.values())
    return [name for name, score in scores.items() if score == best >= 0.6]


def _unknown(leaf: Setting, known: Collection[str]) -> UserError:
    key, value = leaf.key, typed(leaf.value)
    last = key.rsplit(".", 1)[-1]
    found = f"{key} is a section" if key in SECTIONS else f"there is no key {key}"
    if last in _ALIASES and (key not in SECTIONS or type(leaf.value) in (int, float)):  # lr=0.1 is lr.peak
        fix = f"type {_ALIASES[last].format(value=value)}"
    elif key in SECTIONS:
        inside = [name for name in KEYS if _inside(name, key)] or ["task.<option>"]
        fix = f"set one of its keys: {', '.join(inside)}"
    elif near := nearest(key, known):
        fix = f"type {' or '.join(f'{name}={value}' for name in near)}"
    else:
        fix = f"an option of the task is typed task.{key}={value}"
    return UserError(str(leaf), found, fix)


def _bad_value(leaf: Setting, expected: str) -> UserError:
    kind = "null" if leaf.value is None else f"{leaf.value!r} ({type(leaf.value).__name__})"
    fix = f"type {leaf.key}={typed(_meant(leaf, expected))}"
    return UserError(str(leaf), f"{kind}, which {expected}", fix)


def _meant(leaf: Setting, expected: str) -> Any:
    """A value to type: what the user meant where that is clear ("8", 1e5, fp61), else a usual one."""
    value = word(leaf.value) if isinstance(leaf.value, str) else leaf.value
    text = str(leaf.value).casefold()
    guesses = [_WORDS.get(text), *get_close_matches(text, re.findall(r"'([\w-]+)'", expected), 1)]
    guesses += [value, int(value) if isinstance(value, float) and value.is_integer() else None]
    sound = (v for v in guesses if v is not None and not _refused({leaf.key: leaf._replace(value=v)}))
    return next(sound, usual(leaf.key))


def usual(key: str) -> Any:
    """A value that `key` takes."""
    field = KEYS[key]
    return field.examples[0] if field.examples else field.default
