"""Settings that are valid one by one, but not together. They are refused, never ignored.

`exclusive`  keys of one layer that answer the same question
`conflicts`  settings that cannot work together, wherever they come from
`unused`     options of something that is switched off, judged by where they come from

A rule is applied only if all its keys are known: a command line is checked before the task's defaults are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lockstep.config.schema import KEYS
from lockstep.config.settings import Setting, flatten, typed
from lockstep.config.strategies import with_trait
from lockstep.errors import UserError

Settings = Mapping[str, Setting]  # by dotted key

# Prefixes of sources that hold values no user typed. A task may set options of something that is switched off.
PREPARED = ("task default", "preset ")

# Values that mean "not used", whatever the key.
SWITCHED_OFF = (None, "none", "off", "constant", False)


def _on(settings: Settings, key: str) -> list[Setting]:
    """Return [the setting] if it is known and switched on, otherwise an empty list."""
    setting = settings.get(key)
    return [setting] if setting is not None and setting.value not in SWITCHED_OFF else []


def _parallel_axes(settings: Settings) -> list[Setting]:
    """Return mesh.tp and mesh.pp, if they divide the model."""
    return [axis for key in ("mesh.tp", "mesh.pp") for axis in _on(settings, key) if axis.value > 1]


def _without_ddp(settings: Settings) -> list[Setting]:
    """Return the settings under which torch's DDP does not run the model: what makes `RunConfig.uses_ddp` false."""
    strategies = [setting for setting in _on(settings, "strategy") if setting.value not in with_trait("uses_ddp")]
    return strategies + _parallel_axes(settings)


def _collective_forwards(settings: Settings) -> list[Setting]:
    """Return the settings under which forwards wait for other ranks: what makes `RankRole.collective_forwards` true.

    A model that brings its own SyncBatchNorm has such forwards under any settings.
    """
    return _without_ddp(settings) + _on(settings, "ddp.sync_batchnorm")


def _together(setting: Setting, other: Setting, reason: str, fix: str) -> UserError:
    return UserError(f"{setting} cannot be combined with {other}", reason, fix)


# ---- keys of one layer ----

EXCLUSIVE = (("steps", "epochs"), ("global_batch", "local_batch"), ("clip.norm", "clip.value", "clip.adaptive"))


def exclusive(settings: Settings) -> Iterator[UserError]:
    """Yield a problem for each group of EXCLUSIVE if one layer sets more than one of its keys."""
    for group in EXCLUSIVE:
        chosen = [settings[key] for key in group if key in settings and settings[key].value is not None]
        if len(chosen) > 1:
            yield UserError(
                f"{' and '.join(map(str, chosen))}: at most one of {', '.join(group)} can be set",
                "",
                f"keep one, such as {chosen[0].key}={typed(chosen[0].value)}",
            )


# ---- settings that cannot work together ----


def _group_rates(settings: Settings) -> Iterator[UserError]:
    # lr.peak scales all groups together, so it would change the rate that a rule sets.
    for groups in _on(settings, "optim.groups"):
        for peak in _on(settings, "lr.peak"):
            rates = [rule for rule in groups.value if isinstance(rule, Mapping) and "lr" in rule]
            if rates:
                yield UserError(
                    f"{peak} cannot be combined with lr in optim.groups",
                    f"{rates[0].get('match')} has lr={rates[0]['lr']}, and lr.peak scales the rates of all groups",
                    "set lr_scale in the rule: a factor on the rate that its parameters would have",
                )


def conflicts(settings: Settings) -> Iterator[UserError]:
    for rule in (
        _group_rates,
        _order,
        _reference_batch,
        _ddp_options,
        _exact,
        _load_balance,
        _length_balance,
        _stages,
        _cuda_graphs,
        _pairs,
    ):
        yield from rule(settings)


# Pairs of keys; the first must not be larger than the second.
NOT_ABOVE = (
    ("micro_batch", "global_batch"),
    ("micro_batch", "local_batch"),
    ("scaler.minimum", "scaler.initial"),
    ("scaler.initial", "scaler.maximum"),
)


def _order(settings: Settings) -> Iterator[UserError]:
    known = [(settings[low], settings[high]) for low, high in NOT_ABOVE if low in settings and high in settings]
    for lower, upper in known:
        # micro_batch may be `auto`, which is no number.
        numbers = isinstance(lower.value, int | float) and isinstance(upper.value, int | float)
        if numbers and lower.value > upper.value:
            yield UserError(
                f"{lower} is larger than {upper}",
                "",
                f"set {lower.key}={typed(upper.value)}, or {upper.key}={typed(lower.value)}",
            )


def _reference_batch(settings: Settings) -> Iterator[UserError]:
    reference = settings.get("lr.reference_batch")
    for scaling in _on(settings, "lr.scaling"):
        if reference is not None and reference.value is None:
            yield UserError(
                f"{scaling} needs lr.reference_batch, the batch that lr.peak was tuned for",
                "",
                "add lr.reference_batch=256, or set lr.scaling=none",
            )


# Options of torch's DDP -> the value that has no effect. Other values would be ignored where DDP is not used.
ONLY_DDP = {
    "ddp.bucket_mb": "auto",
    "ddp.hook": "none",
    "ddp.static_graph": False,
    "ddp.gradient_as_bucket_view": True,
    "ddp.sync_batchnorm": False,
    "ddp.broadcast_buffers": False,
}


def _ddp_options(settings: Settings) -> Iterator[UserError]:
    others = _without_ddp(settings) + _on(settings, "ddp.find_unused_parameters")
    reason = "an option of torch's DistributedDataParallel, which is not used then"

    for key, neutral in ONLY_DDP.items():
        option = settings.get(key)
        if option is None or option.value in (None, neutral):
            continue

        for other in others:
            # Our own all-reduce for unused parameters broadcasts buffers as well.
            if (key, other.key) != ("ddp.broadcast_buffers", "ddp.find_unused_parameters"):
                yield _together(option, other, reason, f"set {key}={typed(neutral)}, or leave {other.key} out")


def _load_balance(settings: Settings) -> Iterator[UserError]:
    for balance in _on(settings, "load_balance"):
        # The ranks run different numbers of forwards: one with fewer would leave the others waiting in theirs.
        collective = _collective_forwards(settings)
        if collective:
            key = collective[0].key
            fix = "set strategy=ddp, or strategy=zero1" if key == "strategy" else f"leave {key} out"
            reason = "forwards in which the ranks wait for each other, so that all must run the same number"
            yield _together(balance, collective[0], reason, f"{fix}; or leave {balance.key} out")
            return

        for static in _on(settings, "ddp.static_graph"):
            reason = "an option that requires one micro-batch per rank and step"
            yield _together(balance, static, reason, f"leave {static.key} out, or {balance.key}")


def _pipelines(settings: Settings) -> list[Setting]:
    """Return the settings that cut the model into stages."""
    strategies = [setting for setting in _on(settings, "strategy") if setting.value in with_trait("pipeline")]
    return strategies + [axis for axis in _parallel_axes(settings) if axis.key == "mesh.pp"]


def _length_balance(settings: Settings) -> Iterator[UserError]:
    for balance in _on(settings, "data.balance"):
        for pipeline in _pipelines(settings):
            reason = "stages, which pass on micro-batches of equal numbers of samples"
            yield _together(balance, pipeline, reason, f"leave {balance.key} out, or {pipeline.key}")


def _stages(settings: Settings) -> Iterator[UserError]:
    schedule = settings.get("pp.schedule")
    if schedule is None or not _pipelines(settings):
        return

    for stages in _on(settings, "pp.stages_per_rank"):
        # Zero-bubble takes one stage on each rank, or several.
        if stages.value > 1 and schedule.value not in ("interleaved", "zero-bubble"):
            fix = "set pp.schedule=interleaved, or pp.stages_per_rank=1"
            yield _together(stages, schedule, "a schedule with one stage on each rank", fix)
        elif stages.value == 1 and schedule.value == "interleaved":
            fix = "set pp.stages_per_rank=2, or pp.schedule=1f1b"
            yield _together(stages, schedule, "a schedule that interleaves several stages of a rank", fix)


def _cuda_graphs(settings: Settings) -> Iterator[UserError]:
    # Forwards that wait for other ranks, recompute, or differ from call to call cannot be captured.
    for graph in _on(settings, "graph"):
        others = _collective_forwards(settings)
        for key in ("ddp.find_unused_parameters", "remat"):
            others += _on(settings, key)

        # One reason is enough: the first is the most fundamental.
        if others and graph.value != "auto":
            yield _together(
                graph,
                others[0],
                "a model that is sharded, waits for other ranks or computes twice, which is not captured",
                f"set graph=auto, or leave {others[0].key} out",
            )


# (key, value, other key, its value, reason, fix)
PAIRS = (
    (
        # micro_batch=auto may divide a step into several micro-batches when memory runs out.
        "micro_batch",
        "auto",
        "ddp.static_graph",
        True,
        "an option that requires one micro-batch per rank and step",
        "leave ddp.static_graph out, or micro_batch",
    ),
    ("attention", "cudnn", "deterministic", True, "kernels that add in no fixed order", "set attention=flash"),
    (
        "exact",
        True,
        "micro_batch",
        "auto",
        "micro-batches that depend on the memory that is free at the time",
        "set micro_batch=4, the same on every number of ranks",
    ),
)


def _pairs(settings: Settings) -> Iterator[UserError]:
    for key, value, other_key, other_value, reason, fix in PAIRS:
        setting = settings.get(key)
        other = settings.get(other_key)
        if setting and other and setting.value == value and other.value == other_value:
            yield _together(setting, other, reason, fix)


# ---- exact ----


# Key -> (the values under which the result cannot depend on the number of ranks, what the others mean, fix). Keys that
# are not listed do not affect the order of additions.
EXACT: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "strategy": (
        with_trait("exact"),
        "a strategy that adds gradients in a different order",
        "set strategy=ddp, or strategy=fsdp",
    ),
    "mesh.tp": ((None, 1), "sharded layers, whose parts are added in another order", "leave mesh.tp out"),
    "mesh.pp": ((None, 1), "stages, which draw other random numbers than a full model", "leave mesh.pp out"),
    "local_batch": (
        (None,),
        "a batch that grows with the number of ranks",
        "set global_batch=N instead, the samples of all ranks together",
    ),
    "ddp.hook": (("none",), "compressed gradients, which lose bits", "leave ddp.hook out"),
    "ddp.broadcast_buffers": ((False,), "buffers that follow rank 0's samples", "leave ddp.broadcast_buffers out"),
    "ddp.sync_batchnorm": (
        (False,),
        "statistics over the micro-batches that the ranks happen to run together",
        "use GroupNorm",
    ),
    "data.seed_samples": ((True,), "random numbers that follow the ranks", "leave data.seed_samples out"),
    "data.sharding": (("stride",), "a dataset that shards itself by ranks", "return a dataset with a length"),
    "load_balance": (("none",), "shares that follow the speed of the ranks", "leave load_balance out"),
    "precision": (
        ("auto", "fp32", "tf32", "bf16", "fp16"),
        "a format whose sums have no fixed order",
        "set precision=bf16",
    ),
    "graph": (("auto", False), "kernels that may be chosen again at capture", "leave graph out"),
    "attention": (("auto", "flash", "efficient", "math"), "kernels that add in no fixed order", "leave attention out"),
    "compile": (("auto", False), "kernels that are generated again in every layout", "leave compile out"),
}


def _exact(settings: Settings) -> Iterator[UserError]:
    for exact in _on(settings, "exact"):
        for key, (allowed, reason, fix) in EXACT.items():
            if key in settings and settings[key].value not in allowed:
                yield _together(exact, settings[key], reason, fix)


# ---- options of something that is switched off ----


class OptionsOf(NamedTuple):
    """Options that have an effect only with certain values of another key."""

    options: tuple[str, ...]
    switch: str  # the key that switches them on
    values: tuple[Any, ...]  # the values that do; empty: all but SWITCHED_OFF
    reason: str  # why they have no effect otherwise
    fix: str  # a setting that switches them on
    also: Mapping[str, tuple[Any, ...]] = MappingProxyType({})  # other switches; (): all values but the default


# Groups of options that one switch turns on.
POWERSGD = ("ddp.powersgd_rank", "ddp.powersgd_start", "ddp.error_feedback")
PIPELINE = ("pp.schedule", "pp.stages_per_rank")
SPIKES = ("spike.factor", "spike.window")
SCALER = tuple(key for key in KEYS if key.startswith("scaler."))
SHARDED = with_trait("shards_parameters")
WEIGHTS = tuple(key for key in KEYS if key.startswith("weights."))

OPTIONS_OF = (
    OptionsOf(("fsdp.offload",), "strategy", SHARDED, "only a sharded model can be offloaded", "strategy=fsdp"),
    OptionsOf(
        ("fsdp.replicas",), "strategy", with_trait("replica_groups"), "only hsdp has replica groups", "strategy=hsdp"
    ),
    OptionsOf(PIPELINE, "strategy", with_trait("pipeline"), "there is no pipeline", "strategy=pp", {"mesh.pp": ()}),
    OptionsOf(
        ("blocks",),
        "strategy",
        (*SHARDED, *with_trait("pipeline")),
        "nothing is done block by block",
        "remat=full",
        {"remat": (), "precision": ("fp8",), "exact": (True,), "mesh.pp": (), "compile": (True,)},
    ),
    OptionsOf(POWERSGD, "ddp.hook", ("powersgd",), "gradients are not compressed by powersgd", "ddp.hook=powersgd"),
    OptionsOf(("lr.min_ratio",), "lr.schedule", (), "the rate does not fall", "lr.schedule=cosine"),
    OptionsOf(("lr.decay",), "lr.schedule", ("wsd",), "the schedule has no such phase", "lr.schedule=wsd"),
    OptionsOf(("lr.reference_batch",), "lr.scaling", (), "the peak does not follow the batch", "lr.scaling=linear"),
    OptionsOf(SPIKES, "spike.policy", ("skip", "rewind", "stop"), "spike detection is off", "spike.policy=skip"),
    OptionsOf(
        ("checkpoint.best_mode", "checkpoint.final"),
        "checkpoint.best",
        (),
        "no best checkpoint is kept",
        "checkpoint.best=eval_loss",
    ),
    OptionsOf(
        ("stop.metric", "stop.mode", "stop.min_delta"),
        "stop.patience",
        (),
        "no evaluation stops the run",
        "stop.patience=5",
    ),
    OptionsOf(WEIGHTS, "init_from", (), "no weights are read", "init_from=FILE"),
    OptionsOf(SCALER, "precision", ("auto", "fp16"), "the format needs no loss scale", "precision=fp16"),
)


def unused(settings: Settings, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[UserError]:
    """Yield a problem for each option that was typed and has no effect.

    Three sources are exempt: a task, which may prepare options of something that is switched off; a file that a run
    wrote, which has every key; and a weaker layer than the switch's, so that a command line may switch something off
    and leave its options in a file.
    """
    strength = {"default": -1} | {source: place for place, (source, _) in enumerate(layers)}
    # A run writes every key; one of an older version has at least most of them.
    written = {source for source, values in layers if 2 * len(KEYS.keys() & flatten(values).keys()) > len(KEYS)}

    for rule in OPTIONS_OF:
        switch = settings.get(rule.switch)
        if switch is None or _is_on(rule, switch, settings):
            continue

        for option in [settings[name] for name in rule.options if name in settings and _changed(settings[name])]:
            if option.source.startswith(PREPARED) or option.source in written:
                continue

            stronger = strength[option.source] > strength[switch.source]
            # In one file, `ddp.hook: none` next to options of powersgd is intended; `ddp.hook: bf16` is a mistake.
            contradiction = option.source == switch.source and switch.value not in SWITCHED_OFF
            if stronger or contradiction:
                yield UserError(
                    f"{option} has no effect with {rule.switch}={typed(switch.value)}",
                    rule.reason,
                    f"set {rule.fix}, or {option.key}={typed(KEYS[option.key].default)}",
                )


def _is_on(rule: OptionsOf, switch: Setting, settings: Settings) -> bool:
    by_switch = switch.value in rule.values if rule.values else switch.value not in SWITCHED_OFF
    others = [(settings[key], values) for key, values in rule.also.items() if key in settings]
    return by_switch or any(other.value in values if values else _changed(other) for other, values in others)


def _changed(setting: Setting) -> bool:
    return setting.value != KEYS[setting.key].default
