"""Loops that take turns in one process, so that noise hits them alike.

A loop is a generator that yields after every block of steps. Turns are compared one by one, and the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep import targets
from lockstep.bench.ranks.workload import load, settings_of
from lockstep.config import Resolved
from lockstep.engine.loop import Training
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.run import Run
from lockstep.engine.setup import open_run
from lockstep.runtime import context, environments
from lockstep.runtime.context import Runtime
from lockstep.task import Task

WARM_UP = 2  # turns, for imports, compiling and allocations
LOG_EVERY = 10  # steps, as by default: a log line costs one more all-reduce


@dataclass(frozen=True)
class Turn:
    """One block of steps on one rank."""

    seconds: float
    cpu_seconds: float  # the seconds of all threads of the process
    peak_bytes: int  # the peak on the GPU; 0 without one
    value: Any = None  # the value that the loop has yielded

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, for an answer to the pool."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "peak_bytes": self.peak_bytes}


@dataclass(frozen=True)
class Opened:
    """One rank of a benchmark that trains: its task, its settings and its runtime."""

    task: Task
    settings: Resolved
    runtime: Runtime

    def loop(self, block: int) -> Iterator[Run]:
        """Train, and stop after every block of steps."""
        return by_lockstep(self.task, self.settings, self.runtime, block)


@contextmanager
def opened(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Opened]:
    """Start this rank for the target of a benchmark; `values` are the settings that the benchmark itself needs."""
    kind = load(arguments["target"])

    # No more than one log line for each turn, unless something else was asked for.
    layers = [("bench", {"log.every": max(LOG_EVERY, arguments["block"])}), *arguments["layers"]]
    settings = settings_of(kind, layers, {"threads": arguments["threads"], **values})

    with context.start(environments.detect(), settings.config) as runtime:
        yield Opened(targets.make_task(kind, settings.config.task), settings, runtime)


def take(loop: Iterator[Any]) -> Turn:
    """Take one turn, from an idle GPU to an idle GPU, begun on all ranks together."""
    # A run on the CPU of a machine with a GPU has not initialised it.
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()

    meet()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    # A GPU works on after `next` has returned: its time counts as well.
    wall = time.perf_counter()
    cpu = time.process_time()
    value = next(loop)
    if gpu:
        torch.cuda.synchronize()

    return Turn(
        seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
        peak_bytes=torch.cuda.max_memory_allocated() if gpu else 0,
        value=value,
    )


def meet() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def warm_up(loops: Mapping[str, Iterator[Any]], turns: int = WARM_UP) -> None:
    """Take the first turns of every loop, which are not timed."""
    for loop in loops.values():
        for _ in range(turns):
            next(loop)


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """Return the names in the order of a round: who begins alternates, so that no loop always follows the same one."""
    order = list(names)
    return order[::-1] if number % 2 else order


def take_round(loops: Mapping[str, Iterator[Any]], number: int) -> dict[str, Turn]:
    """Take one turn of every loop."""
    return {name: take(loops[name]) for name in in_turn(loops, number)}


def by_lockstep(task: Task, resolved: Resolved, runtime: Runtime, block: int) -> Iterator[Run]:
    """The steps of `engine/loop.fit`, with the task's own hooks, stopped after every block."""
    # The run is opened only now, because that seeds what the model draws.
    training = Training(task, open_run(resolved, runtime, "bench", task.unit))
    run = training.run

    try:
        for _ in training.steps():
            if run.steps_done % block == 0:
                yield run
    finally:
        # Not as in engine/end.py: a benchmark needs neither a last checkpoint nor a report.
        run.source.close()
        run.checkpoints.close()
        run.recorder.close()
        run.folder.release_lock()


def by_own_loop(task: Task, resolved: Resolved, runtime: Runtime, block: int) -> Iterator[None]:
    """A custom loop (`lockstep.start`) with the task's model, loss and optimizer, stopped after every block."""
    # The run comes first: opening it seeds what the model draws.
    run = OwnRun(open_run(resolved, runtime, "bench", task.unit))
    plain = task.model()
    model, _ = run.setup(plain, task.optimizer(plain))

    for step in run.steps(task.data()):
        for batch in step:
            loss = task.loss(model, batch)

            # Sums, not means: `apply` divides once, by the weight of all micro-batches on all ranks.
            step.backward(loss.total, loss.weight)

        step.apply()

        if (step.index + 1) % block == 0:
            yield

    run.close()
