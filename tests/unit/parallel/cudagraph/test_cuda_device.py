"""What captures and limits of memory leave behind on a GPU: nothing, whatever fails. Its calls are faked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fake_cuda import FakeGpu, fake_gpu
from lockstep.errors import UserError
from lockstep.parallel.cudagraph.device import CudaDevice
from lockstep.parallel.fsdp import driver as fsdp
from lockstep.runtime.context import _limit_memory

DEVICE = torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A faked GPU of 8 GiB, which notes captures."""
    gpu, cuda = fake_gpu(monkeypatch), torch.cuda

    class Graph:
        def replay(self) -> None:
            gpu.calls.append("replay")

    @contextmanager
    def graph(captured: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert stream is not gpu.compute, "the default stream cannot be captured"
        gpu.calls.append("capture")
        with gpu.on(stream):
            yield

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "graph", graph)
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(cuda, "default_stream", lambda device: gpu.compute)
    monkeypatch.setattr(cuda, "set_stream", lambda stream: setattr(gpu, "current", stream))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda index, pool: gpu.calls.append("end pool"), raising=False
    )

    settings = {"mode": 0, "fraction": 1.0}
    monkeypatch.setattr(gpu, "settings", settings, raising=False)
    monkeypatch.setattr(cuda, "get_sync_debug_mode", lambda: settings["mode"])
    monkeypatch.setattr(cuda, "set_sync_debug_mode", lambda mode: settings.update(mode=mode))
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: settings["fraction"])
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", lambda value, device: settings.update(fraction=value))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * GIB))
    return gpu


def test_works_are_captured_in_order_off_the_default_stream(gpu: FakeGpu) -> None:
    done: list[str] = []
    replays = CudaDevice(DEVICE).capture([lambda: done.append("forward"), lambda: done.append("backward")])
    assert done == ["forward", "backward"]
    for replay in replays:
        replay()
    assert gpu.calls == ["capture", "capture", "replay", "replay"]
    assert gpu.current is gpu.compute


def test_a_capture_that_fails_leaves_capture_mode(gpu: FakeGpu) -> None:
    """A small capture at the end resets torch's generator."""

    def fail() -> None:
        assert not gc.isenabled()  # a collection could free tensors, which invalidates the capture
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaDevice(DEVICE).capture([lambda: None, fail])
    assert gpu.calls == ["capture", "capture", "end pool", "host waits for the device", "capture"]
    assert gpu.current is gpu.compute
    assert gc.isenabled()


@pytest.mark.parametrize("mode", [0, 1])
def test_waiting_is_forbidden_for_a_while(mode: int, gpu: Any) -> None:
    gpu.settings["mode"] = mode

    def wait() -> None:
        with CudaDevice(DEVICE).forbid_sync():
            assert gpu.settings["mode"] == "error"
            raise RuntimeError("called a synchronizing operation")

    with pytest.raises(RuntimeError):
        wait()
    assert gpu.settings["mode"] == mode


def test_the_limit_of_memory_ends_with_the_run(gpu: Any) -> None:
    gpu.settings["fraction"] = 0.9  # the user's

    def fail() -> None:
        with ExitStack() as stack:
            _limit_memory(2.0, DEVICE, stack)
            assert gpu.settings["fraction"] == 0.25
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gpu.settings["fraction"] == 0.9

    with ExitStack() as stack, pytest.raises(UserError, match="more than the GPU has"):
        _limit_memory(9.0, DEVICE, stack)


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 4 + 1), (0.5, 0.5 * 8 - 2)])
def test_free_memory_is_what_this_process_could_still_allocate(
    fraction: float, expected: float, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 GiB are free; torch has reserved 3 and uses 2 of them."""
    gpu.settings["fraction"] = fraction
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(fsdp, "device_name", lambda device: "a GPU")
    assert fsdp._free_memory(DEVICE) == ("a GPU", expected * GIB)
