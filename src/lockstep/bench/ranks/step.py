"""One rank of `bench step`: all loops live in this process and take turns."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep import targets
from lockstep.bench.ranks.contenders import Case, contenders, prepare_peers
from lockstep.bench.ranks.turns import take_round
from lockstep.bench.ranks.workload import load, settings_of
from lockstep.runtime import context
from lockstep.runtime.world import World

WARM_UP = 2  # blocks, for imports and allocations
SHORT = 60  # steps of a short run


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the loops, then a round of turns for "turn", or a round of whole short runs for "short"."""
    kind = load(arguments["target"])
    folder = Path(arguments["folder"])
    resolved = settings_of(kind, arguments["layers"], {"threads": arguments["threads"]})
    with context.start(World.from_env(), resolved.config) as runtime:
        prepare_peers(runtime.world)
        task = targets.make_task(kind, resolved.config.task)
        case = Case(task, runtime, arguments["micro_batch"], arguments["accumulation"], arguments["block"], folder)
        makers = contenders(case, arguments["peers"])
        loops = {name: make() for name, make in makers.items()}
        for loop in loops.values():
            for _ in range(WARM_UP):
                next(loop)
        command = yield {"loops": list(loops), "torch": torch.__version__, "device": case.device.type}
        rounds = shorts = 0
        while True:
            if command == "short":
                shorts += 1
                value = _short_round(arguments, case, shorts)
            else:
                rounds += 1
                value = take_round(loops, rounds)
            command = yield value


def _short_round(arguments: dict[str, Any], case: Case, number: int) -> dict[str, dict[str, float]]:
    """Time whole runs of SHORT steps, from building the model to the end: with what a framework does there."""
    found = {}
    folder = case.folder / f"short-{number}"
    folder.mkdir(exist_ok=True)
    short = replace(case, block=SHORT, steps=SHORT, folder=folder)
    makers = contenders(short, arguments["peers"])
    for name in list(makers)[:: -1 if number % 2 else 1]:
        if dist.is_initialized():
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in makers[name]():
            pass
        found[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return found
