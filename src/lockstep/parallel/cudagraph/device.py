"""What a device does for captures: capture and replay work, forbid synchronisation, and measure time."""

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
        stream = before = torch.cuda.current_stream(self.device)
        if before == torch.cuda.default_stream(self.device):
            stream = torch.cuda.Stream(self.device)  # the default stream cannot be captured
        pool = torch.cuda.graph_pool_handle()
        graphs = []

        # A tensor that is collected during a capture may call CUDA in ways that invalidate it.
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
        """Make every operation fail that makes the host wait for the device."""
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
        # The host waits a few times in a run, when it is decided what to capture.
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def _recover(self, pool: Any, before: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """Leave capture mode after a failed capture, which torch does not do by itself.

        It leaves the stream, the allocator and the generator as in the middle of a capture. The generator recovers with
        the next capture that succeeds, so we make one.
        """
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # if torch got this far by itself
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)
        torch.cuda.synchronize(self.device)

        numbers = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            numbers.add_(1)
