"""A compilation that takes too long is given up, wherever it is, and torch can compile again afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from lockstep.parallel.compiled.deadline import TookTooLong, deadline

ENDLESS_S = 60.0  # only a test that fails takes so long


def endless(graph: Any, inputs: Any) -> Any:
    """A compiler that goes on after every Exception."""
    ends = time.monotonic() + ENDLESS_S
    while time.monotonic() < ends:
        with suppress(Exception):
            time.sleep(0.01)
    return graph


def compiled(backend: Any) -> Callable[[], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda: torch.ones(2).sum(), backend=backend)


def test_an_endless_compilation_is_given_up() -> None:
    seconds: list[float] = []
    with pytest.raises(TookTooLong, match="longer than 0 s"), deadline(0.3, seconds.append):
        compiled(endless)()
    assert seconds[0] >= 0.3
    assert compiled("eager")() == 2.0


def test_in_the_thread_that_compiles() -> None:
    """As on a GPU, where autograd's own thread compiles the backward."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            compiled(endless)()
        except BaseException as error:
            errors.append(error)

    def wait_for_it() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise errors[0]  # autograd raises it here, too

    with pytest.raises(TookTooLong), deadline(0.3, lambda _: None):
        wait_for_it()


def test_what_ends_in_time_is_left_alone() -> None:
    with deadline(ENDLESS_S, lambda _: None):
        assert compiled("eager")() == 2.0
    watches = [thread for thread in threading.enumerate() if thread.name == "compile deadline"]
    for watch in watches:
        watch.join(ENDLESS_S)
        assert not watch.is_alive()


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), deadline(10.0, lambda _: None):
        raise ZeroDivisionError
