"""Device time without a device: events of a pretended stream, which finish when the test says so."""

import pytest

from lockstep.runtime import device_heartbeat
from lockstep.runtime.device_heartbeat import DeviceHeartbeat
from lockstep.runtime.heartbeat import read


class Stream:
    """A device that has `clock` milliseconds of work handed out, and has `done` that many of them."""

    def __init__(self):
        self.clock = self.done = 0.0
        self.made = 0

    def event(self):
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream, self.moment = stream, None

    def record(self):
        self.moment = self.stream.clock

    def query(self):
        assert self.moment is not None
        return self.moment <= self.stream.done

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "reading an event that has not happened would wait for the device"
        return end.moment - self.moment


def step(heartbeat, stream, number, work):
    for phase, milliseconds in work.items():
        heartbeat.beat(phase, number)
        stream.clock += milliseconds


WORK = {"data": 0.0, "compute": 30.0, "all-reduce": 50.0, "update": 10.0}


def test_phases_take_as_long_as_the_device_took():
    stream = Stream()
    heartbeat = DeviceHeartbeat(event=stream.event)
    for number in range(10):
        step(heartbeat, stream, number, WORK)
        stream.done = stream.clock
    heartbeat.beat("evaluate")
    heartbeat.beat("evaluate")  # a stay is read at the beat after its end
    for phase, milliseconds in WORK.items():
        assert heartbeat.spent[phase] == pytest.approx(10 * milliseconds / 1000)


def test_a_host_that_runs_ahead_reads_later_and_loses_nothing():
    stream = Stream()
    heartbeat = DeviceHeartbeat(event=stream.event)
    for number in range(6):
        step(heartbeat, stream, number, WORK)
    assert heartbeat.spent["compute"] == 0.0
    stream.done = 100.0  # one step and a part
    heartbeat.beat("evaluate")
    assert heartbeat.spent["all-reduce"] == pytest.approx(0.05)
    assert heartbeat.spent["update"] == pytest.approx(0.01)
    stream.done = stream.clock
    heartbeat.beat("data")
    assert heartbeat.spent["all-reduce"] == pytest.approx(0.3)


def test_micro_batches_add_up():
    stream = Stream()
    heartbeat = DeviceHeartbeat(event=stream.event)
    for phase in ("data", "compute", "data", "compute", "all-reduce", "update", "end"):
        heartbeat.beat(phase, 1)
        stream.clock += 10.0
    stream.done = stream.clock
    heartbeat.beat("end")
    assert [heartbeat.spent[phase] for phase in ("data", "compute", "all-reduce")] == pytest.approx([0.02, 0.02, 0.01])


def test_events_are_used_again():
    stream = Stream()
    heartbeat = DeviceHeartbeat(event=stream.event)
    for number in range(200):
        step(heartbeat, stream, number, WORK)
        if number % 7 == 0:
            heartbeat.beat("evaluate")
        stream.done = stream.clock - 100.0  # about a step behind
    assert stream.made < 20
    assert heartbeat.spent["compute"] == pytest.approx(0.03 * 200, rel=0.02)


def test_a_device_that_hangs_does_not_fill_the_memory():
    stream = Stream()
    heartbeat = DeviceHeartbeat(event=stream.event)
    for number in range(1000):
        step(heartbeat, stream, number, WORK)
    assert stream.made <= device_heartbeat.MAX_UNREAD + 2


def test_other_phases_and_signs_of_life_stay_with_the_host(tmp_path):
    stream = Stream()
    heartbeat = DeviceHeartbeat(tmp_path / "heartbeat-0", event=stream.event)
    heartbeat.beat("evaluate")
    heartbeat.beat("data", 3)
    assert heartbeat.spent["evaluate"] > 0.0
    seen = read(tmp_path / "heartbeat-0")
    assert (seen.step, seen.phase) == (3, "data")
