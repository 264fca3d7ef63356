"""A GPU's outside world, faked on a CPU: streams, events, pinned memory, memory counters, a profiler, and a clock.

`fake_gpu` makes `Runtime.on_gpu` true and replaces the calls of `torch.cuda` that the engine makes. Tensors "on the
GPU" are tensors of the CPU, and kernels run at once. Copies that a GPU makes asynchronously are late: their target
holds nan until somebody waits for the event behind them, so code that reads too early reads nan. `FakeClock` is the
time of modules that measure, so that a test decides how long a step takes.

What such a test cannot show:
- that the real calls exist, and take these arguments; tests/gpu has the real ones
- races of kernels: memory that is used again too early, a missing `record_stream`, work on the wrong stream
- results that depend on the device: `is_cuda` is false, so losses and weights are numbers of the host, and kernels
  round as those of a CPU
- whether anything is faster, or really does not make the host wait
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from lockstep.parallel.compiled import kernel_times
from lockstep.runtime.context import Runtime

Work = Callable[[], None]


class FakeStream:
    """Copies that were queued and have not arrived. They arrive in their order."""

    def __init__(self, gpu: FakeGpu, name: str):
        self.gpu = gpu
        self.name = name
        self.queued = 0  # copies so far
        self._left: deque[Work] = deque()

    def queue(self, work: Work) -> None:
        self.queued += 1
        self._left.append(work)

    def arrive(self, until: int | None = None) -> None:
        """Let the copies arrive up to number `until`, or all of them."""
        end = self.queued if until is None else until
        while self._left and self.queued - len(self._left) < end:
            self._left.popleft()()

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.gpu.calls.append(f"{self.name} waits")
        event.arrive()

    def wait_stream(self, other: FakeStream) -> None:
        self.gpu.calls.append(f"{self.name} waits for {other.name}")
        other.arrive()


class FakeEvent:
    """An event: what was queued on a stream before it. It has arrived when it is asked for the second time."""

    def __init__(self, gpu: FakeGpu):
        self._gpu = gpu
        self._stream: FakeStream | None = None
        self._until = 0
        self._asked = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self._stream = stream or self._gpu.current
        self._until = self._stream.queued

    def arrive(self) -> None:
        assert self._stream is not None, "an event that was never recorded"
        self._stream.arrive(self._until)

    def synchronize(self) -> None:
        self._gpu.calls.append("host waits for an event")
        self.arrive()

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 1:
            self.arrive()

        return self._asked > 1


class FakeGpu:
    """What a test sees of the device, and sets."""

    def __init__(self) -> None:
        self.compute = self.current = FakeStream(self, "compute")
        self.streams = [self.compute]
        self.calls: list[str] = []  # what streams and the host have waited for, in order
        self.peak_bytes = 3 * 2**20  # what the memory counter says
        self.pinned: list[Tensor] = []

    def new_stream(self, device: Any = None) -> FakeStream:
        self.streams.append(FakeStream(self, f"copy {len(self.streams)}"))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: Any = None) -> None:
        self.calls.append("host waits for the device")
        for stream in self.streams:
            stream.arrive()

    def copy_later(self, target: Tensor, source: Tensor) -> Tensor:
        """Queue a copy into `target`, which holds nonsense until then."""
        values = source.detach().clone()
        target.fill_(float("nan") if target.is_floating_point() else 99)
        self.current.queue(lambda: _COPY(target, values))
        return target


_COPY = Tensor.copy_
_TO = Tensor.to


def _on_fake(device: Any) -> bool:
    return str(device).startswith("cuda")


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let runs believe that they are on a GPU, until the test ends."""
    gpu = FakeGpu()
    monkeypatch.setattr(Runtime, "on_gpu", True)

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Event", lambda **options: FakeEvent(gpu))
    monkeypatch.setattr(cuda, "Stream", gpu.new_stream)
    monkeypatch.setattr(cuda, "stream", gpu.on)
    monkeypatch.setattr(cuda, "current_stream", lambda device=None: gpu.current)
    monkeypatch.setattr(cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda device=None: gpu.peak_bytes)

    # Memory: "the GPU" is the CPU, and any of it can be pinned.
    empty_like, zeros, tensor = torch.empty_like, torch.zeros, torch.tensor

    def fake_empty_like(like: Tensor, **options: Any) -> Tensor:
        return empty_like(like, **{key: value for key, value in options.items() if key != "device"})

    def unpinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    def pin(of: Tensor) -> Tensor:
        gpu.pinned.append(of.clone())
        return gpu.pinned[-1]

    monkeypatch.setattr(torch, "empty_like", fake_empty_like)
    monkeypatch.setattr(torch, "zeros", unpinned(zeros))
    monkeypatch.setattr(torch, "tensor", unpinned(tensor))
    monkeypatch.setattr(Tensor, "pin_memory", pin)

    # Copies: those that do not make the host wait are late.
    def fake_to(source: Tensor, *args: Any, **options: Any) -> Tensor:
        # By the string: to the device of the run, which is a CPU here, a copy goes the other way.
        if args and isinstance(args[0], str) and args[0] == "cpu" and options.get("non_blocking"):
            return gpu.copy_later(empty_like(source), source)
        if args and _on_fake(args[0]):
            return source

        return _TO(source, *args, **options)

    def fake_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking and gpu.current is not gpu.compute:
            gpu.calls.append(f"{gpu.current.name} copies")
            return gpu.copy_later(target, source)

        return _COPY(target, source, non_blocking)

    monkeypatch.setattr(Tensor, "to", fake_to)
    monkeypatch.setattr(Tensor, "copy_", fake_copy)
    return gpu


# ---- time ----


class FakeClock:
    """A clock that only moves when something says how long it takes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Be the time of these modules."""
        time = SimpleNamespace(perf_counter=self.read, monotonic=self.read, time=self.read)
        for module in modules:
            monkeypatch.setattr(module, "time", time)


# ---- the profiler ----


@dataclass
class FakeKernel:
    name: str
    device_time: float  # microseconds
    device_type: Any = DeviceType.CUDA


class FakeProfiler:
    """torch's profiler: one at a time. It has seen `kernels`, names with seconds, in each step that it measures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernels: list[tuple[str, float]]):
        self.kernels = kernels
        self.calls: list[str] = []
        self._is_on = False
        monkeypatch.setattr(kernel_times, "profile", lambda **options: self)
        monkeypatch.setattr(kernel_times.profiler, "_is_profiler_enabled", False)
        self._set = lambda on: monkeypatch.setattr(kernel_times.profiler, "_is_profiler_enabled", on)

    @property
    def is_on(self) -> bool:
        return self._is_on

    def start(self) -> None:
        assert not self._is_on, "a second profiler"
        self.calls.append("start")
        self._is_on = True
        self._set(True)

    def stop(self) -> None:
        assert self._is_on
        self.calls.append("stop")
        self._is_on = False
        self._set(False)

    def events(self) -> list[FakeKernel]:
        return [FakeKernel(name, seconds * 1e6) for name, seconds in self.kernels]
