"""Loops by hand and by Lockstep, stopped after every block of steps, and what they have in common."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.bench.ranks.turns import Turn, by_lockstep, take, take_round
from lockstep.bench.ranks.workload import settings_of
from lockstep.config import resolve_for
from lockstep.observe.sinks import read_jsonl
from lockstep.precision import choose_precision
from lockstep.runtime import context
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World
from lockstep.task import Task

BLOCK = 20  # steps of a turn
STEADY = 0.95  # a loop is warm when its last turn took no less than this part of each of the two before it

Batches = Iterator[list[Any]]  # the micro-batches of each step, on the CPU


@contextmanager
def started() -> Iterator[tuple[Runtime, str]]:
    """Start this process for a benchmark. Yields the runtime, and a folder that is deleted in the end."""
    config = resolve_for({}, {}, [("benchmark", {})]).config
    with context.start(World(), config) as runtime, tempfile.TemporaryDirectory() as folder:
        choose_precision(config, runtime.device).set_tf32()  # for the loop by hand, too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run would end its step first, and a loop by hand never asks
        yield runtime, folder


def by_hand(
    task: Any,
    batches: Batches,
    device: torch.device,
    compile_model: Callable[[nn.Module], None] | None = None,
    block: int = BLOCK,
) -> Iterator[None]:
    """A plain PyTorch loop with bf16 autocast that never waits for the GPU inside a turn."""
    torch.manual_seed(0)
    on_cuda = device.type == "cuda"
    model = task.model().to(device).train()
    if compile_model:
        compile_model(model)
    optimizer = task.optimizer(model)

    for step, micro_batches in enumerate(batches, start=1):
        for batch in micro_batches:
            moved = to_device(batch, device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_cuda):
                loss = task.loss(model, moved)
            (loss.total / loss.weight / len(micro_batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % block == 0:
            yield


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a tensor, or a list or a dict of tensors, from page-locked memory."""
    if isinstance(batch, Tensor):
        if device.type != "cuda":
            return batch
        pinned = batch if batch.is_pinned() else batch.pin_memory()
        return pinned.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(tensor, device) for name, tensor in batch.items()}
    return [to_device(tensor, device) for tensor in batch]


def tensor_batches(tensors: tuple[Tensor, ...], batch: int) -> Batches:
    """Yield shuffled batches of a TensorDataset for ever, one a step, without a short last one."""
    while True:
        for rows in torch.randperm(len(tensors[0])).split(batch):
            if len(rows) == batch:
                yield [[tensor[rows] for tensor in tensors]]


def lockstep_loop(task: Task, runtime: Runtime, folder: str, block: int = BLOCK, **values: Any) -> Iterator[Any]:
    """The same by Lockstep. What is not in `values` is a default, or what a benchmark must switch off."""
    run_dir = tempfile.mkdtemp(dir=folder)
    last = {"run_dir": run_dir, "log.every": BLOCK, "clip.norm": 1.0, "tail": "drop", **values}
    return by_lockstep(task, settings_of(type(task), [], last), runtime, block)


def empty_cache(folder: str) -> Any:
    """Compile from nothing: what another loop has compiled, or learnt about compiling, must not help this one."""
    from torch._inductor.utils import fresh_cache

    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fresh_cache(dir=folder, delete=False)


def load_compiler(device: torch.device) -> None:
    """Import the compiler and start its workers, which no loop should pay for."""
    if device.type == "cuda":
        torch.compile(torch.sin)(torch.ones(8, device=device))


def printed_rounds(loops: Mapping[str, Iterator[Any]], turns: int) -> list[dict[str, Turn]]:
    """Let the loops take turns. Each round is printed at once, in case that the process is killed before the last."""
    rounds = []
    for number in range(turns):
        rounds.append(take_round(loops, number))
        print(f"  round {number + 1}: {', '.join(f'{n} {t.seconds:.3f} s' for n, t in rounds[-1].items())}", flush=True)

    return rounds


def warm_up(name: str, loop: Iterator[Any], least: int, most: int, most_s: float = 60.0) -> list[Turn]:
    """Take turns that do not count until they get no faster: code is compiled and calls are captured meanwhile.

    least, most: the number of turns
    """
    turns: list[Turn] = []
    while len(turns) < most and sum(turn.seconds for turn in turns) < most_s:
        turns.append(take(loop))
        seconds = [turn.seconds for turn in turns]
        print(f"  {name}: warm-up turn {len(turns)}, {seconds[-1]:.3f} s", flush=True)
        if len(turns) >= least and seconds[-1] >= STEADY * max(seconds[-3:]):
            break

    return turns


def seconds_of(loop: Iterator[Any], steps: int) -> list[float]:
    """Take as many turns as `steps` need, and return when each of them ended."""
    ends = [0.0]
    for _ in range(steps // BLOCK):
        ends.append(ends[-1] + take(loop).seconds)
    return ends[1:]


def decisions(folder: str) -> list[str]:
    """Return what the newest run in the folder has said about compiling and captures."""
    newest = max(Path(folder).glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [record for record in read_jsonl(newest) if record.get("event") in ("compile", "graph")]
    return [f"{event['event']}: {event.get('reason', '')}" for event in events]


def print_decisions(folder: str, most: int = 12) -> None:
    """Print the first of them."""
    found = decisions(folder)
    for line in found[:most]:
        print(f"    {line}", flush=True)
    if len(found) > most:
        print(f"    and {len(found) - most} more", flush=True)
