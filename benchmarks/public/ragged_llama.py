"""A small Llama on padded batches of every length: the time of 60 and of 2,000 steps, eager by hand and by Lockstep.

The last step of an epoch is short.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from statistics import median
from typing import Any

import torch

from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.results import figure, table_lines
from lockstep.hf import CausalLM
from lockstep.runtime.context import Runtime
from public.bounded import Rows
from public.llama import Ragged, short_texts
from public.loops import (
    BLOCK,
    Batches,
    by_hand,
    decisions,
    empty_cache,
    load_compiler,
    lockstep_loop,
    print_decisions,
    printed_rounds,
    started,
)

SHORT, LONG = 60, 2000  # steps
MOST_BEFORE_TURNS = 300  # steps of the long run that are timed before it takes turns
MOST_BEFORE_TURNS_S = 45.0
TEXTS = 475  # 29 steps of 16 texts, and one of 11
WARM_UP = 3  # steps by hand


def settings(ragged: Ragged, steps: int) -> dict[str, Any]:
    return {"global_batch": ragged.batch, "micro_batch": ragged.micro_batch, "tail": "short", "steps": steps}


def padded_batches(task: CausalLM, ragged: Ragged) -> Batches:
    """Yield the micro-batches of each step: shuffled texts, padded to the longest of a micro-batch."""
    data = task.data()
    while True:
        for step in torch.randperm(len(data)).split(ragged.batch):
            yield [task.collate([data[int(n)] for n in micro]) for micro in step.split(ragged.micro_batch)]


def eager_loop(ragged: Ragged, device: torch.device) -> Iterator[None]:
    """Train by hand, and stop after every step."""
    task = CausalLM(ragged.config, ragged.rows)
    return by_hand(task, padded_batches(task, ragged), device, block=1)


def step_seconds(loop: Iterator[Any], steps: int) -> Iterator[float]:
    """Yield the seconds of each step of a loop that stops after every one, as its host sees them.

    The GPU is waited for only after every block of steps, as in a run.
    """
    for number in range(1, steps + 1):
        began = time.perf_counter()
        next(loop)
        if number % BLOCK == 0 or number == steps:
            wait_for_gpu()
        yield time.perf_counter() - began


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def totals(rows: Rows, turns: int, tiny: bool) -> None:
    """Write the rows of 60 and of 2,000 steps."""
    short = BLOCK if tiny else SHORT
    most = BLOCK if tiny else MOST_BEFORE_TURNS
    with started() as (runtime, folder):
        device = runtime.device
        load_compiler(device)
        ragged = short_texts(TEXTS, tiny)
        list(step_seconds(eager_loop(ragged, device), WARM_UP))

        eager = eager_loop(ragged, device)
        eager_s = list(step_seconds(eager, short))
        add(rows, "eager by hand", short, sum(eager_s), 0)

        with empty_cache(folder):
            loop = ours(ragged, runtime, folder, short)
            add(rows, "lockstep", short, sum(step_seconds(loop, short)), 0)
            loop.close()
            print_decisions(folder)

        with empty_cache(folder):
            long = ours(ragged, runtime, folder, LONG)
            long_s = []
            for seconds in step_seconds(long, most):
                long_s.append(seconds)
                if len(long_s) % BLOCK == 0:
                    print(f"  lockstep, steps {len(long_s)}: {1e3 * median(long_s[-BLOCK:]):.1f} ms a step", flush=True)
                    if sum(long_s) > MOST_BEFORE_TURNS_S:
                        break
            print_decisions(folder, most=20)
            captured = Counter(line.split(":")[0] for line in decisions(folder))
            rows.add(case="ragged", events=dict(captured), block_ms=[1e3 * s for s in blocks_of(long_s)])

            loops = {"eager by hand": in_blocks(eager), "lockstep": in_blocks(long)}
            rounds = printed_rounds(loops, turns)

        plain_s, our_s = ([each[name].seconds / BLOCK for each in rounds] for name in loops)
        add(rows, "eager by hand", LONG, sum(eager_s), len(eager_s), estimate(plain_s))
        add(rows, "lockstep", LONG, sum(long_s), len(long_s), estimate(our_s), step_ratio=ratio(our_s, plain_s))


def ours(ragged: Ragged, runtime: Runtime, folder: str, steps: int) -> Iterator[Any]:
    task = CausalLM(ragged.config, ragged.rows)
    return lockstep_loop(task, runtime, folder, block=1, **settings(ragged, steps))


def in_blocks(loop: Iterator[Any]) -> Iterator[None]:
    """Stop after every block of steps."""
    for number in count(1):
        next(loop)
        if number % BLOCK == 0:
            yield


def blocks_of(seconds: list[float]) -> list[float]:
    return [sum(seconds[n : n + BLOCK]) / BLOCK for n in range(0, len(seconds) - BLOCK + 1, BLOCK)]


def add(rows: Rows, loop: str, steps: int, seconds: float, measured: int, step_s: Any = None, **more: Any) -> None:
    """Write a total: as measured, or extrapolated from `measured` steps by the seconds of a later one."""
    if step_s:
        seconds += (steps - measured) * step_s["median"]
        more |= {"measured_steps": measured, "step_ms": 1e3 * step_s["median"]}
    rows.add(case="ragged", loop=loop, steps=steps, seconds=round(seconds, 3), **more)


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the totals."""
    found = {(row["steps"], row["loop"]): row for row in rows if row["case"] == "ragged" and "steps" in row}
    body = []
    for steps in dict.fromkeys(steps for steps, _ in found):
        eager, ours = (found.get((steps, loop), {}).get("seconds") for loop in ("eager by hand", "lockstep"))
        ratio_text = f"{ours / eager:.3f}" if eager and ours else "-"
        body.append([f"{steps:,}", *(figure(s) if s else "-" for s in (eager, ours)), ratio_text])
    return table_lines(("steps", "eager by hand s", "lockstep s", "ratio"), body) if body else []
