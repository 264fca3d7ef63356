"""One rank of `bench step`: all loops live in this process and take turns."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.ranks.contenders import Workload, contenders, prepare_peers
from lockstep.bench.ranks.turns import in_turn, meet, opened, take_round, warm_up

SHORT = 60  # steps of a short run


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the loops, then a round of turns for "turn", or a round of whole short runs for "short"."""
    with opened(arguments, {}) as rank:
        prepare_peers(rank.runtime.world)
        workload = Workload(
            rank.task,
            rank.runtime,
            micro_batch=arguments["micro_batch"],
            accumulation=arguments["accumulation"],
            block=arguments["block"],
            folder=Path(arguments["folder"]),
        )

        # All loops are alive at once, each with a model of its own. Only the one whose turn it is does anything.
        loops = {name: make() for name, make in contenders(workload, arguments["peers"]).items()}
        warm_up(loops)

        command = yield {"loops": list(loops), "torch": torch.__version__, "device": workload.device.type}

        # Counted apart, since the number of a round decides who begins (`in_turn`).
        rounds = 0
        shorts = 0
        while True:
            if command == "short":
                shorts += 1
                value = _short_round(arguments, workload, shorts)
            else:
                rounds += 1
                value = {name: turn.as_dict() for name, turn in take_round(loops, rounds).items()}

            command = yield value


def _short_round(arguments: dict[str, Any], workload: Workload, number: int) -> dict[str, dict[str, float]]:
    """Time whole runs of SHORT steps, from building the model to the end, with the work of a framework there."""
    # A folder for each round: a run must not find the one before it.
    folder = workload.folder / f"short-{number}"
    folder.mkdir(exist_ok=True)
    short = replace(workload, block=SHORT, steps=SHORT, folder=folder)
    makers = contenders(short, arguments["peers"])

    found = {}
    for name in in_turn(makers, number):
        meet()
        wall = time.perf_counter()
        cpu = time.process_time()  # the time of all threads

        # Building happens at the first `next`.
        for _ in makers[name]():
            pass

        found[name] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}

    return found
