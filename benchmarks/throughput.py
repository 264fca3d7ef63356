"""Characters per second of `char_lm` on this machine's device, against a hand-written loop in the same process.

    python benchmarks/throughput.py                 # the gpu preset on CUDA, the cpu preset otherwise
    python benchmarks/throughput.py width=768 layers=12 heads=12 context=1024 --batch 32

The hand-written loop does what its author would be proud of: compiled model, bf16 autocast (on CUDA), fused AdamW,
clipping, pinned batches copied without blocking, and no host synchronisation between log lines. Turns of 20 steps
alternate; every turn ends with a synchronisation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor
from turns import LR_WARM_UP, by_hand, by_lockstep, losses, median_ratio, settings, take_turns

from lockstep.config import Resolved, resolve_for
from lockstep.precision import choose_precision
from lockstep.recipes.char_lm import CharLM
from lockstep.runtime import context
from lockstep.runtime.world import World

BLOCK, LR = 20, 1e-3


def batches(task: CharLM, size: int) -> Iterator[Tensor]:
    data = task.data()
    while True:
        order = torch.randperm(len(data)).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield torch.stack([*map(torch.as_tensor, data.__getitems__(order[start : start + size]))])


def resolved(task: CharLM, batch: int, run_dir: str) -> Resolved:
    rate = {"peak": LR, "warmup": LR_WARM_UP, "schedule": "constant"}
    values = settings(run_dir, BLOCK, global_batch=batch, tail="drop", lr=rate)
    return resolve_for(task.defaults, {"cpu": {}}, [("benchmark", values)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="name=number", help="options of char_lm, such as width=768")
    parser.add_argument("--batch", type=int, help="windows per step")
    parser.add_argument("--turns", type=int, default=12)
    arguments = parser.parse_args()

    on_cuda = torch.cuda.is_available()
    preset = CharLM.presets["gpu" if on_cuda else "cpu"]
    options = preset["task"] | {k: int(v) for k, v in (item.split("=") for item in arguments.options)}
    batch = arguments.batch or preset["global_batch"]
    task = CharLM(**options)
    config = resolve_for({}, {}, [("benchmark", {})]).config
    with context.start(World(), config) as runtime, tempfile.TemporaryDirectory() as folder:
        choose_precision(config, runtime.device).set_tf32()  # for the hand-written loop, too
        loops = {
            "hand-written": by_hand(task, batches(task, batch), runtime.device, BLOCK, LR),
            "lockstep": losses(by_lockstep(task, resolved(task, batch, folder), runtime, BLOCK)),
        }
        found = take_turns(loops, arguments.turns)
    characters = BLOCK * batch * task.context
    rates = {name: [characters / turn.seconds for turn in turns] for name, turns in found.items()}
    for name, each in rates.items():
        print(f"{name:14} {statistics.median(each):12,.0f} characters/s")
    ratio = median_ratio(rates["lockstep"], rates["hand-written"])
    print(f"ratio          {ratio:12.3f}   ({runtime.device}, batch {batch}, {options})")


if __name__ == "__main__":
    main()
