"""One rank of a weak or strong scaling benchmark: blocks of steps of a target, and one traced block."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.ranks.turns import opened, take
from lockstep.bench.ranks.workload import batch_of
from lockstep.engine.profile.tracer import StepTracer
from lockstep.engine.run import Run


def measure(arguments: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
    """Yield the facts of the run, then a turn for each command "turn", or a breakdown for "trace".

    `batch` is the batch of a rank if `mode` is "weak", and of all ranks if it is "strong".
    """
    with opened(arguments, _settings(arguments)) as rank:
        loop = rank.loop(arguments["block"])
        run = next(loop)  # the warm-up

        command = yield _facts(run, rank.task.unit)
        while True:
            if command == "trace":
                # The pool removes the folder of the team, even if this rank is killed.
                file = Path(arguments["folder"]) / f"trace-{rank.runtime.world.rank}.json"
                value = trace(run, loop, file)
            else:
                value = take(loop).as_dict()

            command = yield value


def measure_apart(arguments: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
    """Yield once, then a turn for each command, with the seconds of each step, of a rank that exchanges nothing."""
    with opened(arguments, _settings(arguments)) as rank:
        turns = _timed_steps(rank.loop(1), arguments["block"])
        next(turns)  # the warm-up
        yield {}

        while True:
            turn = take(turns)
            # A host runs ahead of its GPU, so that only the end of a turn is known there.
            on_gpu = rank.runtime.on_gpu
            yield {**turn.as_dict(), "step_seconds": [turn.seconds] if on_gpu else turn.value}


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the measurement itself needs."""
    # Weak scaling: every rank has as much to do as a single one. Strong scaling: the ranks share the work of one.
    batch_setting = "local_batch" if arguments["mode"] == "weak" else "global_batch"
    return {
        batch_setting: batch_of(arguments),
        "run_dir": str(Path(arguments["folder"]) / "run"),  # all ranks of a team share it
    }


def _timed_steps(loop: Iterator[Run], block: int) -> Iterator[list[float]]:
    """Stop a loop of single steps after every block of them, and yield how many seconds each step took."""
    while True:
        ends = [time.perf_counter()]
        for _ in range(block):
            next(loop)
            ends.append(time.perf_counter())

        yield [end - begin for begin, end in pairwise(ends)]


def trace(run: Run, loop: Iterator[Run], file: Path) -> dict[str, Any]:
    """Trace one block and return its breakdown."""
    # The traced steps are slower than others, so they are no turn.
    tracer = StepTracer(run)
    run.driver.parts.add(tracer)
    tracer.start()
    next(loop)
    run.driver.parts.remove(tracer)
    return tracer.stop(file).as_dict()


def _facts(run: Run, unit: str) -> dict[str, Any]:
    """Return the facts about the run for the report and for the projection."""
    # Frozen parameters have no gradients to exchange.
    parameters = [p for p in run.driver.model.parameters() if p.requires_grad]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if run.runtime.on_gpu else "cpu",
        "backend": run.runtime.backend,
        "strategy": run.config.strategy,
        "precision": run.precision.name,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "global_batch": run.plan.global_batch,
        "micro_batch": run.plan.micro_batch,
        "unit": unit,
    }
