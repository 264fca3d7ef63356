"""Micro-batches on their way from the source to the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.engine.run import Run
from lockstep.errors import UserError


def test_a_source_that_gives_another_number_of_micro_batches_than_it_announced_is_named() -> None:
    run: Any = SimpleNamespace(
        runtime=SimpleNamespace(heartbeat=SimpleNamespace(beat=lambda *_: None), notice=SimpleNamespace()),
        stepper=SimpleNamespace(counters=SimpleNamespace(steps_done=0)),
        recorder=SimpleNamespace(data_wait_s=0.0, micro_batches=0),
        load_balancer=None,
    )
    batches: Any = ["first", "second"]
    assert list(Run._feed(run, batches, 2)) == batches
    with pytest.raises(UserError, match="announced 3 micro-batches and gave 2"):
        list(Run._feed(run, batches, 3))
    with pytest.raises(UserError, match="announced 1 micro-batch and gave more"):
        list(Run._feed(run, batches, 1))
