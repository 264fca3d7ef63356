"""What the ranks of a trial recorded, read back without torch.

A trial writes what its ranks did into files: the samples and the loss of every micro-batch, gradients, parameters and
buffers after every step. Comparing needs no torch, so the command stays light while trials run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.launch.failure import Failure
from lockstep.verify.trials import Trial

Tensors = dict[str, np.ndarray]  # by the name of the parameter, buffer, ...


@dataclass(frozen=True)
class Micro:
    """One micro-batch, as the rank that ran it saw it."""

    rank: int
    index: int
    padding: bool
    ids: list[int]
    rows: list[str]  # a digest of every sample
    total: float
    weight: float
    metrics: dict[str, list[float]]  # name -> [sum, weight]
    drawn: list[str]  # the global generators that its loss drew from


@dataclass(eq=False)
class TrialRecord:
    """The record of one trial. Steps count from 0; snapshot `step` is the state before that step.

    All numbers of a step are read from files, one for each rank. A trial that failed has a `failure`, and the steps
    that all ranks have completed.
    """

    folder: Path
    trial: Trial
    ranks: list[dict[str, Any]]  # the JSON record of every rank; empty if one is missing
    failure: Failure | None  # why the trial failed
    _loaded: dict[str, Tensors] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that rank 0 recorded about the run: batch, device, strategy, ..."""
        return self.ranks[0]["facts"]

    @property
    def steps(self) -> int:
        """The number of steps that every rank completed, with a snapshot after each."""
        return min((len(rank["snapshots"]) - 1 for rank in self.ranks), default=0)

    def tensors(self, kind: str, step: int) -> Tensors:
        """Return tensors of rank 0.

        `kind` is "gradients" (those that the step applied), or the state before the step: "parameters", "buffers" or
        "extra" (what the task keeps besides the model).
        """
        from safetensors.numpy import load_file

        # They stay in memory, because every comparison needs the reference's.
        name = f"{kind}-{step}"
        if name not in self._loaded:
            self._loaded[name] = load_file(str(self.folder / f"{name}.safetensors"))

        return self._loaded[name]

    def digests(self, step: int, rank: int) -> dict[str, str]:
        """Return digests of the parameters that `rank` held before step `step`."""
        return self.ranks[rank]["snapshots"][step]["digests"]

    # ---- numbers of all ranks ----

    @cached_property
    def micros(self) -> list[list[Micro]]:
        """The micro-batches of every step, of all ranks together, ordered by index. Padding is left out."""
        return [self._micros_of(step) for step in range(self.steps)]

    def _micros_of(self, step: int) -> list[Micro]:
        """Return the micro-batches of a step, of all ranks, in the order of the global step."""
        micros = [
            Micro(rank=rank, **note)
            for rank, record in enumerate(self.ranks)
            for note in record["steps"][step]["micros"]
            if not note["padding"]
        ]
        return sorted(micros, key=lambda micro: (micro.index, micro.rank))

    def total(self, step: int) -> float:
        return float(sum(micro.total for micro in self.micros[step]))

    def weight(self, step: int) -> float:
        return float(sum(micro.weight for micro in self.micros[step]))

    def loss(self, step: int) -> float:
        """Return the weighted mean loss of a step."""
        weight = self.weight(step)
        return self.total(step) / weight if weight else 0.0

    def metrics(self, step: int) -> dict[str, float]:
        """Return the weighted mean of every metric of a step."""
        sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # name -> [total, weight]

        for micro in self.micros[step]:
            for name, (value, weight) in micro.metrics.items():
                sums[name][0] += value
                sums[name][1] += weight

        return {name: total / weight for name, (total, weight) in sums.items() if weight}

    @property
    def drawn(self) -> set[str]:
        """The global random generators that any loss drew from."""
        return {name for step in self.micros for micro in step for name in micro.drawn}


def read_record(folder: Path, trial: Trial, failure: Failure | None) -> TrialRecord:
    """Read what the ranks of a trial wrote to `folder`; unless every rank left a record, none is used."""
    # A rank that dies before its first snapshot writes none.
    paths = [folder / f"record-{rank}.json" for rank in range(trial.world)]
    ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
    return TrialRecord(folder, trial, ranks if len(ranks) == trial.world else [], failure)
