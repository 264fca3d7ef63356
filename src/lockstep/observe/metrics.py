"""Sums and weights of the loss and the metrics since the last log line. They stay on the device until asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.observe import dyadic
from lockstep.runtime.collectives import Collectives
from lockstep.task import Loss, Weight

FOLD_AT = 128  # losses kept before they are added up: appending to a list is all the hot path does

Term = tuple[str, Weight, Weight]  # (name, sum, weight)


class Sums:
    def __init__(self) -> None:
        self._losses: list[tuple[Tensor, Weight]] = []
        self._metrics: list[Term] = []
        self._folded: dict[str, tuple[Weight, Weight]] = {}

    def add(self, loss: Loss) -> None:
        self._losses.append((loss.total.detach(), loss.weight))
        if loss.metrics:
            self._metrics += metric_terms(loss)

    @property
    def losses(self) -> list[Tensor]:
        """One for each `add` since the last folding."""
        return [total for total, _ in self._losses]

    def merge(self, other: Sums) -> None:
        """Take over what `other` has been given."""
        self._losses += other._losses
        self._metrics += other._metrics
        if len(self._losses) >= FOLD_AT:
            self._fold()

    def take(self, names: list[str], device: torch.device) -> Tensor:
        """(sum, weight) of every name, flat, in float64 on the device; they start again from nothing."""
        self._fold()
        flat = [part for name in names for part in self._folded.pop(name, (0.0, 0.0))]
        known = [0.0 if isinstance(value, Tensor) else value for value in flat]
        on_cuda = device.type == "cuda"
        packed = torch.tensor(known, dtype=torch.float64, pin_memory=on_cuda).to(device, non_blocking=True)
        for place, value in enumerate(flat):
            if isinstance(value, Tensor):  # added on the device: the host does not wait for it
                packed[place] += value
        return packed

    def everybodys(self, names: list[str], collectives: Collectives) -> list[Any]:
        """The same of all ranks together, on the host, for a checkpoint."""
        return collectives.sum_(self.take(names, collectives.device)).tolist()

    def put(self, names: list[str], totals: Sequence[float | str]) -> None:
        """Give back what `everybodys` gave."""
        self._fold()
        numbers = [dyadic.rounded(dyadic.read(total)) for total in totals]
        for name, total, weight in zip(names, numbers[0::2], numbers[1::2], strict=True):
            before = self._folded.get(name, (0.0, 0.0))
            self._folded[name] = (before[0] + total, before[1] + weight)

    def _fold(self) -> None:
        parts: dict[str, tuple[list[Weight], list[Weight]]] = {
            name: ([total], [weight]) for name, (total, weight) in self._folded.items()
        }
        for name, total, weight in [*(("loss", *pair) for pair in self._losses), *self._metrics]:
            totals, weights = parts.setdefault(name, ([], []))
            totals.append(total)
            weights.append(weight)
        self._folded = {name: (_add_up(totals), _add_up(weights)) for name, (totals, weights) in parts.items()}
        self._losses, self._metrics = [], []


class ExactSums(Sums):
    """Sums that are rounded once, when all ranks' have been added: nobody can tell who added what. Reading them makes
    the host wait for the device."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self._exact: dict[str, list[dyadic.Exact]] = {}  # (sum, weight)

    def take(self, names: list[str], device: torch.device) -> Tensor:
        """Rank 0's are those of everybody, the others' are 0, so that one more sum over ranks changes nothing."""
        totals = self.everybodys(names, self._collectives)
        mine = [dyadic.rounded(dyadic.read(total)) for total in totals] if self._collectives.world.rank == 0 else []
        return torch.tensor(mine or [0.0] * len(totals), dtype=torch.float64, device=device)

    def everybodys(self, names: list[str], collectives: Collectives) -> list[Any]:
        self._fold()
        mine = [dyadic.spelled(part) for name in names for part in self._exact.pop(name, [0, 0])]
        totals: list[dyadic.Exact] = [0] * len(mine)
        for theirs in collectives.gather_json(mine):
            totals = [dyadic.add(total, dyadic.read(text)) for total, text in zip(totals, theirs, strict=True)]
        return [dyadic.spelled(total) for total in totals]

    def put(self, names: list[str], totals: Sequence[float | str]) -> None:
        for name, total, weight in zip(names, totals[0::2], totals[1::2], strict=True):
            self._add(name, dyadic.read(total), dyadic.read(weight))

    def _fold(self) -> None:
        found = [*(("loss", *pair) for pair in self._losses), *self._metrics]
        self._losses, self._metrics = [], []
        numbers = _as_floats([part for _, *pair in found for part in pair])
        for (name, *_), total, weight in zip(found, numbers[0::2], numbers[1::2], strict=True):
            self._add(name, dyadic.exactly(total), dyadic.exactly(weight))

    def _add(self, name: str, total: dyadic.Exact, weight: dyadic.Exact) -> None:
        before = self._exact.get(name, [0, 0])
        self._exact[name] = [dyadic.add(before[0], total), dyadic.add(before[1], weight)]


def terms(loss: Loss) -> Iterator[Term]:
    """The loss and each metric, detached."""
    yield "loss", loss.total.detach(), loss.weight
    yield from metric_terms(loss)


def metric_terms(loss: Loss) -> Iterator[Term]:
    for name, value in loss.metrics.items():
        if name == "loss":
            raise UserError("a metric named 'loss'", "that name is the loss's own", "give the metric another name")
        total, weight = value if isinstance(value, tuple) else (value, loss.weight)
        yield name, total.detach() if isinstance(total, Tensor) else total, weight


def _add_up(values: list[Weight]) -> Weight:
    tensors = [value for value in values if isinstance(value, Tensor)]
    plain = float(sum(value for value in values if not isinstance(value, Tensor)))
    return plain if not tensors else torch.stack([t.double() for t in tensors]).sum() + plain


def _as_floats(values: list[Weight]) -> list[float]:
    """Those on a device are fetched together."""
    tensors = [value.double() for value in values if isinstance(value, Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(fetched) if isinstance(value, Tensor) else float(value) for value in values]


def quotients(names: list[str], packed: list[float]) -> dict[str, float]:
    """Sum over weight, taken once, at the very end. What nothing was counted for has none."""
    pairs = zip(names, packed[0::2], packed[1::2], strict=True)
    return {name: total / weight for name, total, weight in pairs if weight}
