"""What each strategy takes of a GPU's memory, and what it makes of a step: one GPT, several ranks on the one device.

    python benchmarks/strategies.py                      # 100M parameters, 4 ranks, micro-batches of 4 x 512 tokens
    python benchmarks/strategies.py --ranks 2 task.width=256 task.layers=4
    python benchmarks/strategies.py --only hsdp          # the rows with that in their name

Memory is torch's own count of what rank 0 had allocated at the worst moment. Ranks that share a GPU exchange through
host memory over gloo, so seconds compare strategies with one another here and say nothing about a cluster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from trainings import FIRST_STEPS, mean_loss, metrics, train

ROWS = {
    "one process": [],
    "one process, remat=full": ["remat=full"],
    "one process, optimizer=adamw8bit": ["optimizer=adamw8bit"],
    "ddp": ["strategy=ddp"],
    "ddp, bf16-master": ["strategy=ddp", "precision=bf16-master"],
    "zero1": ["strategy=zero1"],
    "fsdp-grads": ["strategy=fsdp-grads"],
    "fsdp": ["strategy=fsdp"],
    "fsdp, bf16-master": ["strategy=fsdp", "precision=bf16-master"],
    "hsdp, 2 copies": ["strategy=hsdp", "fsdp.replicas=2"],
    "fsdp, remat=full": ["strategy=fsdp", "remat=full"],
    "fsdp, remat=full, offload": ["strategy=fsdp", "remat=full", "fsdp.offload=true"],
}
SETTINGS = [
    *FIRST_STEPS,
    "steps=6",
    "task.width=768",
    "task.layers=14",
    "task.heads=12",
    "task.eval_bytes=8192",
    "global_batch=16",
    "micro_batch=4",
    "graph=false",  # a strategy that cuts weights goes without
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options, more = parser.parse_known_args()
    failed = 0
    print(f"{'':34}  {'ranks':>5}  {'memory MB':>9}  {'step s':>7}  {'mean loss':>9}", flush=True)
    for name, values in ((name, values) for name, values in ROWS.items() if options.only in name):
        ranks = 1 if name.startswith("one process") else options.ranks
        with tempfile.TemporaryDirectory() as folder:
            done = train("char_lm", Path(folder) / "run", *SETTINGS, *values, *more, ranks=ranks)
            if done.returncode:
                failed += 1
                print(f"{name:34}  exit code {done.returncode}: {done.stderr[-600:]}", flush=True)
                continue
            lines = metrics(Path(folder) / "run")
        memory = max(line["memory_mb"] for line in lines)
        seconds = statistics.median(line["step_s"] for line in lines[2:])
        print(f"{name:34}  {ranks:>5}  {memory:9,.0f}  {seconds:7.3f}  {mean_loss(lines):9.5f}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
