"""Kill ranks again and again, and compare the result with an undisturbed run.

As a benchmark:  python tests/faults/torture.py --kills 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.faults import Fault
from lockstep.testing import faults_environment

EVERY = 3  # steps between checkpoints
IN_A_STEP = ("data", "compute", "all-reduce", "update")
IN_A_SAVE = ("snapshot", "write", "rename", "latest", "committed")  # the last ones happen on rank 0 only
BATCH = 128


@dataclass(frozen=True)
class Outcome:
    code: int
    seconds: float
    restarts: int
    output: str
    weights: dict[str, str]  # name -> digest, of the last checkpoint: weights, moments, counters
    samples: dict[int, list[tuple[int, int]]]  # step -> (epoch, id) of all ranks


def planned(kills: int, steps: int, seed: int) -> list[Fault]:
    """Kills spread over the run, in every phase of a step and of a save."""
    draw = random.Random(seed)
    faults = []
    phases = [*IN_A_STEP, *IN_A_SAVE] * -(-kills // 9)  # each as often as any other
    draw.shuffle(phases)
    for number, phase in enumerate(phases[:kills]):
        step = 1 + number * (steps - 1) // kills
        if phase in IN_A_SAVE:
            step = max(EVERY, step - step % EVERY)
        rank = draw.randrange(2) if phase in (*IN_A_STEP, "snapshot", "write") else 0
        faults.append(Fault("kill", rank, step, phase))
    return faults


def train(folder: Path, steps: int, faults: list[Fault], timed_kills: int = 0, seed: int = 0) -> Outcome:
    settings = {
        "preset": "tiny",
        "run_dir": folder / "run",
        "steps": steps,
        "global_batch": BATCH,
        "micro_batch": BATCH // 2,
        "checkpoint.every": EVERY,
        "restart.per_hour": 100000,
        "restart.max_in_a_row": 100000,
        "log.samples": "true",
        "log.every": 10,
        "evaluate.every": 25,
        "evaluate.at_end": "false",
    }
    import preloaded  # here: a script has to say first where it is found

    words = [f"{key}={value}" for key, value in settings.items()]
    (folder / "marks").mkdir(parents=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | faults_environment(folder / "marks", *faults)
    began = time.monotonic()
    with (folder / "output").open("wb") as output:
        command = ("train", "char_lm", "--nproc", "2", *words)
        launcher = preloaded.start(*command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        killer = threading.Thread(target=_kill_now_and_then, args=(launcher.pid, timed_kills, seed), daemon=True)
        killer.start()
        code = launcher.wait(timeout=120 + 15 * (len(faults) + timed_kills))
    seconds = time.monotonic() - began
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    return Outcome(
        code,
        seconds,
        sum(event["event"] == "restart" for event in events),
        (folder / "output").read_text(errors="replace"),
        digests(folder / "run"),
        history(folder / "run"),
    )


def _kill_now_and_then(launcher: int, kills: int, seed: int) -> None:
    """SIGKILL to some rank, whatever it is doing."""
    draw = random.Random(seed)
    for _ in range(kills):
        time.sleep(draw.uniform(1.0, 2.5))
        try:
            zygotes = psutil.Process(launcher).children()
            ranks = [rank for zygote in zygotes for rank in zygote.children()]
            if ranks:
                draw.choice(ranks).kill()
        except psutil.NoSuchProcess:
            return


def digests(run: Path, step: int | None = None) -> dict[str, str]:
    """Of every tensor of the newest checkpoint, or of the one of a step, however it was cut."""
    import hashlib

    from lockstep.checkpoint.loading.search import VerifyingRanks, newest_valid
    from lockstep.checkpoint.storage.folder import CheckpointStorage
    from lockstep.run_folder.checkpoint_names import folder_name

    only = None if step is None else folder_name(step)
    found = newest_valid(CheckpointStorage(run / "checkpoints"), VerifyingRanks.alone(), only)
    assert found is not None
    reader = found.reader
    tensors = {name: reader.read(name) for name in reader.names()}
    return {name: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for name, t in tensors.items()}


def history(run: Path) -> dict[int, list[tuple[int, int]]]:
    """What was trained in the end: of every step its last attempt, all ranks together."""
    records = [json.loads(line) for path in sorted(run.glob("samples/*.jsonl")) for line in _whole_lines(path)]
    last: dict[int, int] = {}
    for record in records:
        last[record["step"]] = max(record["attempt"], last.get(record["step"], 0))
    found: dict[int, list[tuple[int, int]]] = {}
    for record in records:
        if record["attempt"] == last[record["step"]]:
            pairs = [(epoch, i) for epoch, *ids in record["epoch_and_ids"] for i in ids]
            found.setdefault(record["step"], []).extend(pairs)
    return found


def _whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().split("\n")[:-1] if line]


def counted(samples: dict[int, list[tuple[int, int]]]) -> dict[str, Any]:
    """How often each sample was trained: {epoch: (samples, times at most)}."""
    seen: dict[tuple[int, int], int] = {}
    for pairs in samples.values():
        for pair in pairs:
            seen[pair] = seen.get(pair, 0) + 1
    epochs = sorted({epoch for epoch, _ in seen})
    return {
        str(epoch): (sum(key[0] == epoch for key in seen), max(n for key, n in seen.items() if key[0] == epoch))
        for epoch in epochs
    }


def main() -> None:
    sys.path.append(str(Path(__file__).parent.parent))
    os.environ["LOCKSTEP_FRESH"] = "1"  # what a run takes is measured here: commands are what users start
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = options.steps or max(150, 3 * options.kills)
    with tempfile.TemporaryDirectory() as folder:
        timed = options.kills // 4  # beside those that are planned: any moment at all
        faults = planned(options.kills, steps, options.seed)
        whole = train(Path(folder) / "whole", steps, [])
        torn = train(Path(folder) / "torn", steps, faults, timed, options.seed)
    print(f"undisturbed   {whole.seconds:.0f} s, exit {whole.code}")
    print(f"with {options.kills} kills, and {timed} more at any moment")
    print(f"              {torn.seconds:.0f} s, exit {torn.code}, {torn.restarts} restarts")
    extra = (torn.seconds - whole.seconds) / max(1, torn.restarts)
    print(f"a restart costs {extra:.2f} s in the mean, repeated steps included")
    print(f"same bits     {torn.weights == whole.weights} ({len(whole.weights)} tensors)")
    print(f"same samples  {torn.samples == whole.samples}; epoch: (samples, most often) {counted(torn.samples)}")


if __name__ == "__main__":
    main()
