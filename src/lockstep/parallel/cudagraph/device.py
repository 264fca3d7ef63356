"""Stream capture, replay and timing on a GPU.

All calls of the CUDA runtime that captures need are here, so that a test can put a class for CPUs in its place.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lockstep import garbage

Work = Callable[[], None]


class CudaDevice:
    """A GPU. The tests replace it with a class for CPUs, which replays by running the work again."""

    type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device

    def capture(self, works: Iterable[Work]) -> list[Work]:
        """Run each of `works` once, in order, and return functions that replay them in the same memory.

        They share one memory pool, since later works read results of earlier ones. No other capture uses this pool, so
        captures may be replayed in any order.
        """
        # The default stream cannot be captured.
        stream = before = torch.cuda.current_stream(self.device)
        if before == torch.cuda.default_stream(self.device):
            stream = torch.cuda.Stream(self.device)

        pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        # A garbage collection during a capture may free tensors and call CUDA functions that invalidate the capture.
        gc.collect()
        with garbage.paused():
            try:
                for work in works:
                    graph = torch.cuda.CUDAGraph()

                    # thread_local: other threads (prefetch, checkpoints) may use CUDA at the same time.
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        work()

                    graphs.append(graph)
            except BaseException:
                self._recover(pool, before, stream)
                raise

        return [graph.replay for graph in graphs]

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        """Raise an error from every operation that makes the host wait for the device."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # torch warns that it does not detect every synchronisation
            torch.cuda.set_sync_debug_mode("error")

        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index or 0]

    def reserved_bytes(self) -> int:
        """Return the memory that torch holds, in use or not."""
        return torch.cuda.memory_reserved(self.device)

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # The host waits here, but only when it decides about a capture.
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def _recover(self, pool: Any, before: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Leave capture mode after a failed capture.

        torch leaves the stream, the allocator and the generator in capture mode. A successful capture resets the
        generator, so we run a small one.
        """
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # torch may already have ended it
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)

        torch.cuda.synchronize(self.device)

        # Any kernel will do.
        numbers = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            numbers.add_(1)
