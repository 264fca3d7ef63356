"""Compiled code in use: which calls it takes, how they are made, and how many calls did not fit.

A call that does not fit runs eagerly, which is right but slow. So from time to time the ranks check how many there
were, and the compiler compiles again if there were too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.config import RunConfig
from lockstep.parallel.compiled.batch_sizes import Dims, Shape, fits
from lockstep.parallel.compiled.constants import Constants
from lockstep.parallel.compiled.side_effects import Function
from lockstep.parallel.compiled.targets import Target
from lockstep.parallel.cudagraph.graphs import GraphedCall
from lockstep.parallel.cudagraph.install import graph_link
from lockstep.parallel.cudagraph.variants import RunLength
from lockstep.parallel.driver import Driver
from lockstep.runtime.context import EventLogger

# After this many steps all ranks check how many batches did not fit, then after twice as many, up to the last check.
FIRST_LOOK, LAST_LOOK = 8, 1024


class InstalledCode:
    """The compiled code of a target, which runs in the place of eager code."""

    def __init__(self, target: Target, shapes: Sequence[Shape], dynamic: Dims):
        """Store the code.

        shapes: the shapes of the call that it was compiled for
        dynamic: the dimensions that may have other sizes
        """
        self.target = target
        self.dynamic = dynamic
        self._shapes = shapes

        # Of a compiled loss, if it is captured: the capture, and what the loss reads besides its arguments.
        self._graphed: GraphedCall | None = None
        self._constants: Constants | None = None

        # Since the last look: calls in all, and calls that did not fit.
        self._calls = 0
        self._misses = 0

        # Since the code was installed: steps in all, and the number of steps at which the ranks look next.
        self._steps = 0
        self._next_look = FIRST_LOOK

    def takes(self, shapes: Sequence[Shape]) -> bool:
        """Return whether a call with these shapes fits the compiled code, and count it."""
        # torch's guards find out as well, but they do not count it.
        fitting = fits(shapes, self._shapes, self.dynamic)
        self._calls += 1
        self._misses += not fitting
        return fitting

    @property
    def still_looks(self) -> bool:
        """Whether the ranks will check again how many calls did not fit."""
        return self._next_look <= LAST_LOOK

    def end_step(self) -> float | None:
        """Return the share of the calls since the last look that did not fit, if it is time for a look."""
        self._steps += 1
        if not self.still_looks or self._steps < self._next_look:
            return None

        self._next_look *= 2
        share = self._misses / max(1, self._calls)
        self._calls = 0
        self._misses = 0
        return share

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call that runs compiled code."""
        # Where torch's guards find that the code does not fit, eager code runs: one rank alone must not compile now.
        with torch.compiler.set_stance("eager_on_recompile"):
            return call()

    def call_function(self, driver: Driver, args: tuple[Any, ...]) -> Any:
        """Call the compiled loss, or replay it."""
        # A capture repeats the values of its time, so it is used only while nothing has changed.
        if self._graphed and self._constants and self._constants.hold:
            return driver.call_inside(self._graphed, *args)

        return driver.call_inside(self.target, *args)

    def capture(
        self, function: Function, driver: Driver, config: RunConfig, log_event: EventLogger, length: RunLength
    ) -> None:
        """Capture the calls of a compiled loss from now on, if it reads nothing that may change."""
        # Asked now, and again before every replay.
        self._constants = Constants(function)
        if not self._constants.hold:
            reason = "not captured: the loss may read values that change (attributes of the task, globals)"
            log_event("graph", reason=reason)
            return

        # None if the settings or the model do not allow captures. The link is not installed on the model's call chain:
        # it wraps the compiled function, and `call_function` chooses it.
        self._graphed = graph_link(driver.model, config, driver.runtime, log_event, length)
        if self._graphed:
            self._graphed.inner = self.target

    def remove(self) -> None:
        """Return the model to its eager code, and free the memory of captures."""
        self._graphed = None  # the only reference to the captures
        self.target.remove()
