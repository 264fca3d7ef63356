"""A GPT whose training state is larger than the memory it may take: refused with advice, then trained as advised.

    python benchmarks/memory_cap.py           # 85 million parameters, 16 bytes each = 1.3 GiB, in 1.1 GiB of a GPU
    python benchmarks/memory_cap.py --gib 2.2 task.width=1024 task.layers=16 task.heads=16        # 0.2 billion, 3 GiB

Three runs of `lockstep train char_lm`, each rank with `gpu_memory` of the GPU: one process under ddp, which must end
with what to type; two ranks that share the GPU under fsdp with offload and recomputation, which must train; and one
process without the limit, whose mean loss the second run must have.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from trainings import FIRST_STEPS, mean_loss, metrics, train

SETTINGS = [
    *FIRST_STEPS,
    "steps=4",
    "task.width=768",
    "task.layers=12",
    "task.heads=12",
    "task.context=256",
    "global_batch=16",
    "micro_batch=8",
    "lr.peak=1e-4",
]
ADVISED = ["strategy=fsdp", "fsdp.offload=true", "remat=full"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.1)
    options, more = parser.parse_known_args()
    cap = f"gpu_memory={options.gib:g}"
    with tempfile.TemporaryDirectory() as folder:
        run = partial(_told, Path(folder), [*SETTINGS, *more])
        refused = run("ddp", [cap], 1)
        trained, free = run("fsdp", [cap, *ADVISED], 2), run("free", [], 1)
    if refused is not None or trained is None or free is None:
        return 1
    print(f"mean losses differ by {trained / free - 1:+.3%}")
    return int(abs(trained / free - 1) > 0.01)


def _told(folder: Path, settings: list[str], name: str, words: list[str], ranks: int) -> float | None:
    """The mean loss; None if it failed."""
    began = time.monotonic()
    done = train("char_lm", folder / name, *settings, *words, ranks=ranks)
    seconds = time.monotonic() - began
    print(f"-- {' '.join(words) or 'no limit'}, {ranks} rank(s): exit code {done.returncode} after {seconds:.0f} s")
    if done.returncode:
        print(done.stderr.strip()[-1500:], flush=True)
        return None
    lines = metrics(folder / name)
    memory = max(line["memory_mb"] for line in lines)
    print(f"   {lines[-1]['step']} steps, mean loss {mean_loss(lines):.4f}, {memory:,.0f} MB a rank", flush=True)
    return mean_loss(lines)


if __name__ == "__main__":
    sys.exit(main())
