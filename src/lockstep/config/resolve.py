"""Layers -> one `RunConfig` and the source of each value, or every problem at once with what to type.

A later layer wins over an earlier one, key by key. All problems are collected and raised together, so that a user can
correct all mistakes of a file at once: each is reported with its source and the nearest name that exists.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from lockstep.config.conflicts import EXCLUSIVE, conflicts, exclusive, unused
from lockstep.config.schema import KEYS, RENAMED, SECTIONS, RunConfig
from lockstep.config.settings import Setting, flatten, typed, walk
from lockstep.config.yaml_dialect import word
from lockstep.errors import ConfigError, UserError, likeness, nearest_name

Layer = tuple[str, Mapping[str, Any]]  # (where the values come from, nested and/or dotted values)

# Settings of a run that takes steps and does nothing else, for commands that measure or compare them.
ONLY_TRAINING: dict[str, Any] = {
    "resume": "never",
    "log.progress": "off",
    "evaluate.every": None,
    "evaluate.epochs": None,
    "evaluate.minutes": None,
    "evaluate.at_end": False,
    "checkpoint.best": None,
    "checkpoint.final": "last",
    "checkpoint.every": None,
    "checkpoint.minutes": None,
    "checkpoint.at_end": False,
    "stop.patience": None,
    "stop.max_minutes": None,
}


@dataclass(frozen=True)
class Resolved:
    config: RunConfig
    sources: dict[str, str]  # every dotted key, task.* included -> "default" or the name of the layer that set it

    def without_options(self) -> Resolved:
        """Return a copy without `task.*`, for a task object that was constructed with its own options."""
        sources = {key: source for key, source in self.sources.items() if not key.startswith("task.")}
        return replace(self, config=self.config.model_copy(update={"task": {}}), sources=sources)

    def fill_in(self, source: str, values: Mapping[str, Any]) -> Resolved:
        """Return a copy in which `values`, by dotted key, replace defaults. Keys that a layer has set stay as they are.

        A key also stays if a layer has set another key of its group in EXCLUSIVE.
        """
        settings = {key: Setting(key, value, self.sources[key]) for key, value in flatten(self.config).items()}
        taken = {key for group in EXCLUSIVE for key in group if any(settings[k].value is not None for k in group)}
        free = [key for key in values if self.sources[key] == "default" and key not in taken]
        settings |= {key: Setting(key, values[key], source) for key in free}
        if problems := list(conflicts(settings)):
            raise ConfigError(problems)

        config = RunConfig.model_validate(nest(settings))
        return Resolved(config, {key: setting.source for key, setting in settings.items()})


def resolve(layers: Sequence[Layer], earlier: Sequence[UserError] = ()) -> Resolved:
    """Merge the layers, weakest first, key by key; raise every problem, `earlier` ones included, at once."""
    defaults = {key: Setting(key, field.default, "default") for key, field in KEYS.items()}
    settings = check(layers, earlier, defaults)
    config = RunConfig.model_validate(nest(settings))
    return Resolved(config, {key: setting.source for key, setting in (defaults | settings).items()})


def resolve_for(
    defaults: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]], layers: Sequence[Layer]
) -> Resolved:
    """Resolve for a task, whose defaults and chosen preset are the two weakest layers."""
    weakest: list[Layer] = [("task default", defaults)]

    # The strongest layer chooses the preset, but the preset itself is weak: it only replaces defaults.
    choices = [(source, values["preset"]) for source, values in [*weakest, *layers] if "preset" in values]
    source, name = choices[-1] if choices else ("default", None)

    # A preset that is not text is reported with all other wrong types.
    problems = []
    if isinstance(name, str) and name in presets:
        weakest.append((f"preset {name}", presets[name]))
        if "preset" in presets[name]:
            choice = f"preset = {typed(presets[name]['preset'])}"
            problem = f"the preset {name} sets {choice}, and a preset cannot choose another one"
            problems = [UserError(problem, "", "take the key out of the preset")]
    elif isinstance(name, str):
        near = nearest_name(name, presets, cutoff=0.0) or "null"
        problem = f"preset = {name} ({source}) is not a preset of the task"
        known = f"its presets are {', '.join(presets)}" if presets else "it has no presets"
        problems = [UserError(problem, known, f"set preset={near}")]

    return resolve([*weakest, *layers], problems)


# ---- merging ----


def strongest_value(layers: Sequence[Layer], key: str) -> Any:
    """Return the value of the strongest layer that sets `key`, before anything is checked; None if none does."""
    return next((values[key] for _, values in reversed(layers) if values.get(key)), None)


def extend(weaker: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which those of `stronger` win, key by key, and the rest is that of `weaker`, by dotted key."""
    replaced = {key for key, _ in walk(stronger.items())}
    given = {key for key, value in walk(stronger.items()) if value is not None}

    # As between layers, `steps` in the stronger values unsets `epochs` in the weaker ones.
    replaced |= {key for group in EXCLUSIVE if given & set(group) for key in group}

    kept = {key: value for key, value in walk(weaker.items()) if key not in replaced}
    return {**kept, **stronger}


def settings_of(items: Iterable[tuple[Any, Any]], source: str, problems: list[UserError]) -> dict[str, Setting]:
    """Return settings by dotted key, for nested and dotted keys in any mixture. Problems are appended."""
    settings: dict[str, Setting] = {}
    for key, value in walk(items):
        setting = Setting(key, value, source)
        if not all(key.split(".")):
            problems.append(UserError(f"{setting} has a key with an empty part", "", "use a key such as lr.peak"))
        elif key in settings:
            problems.append(UserError(f"{key} is set twice: {settings[key]} and {setting}", "", f"keep one {key}"))
        else:
            settings[key] = setting

    # `a: 1` next to `a.b: 2`: any name under task.* may be a value or a section, but not both.
    pairs = [(a, b) for a in settings.values() for b in settings.values() if _inside(b.key, a.key)]
    for outer, inner in pairs:
        problem = f"{outer.key} cannot be both a value and a section: {outer} and {inner}"
        problems.append(UserError(problem, "", f"keep either {outer.key} or {inner.key}"))
        settings.pop(inner.key, None)

    return settings


def nest(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return {"lr": {"peak": 1}} for {"lr.peak": Setting("lr.peak", 1, ...)}."""
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        *parents, last = key.split(".")
        section = values
        for name in parents:
            section = section.setdefault(name, {})

        section[last] = setting.value

    return values


def _inside(key: str, section: str) -> bool:
    return key.startswith(f"{section}.")


def check(
    layers: Sequence[Layer], earlier: Sequence[UserError] = (), defaults: Mapping[str, Setting] = MappingProxyType({})
) -> dict[str, Setting]:
    """Return the strongest setting of every key in the layers, or raise all problems, `earlier` ones included.

    `defaults` count only in the rules between keys. Without them, only problems are found that no weaker layer, such
    as a task's, could solve.
    """
    problems = list(earlier)
    merged = _merge(layers, problems)

    # A value of the wrong type is reported once and kept out of the rules between keys.
    invalid = _invalid(merged)
    problems += [_bad_value(merged[key], expected) for key, expected in invalid.items()]
    valid = {key: setting for key, setting in {**defaults, **merged}.items() if key not in invalid}
    problems += [*conflicts(valid), *unused(valid, layers)]
    if problems:
        raise ConfigError(problems)

    return merged


def _merge(layers: Sequence[Layer], problems: list[UserError]) -> dict[str, Setting]:
    """Return the strongest setting of every known key. Problems are appended."""
    of_layers = [settings_of(values.items(), source, problems) for source, values in layers]

    # Options that any layer gives to the task count as known, so that a typo can be compared with them.
    known = [*KEYS, *(key for settings in of_layers for key in settings if _inside(key, "task"))]

    merged: dict[str, Setting] = {}
    for settings in of_layers:
        problems += [_unknown(setting, known) for key, setting in settings.items() if key not in known]
        settings = {key: setting for key, setting in settings.items() if key in known}

        # `steps` on the command line unsets `epochs` of a file.
        problems += exclusive(settings)
        for group in EXCLUSIVE:
            setters = [settings[key] for key in group if key in settings and settings[key].value is not None]
            if setters:
                merged |= {key: Setting(key, None, setters[0].source) for key in group if key in merged}

        # task.a replaces task.a.b of a weaker layer, and the other way round.
        for key in settings:
            merged = {old: v for old, v in merged.items() if not (_inside(old, key) or _inside(key, old))}

        merged |= settings

    return merged


def _invalid(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the keys whose value has the wrong type or size -> what it should be."""
    invalid: dict[str, str] = {}
    try:
        RunConfig.model_validate(nest(settings))
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if not detail["loc"]:
                continue  # a rule between keys, which `conflicts` reports with sources

            # pydantic reports each member of a union separately, with one more part in its location.
            parts = 2 if detail["loc"][0] in SECTIONS else 1
            key = ".".join(map(str, detail["loc"][:parts]))
            expected = detail["msg"].removeprefix("Input ")
            if key in invalid:
                expected = f"{invalid[key]} or {expected.removeprefix('should be ')}"

            invalid[key] = expected

    return invalid


# ---- problems ----

# Keys that other tools use -> what to type here.
_ALIASES = {
    "learning_rate": "lr.peak={value}",
    "lr": "lr.peak={value}",
    "batch_size": "global_batch={value} (all ranks together) or local_batch={value} (per rank)",
    "batch": "global_batch={value} (all ranks together) or local_batch={value} (per rank)",
    "per_device_train_batch_size": "local_batch={value} (per rank) or global_batch=... (all ranks together)",
    "max_steps": "steps={value}",
    **dict.fromkeys(("num_epochs", "max_epochs", "num_train_epochs"), "epochs={value}"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        "micro_batch=... (samples per backward); the count follows from the batch",
    ),
    "fp16": "precision=fp16 (or bf16, fp32, auto)",
    "bf16": "precision=bf16 (or fp16, fp32, auto)",
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), "clip.norm={value}"),
    "weight_decay": "optim.groups='[{{match: \"*\", weight_decay: {value}}}]', or set it in the optimizer of your code",
    "warmup_steps": "lr.warmup={value}",
    "num_workers": "data.workers={value}",
}

# Keys for what an option says -> the option.
_OPTIONS = dict.fromkeys(("nproc", "num_processes", "nproc_per_node", "num_gpus", "devices"), "--nproc")

# Values that other tools have for the same thing -> what to type here.
_WORDS = {
    **{"dp": "ddp", "zero2": "fsdp-grads", "zero3": "fsdp", "fsdp2": "fsdp", "full_shard": "fsdp"},
    **{"hybrid_shard": "hsdp", "float32": "fp32", "float16": "fp16", "half": "fp16", "16-mixed": "fp16"},
    **{"bfloat16": "bf16", "bf16-mixed": "bf16"},
}


def nearest(key: str, names: Collection[str]) -> list[str]:
    """Return the names most like `key`, if any is like it: lr.warmup for `warmpu`."""

    # With and without the section: `log.warmup` is like lr.warmup, and `lr.peek` like lr.peak.
    def likeness_of(name: str) -> float:
        pairs = ((key, name), (key.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1]))
        return max(likeness(a, b) for a, b in pairs)

    scores = {name: likeness_of(name) for name in names}
    best = max(scores.values())
    return [name for name, score in scores.items() if score == best >= 0.6]


def _unknown(setting: Setting, known: Collection[str]) -> UserError:
    """Say what an unknown key was probably meant to be."""
    key = setting.key
    value = typed(setting.value)
    last = key.rsplit(".", 1)[-1]
    problem = f"{setting}: {key} is a section" if key in SECTIONS else f"{setting}: there is no key {key}"

    # The surest guess first: a rename, another tool's name, a section, a typo, and last an option of the task.
    if key in RENAMED:
        problem = f"{setting} cannot be set: {key} is now called {RENAMED[key]}"
        fix = f"set {RENAMED[key]}={value}"
    elif key in _OPTIONS:
        fix = f"use {_OPTIONS[key]} {value}: it is an option, not a setting"
    elif last in _ALIASES and (key not in SECTIONS or type(setting.value) in (int, float)):  # lr=0.1 is lr.peak
        fix = f"set {_ALIASES[last].format(value=value)}"
    elif key in SECTIONS:
        inside = [name for name in KEYS if _inside(name, key)] or ["task.<option>"]
        fix = f"set one of its keys: {', '.join(inside)}"
    elif near := nearest(key, known):
        fix = f"set {' or '.join(f'{name}={value}' for name in near)}"
    else:
        fix = f"an option of the task is set as task.{key}={value}"

    return UserError(problem, "", fix)


def _bad_value(setting: Setting, expected: str) -> UserError:
    return UserError(
        f"{setting} {expected}",
        "null" if setting.value is None else f"{setting.value!r} ({type(setting.value).__name__})",
        f"set {setting.key}={typed(_meant(setting, expected))}",
    )


def _meant(setting: Setting, expected: str) -> Any:
    """Return a value to type: what the user meant where that is clear ("8", 1e5, fp61), else a usual one."""
    value = word(setting.value) if isinstance(setting.value, str) else setting.value
    text = str(setting.value).casefold()

    # The first guess that is valid: another tool's word, a typo, the text as a number, 1e5 as an integer.
    guesses = [_WORDS.get(text), nearest_name(text, re.findall(r"'([\w-]+)'", expected)), value]
    if isinstance(value, float) and value.is_integer():
        guesses.append(int(value))

    for guess in guesses:
        if guess is not None and not _invalid({setting.key: setting._replace(value=guess)}):
            return guess

    return usual(setting.key)


def usual(key: str) -> Any:
    field = KEYS[key]
    return field.examples[0] if field.examples else field.default
