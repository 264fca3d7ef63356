"""A device that records nothing (in place of `cudagraph.device.CudaDevice`), and replays by doing the work again."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation")
        return func(*args, **(kwargs or {}))


class Again:
    """Does the work again. `seconds` is what the device is said to take."""

    type = "cpu"

    def __init__(self, seconds=0.0, stale=False):
        self.takes, self.stale, self.replayed, self.captured = seconds, stale, 0, 0
        self.memory = 4.0  # of which each capture takes 1

    def capture(self, works):
        self.captured += 1
        replays = []
        for work in works:
            work()
            replays.append(lambda work=work: self._replay(work))
        return replays

    def _replay(self, work):
        self.replayed += 1
        if not self.stale:
            work()

    @contextmanager
    def forbid_sync(self):
        with NoWaiting():
            yield

    def generator(self):
        return torch.default_generator

    def reserved_bytes(self):
        return self.captured

    def total_bytes(self):
        return self.memory

    def record_event(self):
        return None

    def elapsed_s(self, begin, end):
        return self.takes
