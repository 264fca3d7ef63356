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
import time
from collections.abc import Iterator

import torch
from torch import nn

from lockstep.config import resolve_for
from lockstep.engine.run import Run
from lockstep.recipes.char_lm import CharLM
from lockstep.runtime import context
from lockstep.runtime.world import World

BLOCK = 20
MANY = 10**6


def raw_loop(task: CharLM, batch: int, device: torch.device, on_cuda: bool) -> Iterator[float]:
    torch.manual_seed(0)
    model = task.model().to(device)
    if on_cuda:
        model.compile()
    optimizer = task.optimizer(model)
    data, step = task.data(), 0
    while True:
        order = torch.randperm(len(data)).tolist()
        for start in range(0, len(order) - batch + 1, batch):
            ids = torch.stack([*map(torch.as_tensor, data.__getitems__(order[start : start + batch]))])
            if on_cuda:
                ids = ids.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda):
                loss = task.loss(model, ids)
                mean = loss.total / loss.weight
            mean.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 101)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % BLOCK == 0:
                yield mean.item()


def lockstep_loop(task: CharLM, batch: int, runtime: context.Runtime, run_dir: str) -> Iterator[float]:
    values = {
        "steps": MANY,
        "global_batch": batch,
        "tail": "drop",
        "lr": {"peak": 1e-3, "warmup": 100, "schedule": "constant"},
        "log": {"every": BLOCK, "progress": "off"},
        "run_dir": run_dir,
    }
    run = Run(resolve_for(task.defaults, {"cpu": {}}, [("benchmark", values)]), runtime, "bench", task.unit)
    run.adopt(task.model(), task.optimizer)
    run.open(task.data(), task.collate)
    for share in run.shares():
        result = run.stepper.step(share, task.loss)
        run.finish(share, result)
        if run.stepper.counters.step % BLOCK == 0:
            run.recorder.poll(wait=True)
            yield run.recorder.last["loss"]


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
        loops = {
            "hand-written": raw_loop(task, batch, runtime.device, on_cuda),
            "lockstep": lockstep_loop(task, batch, runtime, folder),
        }
        rates: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(-2, arguments.turns):  # two turns to compile and warm up
            for name in list(loops)[:: 1 if turn % 2 else -1]:
                began = time.perf_counter()
                next(loops[name])
                if on_cuda:
                    torch.cuda.synchronize()
                if turn >= 0:
                    rates[name].append(BLOCK * batch * task.context / (time.perf_counter() - began))
    for name, found in rates.items():
        print(f"{name:14} {statistics.median(found):12,.0f} characters/s")
    pairs = zip(rates["lockstep"], rates["hand-written"], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"ratio          {ratio:12.3f}   ({runtime.device}, batch {batch}, {options})")


if __name__ == "__main__":
    main()
