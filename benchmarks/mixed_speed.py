"""What `load_balance=auto` brings where one of two ranks is slower.

    python benchmarks/mixed_speed.py                    # half as fast
    python benchmarks/mixed_speed.py --slower 4         # a quarter as fast

A micro-batch takes `--seconds` of the first rank and `--slower` times as long of the second, by sleeping: on a machine
with few cores real work would slow both. Two runs, with and without, live in the same processes and take turns of 10
steps, so noise hits them alike. `ideal` is the ratio for ranks that do nothing but sleep, as 12 micro-batches can be
assigned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainings import on_ranks
from turns import by_lockstep, median_ratio, settings, take_turns

from lockstep import Loss, Task
from lockstep.config import Resolved, resolve
from lockstep.data.windows import rank_counts
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


def resolved(load_balance: str, folder: Path) -> Resolved:
    values = settings(
        folder / load_balance, BLOCK, global_batch=4 * MICRO_BATCHES, micro_batch=4, load_balance=load_balance
    )
    return resolve([("argument", values)])


def worker(seconds: float, slower: float, repeats: int, out: Path) -> None:
    with context.start(World.from_env(), resolve([]).config) as runtime:
        task = Mixed(seconds * (slower if runtime.world.rank else 1.0))
        asked = {word: resolved(word, out.parent / "runs") for word in ("none", "auto")}
        loops = {word: by_lockstep(task, values, runtime, BLOCK) for word, values in asked.items()}
        taken = take_turns(loops, repeats, warm_up=1)  # and the speeds are measured
        times = [[turn.seconds / BLOCK for turn in turns] for turns in taken.values()]
        if runtime.is_main:
            out.write_text(json.dumps(times))
        runtime.collectives.final_barrier()


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
        same = [f"--{name}={getattr(options, name)}" for name in ("seconds", "slower", "repeats")]
        on_ranks(2, __file__, "--worker", str(out), *same)
        even, auto = json.loads(out.read_text())
        events = read_jsonl(Path(folder) / "runs" / "auto" / "events.jsonl")
    for event in (event for event in events if event["event"] == "balance"):
        print(event["reason"])
    assigned = rank_counts(MICRO_BATCHES, (1.0, 1.0 / options.slower))
    ideal = max(assigned[0], assigned[1] * options.slower) / (MICRO_BATCHES / 2 * options.slower)
    ratio = median_ratio(auto, even)
    print(f"even {1000 * statistics.median(even):.1f} ms/step, auto {1000 * statistics.median(auto):.1f} ms/step")
    print(
        f"ratio {ratio:.3f} (median of {options.repeats} turns), ideal {ideal:.3f} with {assigned[0]} + {assigned[1]}"
    )


if __name__ == "__main__":
    main()
