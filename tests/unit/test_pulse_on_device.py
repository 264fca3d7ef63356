"""Device time without a device: events of a pretended stream, which finish when the test says so."""

import pytest

from lockstep.pulse import read
from lockstep.runtime import device_pulse
from lockstep.runtime.device_pulse import DevicePulse


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


def step(pulse, stream, number, work):
    for phase, milliseconds in work.items():
        pulse.beat(phase, number)
        stream.clock += milliseconds


WORK = {"data": 0.0, "compute": 30.0, "exchange": 50.0, "update": 10.0}


def test_phases_take_as_long_as_the_device_took():
    stream = Stream()
    pulse = DevicePulse(event=stream.event)
    for number in range(10):
        step(pulse, stream, number, WORK)
        stream.done = stream.clock
    pulse.beat("evaluate")
    pulse.beat("evaluate")  # a stay is read at the beat after its end
    for phase, milliseconds in WORK.items():
        assert pulse.spent[phase] == pytest.approx(10 * milliseconds / 1000)


def test_a_host_that_runs_ahead_reads_later_and_loses_nothing():
    stream = Stream()
    pulse = DevicePulse(event=stream.event)
    for number in range(6):
        step(pulse, stream, number, WORK)
    assert pulse.spent["compute"] == 0.0
    stream.done = 100.0  # one step and a part
    pulse.beat("evaluate")
    assert pulse.spent["exchange"] == pytest.approx(0.05)
    assert pulse.spent["update"] == pytest.approx(0.01)
    stream.done = stream.clock
    pulse.beat("data")
    assert pulse.spent["exchange"] == pytest.approx(0.3)


def test_micro_batches_add_up():
    stream = Stream()
    pulse = DevicePulse(event=stream.event)
    for phase in ("data", "compute", "data", "compute", "exchange", "update", "end"):
        pulse.beat(phase, 1)
        stream.clock += 10.0
    stream.done = stream.clock
    pulse.beat("end")
    assert [pulse.spent[phase] for phase in ("data", "compute", "exchange")] == pytest.approx([0.02, 0.02, 0.01])


def test_events_are_used_again():
    stream = Stream()
    pulse = DevicePulse(event=stream.event)
    for number in range(200):
        step(pulse, stream, number, WORK)
        if number % 7 == 0:
            pulse.beat("evaluate")
        stream.done = stream.clock - 100.0  # about a step behind
    assert stream.made < 20
    assert pulse.spent["compute"] == pytest.approx(0.03 * 200, rel=0.02)


def test_a_device_that_hangs_does_not_fill_the_memory():
    stream = Stream()
    pulse = DevicePulse(event=stream.event)
    for number in range(1000):
        step(pulse, stream, number, WORK)
    assert stream.made <= device_pulse.MOST + 2


def test_other_phases_and_signs_of_life_stay_with_the_host(tmp_path):
    stream = Stream()
    pulse = DevicePulse(tmp_path / "pulse-0", event=stream.event)
    pulse.beat("evaluate")
    pulse.beat("data", 3)
    assert pulse.spent["evaluate"] > 0.0
    seen = read(tmp_path / "pulse-0")
    assert (seen.step, seen.phase) == (3, "data")
