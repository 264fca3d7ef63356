"""One rank of a weak or strong scaling benchmark: blocks of steps of a target, and one traced block."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.ranks.turns import opened, take
from lockstep.bench.ranks.workload import batch_of
from lockstep.engine.profile.steps import start_tracer, stop_tracer
from lockstep.engine.run import Run


def measure(arguments: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
    """Yield the facts of the run, then a turn for each command "turn", or a breakdown for "trace".

    `batch` is the batch of a rank if `mode` is "weak", and of all ranks if it is "strong".
    """
    # Weak scaling: every rank has as much to do as a single one. Strong scaling: the ranks share the work of one.
    batch_setting = "local_batch" if arguments["mode"] == "weak" else "global_batch"
    values = {
        batch_setting: batch_of(arguments),
        "run_dir": str(Path(arguments["folder"]) / "run"),  # all ranks of a team share it
    }
    with opened(arguments, values) as rank:
        loop = rank.loop(arguments["block"])
        run = next(loop)  # the warm-up

        command = yield _facts(run, rank.task.unit)
        while True:
            if command == "trace":
                # In the folder of the team, which its pool removes: a rank may be killed.
                file = Path(arguments["folder"]) / f"trace-{rank.runtime.world.rank}.json"
                value = trace(run, loop, file)
            else:
                value = take(loop).as_dict()

            command = yield value


def trace(run: Run, loop: Iterator[Run], file: Path) -> dict[str, Any]:
    """Trace one block and return its breakdown."""
    # The traced steps are slower than others, so they are no turn.
    start_tracer(run)
    next(loop)
    return stop_tracer(run, file)


def _facts(run: Run, unit: str) -> dict[str, Any]:
    """Return what the report says about the run, and what the projection computes with."""
    # Frozen parameters have no gradients to exchange.
    parameters = [p for p in run.driver.model.parameters() if p.requires_grad]
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if run.runtime.device.type == "cuda" else "cpu",
        "backend": run.runtime.backend,
        "strategy": run.config.strategy,
        "precision": run.stepper.context.precision.name,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "global_batch": run.plan.global_batch,
        "micro_batch": run.plan.micro_batch,
        "unit": unit,
    }
