"""A compilation that takes too long is given up, wherever it is, and torch can compile again afterwards."""

from __future__ import annotations

import _thread
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
    with pytest.raises(TookTooLong), deadline(0.3, lambda _: None):
        raise in_thread_of_torch(lambda: compiled(endless)())[0]  # autograd raises it here, too


def in_thread_of_torch(work: Callable[[], Any], wait_s: float = ENDLESS_S) -> list[BaseException]:
    """Run `work` in a thread that `threading` has not started. Return what it has raised after at most `wait_s`."""
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        done.set()

    _thread.start_new_thread(run, ())
    done.wait(wait_s)
    return errors


def test_nothing_is_raised_in_a_thread_after_the_end() -> None:
    """It has left the compiler, and comes back to Python in a later backward."""
    # A function that looks like one of torch's compiler, and waits in C, where nothing can be raised.
    namespace: dict[str, Any] = {}
    exec(compile("def wait_for(lock): lock.acquire()", "/torch/_dynamo/example.py", "exec"), namespace)
    lock, seconds = threading.Lock(), []
    lock.acquire()
    with deadline(0.2, seconds.append):
        errors = in_thread_of_torch(lambda: namespace["wait_for"](lock), wait_s=1.0)

    lock.release()
    time.sleep(0.3)
    assert seconds[-1] >= 0.2
    assert errors == []


def slow_sin(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.05)
    return x.sin()


def test_a_thread_of_the_user_is_left_alone() -> None:
    """It may call what shares its files with the compiler: torch.func.vmap in a thread that loads data."""
    errors: list[BaseException] = []
    ends = threading.Event()

    def load() -> None:
        try:
            while not ends.is_set():
                torch.func.vmap(slow_sin)(torch.ones(3))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        with pytest.raises(TookTooLong), deadline(0.5, lambda _: None):
            compiled(endless)()
    finally:
        ends.set()
        thread.join()
    assert errors == []


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
