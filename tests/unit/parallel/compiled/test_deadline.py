"""A compilation that takes too long is given up, wherever it is, and torch can compile again afterwards."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from lockstep.parallel.compiled.deadline import TookTooLong, _is_safe, deadline

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


def as_code_of(file: str, work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function of a file that calls `work`."""
    namespace: dict[str, Any] = {"work": work}
    exec(compile("def call_work(): work()", file, "exec"), namespace)
    return namespace["call_work"]


def test_nothing_is_raised_in_a_thread_after_the_end() -> None:
    """It is in C when the time is over, and comes back to Python later: in the next backward, say."""
    lock, seconds = threading.Lock(), []
    lock.acquire()

    def wait() -> None:
        lock.acquire()

    with deadline(0.2, seconds.append):
        errors = in_thread_of_torch(as_code_of("/torch/_dynamo/example.py", wait), wait_s=1.0)

    lock.release()
    time.sleep(0.3)
    assert seconds[-1] >= 0.2
    assert errors == []


@pytest.mark.parametrize(
    ("file", "name", "safe"),
    [
        ("/other/backend.py", "compile_it", True),
        ("/torch/_library/simple_registry.py", "find_torch_dispatch_rule", False),
        ("/torch/_dynamo/utils.py", "run_node", False),  # it calls C: what Python comes next is not known
        ("/lib/python/contextlib.py", "close", False),
        ("/other/backend.py", "__exit__", False),
    ],
)
def test_where_an_exception_harms_nothing(file: str, name: str, safe: bool) -> None:
    namespace: dict[str, Any] = {"frame": sys._getframe}
    exec(compile(f"def {name}(): return frame()", file, "exec"), namespace)
    assert _is_safe(namespace[name]()) is safe


# Compiles again and again, each time with another limit, and then without one.
MANY = """
import random
import torch
from lockstep.parallel.compiled.deadline import TookTooLong, deadline

random.seed(0)
given_up = 0
for number in range(80):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    compiled = torch.compile(lambda x: model(x).sin().sum(), backend="aot_eager")
    try:
        with deadline(random.uniform(0.001, 0.2), lambda _: None):
            compiled(torch.ones(2, 4)).backward()
    except TookTooLong:
        given_up += 1
assert given_up > 10, given_up
assert not torch.is_anomaly_enabled() and not torch._C._len_torch_dispatch_stack()
torch._dynamo.reset()
torch.testing.assert_close(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)).sin().sum())
"""


@pytest.mark.long
def test_torch_survives_interruptions_wherever_they_arrive() -> None:
    """In C++ that cannot pass an exception on, one of about fifteen ended the process."""
    found = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


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
