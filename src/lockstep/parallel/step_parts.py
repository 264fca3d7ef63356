"""The parts of a step besides the model, its data and its optimizers.

A part times, compiles, traces, checks or records a step, or changes how a driver runs it. `Driver.parts` lists those
of a run; without such features the list is empty, and the run pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lockstep.task import Loss, MicroBatch

if TYPE_CHECKING:
    from lockstep.parallel.progress import PassProgress

# The slots of the parts, in the order in which they are called. It does not depend on which is added first, because
# some have collectives, which all ranks must call in one order. Whatever times a step (trace, compile) ends it before
# others check it (exact) or wait for other ranks (balance). The log comes last: a step that is refused has no line.
PART_ORDER = ("trace", "statistics", "reduce", "compile", "kernels", "exact", "balance", "log")


class StepPart:
    """Takes part in every step. By default it does nothing. `Driver.parts.add` adds it to a run."""

    slot: ClassVar[str]  # one of PART_ORDER

    # Whether the part can do without `before_backward` and `after_backward`. A pipeline calls neither: it has many
    # micro-batches in flight.
    runs_in_pipeline: ClassVar[bool] = False

    is_done = False  # whether the part is not needed after the first step of this process

    # ---- called by the Run ----

    def begin_step(self, steps_left: int) -> None:
        """Begin a step, before its batches are taken. `steps_left` includes it."""

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch, before this rank waits for its data."""

    def end_step(self, progress: PassProgress) -> None:
        """End a step after its update. All ranks come here together."""

    def after_maintenance(self) -> None:
        """End a step after its log line, its evaluation and its save. All ranks come here together."""

    def close(self) -> None:
        """Release resources and restore the model. Called when the run ends or fails."""

    def begin_user_code(self) -> None:
        """Begin code of the user that may call the model between steps. In a custom loop it never ends."""

    def end_user_code(self) -> None:
        """End what `begin_user_code` began."""

    # ---- called by the driver ----

    def begin_pass(self) -> None:
        """Begin a pass over the micro-batches of a step. The last pass may have been abandoned anywhere."""

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        """Prepare for a micro-batch, whose data have arrived."""

    def before_backward(self, loss: Loss, progress: PassProgress) -> None:
        """End the forward of a micro-batch. `loss` has been checked and recorded. Not called in a pipeline."""

    def before_all_reduce(self) -> None:
        """End this rank's own work of the pass: from here on it waits for other ranks.

        It comes before the last backward, in which gradients may be reduced. In a pipeline it comes after that.
        """

    def after_backward(self, progress: PassProgress) -> None:
        """End a micro-batch. Gradients of the pass may not be reduced yet. Not called in a pipeline."""

    def end_pass(self, progress: PassProgress) -> None:
        """End a pass: its gradients are reduced."""


Part = TypeVar("Part", bound=StepPart)


class StepParts(list[StepPart]):
    """The parts of a driver, in the order in which they are called. It is one object for the whole run."""

    def __init__(self, overlapping: bool):
        """`overlapping`: micro-batches overlap, as they do in a pipeline."""
        super().__init__()
        self._overlapping = overlapping

    def add(self, part: Part) -> Part:
        """Add a part to the steps from now on, in its slot of the fixed order, and return it."""
        assert part.runs_in_pipeline or not self._overlapping, f"{part} in a pipeline: see `runs_in_pipeline`"
        self.append(part)
        self.sort(key=lambda part: PART_ORDER.index(part.slot))
        return part

    def drop_done(self) -> None:
        """Remove the parts that are done, so that later steps pay nothing for them. Called after the first step."""
        self[:] = [part for part in self if not part.is_done]

    @contextmanager
    def around_user_code(self) -> Iterator[None]:
        """Inside the `with` block, between two steps, run code of the user that may call the model."""
        for part in self:
            part.begin_user_code()

        try:
            yield
        finally:
            for part in self:
                part.end_user_code()

    def close(self) -> None:
        """Close all parts: the run has ended or failed."""
        for part in self:
            part.close()
