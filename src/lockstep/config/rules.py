"""Settings that would have no effect, or only a late failure, beside the others: refused, not ignored.

Asked of the settings as they came, with their sources. A command line that switches something off may leave the options
of it in a file or a task alone: whoever typed one source meant it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lockstep.config.schema import KEYS, Leaf, typed
from lockstep.errors import UserError

CUTTING = ("fsdp", "fsdp-grads", "hsdp")
REPLICAS = ("ddp", "zero1")


class Need(NamedTuple):
    """An option, and what it is an option of."""

    option: str
    of: str  # the key that switches it on
    on: Callable[[Any], bool]  # by these values
    why: str
    fix: str  # that switches it on
    also: tuple[str, ...] = ()  # keys that switch it on as well, by any value but their default


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _set(value: Any) -> bool:
    return value not in (None, "none", False)


IDLE = (
    Need("fsdp.offload", "strategy", _one_of(*CUTTING), "only a cut model is kept in host memory", "strategy=fsdp"),
    Need("fsdp.replicas", "strategy", _one_of("hsdp"), "only hsdp has groups with a whole copy", "strategy=hsdp"),
    Need("pp.schedule", "strategy", _one_of("pp"), "a schedule of a pipeline, and there is none", "strategy=pp", ("mesh.pp",)),
    Need("pp.stages_per_rank", "strategy", _one_of("pp"), "no pipeline to have stages", "strategy=pp", ("mesh.pp",)),
    Need("blocks", "strategy", _one_of(*CUTTING), "nothing that is done block by block", "remat=full", ("remat",)),
    Need("ddp.powersgd_rank", "ddp.hook", _one_of("powersgd"), "gradients that are not compressed", "ddp.hook=powersgd"),
    Need("ddp.powersgd_start", "ddp.hook", _one_of("powersgd"), "gradients that are not compressed", "ddp.hook=powersgd"),
    Need("ddp.error_feedback", "ddp.hook", _one_of("powersgd"), "gradients that are not compressed", "ddp.hook=powersgd"),
    Need("lr.min_ratio", "lr.schedule", _one_of("linear", "cosine", "wsd"), "a rate that never falls", "lr.schedule=cosine"),
    Need("lr.decay", "lr.schedule", _one_of("wsd"), "a schedule without that phase", "lr.schedule=wsd"),
    Need("lr.reference_batch", "lr.scaling", _set, "a peak that does not follow the batch", "lr.scaling=linear"),
    Need("spike.factor", "spike.policy", _one_of("skip", "rewind", "stop"), "nobody watches for spikes", "spike.policy=skip"),
    Need("spike.window", "spike.policy", _one_of("skip", "rewind", "stop"), "nobody watches for spikes", "spike.policy=skip"),
    Need("checkpoint.best_mode", "checkpoint.best", _set, "no best checkpoint is kept", "checkpoint.best=eval_loss"),
    *(
        Need(key, "precision", _one_of("auto", "fp16"), "a format that needs no loss scale", "precision=fp16")
        for key in KEYS
        if key.startswith("scaler.")
    ),
)


def idle(leaves: Mapping[str, Leaf]) -> list[UserError]:
    """Options of something that is not switched on. A rule without all its keys is not judged."""
    problems = []
    for need in IDLE:
        option, switch = leaves.get(need.option), leaves.get(need.of)
        if option is None or switch is None or option.value == KEYS[need.option].default or need.on(switch.value):
            continue
        if any(key in leaves and leaves[key].value != KEYS[key].default for key in need.also):
            continue
        if switch.source in ("default", option.source):
            usual = typed(KEYS[need.option].default)
            fix = f"type {need.fix}, or {need.option}={usual}"
            problems.append(UserError(f"{option} with {need.of}={typed(switch.value)}", need.why, fix))
    return problems


def impossible(leaves: Mapping[str, Leaf]) -> list[UserError]:
    """What no other setting can make work."""
    found = [_uneven(leaves, leaf) for leaf in _set_leaves(leaves, "speed_weights")]
    found += [_unused_in_parts(leaves, leaf) for leaf in _set_leaves(leaves, "ddp.find_unused_parameters")]
    found += [_schedules(leaves, leaf) for leaf in _set_leaves(leaves, "pp.stages_per_rank")]
    return [problem for problem in found if problem]


def _set_leaves(leaves: Mapping[str, Leaf], key: str) -> list[Leaf]:
    return [leaves[key]] if key in leaves and _set(leaves[key].value) else []


def _uneven(leaves: Mapping[str, Leaf], speeds: Leaf) -> UserError | None:
    """Ranks that run different numbers of micro-batches, where a forward waits for the others."""
    strategy = [leaf for leaf in _set_leaves(leaves, "strategy") if leaf.value not in REPLICAS]
    axes = [leaf for key in ("mesh.tp", "mesh.pp") for leaf in _set_leaves(leaves, key) if leaf.value > 1]
    static = [leaf for key in ("ddp.static_graph", "ddp.sync_batchnorm") for leaf in _set_leaves(leaves, key)]
    if strategy or axes:
        why = "forwards in which the ranks wait for each other, so that all must run equally many"
        return UserError(f"{speeds} with {(strategy + axes)[0]}", why, "type strategy=ddp or zero1, without a mesh")
    if static:
        why = "a promise that every rank runs one micro-batch in a step, or equally many"
        return UserError(f"{speeds} with {static[0]}", why, f"leave {static[0].key} out, or speed_weights")
    return None


def _unused_in_parts(leaves: Mapping[str, Leaf], unused: Leaf) -> UserError | None:
    strategy = leaves.get("strategy")
    if strategy is None or strategy.value not in CUTTING:
        return None
    why = "a model in parts, of which a rank that does not use one keeps the others waiting"
    return UserError(f"{unused} with {strategy}", why, "type strategy=ddp or zero1, or freeze what is not used")


def _schedules(leaves: Mapping[str, Leaf], stages: Leaf) -> UserError | None:
    schedule = leaves.get("pp.schedule")
    if schedule is None or (stages.value > 1) == (schedule.value in ("interleaved", "zero-bubble")):
        return None
    if stages.value > 1:
        why, fix = "a schedule with one stage on each rank", "type pp.schedule=interleaved, or pp.stages_per_rank=1"
        return UserError(f"{stages} with pp.schedule={schedule.value}", why, fix)
    if schedule.value == "zero-bubble":
        return None  # takes one as well
    why, fix = "a schedule that goes to and fro between several stages of a rank", "type pp.stages_per_rank=2"
    return UserError(f"{stages} with {schedule}", why, f"{fix}, or pp.schedule=1f1b")
