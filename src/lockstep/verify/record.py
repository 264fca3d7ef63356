"""What the ranks of a layout have recorded, read back without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.launch.failure import Failure
from lockstep.verify.layouts import Layout

Tensors = dict[str, np.ndarray]  # by the name of the parameter, buffer, ...


@dataclass(frozen=True)
class Micro:
    """One micro-batch, as the rank that ran it saw it."""

    rank: int
    index: int
    samples: int
    ids: tuple[int, ...]
    rows: tuple[str, ...]  # a digest of every sample
    total: float
    weight: float
    metrics: dict[str, list[float]]
    drawn: tuple[str, ...]  # the global generators that its loss has drawn from


class Record:
    """The record of one layout. Steps count from 0; snapshot `step` is the state before that step.

    ranks    the JSON record of every rank; empty if one is missing
    failure  why the layout failed, or None
    """

    def __init__(self, folder: Path, layout: Layout, ranks: list[dict[str, Any]], failure: Failure | None):
        self.folder = folder
        self.layout = layout
        self.ranks = ranks
        self.failure = failure
        self._loaded: dict[str, Tensors] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """What rank 0 has recorded about the run: batch, device, strategy, ..."""
        return self.ranks[0]["facts"]

    @property
    def steps(self) -> int:
        """The number of steps that every rank has completed, with a snapshot after each."""
        return min((len(rank["snapshots"]) - 1 for rank in self.ranks), default=0)

    # ---- tensors of rank 0 ----

    def gradients(self, step: int) -> Tensors:
        """The gradients that step `step` applied."""
        return self._load(f"gradients-{step}")

    def parameters(self, step: int) -> Tensors:
        """The parameters before step `step`."""
        return self._load(f"parameters-{step}")

    def buffers(self, step: int) -> Tensors:
        """The buffers before step `step`."""
        return self._load(f"buffers-{step}")

    def extra(self, step: int) -> Tensors:
        """What the task keeps besides the model, before step `step`."""
        return self._load(f"extra-{step}")

    def _load(self, name: str) -> Tensors:
        from safetensors.numpy import load_file

        # Every comparison reads the tensors of the reference again: they are kept.
        if name not in self._loaded:
            self._loaded[name] = load_file(str(self.folder / f"{name}.safetensors"))
        return self._loaded[name]

    # ---- numbers of all ranks ----

    @cached_property
    def micros(self) -> list[list[Micro]]:
        """The micro-batches of every step, all ranks together, ordered by index. Padding is left out."""
        return [self._micros_of(step) for step in range(self.steps)]

    def total(self, step: int) -> float:
        """The sum of the losses of a step."""
        return float(sum(micro.total for micro in self.micros[step]))

    def weight(self, step: int) -> float:
        """The sum of the loss weights of a step."""
        return float(sum(micro.weight for micro in self.micros[step]))

    def loss(self, step: int) -> float:
        """The weighted mean loss of a step."""
        weight = self.weight(step)
        return self.total(step) / weight if weight else 0.0

    def metrics(self, step: int) -> dict[str, float]:
        """The weighted mean of every metric of a step."""
        sums: dict[str, list[float]] = {}
        for micro in self.micros[step]:
            for name, (value, weight) in micro.metrics.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += weight
        return {name: value / weight for name, (value, weight) in sums.items() if weight}

    def settings(self, step: int, rank: int) -> list[dict[str, Any]]:
        """The learning rate and other settings of each parameter group."""
        return self.ranks[rank]["steps"][step]["settings"]

    def digests(self, step: int, rank: int) -> dict[str, str]:
        """Digests of the parameters that `rank` held before step `step`."""
        return self.ranks[rank]["snapshots"][step]["digests"]

    @property
    def drawn(self) -> set[str]:
        """The global random generators that any loss has drawn from."""
        return {name for step in self.micros for micro in step for name in micro.drawn}

    def _micros_of(self, step: int) -> list[Micro]:
        """Return the micro-batches of one step, from the records of all ranks."""
        found = []
        for number, rank in enumerate(self.ranks):
            for note in rank["steps"][step]["micros"]:
                if note["padding"]:
                    continue
                micro = Micro(
                    rank=number,
                    index=note["index"],
                    samples=note["samples"],
                    ids=tuple(note["ids"]),
                    rows=tuple(note["rows"]),
                    total=note["total"],
                    weight=note["weight"],
                    metrics=note["metrics"],
                    drawn=tuple(note["drawn"]),
                )
                found.append(micro)
        return sorted(found, key=lambda micro: (micro.index, micro.rank))


def read_record(folder: Path, layout: Layout, failure: Failure | None) -> Record:
    """Read what the ranks of a layout have written to `folder`."""
    paths = [folder / f"record-{rank}.json" for rank in range(layout.world)]
    ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
    # Without the record of every rank there is nothing to compare.
    return Record(folder, layout, ranks if len(ranks) == layout.world else [], failure)
