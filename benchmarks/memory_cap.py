"""A GPT whose training state is larger than the memory it may take: refused with advice, then trained as advised.

    python benchmarks/memory_cap.py               # 0.2 billion parameters, 16 bytes each = 3 GiB, in 2.2 GiB of a GPU
    python benchmarks/memory_cap.py --gib 1.1 task.context=128 global_batch=8

Three runs of `lockstep train char_lm`, each rank with `gpu_memory` of the GPU: one process under ddp, which must end
with what to type; two ranks that share the GPU under fsdp with offload and recomputation, which must train; and one
process without the limit, whose losses the second run must have.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from trainings import FIRST_STEPS, metrics, train

SETTINGS = [
    *FIRST_STEPS,
    "task.heads=16",
    "task.context=256",
    "global_batch=16",
    "micro_batch=8",
    "lr.peak=1e-4",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    options, more = parser.parse_known_args()
    size = [f"task.width={options.width}", f"task.layers={options.layers}", f"steps={options.steps}"]
    cap = f"gpu_memory={options.gib:g}"
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), partial(train, "char_lm")
        same = [*SETTINGS, *size, *more]
        refused = run(folder / "ddp", *same, cap, ranks=1)
        print(f"-- ddp, {cap}: exit code {refused.returncode}\n{refused.stderr.strip()[-1500:]}\n")
        advised = ["strategy=fsdp", "fsdp.offload=true", "remat=full"]
        fits = run(folder / "fsdp", *same, cap, *advised, ranks=2)
        print(f"-- {' '.join(advised)}, 2 ranks, {cap}: exit code {fits.returncode}")
        if fits.returncode:
            print(fits.stdout[-1500:], fits.stderr[-3000:])
            return 1
        free = run(folder / "free", *same, ranks=1)
        print(f"-- one process without the limit: exit code {free.returncode}\n")
        if free.returncode:
            print(free.stderr[-1500:])
            return 1
        ours, theirs = metrics(folder / "fsdp"), metrics(folder / "free")
        print(f"{'step':>4}  {'fsdp':>8}  {'free':>8}   memory of a rank, MB")
        for mine, other in zip(ours, theirs, strict=True):
            memory = f"{mine['memory_mb']:8,.0f}  {other['memory_mb']:8,.0f}"
            print(f"{mine['step']:>4}  {mine['loss']:8.4f}  {other['loss']:8.4f}   {memory}")
    off = max(abs(mine["loss"] / other["loss"] - 1) for mine, other in zip(ours, theirs, strict=True))
    print(f"losses differ by at most {off:.2%}")
    return 0 if refused.returncode and off < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
