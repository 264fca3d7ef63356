"""How long from the command to the first finished step: Lockstep against torchrun with a hand-written script.

python benchmarks/start_up.py [--ranks 2] [--repeats 10]

The same model, data and optimizer; both write down when their first step is done. They take turns, so that noise hits
them alike, and the ratio of each pair counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = """
import os, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
dataset = TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))

def done(rank):
    if rank == 0:
        Path(os.environ["FIRST_STEP"]).write_text(repr(time.time()))
"""

BY_HAND = (
    MODEL
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
for x, y in DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset)):
    F.cross_entropy(ddp(x), y).backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    done(dist.get_rank())
    break
dist.barrier()
dist.destroy_process_group()
"""
)

WITH_LOCKSTEP = (
    MODEL
    + """
import lockstep

with lockstep.start(steps=1, global_batch=64, micro_batch=32, clip={"norm": 1.0}) as run:
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    for step in run.steps(dataset):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.apply()
        done(run.rank)
"""
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()

    scripts = Path(sys.executable).parent
    ranks = str(options.ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "by_hand.py").write_text(BY_HAND)
        (folder / "with_lockstep.py").write_text(WITH_LOCKSTEP)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
        commands = {
            "torchrun": [*torchrun, "by_hand.py"],
            "lockstep": [str(scripts / "lockstep"), "train", "with_lockstep.py", "--nproc", ranks],
        }

        for command in commands.values():
            first_step(command, folder)  # caches of files and of Python's modules

        pairs = [
            {name: first_step(command, folder) for name, command in commands.items()} for _ in range(options.repeats)
        ]

    for name in commands:
        seconds = [pair[name] for pair in pairs]
        print(f"{name:10} median {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    ratios = [pair["lockstep"] / pair["torchrun"] for pair in pairs]
    print(f"lockstep / torchrun: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def first_step(command: list[str], folder: Path) -> float:
    """Run the command; return the seconds until its first step was done."""
    stamp = folder / "first_step"
    stamp.unlink(missing_ok=True)
    began = time.time()
    env = os.environ | {"FIRST_STEP": str(stamp), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return float(stamp.read_text()) - began


if __name__ == "__main__":
    main()
