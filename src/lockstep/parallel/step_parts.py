"""What takes part in the steps of a run besides the model, its data and its optimizers.

It times, compiles, traces, checks or records a step, or changes how a driver runs it. `Driver.parts` lists what a run
has; a run without such features has an empty list, and pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lockstep.parallel.compiled.batch_sizes import shapes_of
from lockstep.runtime.attention import without_cudnn
from lockstep.task import MicroBatch

if TYPE_CHECKING:
    from lockstep.parallel.progress import StepProgress

# Data of one size have two sizes of batches, since the last one may be short. How many micro-batches are looked at.
MOST_SIZES, LOOKS = 2, 256


class StepPart:
    """Takes part in every step. By default it does nothing."""

    # ---- called by the Run ----

    def begin_step(self, steps_left: int) -> None:
        """Begin a step, before its batches are taken. `steps_left` includes it."""

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, before this rank waits for its data."""

    def end_step(self, progress: StepProgress) -> None:
        """End a step after its update. All ranks come here together."""

    def after_maintenance(self) -> None:
        """Do what comes after the log line, the evaluation and the save of a step. All ranks come here together."""

    def close(self) -> None:
        """End, because the run has ended or failed: give back what is held, and leave the model as it was."""

    # ---- called by the driver ----

    def begin_pass(self) -> None:
        """Begin to go over the micro-batches of a step. The last pass may have been abandoned anywhere."""

    def before_forward(self, micro: MicroBatch, progress: StepProgress) -> None:
        """Prepare for a micro-batch, whose data have arrived."""

    def before_all_reduce(self) -> None:
        """End this rank's own work of the pass. In a pipeline it is not called."""

    def after_backward(self, progress: StepProgress) -> None:
        """End a micro-batch. Gradients of the pass may not be reduced yet. In a pipeline it is not called."""

    def end_pass(self, progress: StepProgress) -> None:
        """End a pass: its gradients are reduced."""


class CudnnPause(StepPart):
    """Keeps cuDNN attention off in the micro-batches of a run as long as their sizes vary, or may vary.

    cuDNN would make a plan for each new size. The setting belongs to the process, so it is restored after each
    micro-batch: runs may take turns in one process.
    """

    def __init__(self, needed: bool | None):
        self.needed = needed  # None: once more than MOST_SIZES have come
        self._sizes: set[Hashable] = set()
        self._looks = 0
        self._paused = ExitStack()

    def begin_pass(self) -> None:
        self._paused.close()

    def before_forward(self, micro: MicroBatch, progress: StepProgress) -> None:
        if self.needed is None and self._looks < LOOKS:
            self._looks += 1
            self._sizes.add(tuple(shapes_of(micro.data)))
            if len(self._sizes) > MOST_SIZES:
                self.needed = True

        # The last micro-batch may have failed.
        self._paused.close()
        if self.needed:
            self._paused.enter_context(without_cudnn())

    def after_backward(self, progress: StepProgress) -> None:
        self._paused.close()

    def close(self) -> None:
        self._paused.close()
