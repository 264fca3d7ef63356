"""The same GPT trained in several number formats: loss, speed and memory of each, against the first one.

    python benchmarks/precisions.py                                          # 300 steps of the gpu preset, side by side
    python benchmarks/precisions.py --formats bf16 fp8 --steps 30 --in-turn --no-check \\
        task.width=4096 task.layers=5 task.heads=32 task.context=1024 global_batch=16    # a billion parameters

Every format is a `lockstep train char_lm` of its own, from the same weights and with the same batches. Side by side
they share the GPU, so that only losses can be compared; `--in-turn` gives each of them the GPU, and its speed counts.
Without `--no-check` the exit code is 1 if a loss is more than 2 % away from that of the first format.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from trainings import command, metrics

LIMIT = 0.02
SETTINGS = [
    "preset=gpu",
    "task.dropout=0",
    "task.max_bytes=2000000",
    "task.eval_bytes=65536",
    "checkpoint.at_end=false",
    "log.every=10",
    "log.progress=off",
]


class Outcome(NamedTuple):
    loss: float  # of the last steps
    eval_loss: float
    per_second: float  # median of the second half: compiling is over
    memory_mb: float  # at the worst moment


def start(precision: str, steps: int, more: list[str], folder: Path) -> subprocess.Popen:
    values = [*SETTINGS, f"precision={precision}", f"steps={steps}", f"evaluate.every={steps}", *more]
    with (folder / f"{precision}.txt").open("w") as output:
        asked = command("char_lm", folder / precision, *values)
        return subprocess.Popen(asked, stdout=output, stderr=subprocess.STDOUT)


def outcome(precision: str, folder: Path) -> Outcome | None:
    if not (folder / precision / "summary.json").exists():
        print(f"{precision} failed:\n{(folder / f'{precision}.txt').read_text()[-3000:]}")
        return None
    lines = metrics(folder / precision)
    summary, late = json.loads((folder / precision / "summary.json").read_text()), lines[len(lines) // 2 :]
    return Outcome(
        statistics.mean(line["loss"] for line in lines[-3:]),
        summary["loss"] if summary.get("eval_loss") is None else summary["eval_loss"],
        statistics.median(line["weight_per_s"] for line in late),
        max(line["memory_mb"] for line in lines),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["fp32", "tf32", "bf16", "fp16", "fp8"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--in-turn", action="store_true", help="one after the other")
    parser.add_argument("--no-check", action="store_true")
    options, more = parser.parse_known_args()
    worst, first = 0.0, None
    print(
        f"{'format':>24}  {'loss':>7}  {'eval':>7}  {'off by':>7}  {'tokens/s':>9}  {'ratio':>6}  {'memory MB':>9}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = partial(start, steps=options.steps, more=more, folder=folder)
        running = {} if options.in_turn else {precision: begin(precision) for precision in options.formats}
        for precision in options.formats:
            (running.get(precision) or begin(precision)).wait()
            run = outcome(precision, folder)
            first = first or run
            worst = max(worst, told(precision, run, first, options.in_turn) if run and first else math.inf)
    return 0 if options.no_check or worst <= LIMIT else 1


def told(precision: str, run: Outcome, first: Outcome, alone: bool) -> float:
    """How far its loss is from that of the first."""
    off = run.eval_loss / first.eval_loss - 1
    speed = f"{run.per_second:9,.0f}  {run.per_second / first.per_second:6.3f}" if alone else f"{'-':>17}"
    row = f"{precision:>24}  {run.loss:7.4f}  {run.eval_loss:7.4f}  {off:+7.2%}  {speed}  {run.memory_mb:9,.0f}"
    print(row, flush=True)
    return abs(off)


if __name__ == "__main__":
    sys.exit(main())
