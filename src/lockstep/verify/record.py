"""What a layout left behind, read back without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.launch.failure import Failure
from lockstep.verify.layouts import Layout

Tensors = dict[str, np.ndarray]


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
    def __init__(self, folder: Path, layout: Layout, ranks: list[dict[str, Any]], failure: Failure | None):
        self.folder, self.layout, self.ranks, self.failure = folder, layout, ranks, failure

    @property
    def facts(self) -> dict[str, Any]:
        return self.ranks[0]["facts"]

    @property
    def steps(self) -> int:
        """Those that every rank has ended, and after which everybody was looked at."""
        return min((len(rank["snapshots"]) - 1 for rank in self.ranks), default=0)

    def gradients(self, step: int) -> Tensors:
        return self._load(f"gradients-{step}")

    def parameters(self, step: int) -> Tensors:
        """As step `step` found them."""
        return self._load(f"parameters-{step}")

    def buffers(self, step: int) -> Tensors:
        return self._load(f"buffers-{step}")

    def kept(self, step: int) -> Tensors:
        """What the task keeps beside the model, on rank 0."""
        return self._load(f"kept-{step}")

    @cached_property
    def micros(self) -> list[list[Micro]]:
        """Of every step, all ranks together, in the order of their index. Padding is left out."""
        return [self._micros_of(step) for step in range(self.steps)]

    def total(self, step: int) -> float:
        return float(sum(micro.total for micro in self.micros[step]))

    def weight(self, step: int) -> float:
        return float(sum(micro.weight for micro in self.micros[step]))

    def loss(self, step: int) -> float:
        return self.total(step) / self.weight(step) if self.weight(step) else 0.0

    def metrics(self, step: int) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        for micro in self.micros[step]:
            for name, (value, weight) in micro.metrics.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0], total[1] = total[0] + value, total[1] + weight
        return {name: value / weight for name, (value, weight) in sums.items() if weight}

    def settings(self, step: int, rank: int) -> list[dict[str, Any]]:
        return self.ranks[rank]["steps"][step]["settings"]

    def digests(self, step: int, rank: int) -> dict[str, str]:
        return self.ranks[rank]["snapshots"][step]["digests"]

    @property
    def drawn(self) -> set[str]:
        return {name for step in self.micros for micro in step for name in micro.drawn}

    def _micros_of(self, step: int) -> list[Micro]:
        found = [
            Micro(
                number,
                note["index"],
                note["samples"],
                tuple(note["ids"]),
                tuple(note["rows"]),
                note["total"],
                note["weight"],
                note["metrics"],
                tuple(note["drawn"]),
            )
            for number, rank in enumerate(self.ranks)
            for note in rank["steps"][step]["micros"]
            if not note["padding"]
        ]
        return sorted(found, key=lambda micro: (micro.index, micro.rank))

    def _load(self, name: str) -> Tensors:
        from safetensors.numpy import load_file

        if name not in self._loaded:
            self._loaded[name] = load_file(str(self.folder / f"{name}.safetensors"))
        return self._loaded[name]

    @cached_property
    def _loaded(self) -> dict[str, Tensors]:
        return {}


def read_record(folder: Path, layout: Layout, failure: Failure | None) -> Record:
    paths = [folder / f"record-{rank}.json" for rank in range(layout.world)]
    ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
    return Record(folder, layout, ranks if len(ranks) == layout.world else [], failure)
