"""Keeps cuDNN attention from making a plan for each new size of a batch."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack

from lockstep.parallel.compiled.batch_sizes import shapes_of
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.runtime.attention import without_cudnn
from lockstep.task import MicroBatch

MOST_SIZES = 2  # A dataset gives at most two batch sizes; the last batch may be short.
LOOKS = 256  # Micro-batches to inspect.


class CudnnPause(StepPart):
    """Keeps cuDNN attention off in the micro-batches of a run as long as their sizes vary, or may vary.

    cuDNN would make a plan for each new size. The setting belongs to the process, so it is restored after each
    micro-batch: runs may take turns in one process.
    """

    slot = "kernels"

    def __init__(self, needed: bool | None):
        self.needed = needed  # None: not known yet; it is once more than MOST_SIZES sizes have come
        self._sizes: set[Hashable] = set()
        self._looks = 0
        self._paused = ExitStack()

    def begin_pass(self) -> None:
        self._paused.close()

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        if self.needed is None and self._looks < LOOKS:
            self._looks += 1
            self._sizes.add(tuple(shapes_of(micro.data)))
            if len(self._sizes) > MOST_SIZES:
                self.needed = True

        # The last micro-batch may have failed.
        self._paused.close()
        if self.needed:
            self._paused.enter_context(without_cudnn())

    def after_backward(self, progress: PassProgress) -> None:
        self._paused.close()

    def close(self) -> None:
        self._paused.close()
