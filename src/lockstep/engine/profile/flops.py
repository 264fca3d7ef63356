"""Floating-point operations: those of a forward, and the most that a device does per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from lockstep.engine.evaluation.modes import restore_modes
from lockstep.parallel.call_chain import run_eagerly
from lockstep.parallel.driver import Driver

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows of the matrices whose product sets the peak
REPEATS = 10
BACKWARD = 2.0  # operations of a backward, in those of its forward


class StepFlops:
    """Counts the multiplications and additions of this rank's steps.

    The last call of the loss is kept, and its forward is repeated without gradients and counted.
    """

    def __init__(self, driver: Driver):
        self._driver: Any = driver
        self._last_call: tuple[Callable[[Any, Any], Any], Any] | None = None  # the loss function, and its batch

    def watch(self) -> None:
        """Keep the arguments of every call of the loss from now on."""
        # On the instance, where it hides the method of the class until `unwatch` deletes it.
        call_loss = self._driver.call_loss

        def watched(loss_fn: Any, module: Any, data: Any) -> Any:
            self._last_call = (loss_fn, data)
            return call_loss(loss_fn, module, data)

        self._driver.call_loss = watched

    def unwatch(self) -> None:
        """Return to the driver's own method."""
        del self._driver.call_loss

    def of_step(self, micro_batches: int) -> float | None:
        """Return the operations of a step of so many micro-batches, or None if they cannot be counted.

        The random numbers that the forward draws are not those of training: the caller restores the generators.
        """
        # Dropped here, so that the batch does not stay in memory for the rest of the run.
        call = self._last_call
        self._last_call = None
        role = self._driver.role

        # This rank must be able to run a forward alone.
        if call is None or not role.replicated or role.collective_forwards or not role.runs_whole_model:
            return None

        try:
            forward = self._count(*call)
        except Exception:  # a loss that needs gradients, or a mode that the model does not have
            return None

        # A backward computes two products for each one of the forward: for the inputs, and for the weights.
        return forward * (1 + BACKWARD) * micro_batches

    def _count(self, loss_fn: Callable[[Any, Any], Any], data: Any) -> float:
        """Return the operations of one forward."""
        # Eagerly: the counter sees the calls of torch's functions, which compiled code and CUDA graphs do not make.
        model = self._driver.model
        with restore_modes(model.modules()), torch.no_grad(), run_eagerly(model):
            model.eval()  # no statistics change
            with FlopCounterMode(display=False) as counter:
                loss_fn(model, data)

        return float(counter.get_total_flops())


def matmul_rate(device: torch.device) -> float:
    """Return the floating-point operations per second of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    on_gpu = device.type == "cuda"
    size = MATRIX["cuda" if on_gpu else "cpu"]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a = torch.ones(size, size, device=device, dtype=dtype)

    # The fastest of several: the first ones warm up, and others may be disturbed.
    best = float("inf")
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - began)

    # One multiplication and one addition for each of size^3 terms.
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    # The host waits for the device, once after the traced steps.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
