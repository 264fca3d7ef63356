"""What the steps show: how long they take, and which sizes their batches have."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from lockstep.parallel.compiled.shapes import Arguments, Dims, Shape, SizesSeen, shapes_of
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime

MOST_EXAMPLES = 3
ALIGNED = 8  # some kernels have a version for sizes that are multiples of this


class StepTimer:
    """Times a few steps, after some that are left out because they allocate, tune and connect.

    The step in which the timer is made does not count.
    """

    def __init__(self, warm_up: int, timed: int):
        self._warm_up = warm_up  # steps that are left out
        self._steps = warm_up + timed
        self._seconds: list[float] = []  # of each step so far, with those that are left out
        self._began: float | None = None  # None before the first whole step

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def end_step(self, runtime: Runtime) -> float | None:
        """Return the seconds of a step on the slowest rank once enough steps were timed. Collective then."""
        if self._began is None:
            return None

        # The host waits for the device, in the few steps that are timed.
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()

        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) < self._steps:
            return None

        # The median leaves out a step that a checkpoint or another program has slowed down.
        own_s = median(self._seconds[self._warm_up :])
        return max(runtime.collectives.gather_json(own_s))


class BatchWatch:
    """The sizes of the batches so far, and a few calls of the model, to compile for these sizes."""

    def __init__(self) -> None:
        self.sizes = SizesSeen()
        self.varying: Dims = frozenset()  # the dimensions that vary, as all ranks have agreed
        # One call for each class of sizes: some kernels need aligned ones.
        self._examples: dict[tuple[bool, ...], Arguments] = {}

    @property
    def examples(self) -> list[Arguments]:
        return list(self._examples.values())

    def note(self, arguments: Any) -> None:
        """Note the sizes of one call's tensors."""
        self.sizes.add(shapes_of(arguments))

    def keep_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep a call of the model if no call of its class of sizes is kept: which of its sizes are aligned."""
        if len(self._examples) >= MOST_EXAMPLES:
            return

        sizes = [size for shape in shapes_of((args, kwargs)) for size in shape]
        kind = tuple(size % ALIGNED == 0 for size in sizes)
        self._examples.setdefault(kind, (args, kwargs))

    def drop_examples(self) -> None:
        """Free the memory of the batches."""
        self._examples.clear()

    def agree(self, collectives: Collectives) -> None:
        """Give all ranks the same sizes, merged in the order of the ranks. Collective."""
        # Merged from scratch on every rank, in the same order, so that all get the same result.
        agreed = SizesSeen()
        for sizes, irregular in collectives.gather_json([self.sizes.sizes, self.sizes.irregular]):
            agreed.merge(sizes)
            agreed.irregular |= irregular

        self.sizes.sizes = agreed.sizes
        self.sizes.irregular = agreed.irregular

        # Irregular calls have no common dimensions, so none of them is marked as dynamic.
        self.varying = frozenset() if agreed.irregular else agreed.varying()

    def smallest(self) -> list[Shape]:
        """Return, for each tensor, the smallest size seen of each dimension."""
        return [tuple(sizes[0] for sizes in dims) for dims in self.sizes.sizes or []]
