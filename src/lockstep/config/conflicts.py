"""Values that are sound one by one, but not together, whatever their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lockstep.config.schema import KEYS, flatten
from lockstep.config.values import Setting, typed
from lockstep.errors import UserError

RIVALS = (("steps", "epochs"), ("global_batch", "local_batch"), ("clip.norm", "clip.value", "clip.adaptive"))
NOT_ABOVE = (  # the first must not be larger than the second
    ("micro_batch", "global_batch"),
    ("micro_batch", "local_batch"),
    ("scaler.minimum", "scaler.initial"),
    ("scaler.initial", "scaler.maximum"),
)

ONLY_DDP = {  # and the values that ask for nothing
    "ddp.hook": "none",
    "ddp.static_graph": False,
    "ddp.gradient_as_bucket_view": True,
    "ddp.sync_batchnorm": False,
    "ddp.broadcast_buffers": False,
}


def rivals(leaves: Mapping[str, Setting]) -> list[UserError]:
    """Keys of one layer that answer the same question."""
    problems = []
    for group in RIVALS:
        both = [leaves[key] for key in group if key in leaves and leaves[key].value is not None]
        if len(both) > 1:
            fix = f"keep one, such as {both[0].key}={typed(both[0].value)}"
            found = f"at most one of {', '.join(group)} can be set"
            problems.append(UserError(" and ".join(map(str, both)), found, fix))
    return problems


def clashes(leaves: Mapping[str, Setting]) -> list[UserError]:
    """Values that are sound one by one, but not together. A rule without all its keys is not judged."""
    problems = []
    scaling, reference = leaves.get("lr.scaling"), leaves.get("lr.reference_batch")
    if scaling and reference and scaling.value not in (None, "none") and reference.value is None:
        found = "lr.reference_batch, the batch that the rate was tuned for, is not set"
        problems.append(UserError(str(scaling), found, "add lr.reference_batch=256, or type lr.scaling=none"))
    for low, high in [(leaves[a], leaves[b]) for a, b in NOT_ABOVE if a in leaves and b in leaves]:
        both_numbers = all(isinstance(leaf.value, int | float) for leaf in (low, high))
        if both_numbers and low.value > high.value:
            fix = f"type {low.key}={typed(high.value)}, or {high.key}={typed(low.value)}"
            problems.append(UserError(f"{low} and {high}", f"{low.key} is larger than {high.key}", fix))
    return problems + _without_ddp(leaves) + inexact(leaves)


def _without_ddp(leaves: Mapping[str, Setting]) -> list[UserError]:
    """Options of torch's DDP, where something else runs the model or exchanges the gradients."""
    strategy, unused = leaves.get("strategy"), leaves.get("ddp.find_unused_parameters")
    rivals = [strategy] if strategy and strategy.value not in ("ddp", "zero1") else []
    rivals += [unused] if unused and unused.value else []
    rivals += [leaves[key] for key in ("mesh.tp", "mesh.pp") if key in leaves and (leaves[key].value or 1) > 1]
    asked = [leaves[key] for key, usual in ONLY_DDP.items() if key in leaves and leaves[key].value not in (None, usual)]
    found = "an option of torch's DistributedDataParallel, which does not run then"
    return [
        UserError(
            f"{leaf} and {rival}", found, f"type {leaf.key}={typed(ONLY_DDP[leaf.key])}, or leave {rival.key} out"
        )
        for leaf in asked
        for rival in rivals
        if (leaf.key, rival.key) != ("ddp.broadcast_buffers", "ddp.find_unused_parameters")  # which knows that one, too
    ]


# Settings that would have no effect, or only a late failure, beside the others: refused, not ignored. Judged with
# their sources: a command line that switches something off may leave the options of it in a file alone.


CUTTING = ("fsdp", "fsdp-grads", "hsdp")
REPLICAS = ("ddp", "zero1")
PREPARED = ("task default", "preset ")


class Need(NamedTuple):
    """Options, and what they are options of."""

    options: tuple[str, ...]
    of: str  # the key that switches them on
    by: tuple[Any, ...]  # its values that do; empty: any but none
    why: str  # nothing comes of them otherwise
    fix: str
    also: Mapping[str, tuple[Any, ...]] = MappingProxyType({})  # what switches them on as well; (): all but its default


POWERSGD = ("ddp.powersgd_rank", "ddp.powersgd_start", "ddp.error_feedback")
SPIKES = ("spike.factor", "spike.window")
SCALER = tuple(key for key in KEYS if key.startswith("scaler."))
BY_BLOCK = {"remat": (), "precision": ("fp8",)}
IDLE = (
    Need(("fsdp.offload",), "strategy", CUTTING, "only a model that is cut is kept in host memory", "strategy=fsdp"),
    Need(("fsdp.replicas",), "strategy", ("hsdp",), "only hsdp has groups with a whole copy each", "strategy=hsdp"),
    Need(("pp.schedule", "pp.stages_per_rank"), "strategy", ("pp",), "no pipeline", "strategy=pp", {"mesh.pp": ()}),
    Need(("blocks",), "strategy", CUTTING, "nothing that is done block by block", "remat=full", BY_BLOCK),
    Need(POWERSGD, "ddp.hook", ("powersgd",), "gradients that are not compressed by it", "ddp.hook=powersgd"),
    Need(("lr.min_ratio",), "lr.schedule", (), "a rate that stays", "lr.schedule=cosine"),
    Need(("lr.decay",), "lr.schedule", ("wsd",), "a schedule without that phase", "lr.schedule=wsd"),
    Need(("lr.reference_batch",), "lr.scaling", (), "a peak that does not follow the batch", "lr.scaling=linear"),
    Need(SPIKES, "spike.policy", ("skip", "rewind", "stop"), "nobody who looks for spikes", "spike.policy=skip"),
    Need(("checkpoint.best_mode",), "checkpoint.best", (), "no best one is kept", "checkpoint.best=eval_loss"),
    Need(SCALER, "precision", ("auto", "fp16"), "a number format without a loss scale", "precision=fp16"),
)


def idle(leaves: Mapping[str, Setting], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[UserError]:
    """Options of something that is not switched on. Not judged: a rule without all its keys; what a task has set for
    the day that somebody switches it on; and a configuration that a run has written, which has every key."""
    strength = {source: place for place, (source, _) in enumerate(layers)} | {"default": -1}
    written = {source for source, values in layers if by_a_run(values)}
    problems = []
    for need in IDLE:
        switch = leaves.get(need.of)
        if switch is None or _is_on(need, switch, leaves):
            continue
        for option in [leaves[name] for name in need.options if name in leaves and _changed(leaves[name])]:
            weaker = strength[switch.source] < strength[option.source]
            together = switch.source == option.source and _set(switch.value)  # `none` beside it is meant so
            if (weaker or together) and not option.source.startswith(PREPARED) and option.source not in written:
                fix = f"type {need.fix}, or {option.key}={typed(KEYS[option.key].default)}"
                problems.append(UserError(f"{option} with {need.of}={typed(switch.value)}", need.why, fix))
    return problems


def by_a_run(values: Mapping[str, Any]) -> bool:
    """Whether a run has written them: it writes every key down, chosen or not. An older version had fewer of them."""
    return 2 * len(KEYS.keys() & flatten(values).keys()) > len(KEYS)


def _is_on(need: Need, switch: Setting, leaves: Mapping[str, Setting]) -> bool:
    on = switch.value in need.by if need.by else _set(switch.value)
    others = [(leaves[key], by) for key, by in need.also.items() if key in leaves]
    return on or any(leaf.value in by if by else _changed(leaf) for leaf, by in others)


def _changed(leaf: Setting) -> bool:
    return leaf.value != KEYS[leaf.key].default


def _set(value: Any) -> bool:
    return value not in (None, "none", "off", "constant", False)


def impossible(leaves: Mapping[str, Setting]) -> list[UserError]:
    """What no other setting can make work."""
    found = [_uneven(leaves, leaf) for leaf in _set_leaves(leaves, "speed_weights")]
    found += [_several(leaf, leaves) for leaf in _set_leaves(leaves, "ddp.static_graph")]
    found += [_schedules(leaves, leaf) for leaf in _set_leaves(leaves, "pp.stages_per_rank")]
    found += [_unrecordable(leaves, leaf) for leaf in _set_leaves(leaves, "graph") if leaf.value is True]
    found += [_unrepeatable(leaves, leaf) for leaf in _set_leaves(leaves, "attention") if leaf.value == "cudnn"]
    return [problem for problem in found if problem]


def _unrepeatable(leaves: Mapping[str, Setting], attention: Setting) -> UserError | None:
    wanted = _set_leaves(leaves, "deterministic")
    if not wanted:
        return None
    return UserError(f"{attention} with {wanted[0]}", "kernels that add in no fixed order", "type attention=flash")


def _unrecordable(leaves: Mapping[str, Setting], graph: Setting) -> UserError | None:
    """Forwards that wait for other ranks, that compute again, or that are another at every call."""
    rivals = [leaf for leaf in _set_leaves(leaves, "strategy") if leaf.value not in REPLICAS]
    rivals += [leaf for key in ("mesh.tp", "mesh.pp") for leaf in _set_leaves(leaves, key) if leaf.value > 1]
    options = ("ddp.sync_batchnorm", "ddp.find_unused_parameters", "remat")
    rivals += [leaf for key in options for leaf in _set_leaves(leaves, key)]
    if not rivals:
        return None
    why = "a model that is cut, waits for other ranks or computes twice, which is not recorded"
    return UserError(f"{graph} with {rivals[0]}", why, f"type graph=auto, or leave {rivals[0].key} out")


def _set_leaves(leaves: Mapping[str, Setting], key: str) -> list[Setting]:
    return [leaves[key]] if key in leaves and _set(leaves[key].value) else []


def _uneven(leaves: Mapping[str, Setting], speeds: Setting) -> UserError | None:
    """Ranks that run different numbers of micro-batches, where a forward waits for the others."""
    strategy = [leaf for leaf in _set_leaves(leaves, "strategy") if leaf.value not in REPLICAS]
    axes = [leaf for key in ("mesh.tp", "mesh.pp") for leaf in _set_leaves(leaves, key) if leaf.value > 1]
    static = [leaf for key in ("ddp.static_graph", "ddp.sync_batchnorm") for leaf in _set_leaves(leaves, key)]
    if strategy or axes:
        why = "forwards in which the ranks wait for each other, so that all must run equally many"
        fix = "type strategy=ddp, or strategy=zero1" if strategy else f"leave {axes[0].key} out"
        return UserError(f"{speeds} with {(strategy + axes)[0]}", why, f"{fix}; or leave speed_weights out")
    if static:
        why = "a promise that every rank runs one micro-batch in a step, or equally many"
        return UserError(f"{speeds} with {static[0]}", why, f"leave {static[0].key} out, or speed_weights")
    return None


def _several(static: Setting, leaves: Mapping[str, Setting]) -> UserError | None:
    """The size that memory leaves may be one of several micro-batches in a step."""
    auto = [leaf for leaf in _set_leaves(leaves, "micro_batch") if leaf.value == "auto"]
    why, fix = "a promise that every rank runs one micro-batch in a step", f"leave {static.key} out, or micro_batch"
    return UserError(f"{auto[0]} with {static}", why, fix) if auto else None


def _schedules(leaves: Mapping[str, Setting], stages: Setting) -> UserError | None:
    schedule, strategy, axis = (leaves.get(key) for key in ("pp.schedule", "strategy", "mesh.pp"))
    staged = (strategy and strategy.value == "pp") or (axis and (axis.value or 1) > 1)
    if schedule is None or not staged or (stages.value > 1) == (schedule.value in ("interleaved", "zero-bubble")):
        return None
    if stages.value > 1:
        why, fix = "a schedule with one stage on each rank", "type pp.schedule=interleaved, or pp.stages_per_rank=1"
        return UserError(f"{stages} with pp.schedule={schedule.value}", why, fix)
    if schedule.value == "zero-bubble":
        return None  # takes one as well
    why, fix = "a schedule that goes to and fro between several stages of a rank", "type pp.stages_per_rank=2"
    return UserError(f"{stages} with {schedule}", why, f"{fix}, or pp.schedule=1f1b")


# What `exact` cannot be combined with: settings under which the number of ranks would leave a trace in the result.


class _Rule(NamedTuple):
    fits: tuple[Any, ...]  # the values that do no harm
    found: str
    fix: str


STRATEGIES = ("ddp", "zero1", "fsdp", "fsdp-grads")
UNUSED = "freeze what nothing uses; add `0 * parameter.sum()` to the loss for what only some micro-batches use"

_RULES = {
    "strategy": _Rule(STRATEGIES, "a strategy that adds in an order of its own", "type strategy=ddp, or strategy=fsdp"),
    "mesh.tp": _Rule((None, 1), "layers that are cut, whose parts are added in another order", "leave mesh.tp out"),
    "mesh.pp": _Rule((None, 1), "stages, which draw other random numbers than a whole model", "leave mesh.pp out"),
    "local_batch": _Rule(
        (None,),
        "a batch that grows with the number of ranks",
        "type global_batch=N instead, the samples of all ranks together",
    ),
    "ddp.hook": _Rule(("none",), "gradients that lose bits on the way", "leave ddp.hook out"),
    "ddp.find_unused_parameters": _Rule((False,), "an exchange in an order of its own", UNUSED),
    "ddp.broadcast_buffers": _Rule((False,), "buffers that follow rank 0's samples", "leave ddp.broadcast_buffers out"),
    "ddp.sync_batchnorm": _Rule((False,), "statistics over whatever the ranks run at a time", "use GroupNorm"),
    "data.seed_samples": _Rule((True,), "random numbers that follow the ranks", "leave data.seed_samples out"),
    "data.sharding": _Rule(("stride",), "a dataset that cuts itself by ranks", "return a dataset with a length"),
    "speed_weights": _Rule(("none",), "shares that follow the speed of the ranks", "leave speed_weights out"),
    "precision": _Rule(
        ("auto", "fp32", "tf32", "bf16", "fp16"), "a format whose sums were not put in order", "type precision=bf16"
    ),
    "optimizer": _Rule(("task",), "an optimizer whose sums were not put in order", "leave optimizer out"),
    "graph": _Rule(("auto", False), "kernels that may be chosen anew when they are recorded", "leave graph out"),
    "attention": _Rule(
        ("auto", "flash", "efficient", "math"), "kernels that add in no fixed order", "leave attention out"
    ),
    "compile": _Rule(("auto", False), "kernels that are put together anew in every layout", "leave compile out"),
}


def inexact(leaves: Mapping[str, Any]) -> list[UserError]:
    """`leaves`: every setting by its dotted key, with `.value`; its text names the source."""
    exact, micro = leaves.get("exact"), leaves.get("micro_batch")
    if exact is None or not exact.value:
        return []
    broken = [(leaves[key], rule) for key, rule in _RULES.items() if key in leaves]
    problems = [
        UserError(f"{exact} and {leaf}", rule.found, rule.fix) for leaf, rule in broken if leaf.value not in rule.fits
    ]
    if micro is not None and micro.value == "auto":
        found = "micro-batches that follow the memory of the moment"
        problems.append(
            UserError(f"{exact} and {micro}", found, "type micro_batch=4, the same on every number of ranks")
        )
    return problems
