"""How a run will run: every derived value, with its reason, before anything starts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import UserError

EXACT_PIECES = 8  # micro-batches of a step under `exact`, if nobody says otherwise: up to so many ranks


@dataclass(frozen=True)
class Plan:
    world: int
    global_batch: int
    micro_batch: int
    micro_batches: int  # of one full global step
    accumulation: int  # most micro-batches any rank runs in a step
    steps: int
    steps_per_epoch: int | None  # None: a stream, whose length nobody knows
    samples: int | None
    reasons: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: RunConfig, world: int, samples: int | None, most: int | None = None, depth: int = 1) -> Plan:
    """`samples` is the length of the dataset, None for a stream; `most`: the largest micro-batch that memory holds, as
    far as an earlier attempt has found out; `depth`: how many micro-batches the stages of a pipeline want."""
    if samples == 0:
        raise UserError("a dataset to train on", "one with no samples", "check the path or filter that it is made from")
    reasons: dict[str, str] = {}
    global_batch = _global_batch(config, world, reasons)
    micro_batch = _micro_batch(config, global_batch, world, most, reasons)
    if depth > 1 and config.micro_batch in (None, "auto"):
        micro_batch = _for_stages(micro_batch, global_batch // world, depth, samples is None, reasons)
    micro_batches = math.ceil(global_batch / micro_batch)
    accumulation = math.ceil(micro_batches / world)
    if config.ddp.static_graph and world > 1 and accumulation > 1:
        raise UserError(
            "ddp.static_graph=true",
            f"{accumulation} micro-batches per rank and step; torch counts the gradients of all of them in the first "
            "step, and of the last one from then on",
            f"type micro_batch={math.ceil(global_batch / world)}, or leave ddp.static_graph out",
        )
    reasons["accumulation"] = f"{micro_batches} micro-batches on {world} rank{'s' * (world > 1)}"
    per_epoch = None if samples is None else _steps_per_epoch(samples, global_batch, config.tail)
    if per_epoch == 0:
        raise UserError(
            f"global_batch={global_batch} with tail=drop",
            f"a dataset of {samples} samples, which fills no step",
            "type tail=short, or a smaller global_batch",
        )
    steps = _steps(config, per_epoch, reasons)
    return Plan(world, global_batch, micro_batch, micro_batches, accumulation, steps, per_epoch, samples, reasons)


def smaller_micro_batch(plan: Plan) -> int:
    """Half of it, or the next size below that a stream can be cut into without a rest."""
    half = max(1, plan.micro_batch // 2)
    if plan.samples is not None:
        return half
    return next(size for size in range(half, 0, -1) if plan.micro_batch % size == 0)


def _steps_per_epoch(samples: int, global_batch: int, tail: str) -> int:
    return samples // global_batch if tail == "drop" else math.ceil(samples / global_batch)


def _global_batch(config: RunConfig, world: int, reasons: dict[str, str]) -> int:
    if config.local_batch is not None:
        reasons["global_batch"] = f"local_batch {config.local_batch} x {world} rank{'s' * (world > 1)}"
        return config.local_batch * world
    if config.global_batch is None:
        raise UserError(
            "how many samples an optimizer step takes",
            "neither global_batch nor local_batch",
            "type global_batch=32 (all ranks together: the same model on any number of them)",
        )
    reasons["global_batch"] = "as asked"
    return config.global_batch


def _micro_batch(config: RunConfig, global_batch: int, world: int, most: int | None, reasons: dict[str, str]) -> int:
    if global_batch < world:
        raise UserError(
            f"global_batch={global_batch} on {world} ranks",
            f"a batch that cannot be split: {world - global_batch} ranks would have nothing to do in every step",
            f"type global_batch={world} or more, or --nproc {global_batch}",
        )
    if config.exact and config.micro_batch is None:
        micro = math.ceil(global_batch / EXACT_PIECES)
        count = math.ceil(global_batch / micro)
        if count < world:
            raise UserError(
                f"exact=true with global_batch={global_batch} on {world} ranks",
                f"{count} micro-batches of {micro}, whatever the number of ranks",
                f"type micro_batch={global_batch // world} (on every number of ranks alike), or --nproc {count}",
            )
        reasons["micro_batch"] = f"exact: global_batch {global_batch} / {EXACT_PIECES}, whatever the number of ranks"
        return micro
    if config.micro_batch in (None, "auto"):
        even = math.ceil(global_batch / world)
        # 9 samples on 4 ranks: pieces of 3 would leave a rank idle in every step, pieces of 2 do not.
        micro = even if math.ceil(global_batch / even) >= world else global_batch // world
        reasons["micro_batch"] = f"global_batch {global_batch} / {world} ranks" if world > 1 else "the whole batch"
        if most is not None and most < micro:
            reasons["micro_batch"] = f"{micro} did not fit into memory"
            return most
        return micro
    count = math.ceil(global_batch / config.micro_batch)
    if count < world:
        raise UserError(
            f"global_batch={global_batch} in micro-batches of {config.micro_batch} on {world} ranks",
            f"a batch that cannot be split: {count} micro-batch{'es' * (count > 1)} for {world} ranks",
            f"type micro_batch={global_batch // world} or less",
        )
    reasons["micro_batch"] = "as asked"
    return config.micro_batch


def _for_stages(micro_batch: int, share: int, depth: int, stream: bool, reasons: dict[str, str]) -> int:
    """So many that every stage of a pipeline has one to work at, if there are so many samples."""
    most = max(1, share // depth)
    if micro_batch <= most:
        return micro_batch
    reasons["micro_batch"] = f"{share} samples for each pipeline / {depth} stages"
    return next(size for size in range(most, 0, -1) if share % size == 0) if stream else most


def _steps(config: RunConfig, per_epoch: int | None, reasons: dict[str, str]) -> int:
    if config.steps is not None:
        reasons["steps"] = "as asked"
        return config.steps
    if config.epochs is not None and per_epoch is None:
        raise UserError(
            f"epochs={config.epochs} of a stream",
            "a dataset without a length, so the schedule would not know where it ends",
            "type steps=1000",
        )
    if config.epochs is not None and per_epoch is not None:
        reasons["steps"] = f"{config.epochs:g} epochs of {per_epoch} steps"
        if steps := round(config.epochs * per_epoch):
            return steps
        raise UserError(
            f"epochs={config.epochs:g}", f"{per_epoch} steps an epoch: less than half a step to train", "type steps=1"
        )
    raise UserError("how long to train", "neither steps nor epochs", "type steps=1000, or epochs=3")
