"""For scripts in which several loops take turns in one process, so that noise hits them alike.

A loop is a generator that yields after every block of steps, as in `lockstep.bench.ranks.turns`. Turns are compared one
by one, and the median counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.bench.ranks.turns import Turn, by_lockstep, take
from lockstep.bench.ranks.workload import MANY
from lockstep.engine.run import Run
from lockstep.task import Loss, Task

__all__ = ["MANY", "by_hand", "by_lockstep", "losses", "median_ratio", "settings", "take", "take_turns"]

WARM_UP = 2  # turns, for imports, compiling and allocations
LR_WARM_UP = 100  # steps


def take_turns(
    loops: Mapping[str, Iterator[Any]],
    turns: int,
    warm_up: int = WARM_UP,
    meet: Callable[[], object] = lambda: None,
    limit_s: float = math.inf,
) -> dict[str, list[Turn]]:
    """By name; who begins alternates. `meet` is called before every turn. After `limit_s` no round begins."""
    for loop in loops.values():
        for _ in range(warm_up):
            next(loop)
    found: dict[str, list[Turn]] = {name: [] for name in loops}
    began = time.perf_counter()
    for turn in range(turns):
        for name in list(loops)[:: -1 if turn % 2 else 1]:
            meet()
            found[name].append(take(loops[name]))
        if time.perf_counter() - began > limit_s:
            break
    return found


def median_ratio(these: Iterable[float], those: Iterable[float]) -> float:
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


def settings(run_dir: object, log_every: int, **more: Any) -> dict[str, Any]:
    """Of a run that goes on for as long as it is asked to, and writes to its files only."""
    return {"steps": MANY, "log": {"every": log_every, "progress": "off"}, "run_dir": str(run_dir), **more}


def losses(loop: Iterator[Run]) -> Iterator[float]:
    """Of the last step of every turn; the host waits for it, as that of a hand-written loop does."""
    for run in loop:
        run.recorder.poll(wait=True)
        yield run.recorder.last["loss"]


def by_hand(
    task: Task,
    batches: Iterator[Tensor],
    device: torch.device,
    block: int,
    peak: float,
    loss_of: Callable[[nn.Module, Tensor], Loss] | None = None,
) -> Iterator[float]:
    """A loop that its author would be proud of, with the task's model, loss and optimizer; yields losses."""
    torch.manual_seed(0)
    on_cuda, loss_of = device.type == "cuda", loss_of or task.loss
    model = task.model().to(device)
    if on_cuda:
        model.compile()
    optimizer = task.optimizer(model)
    for step, batch in enumerate(batches, start=1):
        if on_cuda:
            batch = batch.pin_memory().to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda):
            loss = loss_of(model, batch)
            mean = loss.total / loss.weight
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, step / (LR_WARM_UP + 1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % block == 0:
            yield mean.item()
