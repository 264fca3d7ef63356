"""While a model is compiled, how long it has taken so far is reported now and then."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.parallel.compiled import deadline
from lockstep.parallel.compiled.deadline import reported

ENDLESS_S = 60.0  # only a test that fails takes so long


def test_progress_is_reported_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "PROGRESS_S", 0.01)
    seconds: list[float] = []
    twice = threading.Event()

    def progress(passed_s: float) -> None:
        seconds.append(passed_s)
        if len(seconds) == 2:
            twice.set()

    def work() -> None:
        assert twice.wait(ENDLESS_S)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), reported(progress):
        work()

    reports = len(seconds)
    time.sleep(0.1)
    assert len(seconds) == reports
    assert sorted(seconds) == seconds
    assert seconds[0] >= 0.01
