"""Estimates how much of a step compiled code could save, from the times of its kernels on a GPU.

Matrix products and attention stay as they are, and so do the optimizer, copies and collectives. What compiling saves
is the rest: element-wise kernels and reductions, which it fuses, and products of odd sizes, which it pads. The parts
below were measured for eight public models on an H200: for seven of them the estimate is 0.5 to 1.02 of what compiling
really saved (docs/LOG.md, "2026-11-18: what compiling saves, known before"). The eighth kept its GPU waiting for the
host, and then kernels show nothing.
"""

from __future__ import annotations

import torch
from torch.autograd import DeviceType, profiler
from torch.profiler import ProfilerActivity, profile
from torch.profiler.profiler import PROFILER_STEP_NAME

# Parts of kernels' names, in lower case.
UNCHANGED = ("multi_tensor", "memcpy", "memset", "nccl")
PRODUCTS = ("gemm", "cutlass", "xmma", "nvjet", "flash", "fmha", "cudnn", "conv", "attention", "wgrad", "dgrad")
ODD, UNALIGNED = "align1", ("align2", "align4")
SCALAR = "simt"  # products without tensor cores, as in fp32 without TF32: their names have `align1` for any size

# Parts of their time that compiled code saves, at the lower end of what was seen.
SAVED = {"fusible": 0.55, "odd": 0.75, "unaligned": 0.25, "fixed": 0.0}
MOST = 0.7  # the largest part of a step that can be saved, whatever its kernels say
BUSY = 0.7  # kernels that take less than this part of a step do not decide how long it takes


def saving_s(kernels: list[tuple[str, float]], step_s: float) -> float | None:
    """Return the seconds that compiled code would save in a step of `step_s` seconds, or None if they do not show it.

    kernels: the name and the seconds of each kernel of the step
    """
    busy_s = sum(kernel_s for _, kernel_s in kernels)
    if busy_s < BUSY * step_s:
        return None

    saved_s = sum(SAVED[kind_of(name)] * kernel_s for name, kernel_s in kernels)
    return min(saved_s, MOST * step_s)


def kind_of(name: str) -> str:
    """Return what compiling could do about a kernel: a key of SAVED."""
    # Kernels of libraries are named after what they compute. torch's own may have `conv` in the name of a cast.
    name = name.lower()
    is_product = "at::native" not in name and any(part in name for part in PRODUCTS)
    if not is_product:
        return "fixed" if any(part in name for part in UNCHANGED) else "fusible"

    if SCALAR in name:
        return "fixed"
    if ODD in name:
        return "odd"
    return "unaligned" if any(part in name for part in UNALIGNED) else "fixed"


class KernelTimer:
    """Measures the kernels between `start` and `stop`.

    torch has one profiler for a process. If the user uses it, or has one that waits for its turn, nothing is
    measured: torch 2.13 crashes if another profiler starts during the warm-up of a schedule.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._profile: profile | None = None

    def start(self) -> None:
        self.abandon()  # the step before may have failed, and the user's loop may repeat it
        if profiler._is_profiler_enabled or _another_exists():
            return

        self._profile = profile(activities=[ProfilerActivity.CUDA])
        profiler.KinetoStepTracker.erase_step_count(PROFILER_STEP_NAME)  # only those of others count
        self._profile.start()

    def stop(self) -> list[tuple[str, float]]:
        """Return the name and the seconds of each kernel; none if they could not be measured."""
        # Host-device synchronisation, once in a run: kernels of this step may still be running.
        if self._profile:
            torch.cuda.synchronize(self._device)

        own = self.abandon()
        events = own.events() if own else None
        kernels = [event for event in events or () if event.device_type == DeviceType.CUDA]
        return [(kernel.name, kernel.device_time * 1e-6) for kernel in kernels]

    def abandon(self) -> profile | None:
        """Stop the profiler, as after a step that has failed, and return it if it has measured anything."""
        own, self._profile = self._profile, None

        # A profiler that was started since has ended ours, or will stop by itself.
        if own is None or not profiler._is_profiler_enabled or _another_exists():
            return None

        own.stop()
        return own


def _another_exists() -> bool:
    """Return whether the user has made a profiler of torch: it may have a schedule, by which it starts later."""
    return PROFILER_STEP_NAME in profiler.KinetoStepTracker._step_dict
