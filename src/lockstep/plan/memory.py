"""What a rank's memory holds, counted from live tensors, and what would make it less."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lockstep.config import RunConfig

CUT = ("fsdp", "fsdp-grads", "hsdp")  # strategies that cut more than the optimizer's state


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None  # what else was in use at the worst moment; None: nobody counts it (on a CPU)
    to_come: int = 0  # what the optimizer's first step will make

    @property
    def state(self) -> int:
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
    """Something to type, and about how many bytes of a rank it saves."""

    typed: str
    saves: int | None  # None: it helps, and nobody knows how much

    def enough(self, missing: int | None) -> bool:
        return self.saves is not None and missing is not None and self.saves >= missing

    def text(self, missing: int | None) -> str:
        if self.saves is None:
            return self.typed
        return f"{self.typed} (about {amount(self.saves)} less{', enough by itself' if self.enough(missing) else ''})"


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the parts that lie on this rank; what several names share counts once."""
    found = {}
    for tensor in tensors:
        here = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found[here.data_ptr() if here.numel() else id(here)] = here.nbytes
    return sum(found.values())


def options(
    held: Footprint, config: RunConfig, world: int, micro_batch: int, blocks: int, on_host: bool = False
) -> list[Option]:
    """What would take less memory, in the order in which to try it: what costs least speed comes first. `on_host`: it
    is the host's memory that ran out, so that there is nowhere to offload to."""
    found = []
    if micro_batch > 1:
        smaller = math.ceil(micro_batch / 2)
        found.append(Option(f"micro_batch={smaller}", _part(held.activations, 1 - smaller / micro_batch)))
    if config.remat != "full" and blocks > 1:
        found.append(Option("remat=full", _part(held.activations, 1 - 1 / blocks)))
    ranks = max(2, world)
    if config.strategy != "fsdp":
        found.append(Option(f"strategy=fsdp{' --nproc 2' * (world == 1)}", _less_by_cutting(held, config, ranks)))
    if not config.fsdp.offload and not on_host:
        typed = "fsdp.offload=true" if config.strategy in CUT and world > 1 else "strategy=fsdp fsdp.offload=true"
        found.append(Option(f"{typed}{' --nproc 2' * (world == 1)}", held.state))
    return found


def _less_by_cutting(held: Footprint, config: RunConfig, ranks: int) -> int:
    """What the strategy at hand leaves whole on every rank would be cut."""
    whole = {"zero1": held.parameters + held.gradients, "fsdp-grads": 0}.get(config.strategy, held.state)
    return round(whole * (1 - 1 / ranks))


def _part(count: int | None, share: float) -> int | None:
    return None if count is None else round(count * share)


def amount(count: float) -> str:
    """`512 B`, `3.4 MiB`, `17.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
