"""Derives the numbers of a run from its configuration, each with its reason, before training starts.

Batches, micro-batches, steps, warm-up: whatever follows from settings is derived in one place and printed with its
reason, so that a user can check it before hours of training. The plan is the same on all ranks, and no other module
derives these numbers again.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.config import RunConfig
from lockstep.errors import UserError, plural

# Micro-batches of a step under `exact`, unless micro_batch is set. The number must not depend on the number of ranks,
# which it limits: eight is a full host.
EXACT_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Plan:
    """The batch arithmetic of a run."""

    data_size: int  # data-parallel ranks: the size of `RankRole.data_world`
    global_batch: int
    micro_batch: int
    global_num_micro_batches: int  # the micro-batches of one full global step, on all ranks
    accumulation: int  # the most micro-batches that a rank runs in a step
    steps: int
    steps_per_epoch: int | None  # None: a stream, whose length is not known
    samples: int | None
    reasons: dict[str, str] = field(default_factory=dict)  # field -> why it has its value, for the banner

    # How many steps of this size the data is ahead of the steps done. It is 0, unless a run was resumed with another
    # batch size: after 8 steps of 8 samples the data is where 4 steps of 16 lead, so it is -4 ahead.
    ahead: int = 0

    def as_record(self) -> dict[str, Any]:
        """Return the plan as files hold it, under the keys of the file format."""
        names = {"data_size": "world", "global_num_micro_batches": "micro_batches"}
        return {names.get(key, key): value for key, value in asdict(self).items()}

    def epochs_after(self, steps_done: int) -> float | None:
        """Return how many epochs of the data have been trained after so many steps, or None for a stream."""
        return (steps_done + self.ahead) / self.steps_per_epoch if self.steps_per_epoch else None

    def follows_ranks(self, config: RunConfig) -> bool:
        """Return whether the same samples would be in other micro-batches on another number of ranks."""
        # With local_batch another number of ranks has other steps. A single sample cannot be divided.
        derived = config.micro_batch in (None, "auto") and not config.exact
        return derived and config.local_batch is None and self.global_batch > 1

    def resumed(self, config: RunConfig, steps_done: int, steps_counted: int) -> Plan:
        """Return the plan of a resumed run, whose data is where `steps_counted` steps of this size lead."""
        ahead = steps_counted - steps_done
        if not ahead or config.steps is not None:
            return replace(self, ahead=ahead)

        # The steps before the resume had another size, so the epochs take another number of steps.
        reason = f"{self.reasons['steps']}, of which the {steps_done} steps done count for {steps_counted}"
        return replace(self, ahead=ahead, steps=self.steps - ahead, reasons=self.reasons | {"steps": reason})


def make_plan(config: RunConfig, data_size: int, samples: int | None, most: int | None = None, depth: int = 1) -> Plan:
    """Derive the plan of a run on `data_size` data-parallel ranks.

    samples  the length of the dataset; None for a stream
    most     the largest micro-batch that fits into memory, if an earlier attempt has found it
    depth    how many micro-batches keep the stages of a pipeline busy
    """
    if samples == 0:
        raise UserError("the dataset has no samples", "", "check the path or filter that it is made from")

    reasons: dict[str, str] = {}

    # A step: how many samples, in how many micro-batches.
    global_batch, reasons["global_batch"] = _global_batch(config, data_size)
    micro_batch, reasons["micro_batch"] = _micro_batch(config, global_batch, data_size, most)

    # Every stage of a pipeline should have a micro-batch to work on, if there are enough samples. For a stream the size
    # must divide the samples of one pipeline.
    share = global_batch // data_size
    largest = max(1, share // depth)
    if depth > 1 and config.micro_batch in (None, "auto") and micro_batch > largest:
        micro_batch = _largest_divisor(share, largest) if samples is None else largest
        reasons["micro_batch"] = f"{share} samples for each pipeline / {depth} stages"

    global_num_micro_batches = math.ceil(global_batch / micro_batch)
    accumulation = math.ceil(global_num_micro_batches / data_size)
    reasons["accumulation"] = f"{global_num_micro_batches} micro-batches on {_ranks(config, data_size)}"

    if config.ddp.static_graph and data_size > 1 and accumulation > 1:
        raise UserError(
            f"ddp.static_graph=true does not work with {accumulation} micro-batches per rank and step",
            "torch's DDP expects gradients of all micro-batches in the first step, and of the last one afterwards",
            f"set micro_batch={math.ceil(global_batch / data_size)}, or leave ddp.static_graph out",
        )

    # The run: how many steps.
    per_epoch = None if samples is None else _steps_per_epoch(config, global_batch, samples)
    steps, reasons["steps"] = _steps(config, per_epoch)
    return Plan(
        data_size, global_batch, micro_batch, global_num_micro_batches, accumulation, steps, per_epoch, samples, reasons
    )


def _steps_per_epoch(config: RunConfig, global_batch: int, samples: int) -> int:
    steps = samples // global_batch if config.tail == "drop" else math.ceil(samples / global_batch)

    # Such a run would end before its first step and look like a success.
    if steps == 0:
        raise UserError(
            f"global_batch={global_batch} with tail=drop leaves no step: the dataset has {samples} samples",
            "",
            "set tail=short, or a smaller global_batch",
        )

    return steps


def smaller_micro_batch(plan: Plan) -> int:
    """Return half of the micro-batch; for a stream its largest divisor that is no larger than half."""
    half = max(1, plan.micro_batch // 2)
    # A map-style dataset takes any size, because its last micro-batch may be smaller.
    return half if plan.samples is not None else _largest_divisor(plan.micro_batch, half)


def _ranks(config: RunConfig, count: int) -> str:
    """Count data-parallel ranks. They are all ranks, unless several share a copy of the model."""
    return plural(count, "data-parallel rank" if config.uses_axis("tp", "pp") else "rank")


def _largest_divisor(number: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if number % size == 0)


def _global_batch(config: RunConfig, data_size: int) -> tuple[int, str]:
    """Return the samples of a step. The two keys exclude each other (config/conflicts.py)."""
    if config.local_batch is not None:
        return config.local_batch * data_size, f"local_batch {config.local_batch} x {_ranks(config, data_size)}"

    if config.global_batch is None:
        raise UserError(
            "neither global_batch nor local_batch is set",
            "",
            "set global_batch=32, the samples of all ranks together (the same model on any number of ranks)",
        )

    return config.global_batch, "as asked"


def _micro_batch(config: RunConfig, global_batch: int, data_size: int, most: int | None) -> tuple[int, str]:
    """Return the samples of a forward, such that every rank gets at least one micro-batch."""
    if global_batch < data_size:
        raise UserError(
            f"global_batch={global_batch} cannot be split over {_ranks(config, data_size)}",
            f"{_ranks(config, data_size - global_batch)} would have nothing to do",
            f"set global_batch={data_size} or more"
            + ("" if config.uses_axis("tp", "pp") else f", or --nproc {global_batch}"),
        )

    if config.exact and config.micro_batch is None:
        return _exact_micro_batch(global_batch, data_size)
    if config.micro_batch in (None, "auto"):
        return _derived_micro_batch(config, global_batch, data_size, most)

    # A size that was asked for is never changed, so it may be refused.
    count = math.ceil(global_batch / config.micro_batch)
    if count < data_size:
        raise UserError(
            f"global_batch={global_batch} in micro-batches of {config.micro_batch} cannot be split over "
            f"{_ranks(config, data_size)}",
            f"{plural(count, 'micro-batch', 'micro-batches')} for {_ranks(config, data_size)}",
            f"set micro_batch={global_batch // data_size} or less",
        )

    return config.micro_batch, "as asked"


def _exact_micro_batch(global_batch: int, data_size: int) -> tuple[int, str]:
    """Divide the batch without looking at the number of ranks, which must not change the result."""
    micro = math.ceil(global_batch / EXACT_MICRO_BATCHES)
    count = math.ceil(global_batch / micro)
    if count < data_size:
        raise UserError(
            f"exact=true with global_batch={global_batch} cannot be split over {data_size} ranks",
            f"{count} micro-batches of {micro}, whatever the number of ranks",
            f"set micro_batch={global_batch // data_size} (the same on any number of ranks), or --nproc {count}",
        )

    return micro, f"exact: global_batch {global_batch} / {EXACT_MICRO_BATCHES}, whatever the number of ranks"


def _derived_micro_batch(config: RunConfig, global_batch: int, data_size: int, most: int | None) -> tuple[int, str]:
    """Give every rank one micro-batch, unless memory does not hold it."""
    even = math.ceil(global_batch / data_size)
    # 9 samples on 4 ranks: micro-batches of 3 would leave a rank idle in every step, micro-batches of 2 do not.
    micro = even if math.ceil(global_batch / even) >= data_size else global_batch // data_size
    if most is not None and most < micro:
        return most, f"{micro} did not fit into memory"
    return micro, f"global_batch {global_batch} / {_ranks(config, data_size)}" if data_size > 1 else "the whole batch"


def _steps(config: RunConfig, per_epoch: int | None) -> tuple[int, str]:
    if config.steps is not None:
        return config.steps, "as asked"
    if config.epochs is None:
        raise UserError("neither steps nor epochs is set", "", "set steps=1000, or epochs=3")

    if per_epoch is None:
        raise UserError(
            f"epochs={config.epochs} cannot be counted: the dataset is a stream without a length",
            "the learning-rate schedule needs the number of steps",
            "set steps=1000",
        )

    # Fractions of an epoch are allowed, down to one step.
    steps = round(config.epochs * per_epoch)
    if not steps:
        raise UserError(
            f"epochs={config.epochs:g} is less than half a step: an epoch has {per_epoch} steps", "", "set steps=1"
        )

    return steps, f"{config.epochs:g} epochs of {per_epoch} steps"
