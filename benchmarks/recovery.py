"""Kill a rank with SIGKILL, many times in one run: how long until it is noticed, and until training goes on?

python benchmarks/recovery.py [--kills 50] [--ranks 2] [--how KILL|STOP]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from trainings import command

PATIENCE = 60.0  # longer than this is a hang, and ends the benchmark with an error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--how", choices=["KILL", "STOP"], default="KILL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        launcher = start(run, options.ranks)
        try:
            noticed, again, lost = measure(run, launcher, options.kills, getattr(signal, f"SIG{options.how}"))
        finally:
            launcher.kill()
            launcher.wait()
    print(f"{options.kills} x SIG{options.how} to one of {options.ranks} ranks")
    for name, values in (("noticed after", noticed), ("training again after", again)):
        print(f"{name:22} median {statistics.median(values):.2f} s, at most {max(values):.2f} s")
    print(
        f"{'steps repeated':22} median {statistics.median(lost):.0f}, at most {max(lost)} (a checkpoint every 5 steps)"
    )


def start(run: Path, ranks: int) -> subprocess.Popen[bytes]:
    settings = ["preset=tiny", "steps=1000000", "checkpoint.every=5", "log.every=1", "restart.per_hour=100000"]
    settings += ["lr.schedule=constant", "evaluate.every=null"]
    asked = command("char_lm", run, *settings, ranks=ranks)
    return subprocess.Popen(asked, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def measure(run: Path, launcher: subprocess.Popen[bytes], kills: int, how: int) -> tuple[list, list, list]:
    draw, noticed, again, lost = random.Random(0), [], [], []
    last_step(run, after=0.0)
    for number in range(kills):
        time.sleep(draw.uniform(0.1, 0.8))
        ranks = [rank for child in psutil.Process(launcher.pid).children() for rank in child.children()]
        before, moment = last_step(run, after=0.0), time.time()
        os.kill(draw.choice(ranks).pid, how)
        failure = wait_for(run / "events.jsonl", lambda r, t=moment: r["event"] == "failure" and r["time"] > t, number)
        first = wait_for(run / "metrics.jsonl", lambda r, since=failure["time"]: r["time"] > since, None)
        noticed.append(failure["time"] - moment)
        again.append(first["time"] - moment)
        lost.append(before - first["step"] + 1)
    return noticed, again, lost


def last_step(run: Path, after: float) -> int:
    return wait_for(run / "metrics.jsonl", lambda r: r["time"] > after, None, newest=True)["step"]


def wait_for(path: Path, wanted: Any, number: int | None, newest: bool = False) -> dict[str, Any]:
    """The first (or newest) record of that kind; `number`: how many of them have come before."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = [record for record in map(json.loads, lines) if wanted(record)]
        if found:
            return found[-1] if newest else found[0]
        time.sleep(0.02)
    raise SystemExit(f"HANG: nothing in {path.name} for {PATIENCE:.0f} s ({number})")


if __name__ == "__main__":
    main()
