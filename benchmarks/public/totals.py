"""The total time of 20, 200 and 2,000 steps of a public model, by Lockstep and by a compiled loop by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.bench.intervals import estimate, ratio
from lockstep.bench.results import figure, table_lines
from lockstep.runtime.context import Runtime
from public.bounded import Rows
from public.cases import CASES, Case
from public.loops import (
    BLOCK,
    by_hand,
    empty_cache,
    load_compiler,
    lockstep_loop,
    print_decisions,
    printed_rounds,
    seconds_of,
    started,
    tensor_batches,
)

FIRST, LATER = 200, 2000  # steps
BEFORE_TURNS = 100  # steps of the long run that are timed before it takes turns
ALONE = 3  # turns of the long run before the loop by hand begins
WARM_UP = 5  # steps by hand, not compiled


def measure(name: str, rows: Rows, turns: int, tiny: bool) -> None:
    """Write a row for each number of steps and each loop as soon as it is known."""
    with started() as (runtime, folder):
        Totals(name, CASES[name](tiny), rows, turns).measure(runtime, folder)


class Totals:
    """The measurements of one model."""

    def __init__(self, name: str, task: Case, rows: Rows, turns: int):
        self.name = name
        self.task = task
        self.rows = rows
        self.turns = turns
        self.first = 2 * BLOCK if task.tiny else FIRST
        self.before = BLOCK if task.tiny else BEFORE_TURNS

    def measure(self, runtime: Runtime, folder: str) -> None:
        """Measure Lockstep first: the loop by hand may take longer to compile than there is time."""
        task = self.task
        device = runtime.device
        load_compiler(device)

        # The first loop must not pay for imports and for the GPU's libraries.
        warm_up = self.by_hand(device, block=WARM_UP, compiled=False)
        next(warm_up)
        warm_up.close()

        for steps in (BLOCK, self.first):
            with empty_cache(folder):
                loop = lockstep_loop(task, runtime, folder, global_batch=task.batch, steps=steps)
                ends = seconds_of(loop, steps)
                loop.close()
            self.add("lockstep", steps, ends[-1])

        # Not later: the long run keeps its code.
        torch.compiler.reset()

        # With turns of its own, so that there is an estimate even if the loop by hand never ends.
        with empty_cache(folder):
            long = lockstep_loop(task, runtime, folder, global_batch=task.batch, steps=LATER)
            ours = seconds_of(long, self.before)[-1]
            ends = seconds_of(long, ALONE * BLOCK)
            print_decisions(folder)
        step_s = estimate([turn / BLOCK for turn in np.diff([0.0, *ends]).tolist()])
        self.add_extrapolated("lockstep", ours, self.before, step_s)
        done = self.before + ALONE * BLOCK
        ours += ends[-1]

        with empty_cache(folder):
            plain = self.by_hand(device, block=BLOCK, compiled=not task.tiny)
            theirs = seconds_of(plain, BLOCK)[-1]
            self.add("by hand", BLOCK, theirs)
            theirs += seconds_of(plain, self.first - BLOCK)[-1]
            self.add("by hand", self.first, theirs)

            loops = {"by hand": plain, "lockstep": long}
            rounds = printed_rounds(loops, self.turns)
        for loop in loops.values():
            loop.close()

        plain_s, our_s = ([each[name].seconds / BLOCK for each in rounds] for name in loops)
        self.add_extrapolated("by hand", theirs, self.first, estimate(plain_s))
        self.add_extrapolated("lockstep", ours, done, estimate(our_s), step_ratio=ratio(our_s, plain_s))

    def by_hand(self, device: torch.device, block: int, compiled: bool) -> Iterator[None]:
        batches = tensor_batches(self.task.data().tensors, self.task.batch)
        return by_hand(self.task, batches, device, nn.Module.compile if compiled else None, block)

    def add(self, loop: str, steps: int, seconds: float, **more: Any) -> None:
        self.rows.add(case=self.name, loop=loop, steps=steps, seconds=round(seconds, 3), **more)

    def add_extrapolated(self, loop: str, seconds: float, steps: int, step_s: Any, **more: Any) -> None:
        """Add the total of the long run: its first `steps` as measured, and the median of later ones for the rest."""
        total = seconds + (LATER - steps) * step_s["median"]
        self.add(loop, LATER, total, measured_steps=steps, step_ms=1e3 * step_s["median"], **more)


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table; later rows replace earlier ones of the same kind."""
    found = {(row["case"], row["steps"], row["loop"]): row for row in rows if "steps" in row}
    body = []
    for name, steps in dict.fromkeys((case, steps) for case, steps, _ in sorted(found, key=_order)):
        plain, ours = (found.get((name, steps, loop)) for loop in ("by hand", "lockstep"))
        both = plain and ours
        body.append(
            [
                name,
                f"{steps:,}",
                figure(plain["seconds"]) if plain else "-",
                figure(ours["seconds"]) if ours else "-",
                f"{ours['seconds'] / plain['seconds']:.3f}" if both else "-",
                *(figure(row["step_ms"]) if row and "step_ms" in row else "-" for row in (plain, ours)),
            ]
        )
    heads = ("model", "steps", "by hand s", "lockstep s", "lockstep / by hand", "step by hand ms", "step lockstep ms")
    return table_lines(heads, body) if body else []


def _order(key: tuple[str, int, str]) -> tuple[int, int]:
    """Sort by the order of CASES, then by steps."""
    return list(CASES).index(key[0]), key[1]
