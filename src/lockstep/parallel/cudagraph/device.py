"""The device behind captures: it captures and replays work, forbids synchronisation, and measures time."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Work = Callable[[], None]


class CudaDevice:
    """A GPU. The tests have another class for CPUs, which replays by running the work again."""

    type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device

    def capture(self, works: Iterable[Work]) -> list[Work]:
        """Run each of `works` once, in order, and return functions that replay them in the same memory.

        They share one memory pool, since the later ones read what the earlier ones leave. No other capture shares the
        pool, so captures may be replayed in any order.
        """
        # The default stream cannot be captured.
        stream = before = torch.cuda.current_stream(self.device)
        if before == torch.cuda.default_stream(self.device):
            stream = torch.cuda.Stream(self.device)

        pool = torch.cuda.graph_pool_handle()
        graphs = []

        # Garbage collection during a capture may free a tensor, and with it call CUDA in ways that spoil the capture.
        was_collecting = gc.isenabled()
        gc.collect()
        gc.disable()
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
        finally:
            if was_collecting:
                gc.enable()

        return [graph.replay for graph in graphs]

    @contextmanager
    def forbid_sync(self) -> Iterator[None]:
        """Raise an error from every operation that makes the host wait for the device."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # torch warns that it does not notice every synchronisation
            torch.cuda.set_sync_debug_mode("error")

        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index or 0]

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # The host waits only a few times in a run, when we decide what to capture.
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def _recover(self, pool: Any, before: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Leave capture mode after a failed capture.

        torch leaves the stream, the allocator and the generator as they were in the middle of the capture. The
        generator recovers with the next capture that succeeds, so we make one.
        """
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # if torch has already done it
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)

        torch.cuda.synchronize(self.device)

        numbers = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            numbers.add_(1)
