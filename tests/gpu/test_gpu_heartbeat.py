"""Phases are timed on the device, and nothing waits for it."""

import time

import pytest
import torch

from lockstep.runtime.device_heartbeat import DeviceHeartbeat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")


def busy(milliseconds, cycles_per_ms):
    torch.cuda._sleep(int(milliseconds * cycles_per_ms))


@pytest.fixture(scope="module")
def cycles_per_ms():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    return 100_000_000 / begin.elapsed_time(end)


def test_phases_take_as_long_as_on_the_device(cycles_per_ms):
    heartbeat = DeviceHeartbeat()
    begin = time.monotonic()
    for step in range(5):
        for phase, milliseconds in (("data", 0), ("compute", 30), ("all-reduce", 60), ("update", 10)):
            heartbeat.beat(phase, step)
            busy(milliseconds, cycles_per_ms)
    handed_out = time.monotonic() - begin
    heartbeat.beat("evaluate")
    torch.cuda.synchronize()
    heartbeat.beat("data")
    assert handed_out < 0.4  # of the 0.5 s that the device needs: the host ran ahead
    assert heartbeat.spent["compute"] == pytest.approx(0.15, rel=0.2)
    assert heartbeat.spent["all-reduce"] == pytest.approx(0.30, rel=0.2)
    assert heartbeat.spent["update"] == pytest.approx(0.05, rel=0.2)
    assert heartbeat.spent["data"] < 0.02


def test_a_beat_never_synchronises(cycles_per_ms):
    heartbeat = DeviceHeartbeat()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            for phase in ("data", "compute", "all-reduce", "update", "collective"):
                heartbeat.beat(phase, step)
                busy(1, cycles_per_ms)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_device_that_waits_for_its_batch_shows_it():
    torch.cuda.synchronize()  # nothing of the tests before is left to do
    heartbeat = DeviceHeartbeat()
    for step in range(3):
        heartbeat.beat("data", step)
        time.sleep(0.05)
        heartbeat.beat("compute", step)
        heartbeat.beat("update", step)
    heartbeat.beat("evaluate")
    torch.cuda.synchronize()
    heartbeat.beat("data")
    assert heartbeat.spent["data"] == pytest.approx(0.15, rel=0.2)
