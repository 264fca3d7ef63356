"""The garbage collector stays off while any thread needs that."""

import gc
import threading
from contextlib import nullcontext

import pytest
import torch

from lockstep.checkpoint import manifest_reader
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage
from lockstep.parallel.cudagraph.device import CudaDevice


class FakeGraph:
    def replay(self) -> None: ...


@pytest.fixture
def device(monkeypatch):
    """Return a CudaDevice that captures nothing."""
    for name, fake in {
        "current_stream": lambda _device: "own stream",
        "default_stream": lambda _device: "default stream",
        "graph_pool_handle": lambda: None,
        "CUDAGraph": FakeGraph,
        "graph": lambda *_args, **_options: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return CudaDevice(torch.device("cuda"))


def test_a_manifest_that_is_decoded_during_a_capture_does_not_switch_the_collector_on(device, monkeypatch, tmp_path):
    """The writing thread decodes its manifest; a capture begins before it ends, and lasts longer."""
    decoding, capturing = threading.Event(), threading.Event()

    def slow(_data, _checkpoint):
        decoding.set()
        assert capturing.wait(60)
        return "decoded"

    monkeypatch.setattr(manifest_reader, "_parse", slow)
    decode = threading.Thread(
        target=manifest_reader.decode_manifest, args=(b"", Checkpoint(CheckpointStorage(tmp_path), "step-00000001"))
    )
    decode.start()
    assert decoding.wait(60)

    seen = []

    def work():
        capturing.set()
        decode.join()
        seen.append(gc.isenabled())

    device.capture([work])
    assert seen == [False]
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(device):
    gc.disable()
    try:
        device.capture([])
        assert not gc.isenabled()
    finally:
        gc.enable()
