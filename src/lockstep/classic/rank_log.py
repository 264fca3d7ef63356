"""What one rank did in each optimizer step, as lines of JSON in a separate file.

Each rank writes a file of its own, so no line of one rank waits for another, and the last lines of a killed rank are
there.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.task import Loss, StepResult

# Lines that wait for the device at once, so that the host does not wait for it in every step.
LINES_AT_ONCE = 20


class RankLog:
    """The file `rank-00001.jsonl` of a folder. Losses are this rank's own; everything else all ranks agree on."""

    def __init__(self, folder: str | Path, rank: int, device: torch.device):
        self.path = Path(folder) / f"rank-{rank:05}.jsonl"

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
        except OSError as error:
            raise UserError(
                f"log_dir={str(folder)!r} cannot be written to", str(error), "choose another folder for log_dir"
            ) from None

        # On a CPU nothing waits, so a killed process has lost no line.
        self._most = LINES_AT_ONCE if device.type == "cuda" else 1
        self._sums: list[Tensor] = []

        # Steps whose outcome is not known yet, and lines whose loss is still on the device.
        self._losses: dict[int, Tensor] = {}
        self._lines: list[tuple[dict[str, Any], Tensor]] = []

    def add(self, loss: Loss) -> None:
        """Add the loss of one batch to the loss of the step."""
        weight = torch.as_tensor(loss.weight, device=loss.total.device)
        self._sums.append(torch.stack([loss.total.detach().double(), weight.double()]))

    def end_step(self, step: int, result: StepResult | None, **fields: Any) -> None:
        """End the optimizer step number `step`; `result` is of the newest one whose outcome is known."""
        self._losses[step] = torch.stack(self._sums).sum(0) if self._sums else torch.zeros(2, dtype=torch.float64)
        self._sums = []
        self.conclude(result, **fields)

    def conclude(self, result: StepResult | None, **fields: Any) -> None:
        """Take in the outcome of a step."""
        if result is None or result.step not in self._losses:
            return

        line = {
            "time": round(time.time(), 3),
            "step": result.step + 1,  # the number of steps done, as in all records
            "applied": result.applied,
            "grad_norm": result.grad_norm,
            "skip_reason": result.skip_reason,
            **fields,
        }
        self._lines.append((line, self._losses.pop(result.step)))
        if len(self._lines) >= self._most:
            self.flush()

    def flush(self) -> None:
        """Write all lines. On a GPU the host waits for the device."""
        if not self._lines:
            return

        # One copy from the device for all of them.
        sums = torch.stack([sums for _, sums in self._lines]).tolist()
        for (line, _), (total, weight) in zip(self._lines, sums, strict=True):
            loss = total / weight if weight else None
            self._file.write(json.dumps(line | {"loss": loss, "weight": weight}) + "\n")

        self._file.flush()
        self._lines = []

    def close(self) -> None:
        self.flush()
        self._file.close()
