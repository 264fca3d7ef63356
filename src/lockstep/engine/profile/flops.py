"""Floating-point operations: how many a forward has, and how many a device can do per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lockstep.parallel.calls.chain import run_eagerly
from lockstep.parallel.calls.state import restore_modes
from lockstep.parallel.driver import Driver, LossFn
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.task import MicroBatch

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows of the matrices whose product sets the peak
REPEATS = 10
BACKWARD = 2.0  # a backward has this many times the operations of its forward


class StepFlops(StepPart):
    """Counts the multiplications and additions of this rank's steps.

    From `start` on the last batch is kept, whose forward is repeated without gradients and counted.
    """

    slot = "trace"
    runs_in_pipeline = True

    def __init__(self, driver: Driver, loss_fn: LossFn | None):
        """`loss_fn` is the task's loss; None in a custom loop, whose forwards cannot be repeated."""
        self._driver = driver
        self._loss_fn = loss_fn
        self._keeps_batch = False
        self._batch: Any = None

    def start(self) -> None:
        self._keeps_batch = True

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        if self._keeps_batch:
            self._batch = micro.data

    def of_step(self, micro_batches: int) -> float | None:
        """Return the operations of a step of so many micro-batches, or None if they cannot be counted.

        The random numbers that the forward draws are not those of training: the caller restores the generators.
        """
        batch, self._batch = self._batch, None
        self._keeps_batch = False

        # This rank must be able to run a forward alone.
        if self._loss_fn is None or not self._driver.role.replicated:
            return None

        try:
            forward = self._count(self._loss_fn, batch)
        except Exception:  # a loss that needs gradients, or a mode that the model does not have
            return None

        return forward * (1 + BACKWARD) * micro_batches

    def _count(self, loss_fn: LossFn, data: Any) -> float:
        """Return the operations of one forward. It changes no weight, no statistics and no gradient."""
        model = self._driver.model
        with restore_modes(model.modules()), torch.no_grad(), run_eagerly(model):
            model.eval()  # no statistics change
            with FlopCounterMode(display=False) as counter:
                loss_fn(model, data)

        return float(counter.get_total_flops())


def matmul_rate(device: torch.device) -> float:
    """Return the floating-point operations per second of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    size = MATRIX["cuda" if device.type == "cuda" else "cpu"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    # The best of several: the first ones load the library, and other processes may disturb some.
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")

    for _ in range(REPEATS):
        # A GPU only queues the product, so wait before and after it.
        wait_for_device(device)
        began = time.perf_counter()
        a @ a
        wait_for_device(device)
        best = min(best, time.perf_counter() - began)

    # Each of the size^2 results needs `size` multiplications and as many additions.
    return 2 * size**3 / best


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all launched work. On a CPU a call returns when it has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
