"""A compilation that takes too long is given up at the next look at the clock, and torch can compile again."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from lockstep.parallel.compiled import deadline
from lockstep.parallel.compiled.deadline import Deadline, TookTooLong

LIMIT_S = 0.2
ENDLESS_S = 60.0  # only a test that fails takes so long


class Clock:
    """Stands in for the module `time`: only what sleeps takes time, however busy the machine is."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


time = Clock()


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deadline, "time", time)
    torch._dynamo.reset()
    yield
    assert torch._dynamo.callback_handler.start_callbacks == []
    assert compiled_eagerly() == 2.0


def compiled_eagerly() -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(lambda: torch.ones(2).sum(), backend="eager")()


class SlowBackend:
    """Takes longer than the limit for each graph, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        time.sleep(1.5 * LIMIT_S)
        return graph


def three_graphs(x: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    x = x.cos()
    torch._dynamo.graph_break()
    return x.exp()


def test_it_is_given_up_at_the_next_graph() -> None:
    backend = SlowBackend()
    with pytest.raises(TookTooLong, match="it takes longer than 0 s to compile"), Deadline(LIMIT_S):
        torch.compile(three_graphs, backend=backend)(torch.ones(2))
    assert backend.graphs == 1


def test_the_last_graph_is_kept_however_long_it_took() -> None:
    backend = SlowBackend()
    with Deadline(LIMIT_S):
        found = torch.compile(torch.sin, backend=backend)(torch.ones(2))
    torch.testing.assert_close(found, torch.ones(2).sin())


def test_a_graph_that_took_long_to_trace_is_not_compiled() -> None:
    limit = Deadline(LIMIT_S)
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(1.5 * LIMIT_S)
        limit.check()
        compiled.append(graph)
        return graph

    with pytest.raises(TookTooLong), limit:
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert compiled == []


def compiled_twice(seconds: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of which forward and backward are compiled. They take so long, one after the other."""

    def compile_slowly(graph: Any, inputs: Any) -> Any:
        time.sleep(seconds.pop(0))
        return graph

    backend = aot_autograd(fw_compiler=compile_slowly, bw_compiler=compile_slowly)
    return torch.compile(lambda x: x.sin().sum(), backend=backend)


def test_a_backward_is_not_compiled_after_a_slow_forward() -> None:
    seconds = [1.5 * LIMIT_S, 0.0]
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TookTooLong), Deadline(LIMIT_S):
        compiled_twice(seconds)(x).backward()
    assert seconds == [0.0]
    assert x.grad is None


def test_a_backward_in_another_thread() -> None:
    """As on a GPU, where autograd's own thread compiles the backward."""
    seconds = [1.5 * LIMIT_S, 0.0]
    f = compiled_twice(seconds)
    with pytest.raises(TookTooLong), Deadline(LIMIT_S):
        in_thread_of_torch(f(torch.ones(2, requires_grad=True)).backward)
    assert seconds == [0.0]


def in_thread_of_torch(work: Callable[[], Any]) -> None:
    """Run `work` in a thread that `threading` has not started, and raise what it raises, as autograd does."""
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        done.set()

    _thread.start_new_thread(run, ())
    assert done.wait(ENDLESS_S)
    for error in errors:
        raise error


def test_an_exception_that_torch_drops_counts() -> None:
    """With this setting it runs what it cannot compile eagerly, so that only a part would be compiled."""
    results = []
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(TookTooLong), Deadline(LIMIT_S):
        results.append(torch.compile(three_graphs, backend=SlowBackend())(torch.ones(2)))
    torch.testing.assert_close(results[0], three_graphs(torch.ones(2)))


def test_a_thread_of_the_user_is_left_alone() -> None:
    """It compiles something for itself while the time of this thread is over."""
    results = []

    def work() -> None:
        results.append(torch.compile(three_graphs, backend="eager")(torch.ones(2)))

    with Deadline(0.0):
        time.sleep(0.01)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.testing.assert_close(results, [three_graphs(torch.ones(2))])


def test_outside_the_block_there_is_no_limit() -> None:
    with Deadline(0.0) as limit:
        time.sleep(0.01)
    limit.check()


def test_torch_forgets_the_check_when_it_is_reset() -> None:
    with Deadline(0.0):
        torch._dynamo.reset()
        time.sleep(0.01)
        assert torch.compile(torch.sin, backend="eager")(torch.zeros(())) == 0.0


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_other_errors_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), Deadline(ENDLESS_S):
        raise error


def test_an_interrupt_by_the_user_passes_after_the_limit() -> None:
    def interrupted() -> None:
        time.sleep(0.01)
        with pytest.raises(Exception, match="takes longer"):
            torch.compile(three_graphs, backend="eager")(torch.ones(2))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Deadline(0.0):
        interrupted()
