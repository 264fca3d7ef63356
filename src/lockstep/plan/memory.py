"""Counts the bytes that a rank holds in memory, from live tensors, and lists settings that would need less.

So it sees what is there, and not what a formula expects. The advice names settings that would need less, each with the
part of memory that it changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lockstep.config import RunConfig
from lockstep.config.strategies import LEAST_MEMORY, Strategy


@dataclass(frozen=True)
class Footprint:
    """The bytes that one rank holds."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None  # the rest at the peak; None where it is not measured (on a CPU)
    to_come: int = 0  # optimizer state that the first step will allocate

    @property
    def state(self) -> int:
        """Everything that is kept from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.to_come

    def __str__(self) -> str:
        rest = "activations not known" if self.activations is None else f"activations {amount(self.activations)}"
        coming = f" (and {amount(self.to_come)} from its first step on)" if self.to_come else ""
        return (
            f"parameters {amount(self.parameters)}, gradients {amount(self.gradients)}, "
            f"optimizer {amount(self.optimizer)}{coming}, {rest}"
        )


@dataclass(frozen=True)
class Option:
    """A setting to type, and about how many bytes it saves on a rank."""

    typed: str
    saves: int | None  # None: it helps, but the amount is not known

    def enough(self, missing: int | None) -> bool:
        return self.saves is not None and missing is not None and self.saves >= missing

    def text(self, missing: int | None) -> str:
        if self.saves is None:
            return self.typed

        verdict = ", enough by itself" if self.enough(missing) else ""
        return f"{self.typed} (about {amount(self.saves)} less{verdict})"


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' shards on this rank, counting shared memory once."""
    # Views and tied parameters have the same address, and all empty shards have address 0.
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sizes[local.data_ptr() if local.numel() else id(local)] = local.nbytes

    return sum(sizes.values())


def options(
    held: Footprint, config: RunConfig, world: int, micro_batch: int, blocks: int, on_host: bool = False
) -> list[Option]:
    """Return settings that would need less memory, those that cost the least speed first.

    `on_host`: the host's memory ran out, so there is nothing to offload to.
    """
    advice = []

    # Fewer activations: of half the micro-batch, or of one block at a time.
    if micro_batch > 1:
        smaller = math.ceil(micro_batch / 2)
        advice.append(Option(f"micro_batch={smaller}", _fraction(held.activations, 1 - smaller / micro_batch)))

    if config.remat != "full" and blocks > 1:
        advice.append(Option("remat=full", _fraction(held.activations, 1 - 1 / blocks)))

    # Less state per rank: sharding it takes at least two ranks.
    more_ranks = " --nproc 2" if world == 1 else ""
    strategy = config.strategy_record
    if config.strategy != LEAST_MEMORY:
        saves = round(_replicated(held, strategy) * (1 - 1 / max(2, world)))
        advice.append(Option(f"strategy={LEAST_MEMORY}{more_ranks}", saves))

    # Offloaded state lies in the host's memory, so the device saves all of it.
    if not config.fsdp.offload and not on_host:
        choice = "" if strategy.shards_parameters and world > 1 else f"strategy={LEAST_MEMORY} "
        advice.append(Option(f"{choice}fsdp.offload=true{more_ranks}", held.state))

    return advice


def _replicated(held: Footprint, strategy: Strategy) -> int:
    """Return the bytes of state that more than one rank holds."""
    # The optimizer's state may not be allocated yet when memory runs out in the first step.
    to_come = held.to_come if "optimizer" in strategy.replicates else 0
    return to_come + sum(getattr(held, name) for name in strategy.replicates)


def _fraction(count: int | None, share: float) -> int | None:
    return None if count is None else round(count * share)


def amount(count: float) -> str:
    """Return `512 B`, `3.4 MiB` or `17.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"

        count /= 1024

    return f"{count:.1f} GiB"
