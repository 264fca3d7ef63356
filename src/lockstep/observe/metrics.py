"""Sums and weights of the loss and the metrics since the last log line. They stay on the device until asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.task import Loss, Weight

FOLD_AT = 128  # entries kept before they are added up: appending to a list is all the hot path does


class Sums:
    def __init__(self) -> None:
        self._entries: dict[str, tuple[list[Weight], list[Weight]]] = {}

    def add(self, loss: Loss) -> None:
        for name, total, weight in terms(loss):
            totals, weights = self._entries.setdefault(name, ([], []))
            totals.append(total)
            weights.append(weight)
            if len(totals) >= FOLD_AT:
                totals[:], weights[:] = [_add_up(totals)], [_add_up(weights)]

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def take(self, names: list[str], device: torch.device) -> Tensor:
        """(sum, weight) of every name, flat, in float64 on the device; they start again from nothing."""
        flat = [_add_up(part) for name in names for part in self._entries.pop(name, ([], []))]
        on_cuda = device.type == "cuda"
        known = [0.0 if isinstance(value, Tensor) else value for value in flat]
        packed = torch.tensor(known, dtype=torch.float64, pin_memory=on_cuda).to(device, non_blocking=True)
        for place, value in enumerate(flat):
            if isinstance(value, Tensor):  # added on the device: the host does not wait for it
                packed[place] += value
        return packed

    def merge(self, other: Sums) -> None:
        for name, (totals, weights) in other._entries.items():
            mine = self._entries.setdefault(name, ([], []))
            mine[0].extend(totals)
            mine[1].extend(weights)
            if len(mine[0]) >= FOLD_AT:
                mine[0][:], mine[1][:] = [_add_up(mine[0])], [_add_up(mine[1])]


def terms(loss: Loss) -> Iterator[tuple[str, Weight, Weight]]:
    """The loss and each metric as (name, sum, weight), detached."""
    yield "loss", loss.total.detach(), loss.weight
    for name, value in loss.metrics.items():
        if name == "loss":
            raise UserError("a metric named 'loss'", "that name is the loss's own", "give the metric another name")
        total, weight = value if isinstance(value, tuple) else (value, loss.weight)
        yield name, total.detach() if isinstance(total, Tensor) else total, weight


def _add_up(values: list[Weight]) -> Weight:
    tensors = [value for value in values if isinstance(value, Tensor)]
    plain = float(sum(value for value in values if not isinstance(value, Tensor)))
    return plain if not tensors else torch.stack([t.double() for t in tensors]).sum() + plain


def quotients(names: list[str], packed: list[float]) -> dict[str, float]:
    """Sum over weight, taken once, at the very end."""
    pairs = zip(names, packed[0::2], packed[1::2], strict=True)
    return {name: total / weight if weight else float("nan") for name, total, weight in pairs}
