"""Steps of several passes: a custom loop may go over the batches of a step more than once.

Each pass ends with an update (`apply`) or leaves its gradients to the user (`measure`). The step counts once: as
applied if any of its passes is, as skipped if any of them is, and perhaps as both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from lockstep.task import MicroBatch, StepResult


@dataclass(slots=True, eq=False)
class StepStatus:
    """What is known of a step so far, from all of its passes. Usually it has one."""

    step: int
    updates: int = 0  # passes so far that ended with an update, applied or not
    applied: bool = False  # whether the host knows of a pass that was applied
    not_applied: bool | Tensor = True  # the opposite; where the device decides a tensor (), which is known earlier

    # Whether the step is counted already: `OutcomeHandler` counts the first of several skipped passes.
    counted_as_skipped: bool = False
    counted_in_a_row: bool = False

    def add_update(self, not_applied: bool | Tensor) -> None:
        """Add a pass that ended with an update. `not_applied` (): whether this one is not applied."""
        self.updates += 1

        # A step with one pass launches no kernel here.
        self.not_applied = not_applied if self.not_applied is True else self.not_applied & not_applied

    def complete(self, result: StepResult) -> StepResult:
        """Return the result of this step from the newest result of its passes. An earlier one may be applied."""
        if result.applied or not self.applied:
            return result

        return replace(result, applied=True, skip_reason=None)


class RepeatedBatches:
    """The micro-batches of a step for several passes: each iteration over this object is the next pass.

    The source gives each micro-batch only once. It stays in memory until the last pass.
    """

    def __init__(
        self,
        micro_batches: Iterable[MicroBatch],
        passes: int,
        feed: Callable[[Iterable[MicroBatch]], Iterable[MicroBatch]],
    ):
        """`feed` returns what the loop gets: the same micro-batches, with the calls that belong to each pass."""
        self._micro_batches = micro_batches
        self._passes_left = passes
        self._feed = feed

    def __iter__(self) -> Iterator[MicroBatch]:
        self._passes_left -= 1
        if self._passes_left == 0:
            return iter(self._feed(self._micro_batches))

        # Keep what this pass reads, for the next one.
        kept: list[MicroBatch] = []
        keeping = _keep(self._micro_batches, kept)
        self._micro_batches = _take_out(kept)
        return iter(self._feed(keeping))


def _keep(micro_batches: Iterable[MicroBatch], kept: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield a copy of each micro-batch, whose data a hook may replace, and keep the original."""
    for micro in micro_batches:
        kept.append(micro)
        yield replace(micro)


def _take_out(kept: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches that were kept, and let go of each."""
    while kept:
        yield kept.pop(0)
