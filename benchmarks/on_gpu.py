"""All measurements that need a GPU, in the order of their worth, as many as fit into a budget of seconds.

    python benchmarks/on_gpu.py                                # what there is
    python benchmarks/on_gpu.py --out results --budget 570     # call it again to continue with the rows that are left
    python benchmarks/on_gpu.py --out results --only packing weak
    python benchmarks/on_gpu.py --out results --tiny           # on a CPU: does everything run

A row is a command. It begins only if the time that it usually takes is left, and is killed after its limit. Then
whatever it has started is killed, and its caches and temporary files are deleted: the next row finds an idle machine
that has compiled nothing. Its result is a line in OUT/results.jsonl at once; what it printed is in OUT/log.txt, what
public_models.py measured in OUT/rows.jsonl, and what `lockstep bench` measured in OUT/ROW.json. A row that OUT or
--done has is not run again, unless the budget ended it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lockstep.bench.results import table_lines

ROOT = Path(__file__).resolve().parent.parent
TAIL = 14  # lines of the output that are part of a result
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    command: str  # {out} is the folder of the results, {folder} one that is deleted after the row
    usual_s: float
    limit_s: float
    tiny: str = ""  # more arguments, for a try on a CPU
    keep: str = ""  # a file in {folder} that is copied to {out}, as NAME.json


def public(name: str, words: str, usual_s: float, limit_s: float, case_s: float | None = None) -> Row:
    """Return a row of public_models.py, which kills its cases by itself a little earlier.

    case_s: seconds for each case, if there are several; otherwise one that hangs takes the time of all others
    """
    limits = f"--limit {case_s or limit_s - 15} --seconds {limit_s - 15}"
    command = f"{{python}} benchmarks/public_models.py {words} {limits} --json {{out}}/rows.jsonl"
    return Row(name, command, usual_s, limit_s, tiny="--tiny --turns 1")


def bench(name: str, words: str, usual_s: float, limit_s: float, tiny: str, before: str = "") -> Row:
    """Return a row of `lockstep bench`, of whose files the numbers are kept."""
    command = f"{before}{{python}} -m lockstep bench {words} --out {{folder}}/bench"
    return Row(name, command, usual_s, limit_s, tiny, keep="bench/results.json")


# Ranks on CPUs, of which each has two and computes on one: the other is for communication. A step of 192 samples
# computes about 50 times as long as its gradients travel, as GPT-2 124M does on 8 GPUs with half a million tokens.
WEAK = "weak gpt micro_batch=8 --siblings adjacent --worlds 1,8 --seconds 90 --block 1 --batch 192"
MUON = "settings gpt global_batch=64 compile=false --way optimizer=muon --repeats 9 --worlds 1"

# The first file is the one that takes longest, alone about 90 s. The names show what has passed, should it be killed.
TESTS = "{python} -m pytest tests/gpu/test_memory_cap.py tests/gpu -v -n 8"

ROWS = (
    public("packing", "packing --only packing-short --turns 6", 130, 200),
    public("gpt2", "rates --only gpt2 --turns 6", 130, 180),
    public("verify", "verify", 160, 240),
    public("nanogpt", "rates --only nanogpt --turns 6", 100, 160),
    public("resnet", "rates --only resnet --turns 4", 140, 180),
    bench("weak", WEAK, 130, 200, tiny="--worlds 1 --seconds 1 --batch 8", before="CUDA_VISIBLE_DEVICES= "),
    Row("tests", TESTS, 190, 290),
    public("fp8", "fp8", 90, 140),
    public("models", "models", 300, 360, case_s=75),
    public("ragged", "ragged", 100, 150),
    bench("muon", MUON, 50, 90, tiny="--repeats 1 --block 1 --cores-per-rank 1"),
    Row(
        "gpt2-speed", "{python} benchmarks/gpt2_speed.py --turns 4", 90, 130, tiny="--tiny --turns 1 --attention torch"
    ),
    Row("token-loss", "{python} benchmarks/token_loss.py --minutes 1.8", 120, 160, tiny="--tiny --turns 1"),
)


def run_rows(rows: Sequence[Row], out: Path, done: set[str], budget_s: float, tiny: bool = False) -> None:
    """Run the rows that are not done, as far as the budget goes. Each result is written at once."""
    ends = time.monotonic() + budget_s
    for row in rows:
        left_s = ends - time.monotonic()
        if row.name in done:
            print(f"{row.name}: done before", flush=True)
        elif left_s < row.usual_s:
            print(f"{row.name}: not begun, it takes about {row.usual_s:.0f} s and {left_s:.0f} s are left", flush=True)
        else:
            result = run(row, out, left_s, tiny)
            with (out / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{row.name}: {result['end']}, {result['seconds']} s", *result["tail"], sep="\n  ", flush=True)


def run(row: Row, out: Path, left_s: float, tiny: bool) -> dict[str, Any]:
    """Run one command until it ends or its time is over, and return the result."""
    limit_s = min(row.limit_s, left_s)
    began = time.monotonic()
    others = set(psutil.Process().children(recursive=True))
    with (
        (out / "log.txt").open("a+") as log,
        tempfile.TemporaryDirectory(prefix="row-", ignore_cleanup_errors=True) as folder,
    ):
        words = f"{row.command} {row.tiny if tiny else ''}".format(python=sys.executable, out=out, folder=folder)
        print(f"\n==== {row.name}: {words}", file=log, flush=True)
        start = log.tell()
        environment = {**os.environ, **own_caches(folder)}
        command = subprocess.Popen(words, shell=True, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = f"exit code {command.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            end = f"killed after {limit_s:.0f} s"
        end_all_but(others)
        command.wait()

        if row.keep and (file := Path(folder) / row.keep).is_file():
            shutil.copy(file, out / f"{row.name}.json")
        log.seek(start)
        tail = [line.rstrip()[:200] for line in log if line.strip()][-TAIL:]

    final = end.startswith("exit") or limit_s == row.limit_s
    seconds = round(time.monotonic() - began, 1)
    return {"row": row.name, "end": end, "seconds": seconds, "final": final, "tail": tail}


def own_caches(folder: str) -> dict[str, str]:
    """Return the variables that move temporary files, torch's compiled code and Lockstep's records to `folder`.

    What one row has compiled must not help another one, and a compiler that is killed leaves damaged files behind.
    """
    return {"TMPDIR": folder, "XDG_CACHE_HOME": f"{folder}/cache", "TRITON_CACHE_DIR": f"{folder}/triton"}


def adopt_orphans() -> None:
    """Become the parent of all processes that a row leaves behind, so that they are found and killed (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def end_all_but(others: set[psutil.Process]) -> None:
    """Kill all processes that this one has started, but `others`. They may be in process groups of their own."""
    # A process may start another one before it is killed.
    for _ in range(3):
        family = [child for child in psutil.Process().children(recursive=True) if child not in others]
        for child in family:  # parents first: a shell would report the death of its command
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=3)


def results(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the results")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="for all rows (default: no limit)")
    parser.add_argument("--done", type=Path, metavar="FILE", help="a results.jsonl whose rows are not run again")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="ROW")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    given = parser.parse_args()

    rows = [row for row in ROWS if not given.only or row.name in given.only]
    if not given.out:
        body = [[row.name, f"{row.usual_s:.0f}", f"{row.limit_s:.0f}", row.command] for row in rows]
        print(*table_lines(("row", "usually s", "limit s", "command"), body), sep="\n")
        return

    # Absolute, for tests that start Python in other folders.
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *map(os.path.abspath, folders)])
    os.environ["PYTHONUNBUFFERED"] = "1"

    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    earlier = results(given.done)
    done = {result["row"] for result in [*earlier, *results(out / "results.jsonl")] if result["final"]}
    adopt_orphans()
    run_rows(rows, out, done, given.budget, given.tiny)

    found = [*earlier, *results(out / "results.jsonl")]
    body = [[each["row"], each["end"], f"{each['seconds']:.1f}", (each["tail"] or [""])[-1]] for each in found]
    print(*table_lines(("row", "end", "s", "last line"), body), sep="\n")


if __name__ == "__main__":
    main()
