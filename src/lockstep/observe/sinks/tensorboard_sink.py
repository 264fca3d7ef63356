"""TensorBoard: `tensorboard --logdir RUN_FOLDER` shows the curves of a run, or of all runs below a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.sinks.sink import Sink, scalars


class TensorBoardSink(Sink):
    """Writes event files to `tensorboard/` in the run folder."""

    package = "tensorboard"
    files = ("tensorboard",)

    def __init__(self, run_dir: Path):
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        numbers = scalars(record)
        if not numbers:
            return

        # Opened with the first number. A resumed run repeats some steps, and TensorBoard hides what an earlier process
        # wrote for them.
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=record["step"])

        for name, value in numbers.items():
            self._writer.add_scalar(name, value, record["step"], walltime=record["time"])

        self._writer.flush()  # a killed run never closes its sinks

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
