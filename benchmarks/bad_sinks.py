"""What a sink costs that raises, blocks for a minute, or writes to a full disk: steps with and without it, in turns.

    python benchmarks/bad_sinks.py --turns 40

Each way is a run of its own in this process, and writes a log line in every step. A ratio of 1 means that training does
not notice the sink.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.bench.intervals import ratio
from lockstep.bench.ranks.turns import Turn, by_lockstep, take
from lockstep.bench.ranks.workload import MLPTask
from lockstep.config import resolve_for
from lockstep.observe.sinks import SINKS
from lockstep.runtime import context
from lockstep.runtime.world import World

BLOCK = 25  # steps of a turn
WARM_UP = 3  # turns


class Raises:
    def __init__(self, run_dir: Path):
        pass

    def write(self, record: Any) -> None:
        raise ConnectionError("nobody answers")

    def close(self) -> None:
        pass


class Blocks(Raises):
    def write(self, record: Any) -> None:
        time.sleep(60)


class FullDisk(Raises):
    def write(self, record: Any) -> None:
        with Path("/dev/full").open("w") as file:
            file.write(str(record))


WAYS: dict[str, list[str]] = {"no sink": [], "raises": ["raises"], "blocks": ["blocks"], "full disk": ["full"]}


def opened(folder: Path, sinks: list[str], runtime: Any) -> Iterator[Any]:
    task = MLPTask(samples=4096)
    values = {
        "run_dir": str(folder),
        "steps": 10**6,
        "global_batch": 64,
        "log": {"progress": "off", "every": 1, "sinks": sinks},
        "checkpoint": {"every": None, "minutes": None},
        "threads": 1,
    }
    settings = resolve_for(task.defaults, task.presets, [("benchmark", values)]).without_options()
    return by_lockstep(task, settings, runtime, BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args().turns
    SINKS.update(raises=Raises, blocks=Blocks, full=FullDisk)

    config = resolve_for({}, {}, [("benchmark", {"threads": 1})]).config
    with context.start(World(), config) as runtime, tempfile.TemporaryDirectory() as folder:
        loops = {way: opened(Path(folder) / way, sinks, runtime) for way, sinks in WAYS.items()}
        taken: dict[str, list[Turn]] = {way: [] for way in WAYS}
        for turn in range(WARM_UP + turns):
            for way, loop in loops.items():
                found = take(loop)
                if turn >= WARM_UP:
                    taken[way].append(found)

        # On a busy machine the CPU time, of all threads of the process, says more than the clock.
        for what in ("seconds", "cpu_seconds"):
            without = [getattr(turn, what) for turn in taken["no sink"]]
            for way in list(WAYS)[1:]:
                found = ratio([getattr(turn, what) for turn in taken[way]], without)
                print(f"{way:<10} {what:<12} {found.median:.4f} ({found.low:.4f} to {found.high:.4f})")


if __name__ == "__main__":
    main()
