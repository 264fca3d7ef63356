"""Steps per second of launch-bound models on a GPU: plain, compiled, recorded (CUDA graphs), and both, against a
hand-written eager loop of the same model.

    python benchmarks/graph_speed.py                       # all, about a minute
    python benchmarks/graph_speed.py --models lstm --turns 10

The hand-written loop takes its batches from the device already, casts to bf16, clips, uses the task's own optimizer,
and never waits between turns. Lockstep reads its batches: those of hrm in worker processes, as in the recipe's presets
for GPUs (`--workers 0` shows what reading costs in the process that hands out kernels). Turns of all of them alternate;
each ends with a synchronisation. Of a way the median of its turns is told, how many times faster than the hand-written
loop that is, and how long a step waits for its batch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from turns import settings, take_turns

import lockstep
from lockstep.config import resolve_for
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.observe.sinks import read_jsonl
from lockstep.precision import choose_precision
from lockstep.recipes.hrm import TASK as HRM
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import MicroBatch

WAYS = {
    "plain": {"compile": False, "graph": False},
    "compile": {"compile": True, "graph": False},
    "graph": {"compile": False, "graph": "auto"},
    "compile + graph": {"compile": True, "graph": "auto"},
}


class SmallLSTM(nn.Module):
    """Cells by hand, as in research code: cuDNN's own LSTM is few kernels already."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, W)
        rows = list(x.unbind(1))
        for cell, norm in zip(self.cells, self.norms, strict=True):
            state = None
            for place, row in enumerate(rows):
                state = cell(norm(row), state)
                rows[place] = row + state[0]
        return self.head(torch.stack(rows, 1))


class Sequences(lockstep.Task):
    """Says again, at every place, what it has seen there."""

    defaults = {"global_batch": 32, "precision": "bf16", "clip": {"norm": 1.0}}

    def model(self) -> nn.Module:
        return SmallLSTM(128, 2)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(
            torch.randn(256, 32, 128, generator=generator), torch.randint(16, (256, 32), generator=generator)
        )

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        losses = nn.functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten(), reduction="sum")
        return lockstep.Loss(losses, y.numel())


TASKS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "lstm": (Sequences, {}),
    # The model of the preset `gpu-short`: 2 levels of 2 blocks, width 256, Sudoku 9 x 9; fewer puzzles.
    "hrm": (
        lambda: HRM(puzzle="sudoku9", train_size=256, test_size=16, width=256, heads=4, layers=2, loss="softmax"),
        {
            "preset": "cpu",
            "global_batch": 64,
            "micro_batch": 64,
            "precision": "bf16",
            "goals": [],
            "data": {"workers": 4},
        },
    ),
}


def by_hand(make: Callable[[], Any], block: int, device: torch.device, batch: int) -> Generator[None]:
    """Eager. What is read and put together is ready before the first step."""
    torch.manual_seed(0)
    task = make()
    model = task.model().to(device)
    made = task.optimizer(model)
    optimizers = made if isinstance(made, list) else [made]
    data = task.data()
    picks = [task.collate([data[i] for i in range(at, at + batch)]) for at in (0, batch, 2 * batch)]
    batches = [_to(pick, device) for pick in picks]
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = 0
    while True:
        for _ in range(block):
            if type(task).before_batch is not lockstep.Task.before_batch:
                task.before_batch(MicroBatch(None, 0, batch, 0, None, False, 0))
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = task.loss(model, batches[step % 3])
            (loss.total / loss.weight).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if type(task).after_step is not lockstep.Task.after_step:
                task.after_step(model, step)
        yield


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _to(part, device) for name, part in value.items()}
    return [_to(part, device) for part in value] if isinstance(value, list | tuple) else value.to(device)


def by_lockstep(
    make: Callable[[], Any], block: int, runtime: context.Runtime, values: dict[str, Any], run_dir: str
) -> Generator[None]:
    task = make()
    asked = values | settings(run_dir, block, checkpoint={"minutes": None}, clip={"norm": 1.0})
    resolved = resolve_for(task.defaults, task.presets, [("benchmark", asked)]).without_options()
    builder = open_run(resolved, runtime, "bench")
    builder.setup_model(task.model(), task.optimizer, task)
    run = builder.setup_run(task.data(), task.collate)
    before, after = loop._own_method(task, "before_batch"), loop._own_method(task, "after_step")
    try:
        for batches in run.step_batches():
            if before:
                batches.micro_batches = loop._call_before_each(batches.micro_batches, before)
            run.end_step(batches, run.stepper.step(batches, task.loss))
            if after:
                after(run.driver.model, run.stepper.counters.steps_done)
            if run.stepper.counters.steps_done % block == 0:
                yield
    finally:
        run.close_loaders()


def measure(name: str, ways: list[str], turns: int, block: int, limit_s: float, workers: int | None) -> None:
    make, values = TASKS[name]
    values = values if workers is None else values | {"data": {"workers": workers}}
    config = resolve_for({}, {}, [("benchmark", {"precision": "bf16"})]).config
    with context.start(World(), config) as runtime, tempfile.TemporaryDirectory() as folder:
        choose_precision(config, runtime.device).set_tf32()  # for the hand-written loop, too
        batch = values.get("global_batch", 32)
        loops = {"by hand": by_hand(make, block, runtime.device, batch)}
        for way in ways:
            loops[way] = by_lockstep(make, block, runtime, values | WAYS[way], f"{folder}/{way}")
        found = take_turns(loops, turns, limit_s=limit_s)  # warmed up they are compiled, decided, recorded
        typically = {way: statistics.median(turn.seconds for turn in taken) / block for way, taken in found.items()}
        base = typically["by hand"]
        for way, typical in typically.items():
            line = f"{name:6} {way:16} {1 / typical:8.1f} steps/s  x {base / typical:.2f} of by hand"
            if way in ways:
                waits = [m["data_wait_s"] for m in read_jsonl(f"{folder}/{way}/metrics.jsonl")]
                line += f"  waits {statistics.median(waits) * 1e3:.2f} ms for data"
            print(f"{line}  ({len(found[way])} turns)")
        for each in loops.values():
            each.close()
        for way in ways:
            for event in read_jsonl(f"{folder}/{way}/events.jsonl"):
                if event["event"] == "graph":
                    print(f"{name:6} {way:16} {event['call']}: {event['reason']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(TASKS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for the turns of a model")
    parser.add_argument("--workers", type=int, help="worker processes, instead of a model's own number")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    for name in asked.models:
        measure(name, asked.ways, asked.turns, asked.block, asked.limit, asked.workers)


if __name__ == "__main__":
    main()
