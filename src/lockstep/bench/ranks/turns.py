"""Loops that take turns in one process, so that noise hits them alike.

A loop is a generator that yields after every block of steps. Turns are compared one by one, and the median counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import Resolved
from lockstep.engine.loop import Training
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.run import Run
from lockstep.engine.setup import open_run
from lockstep.runtime.context import Runtime
from lockstep.task import Task


@dataclass(frozen=True)
class Turn:
    """One block of steps on one rank."""

    seconds: float
    cpu_seconds: float  # of all threads of the process
    peak_bytes: int  # of the GPU; 0 without one
    value: Any = None  # what the loop has yielded

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers, for an answer to the pool."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "peak_bytes": self.peak_bytes}


def take(loop: Iterator[Any]) -> Turn:
    """Take one turn, from an idle GPU to an idle GPU, begun on all ranks together."""
    gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    if dist.is_initialized():
        dist.barrier()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    value = next(loop)
    if gpu:
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return Turn(seconds, cpu_seconds, torch.cuda.max_memory_allocated() if gpu else 0, value)


def take_round(loops: Mapping[str, Iterator[Any]], number: int) -> dict[str, dict[str, Any]]:
    """Take one turn of every loop. The order of the loops alternates from round to round."""
    names = list(loops)[:: -1 if number % 2 else 1]
    return {name: take(loops[name]).as_dict() for name in names}


def by_lockstep(task: Task, resolved: Resolved, runtime: Runtime, block: int) -> Iterator[Run]:
    """The steps of `engine/loop.fit`, with the task's own hooks, stopped after every block."""
    builder = open_run(resolved, runtime, "bench", task.unit)  # only now: it seeds what the model draws
    training = Training(task, builder)
    run = training.run
    try:
        for batches in run.step_batches():
            training.step(batches)
            if run.stepper.counters.steps_done % block == 0:
                yield run
    finally:
        run.close_source()
        run.checkpoints.close()
        run.recorder.close()
        run.folder.release_lock()


def by_own_loop(task: Task, resolved: Resolved, runtime: Runtime, block: int) -> Iterator[None]:
    """A custom loop (`lockstep.start`) with the task's model, loss and optimizer, stopped after every block."""
    run = OwnRun(open_run(resolved, runtime, "bench", task.unit))
    plain = task.model()
    model, _ = run.setup(plain, task.optimizer(plain))
    for step in run.steps(task.data()):
        for batch in step:
            loss = task.loss(model, batch)
            step.backward(loss.total, loss.weight)
        step.apply()
        if (step.index + 1) % block == 0:
            yield
    run.close()
