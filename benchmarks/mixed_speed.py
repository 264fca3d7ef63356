"""What `speed_weights=auto` brings where one of two ranks is slower.

    python benchmarks/mixed_speed.py                    # half as fast
    python benchmarks/mixed_speed.py --slower 4         # a quarter as fast

A micro-batch takes `--seconds` of the first rank and `--slower` times as long of the second, by sleeping: on a machine
with few cores real work would slow both. Two runs, with and without, live in the same processes and take turns of 10
steps, so noise hits them alike. `ideal` is the ratio for ranks that do nothing but sleep, as 12 micro-batches can be
dealt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Task
from lockstep.config import resolve
from lockstep.data.shard import apportion
from lockstep.engine.run import Run
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime import context
from lockstep.runtime.world import World

BLOCK = 10  # steps in a turn
MICRO_BATCHES = 12


class Mixed(Task):
    def __init__(self, seconds: float):
        self.seconds = seconds

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(4800, 64, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> Loss:
        time.sleep(self.seconds)
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


def turns(speed_weights: str, task: Mixed, runtime: context.Runtime, folder: Path) -> Iterator[None]:
    """`engine/loop.fit`, stopped after every block to let the other run go on."""
    values = {
        "steps": 10**6,
        "global_batch": 4 * MICRO_BATCHES,
        "micro_batch": 4,
        "speed_weights": speed_weights,
        "log": {"every": BLOCK, "progress": "off"},
        "run_dir": str(folder / speed_weights),
    }
    run = Run(resolve([("argument", values)]), runtime, "bench")
    run.adopt(task.model(), task.optimizer)
    run.open(task.data(), task.collate)
    for share in run.shares():
        run.finish(share, run.stepper.step(share, task.loss))
        run.keep()
        if run.stepper.counters.step % BLOCK == 0:
            yield


def worker(seconds: float, slower: float, repeats: int, out: Path) -> None:
    with context.start(World.from_env(), resolve([]).config) as runtime:
        task = Mixed(seconds * (slower if runtime.world.rank else 1.0))
        runs = [turns(word, task, runtime, out.parent / "runs") for word in ("none", "auto")]
        for run in runs:  # warm-up, and the measurement
            next(run)
        times: list[list[float]] = [[], []]
        for turn in range(repeats):
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                began = time.perf_counter()
                next(runs[index])
                times[index].append((time.perf_counter() - began) / BLOCK)
        if runtime.is_main:
            out.write_text(json.dumps(times))
        runtime.collectives.farewell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=2.0, help="how many times as long the second rank takes")
    parser.add_argument("--seconds", type=float, default=0.05, help="what a micro-batch takes of the first rank")
    parser.add_argument("--repeats", type=int, default=4, help="turns of 10 steps for each run")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.seconds, options.slower, options.repeats, options.worker)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        same = [f"--{name}={getattr(options, name)}" for name in ("seconds", "slower", "repeats")]
        command = [*torchrun, __file__, "--worker", str(out), *same]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        even, auto = json.loads(out.read_text())
        events = read_jsonl(Path(folder) / "runs" / "auto" / "events.jsonl")
    for event in (event for event in events if event["event"] == "deal"):
        print(event["reason"])
    dealt = apportion(MICRO_BATCHES, (1.0, 1.0 / options.slower))
    ideal = max(dealt[0], dealt[1] * options.slower) / (MICRO_BATCHES / 2 * options.slower)
    ratio = statistics.median(b / a for a, b in zip(even, auto, strict=True))
    print(f"even {1000 * statistics.median(even):.1f} ms/step, auto {1000 * statistics.median(auto):.1f} ms/step")
    print(f"ratio {ratio:.3f} (median of {options.repeats} turns), ideal {ideal:.3f} with {dealt[0]} + {dealt[1]}")


if __name__ == "__main__":
    main()
