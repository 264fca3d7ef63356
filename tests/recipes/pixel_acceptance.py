"""The caption recipe on one process and on two, where one of the two is killed after the checkpoint in the middle.

python tests/recipes/pixel_acceptance.py
python tests/recipes/pixel_acceptance.py --steps 60 --preset tiny

The losses of the first 50 steps must agree within 1e-4, the last ones within 2 %, and every checkpoint must be whole.
Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from lockstep.observe.sinks import read_jsonl

FIRST, FIRST_LIMIT = 50, 1e-4
LAST, LAST_LIMIT = 100, 0.02  # the mean of this many steps: one step's loss depends on its few hard pictures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/pixel_acceptance"))
    asked = parser.parse_args()
    batch = {"cpu": 64, "tiny": 16}.get(asked.preset, 64)
    settings = [
        f"preset={asked.preset}", f"steps={asked.steps}", "precision=fp32", f"micro_batch={batch // 2}", "log.every=1",
        f"checkpoint.every={asked.steps // 2}", "evaluate.every=null", "threads=1", "log.progress=off",
    ]  # fmt: skip
    one, two = asked.out / "one", asked.out / "two"
    train(one, settings, ranks=1)
    marks = asked.out / "killed"
    marks.mkdir(parents=True)
    fault = {"how": "kill", "rank": 1, "step": asked.steps * 3 // 4, "marks": str(marks.resolve())}
    train(two, settings, ranks=2, faults=[fault])
    return judge(one, two)


def train(run_dir: Path, settings: list[str], ranks: int, faults: list[dict] | None = None) -> None:
    env = os.environ | ({"LOCKSTEP_FAULTS": json.dumps(faults)} if faults else {})
    command = [sys.executable, "-m", "lockstep", "train", "pixel_llm", "--nproc", str(ranks), *settings]
    subprocess.run([*command, f"run_dir={run_dir}"], env=env, check=True)


def losses(run_dir: Path) -> list[float]:
    """By step; a step that was taken again after a failure counts as it was the last time."""
    found = {row["step"]: row["loss"] for row in read_jsonl(run_dir / "metrics.jsonl")}
    return [loss for _, loss in sorted(found.items())]


def judge(one: Path, two: Path) -> int:
    a, b = losses(one), losses(two)
    assert len(a) == len(b), f"{len(a)} steps against {len(b)}"
    apart = [abs(x - y) / x for x, y in zip(a, b, strict=True)]
    last = min(LAST, len(a) // 4)
    mean_a, mean_b = sum(a[-last:]) / last, sum(b[-last:]) / last
    for run_dir in (one, two):
        subprocess.run([sys.executable, "-m", "lockstep.cli", "ckpt", "verify", str(run_dir)], check=True)
    restarts = [line for line in (two / "events.jsonl").read_text().splitlines() if '"restart"' in line]
    print(f"{len(a)} steps; restarts of the two processes: {len(restarts)}")
    print(f"first {FIRST} steps: losses apart by at most {max(apart[:FIRST]):.1e} (limit {FIRST_LIMIT})")
    print(f"all steps: at most {max(apart):.1e}")
    end = abs(mean_a - mean_b) / mean_a
    print(f"mean of the last {last}: {mean_a:.6f} and {mean_b:.6f}, apart by {end:.1e} (limit {LAST_LIMIT})")
    well = max(apart[:FIRST]) <= FIRST_LIMIT and end <= LAST_LIMIT and len(restarts) == 1
    print("pass" if well else "FAIL")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
