"""What the user asked for: one typed, frozen `RunConfig`, and where each of its values came from.

Values arrive in layers (task default, preset, file, command line, argument); a later layer wins, key by key.
All problems of all layers are reported together. Nothing is derived here (that is the Plan's work), and
`task.*` is passed on as it is: only the task knows its own options.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from lockstep.errors import ConfigError, UserError

Layer = tuple[str, Mapping[str, Any]]  # (where the values come from, nested and/or dotted values)


# ---- the keys -------------------------------------------------------------------------------------------


def _key(default: Any, about: str, *, example: Any = None, **limits: Any) -> Any:
    """One configuration key: its default, its meaning with the unit, and (where it helps) a value to type."""
    return Field(default, description=about, examples=None if example is None else [example], **limits)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# `none` and `off` reach us as null and false, because that is how YAML reads these words.
Scaling = Annotated[Literal["none", "sqrt", "linear"], BeforeValidator(lambda v: "none" if v is None else v)]
Progress = Annotated[
    Literal["auto", "live", "plain", "off"], BeforeValidator(lambda v: "off" if v is False else v)
]
PathText = Annotated[str, BeforeValidator(lambda v: os.fspath(v) if isinstance(v, os.PathLike) else v)]


class LrConfig(_Section):
    peak: float | None = _key(None, "highest learning rate; null: the optimizer's own", example=0.001, ge=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = _key("constant", "shape after the warm-up")
    warmup: int = _key(0, "optimizer steps of linear warm-up", ge=0)
    min_ratio: float = _key(0.0, "final rate as a share of the peak", ge=0, le=1)
    decay: float = _key(0.2, "wsd: last share of the run, in which the rate falls", ge=0, le=1)
    scaling: Scaling = _key("none", "how the peak follows global batch / reference_batch")
    reference_batch: int | None = _key(None, "samples per step that lr.peak was tuned for", example=256, ge=1)


class ClipConfig(_Section):
    norm: float | None = _key(None, "largest global L2 norm of the gradient", example=1.0, gt=0)
    value: float | None = _key(None, "largest absolute value of a gradient element", example=0.5, gt=0)
    adaptive: float | None = _key(None, "largest gradient / weight norm, per unit", example=0.01, gt=0)


class NonfiniteConfig(_Section):
    policy: Literal["skip", "stop"] = _key("skip", "what a step with a NaN or infinite gradient does")
    max_in_a_row: int = _key(5, "skipped steps in a row that end the run", ge=1)


class ScalerConfig(_Section):
    initial: float = _key(2.0**15, "fp16: loss scale at the start", gt=0)
    growth: float = _key(2.0, "fp16: factor after `interval` good steps", ge=1)
    backoff: float = _key(0.5, "fp16: factor after an overflow", gt=0, lt=1)
    interval: int = _key(2000, "fp16: good steps in a row before the scale grows", ge=1)
    minimum: float = _key(1.0, "fp16: smallest loss scale", gt=0)
    maximum: float = _key(2.0**24, "fp16: largest loss scale", gt=0)
    hysteresis: int = _key(1, "fp16: overflows before the scale shrinks", ge=1)


class EvaluateConfig(_Section):
    every: int | None = _key(
        None, "optimizer steps between evaluations; null: at the end only", example=100, ge=1
    )
    batch: int | None = _key(None, "samples per evaluation forward; null: the micro-batch", example=8, ge=1)
    at_end: bool = _key(True, "evaluate after the last step")


class DataConfig(_Section):
    workers: int = _key(0, "loader processes per rank; 0: load in the training process", ge=0)
    prefetch: int = _key(2, "micro-batches each worker prepares ahead", ge=1)
    pin_memory: Literal["auto"] | bool = _key("auto", "page-locked host memory; auto: on for CUDA")
    shuffle: bool = _key(True, "a new order of the samples in every epoch")
    seed_samples: bool = _key(True, "seed the randomness of each sample by itself, whatever the ranks")
    sharding: Literal["stride", "own"] = _key("stride", "iterable datasets: we deal the samples, or they do")


class DDPConfig(_Section):
    bucket_mb: float = _key(25.0, "gradient bucket of one all-reduce, in MiB", gt=0)
    find_unused_parameters: bool = _key(False, "look for parameters without gradient, every step (slow)")
    static_graph: bool = _key(False, "promise that every step uses the same parameters")


class LogConfig(_Section):
    every: int = _key(10, "optimizer steps between metric lines", ge=1)
    progress: Progress = _key("auto", "how progress is shown; auto: live on a terminal, else plain")


class ChecksConfig(_Section):
    first_batch: bool = _key(True, "check on the first step that the ranks hold different samples")
    every: int = _key(500, "optimizer steps between checks that all ranks hold the same weights", ge=1)


class RunConfig(_Section):
    """Everything a run was asked to do. Values that follow from these live in the Plan."""

    preset: str | None = _key(None, "name of a preset of the task", example="tiny")
    steps: int | None = _key(None, "optimizer steps to train (this or epochs)", example=1000, ge=1)
    epochs: float | None = _key(None, "passes over the data to train (this or steps)", example=3, gt=0)
    seed: int = _key(0, "seed of all random streams", ge=0)
    global_batch: int | None = _key(None, "samples per optimizer step, all ranks together", example=64, ge=1)
    local_batch: int | None = _key(None, "samples per optimizer step and rank", example=8, ge=1)
    micro_batch: int | None = _key(None, "samples per forward and backward; null: derived", example=8, ge=1)
    tail: Literal["short", "drop"] = _key("short", "what happens to an incomplete last step of an epoch")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = _key("auto", "number format of the compute")
    strategy: Literal["ddp"] = _key("ddp", "how the ranks share the model")
    compile: Literal["auto"] | bool = _key("auto", "torch.compile the model; auto: on for CUDA")
    device: Literal["auto", "cpu", "cuda"] = _key("auto", "where to train")
    deterministic: bool = _key(False, "refuse kernels whose result differs from run to run")
    run_dir: PathText | None = _key(None, "folder of the run; null: runs/<name>-<time>", example="runs/first")
    threads: int | None = _key(None, "CPU threads per rank; null: cores / ranks of a host", example=1, ge=1)
    lr: LrConfig = LrConfig()
    clip: ClipConfig = ClipConfig()
    nonfinite: NonfiniteConfig = NonfiniteConfig()
    scaler: ScalerConfig = ScalerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    data: DataConfig = DataConfig()
    ddp: DDPConfig = DDPConfig()
    log: LogConfig = LogConfig()
    checks: ChecksConfig = ChecksConfig()
    task: dict[str, Any] = _key({}, "keyword arguments of the task's constructor")

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        # `resolve` reports the same rules with sources; this guards a RunConfig that is built directly.
        leaves = {key: _Leaf(key, value, "argument") for key, value in flatten(self).items()}
        problems = _rivals(leaves) + _clashes(leaves)
        if problems:
            raise ValueError("; ".join(f"{problem.asked}: {problem.found}" for problem in problems))
        return self


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            yield from _fields(field.annotation, f"{name}.")
        elif name != "task":
            yield prefix + name, field


KEYS = dict(_fields(RunConfig))  # every dotted key but task.*; `KEYS[key].description` says what it means
_SECTIONS = {key.split(".")[0] for key in KEYS if "." in key} | {"task"}
_CLIPS = ("clip.norm", "clip.value", "clip.adaptive")
_EXCLUSIVE = (("steps", "epochs"), ("global_batch", "local_batch"), _CLIPS)


# ---- nested and dotted ----------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    key: str  # dotted
    value: Any
    source: str

    def __str__(self) -> str:
        return f"{self.key} = {_show(self.value)} ({self.source})"


def _values(config: BaseModel, only_set: bool = False) -> dict[str, Any]:
    """Nested values as they are (`model_dump` would take apart objects that a user put under `task`)."""
    names = [name for name in type(config).model_fields if not only_set or name in config.model_fields_set]
    values = {name: getattr(config, name) for name in names}
    return {name: _values(v, only_set) if isinstance(v, _Section) else v for name, v in values.items()}


def _walk(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf. A mapping whose names a dotted key cannot spell is one value."""
    for name, value in items:
        key = f"{prefix}{name}"
        inner = value if isinstance(value, Mapping) and key not in KEYS else {}
        spelled = inner and all(isinstance(n, str) and n and "." not in n for n in inner)
        if spelled or (key in _SECTIONS and isinstance(value, Mapping)):
            yield from _walk(inner.items(), f"{key}.")
        else:
            yield key, value


def flatten(nested: Mapping[str, Any] | RunConfig) -> dict[str, Any]:
    """{"lr": {"peak": 1}} -> {"lr.peak": 1}"""
    return dict(_walk((_values(nested) if isinstance(nested, RunConfig) else nested).items()))


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        section = nested
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return nested


def _leaves(items: Iterable[tuple[Any, Any]], source: str, problems: list[UserError]) -> dict[str, _Leaf]:
    """Nested and dotted keys, mixed as the user likes -> leaves by dotted key. Problems are appended."""
    leaves: dict[str, _Leaf] = {}
    for key, value in _walk(items):
        leaf = _Leaf(key, value, source)
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


def _inside(key: str, section: str) -> bool:
    return key.startswith(f"{section}.")


# ---- layers -> RunConfig --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    config: RunConfig
    sources: dict[str, str]  # every dotted key, task.* too -> "default" or the name of the layer that set it


def resolve(layers: Sequence[Layer], earlier: Sequence[UserError] = ()) -> Resolved:
    """Merge the layers, weakest first, leaf by leaf; raise every problem (`earlier` ones too) at once."""
    problems = list(earlier)
    given = _merge(layers, problems)
    config, bad = _validate({key: leaf.value for key, leaf in given.items()})
    problems += [_bad_value(given[key], expected) for key, expected in bad.items()]
    every = {key: _Leaf(key, field.default, "default") for key, field in KEYS.items()} | given
    problems += _clashes({key: leaf for key, leaf in every.items() if key not in bad})
    if problems:
        raise ConfigError(problems)
    assert config is not None, "a value was refused without a problem to show for it"
    return Resolved(config, {key: leaf.source for key, leaf in every.items()})


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
            asked = f"preset = {_show(presets[name]['preset'])} (preset {name})"
            problems = [UserError(asked, "a preset cannot choose a preset", "take the key out of the preset")]
    elif isinstance(name, str):
        near = get_close_matches(name, presets, 1, 0.0)
        found = f"no such preset; the task has {', '.join(presets) or 'none'}"
        problems = [
            UserError(f"preset = {name} ({source})", found, f"type preset={near[0] if near else 'null'}")
        ]
    return resolve([*weakest, *layers], problems)


def _merge(layers: Sequence[Layer], problems: list[UserError]) -> dict[str, _Leaf]:
    """The strongest leaf of every known key."""
    parts = [_leaves(values.items(), source, problems) for source, values in layers]
    options = [key for leaves in parts for key in leaves if _inside(key, "task")]
    merged: dict[str, _Leaf] = {}
    for leaves in parts:
        known = {key: leaf for key, leaf in leaves.items() if key in KEYS or key in options}
        problems += [_unknown(leaf, [*KEYS, *options]) for key, leaf in leaves.items() if key not in known]
        problems += _rivals(known)
        for group in _EXCLUSIVE:
            setter = next(
                (known[key] for key in group if key in known and known[key].value is not None), None
            )
            if setter:  # steps on the command line ends the epochs of a file
                merged |= {key: _Leaf(key, None, setter.source) for key in group if key in merged}
        for key in known:  # task.a replaces task.a.b of a weaker layer, and the other way round
            merged = {old: v for old, v in merged.items() if not (_inside(old, key) or _inside(key, old))}
        merged |= known
    return merged


def _validate(flat: Mapping[str, Any]) -> tuple[RunConfig | None, dict[str, str]]:
    """The config, or what each bad key should be."""
    try:
        return RunConfig.model_validate(_nest(flat)), {}
    except ValidationError as error:
        bad: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            # A union adds one more part to `loc` for each of its members; no `loc` at all is `_consistent`.
            key = next((key for n in (2, 1) if (key := ".".join(map(str, detail["loc"][:n]))) in KEYS), None)
            if key is not None:
                should = detail["msg"].removeprefix("Input ")
                bad[key] = f"{bad[key]} or {should.removeprefix('should be ')}" if key in bad else should
        return None, bad


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


def _show(value: Any) -> str:
    """A value as one would type it after `key=`."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str, skipkeys=True)


def _unknown(leaf: _Leaf, names: Sequence[str]) -> UserError:
    key, value = leaf.key, _show(leaf.value)
    last = key.rsplit(".", 1)[-1]
    found = f"{key} is a section" if key in _SECTIONS else f"there is no key {key}"
    if last in _ALIASES and (key not in _SECTIONS or type(leaf.value) in (int, float)):  # lr=0.1 is lr.peak
        return UserError(str(leaf), found, f"type {_ALIASES[last].format(value=value)}")
    if key in _SECTIONS:
        inside = [name for name in KEYS if _inside(name, key)] or ["task.<option>"]
        return UserError(str(leaf), found, f"set one of its keys: {', '.join(inside)}")

    def likeness(name: str) -> float:
        pairs = ((key, name), (last, name.rsplit(".", 1)[-1]))
        return max(SequenceMatcher(None, a.casefold(), b).ratio() for a, b in pairs)

    best = max(map(likeness, names))
    near = dict.fromkeys(f"{name}={value}" for name in names if likeness(name) == best and best >= 0.6)
    fix = f"type {' or '.join(near)}" if near else f"an option of the task is typed task.{key}={value}"
    return UserError(str(leaf), found, fix)


def _bad_value(leaf: _Leaf, expected: str) -> UserError:
    kind = "null" if leaf.value is None else f"{leaf.value!r} ({type(leaf.value).__name__})"
    fix = f"type {leaf.key}={_show(_example(leaf, expected))}"
    return UserError(str(leaf), f"{kind}, which {expected}", fix)


def _example(leaf: _Leaf, expected: str) -> Any:
    """A value to type: what the user meant where that is clear ("8", 1e5, fp61), else a usual one."""
    field = KEYS[leaf.key]
    meant = _plain(leaf.value) if isinstance(leaf.value, str) else leaf.value
    guesses = get_close_matches(str(leaf.value).casefold(), re.findall(r"'(\w+)'", expected), 1)
    guesses += [meant, int(meant) if isinstance(meant, float) and meant.is_integer() else None]
    guesses += [*(field.examples or []), field.default]
    return next(v for v in guesses if v is not None and not _validate({leaf.key: v})[1])


def _rivals(leaves: Mapping[str, _Leaf]) -> list[UserError]:
    """Keys of one layer that answer the same question."""
    problems = []
    for group in _EXCLUSIVE:
        both = [leaves[key] for key in group if key in leaves and leaves[key].value is not None]
        if len(both) > 1:
            fix = f"keep one, such as {both[0].key}={_show(both[0].value)}"
            found = f"at most one of {', '.join(group)} can be set"
            problems.append(UserError(" and ".join(map(str, both)), found, fix))
    return problems


def _clashes(leaves: Mapping[str, _Leaf]) -> list[UserError]:
    """Values that are sound one by one, but not together. A rule without all its keys is not judged."""
    problems = []
    scaling, reference = leaves.get("lr.scaling"), leaves.get("lr.reference_batch")
    if scaling and reference and scaling.value not in (None, "none") and reference.value is None:
        found = "lr.reference_batch, the batch that the rate was tuned for, is not set"
        problems.append(UserError(str(scaling), found, "add lr.reference_batch=256, or type lr.scaling=none"))
    ordered = [("micro_batch", "global_batch"), ("micro_batch", "local_batch")]
    ordered += [("scaler.minimum", "scaler.initial"), ("scaler.initial", "scaler.maximum")]
    for low, high in [(leaves[a], leaves[b]) for a, b in ordered if a in leaves and b in leaves]:
        if low.value is not None and high.value is not None and low.value > high.value:
            fix = f"type {low.key}={_show(high.value)}, or {high.key}={_show(low.value)}"
            problems.append(UserError(f"{low} and {high}", f"{low.key} is larger than {high.key}", fix))
    return problems


# ---- files, command line, objects -----------------------------------------------------------------------

# YAML 1.1 reads 1e-4 as text, 010 as eight, 16:9 as 969 and 2024-01-01 as a date. Here the first is a number
# and the others are text. Files are written by the same rules, so that they read back equal.
_EXPONENT = r"[eE][-+]?[0-9]+"
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+)$",
    "tag:yaml.org,2002:float": rf"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)({_EXPONENT})?$"
    rf"|[-+]?[0-9][0-9_]*{_EXPONENT}$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
}
_KEPT = {f"tag:yaml.org,2002:{name}" for name in ("bool", "null", "merge")}


def _scalar_rules() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """First character -> (tag, pattern) of the plain words that are not text, as PyYAML keeps them."""
    yaml_1_1 = yaml.SafeLoader.yaml_implicit_resolvers
    rules = {first: [rule for rule in old if rule[0] in _KEPT] for first, old in yaml_1_1.items()}
    for tag, pattern in _NUMBERS.items():
        for first in "+-.0123456789":
            rules.setdefault(first, []).append((tag, re.compile(pattern)))
    return rules


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _scalar_rules()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _scalar_rules()

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list that two keys share is written twice, not as &id001


_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for n, (key, _) in enumerate(pairs):
        if any(key == earlier for earlier, _ in pairs[:n]):
            raise ValueError(f"{key} is set twice")
    return dict(pairs)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of a .yaml, .yml or .json file."""
    path = Path(path)
    asked = f"the configuration file {path}"
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(asked, "it is neither YAML nor JSON by its name", "name it .yaml, .yml or .json")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_unique) if path.suffix == ".json" else _yaml(text)
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


def _plain(text: str) -> Any:
    """A word by the rules of the files, but never more than a scalar: `a: b` is text."""
    tag = _Loader("").resolve(yaml.ScalarNode, text, (True, False))
    return text if text == "<<" else _Loader("").construct_object(yaml.ScalarNode(tag, text))


def parse_overrides(args: Sequence[str]) -> dict[str, Any]:
    """`lr.peak=1e-3 task.sizes=[1,2] clip.norm=null` -> nested values."""
    problems: list[UserError] = []
    items: list[tuple[str, Any]] = []
    for arg in args:
        key, equals, text = (part.strip() for part in arg.partition("="))
        asked = f"{arg} (command line)"
        if not (key and equals):
            found = "there is no key before the =" if equals else "there is no = in it"
            problems.append(UserError(asked, found, "type key=value, such as steps=1000"))
        elif not text:  # most often an unset shell variable
            fix = f"type {key}=null to unset it, or {key}=\"''\" for an empty text"
            problems.append(UserError(asked, "there is no value after the =", fix))
        else:
            try:
                value = _yaml(text) if text[0] in "[{'\"" else _plain(text)
                items.append((key, None if text.casefold() == "none" else value))
            except yaml.YAMLError:
                found = "the value is no complete list, mapping or quoted text"
                problems.append(UserError(asked, found, f"close it, or quote a text: {key}=\"'...'\""))
    return _normal(items, "command line", problems)


def _normal(items: Iterable[tuple[Any, Any]], source: str, problems: list[UserError]) -> dict[str, Any]:
    leaves = _leaves(items, source, problems)
    if problems:
        raise ConfigError(problems)
    return _nest({key: leaf.value for key, leaf in leaves.items()})


def from_object(obj: Any) -> dict[str, Any]:
    """Nested values of what a Python caller has: None, a dict, a RunConfig, a file's path, a Hydra config."""
    omegaconf = sys.modules.get("omegaconf")  # whoever holds such an object has imported it
    if omegaconf is not None and omegaconf.OmegaConf.is_config(obj):
        obj = omegaconf.OmegaConf.to_container(obj, resolve=True, throw_on_missing=True)
    if obj is None:
        return {}
    if isinstance(obj, RunConfig):
        return _values(obj, only_set=True)  # a default that nobody chose must not beat a task's own
    if isinstance(obj, (str, os.PathLike)):
        return read_file(obj)
    if not isinstance(obj, Mapping):
        fix = "pass a dict, a RunConfig, the path of a file, or nothing"
        raise UserError("a configuration", f"an object of type {type(obj).__name__}", fix)
    return _normal(obj.items(), "argument", [])


# ---- showing --------------------------------------------------------------------------------------------


def to_yaml(config: RunConfig) -> str:
    """All values, in a form that `read_file` reads back."""
    try:
        return yaml.dump(_values(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        key = next((key for key, leaf in flatten(config).items() if leaf is value), "task")
        found = f"{key} is an object of type {type(value).__name__}, which YAML cannot hold"
        raise UserError("to save the configuration", found, "give it plain numbers, texts or lists") from None


def describe(config: RunConfig, sources: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """(key, value, where it came from) of every key, for `lockstep config show`."""
    return [(key, value, sources.get(key, "default")) for key, value in flatten(config).items()]


def diff(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, value in a, value in b) where they differ; a task option that one of them lacks is None there."""
    left, right = flatten(a), flatten(b)
    keys = [key for key in left | right if key not in left or key not in right or left[key] != right[key]]
    return [(key, left.get(key), right.get(key)) for key in keys]
