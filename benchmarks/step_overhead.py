"""What a step costs against the best hand-written PyTorch loop.

    python benchmarks/step_overhead.py                      # all cases
    python benchmarks/step_overhead.py --cases mlp:2x4      # tiny MLP, 2 ranks, accumulation 4

`fit` is the loop of `lockstep.fit`; `own loop` is written around `lockstep.start`, as a user would. All loops live
in the same processes and take turns of 50 steps, so noise hits them alike. Same model, data, fused AdamW, clipping,
schedule and a log line every 50 steps (the hand-written one reduces its loss over ranks for it).
The hand-written loop divides every micro-batch's mean by the accumulation: it is wrong for ragged weights, and still
it is what people write. CPU time is that of the whole process, gloo's threads included, added over ranks.
`raw/raw` runs two hand-written loops against each other: the noise of the measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from trainings import on_ranks
from turns import LR_WARM_UP, MANY, by_lockstep, by_own_loop, settings, take_turns

from lockstep import Loss, Task
from lockstep.config import Resolved, resolve
from lockstep.runtime import context
from lockstep.runtime.world import World

BLOCK = 50  # steps in a turn, and between two log lines


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """About 2M parameters."""

    def __init__(self, vocabulary: int = 256, width: int = 192, layers: int = 4, context_length: int = 64):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context_length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:  # [batch, time] -> [batch, time, vocabulary]
        return self.head(self.blocks(self.token(ids) + self.position.weight[: ids.shape[1]]))


class Workload(Task):
    def __init__(self, name: str):
        self.name = name

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name == "gpt":
            return GPT()
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        if self.name == "gpt":
            ids = torch.randint(0, 256, (4096, 65), generator=generator)
            return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        return TensorDataset(
            torch.randn(65536, 64, generator=generator), torch.randint(0, 10, (65536,), generator=generator)
        )

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum"), y.numel())


MICRO_BATCH = {"mlp": 32, "gpt": 4}


def learning_rate(step: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / (LR_WARM_UP + 1)) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / MANY)))


def raw_loop(work: Workload, accumulation: int, world: World, log: Path) -> Iterator[None]:
    """The loop that a careful person writes. Yields after every block."""
    inner = work.model()
    model = inner if world.alone else DistributedDataParallel(inner, gradient_as_bucket_view=True)
    optimizer = work.optimizer(inner)
    x, y = work.data().tensors
    micro, step = MICRO_BATCH[work.name], 0
    lines = log.open("w")
    while True:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[world.rank :: world.size]
        pieces = iter(order.split(micro))
        for _ in range(len(order) // (micro * accumulation)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.zero_grad(set_to_none=True)
            for part in range(accumulation):
                rows = next(pieces)
                last = part == accumulation - 1
                with nullcontext() if last or world.alone else model.no_sync():  # pyrefly: ignore
                    loss = F.cross_entropy(model(x[rows]).flatten(0, -2), y[rows].flatten()) / accumulation
                    loss.backward()
            nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % BLOCK == 0:
                mean = loss.detach()
                if not world.alone:
                    dist.all_reduce(mean)
                lines.write(json.dumps({"step": step, "loss": mean.item() / world.size}) + "\n")
                lines.flush()
                yield


def resolved(work: Workload, accumulation: int, world: World, folder: Path) -> Resolved:
    micro = MICRO_BATCH[work.name]
    batch = micro * accumulation * world.size
    rate = {"schedule": "cosine", "warmup": LR_WARM_UP}
    values = settings(folder, BLOCK, global_batch=batch, micro_batch=micro, clip={"norm": 1.0}, lr=rate)
    return resolve([("argument", values)])


def worker(case: str, repeats: int, out: Path) -> None:
    name, shape = case.split(":")
    accumulation = int(shape.split("x")[1])
    work = Workload(name)
    with (
        context.start(World.from_env(), resolve([]).config) as runtime,
        tempfile.TemporaryDirectory() as folder,
    ):
        fit, own = (
            resolved(work, accumulation, runtime.world, out.parent / f"{kind}-{out.name}") for kind in ("fit", "own")
        )
        loops = {
            "raw": raw_loop(work, accumulation, runtime.world, Path(folder) / "raw.jsonl"),
            "fit": by_lockstep(work, fit, runtime, BLOCK, maintaining=True),
            "own": by_own_loop(work, own, runtime, BLOCK),
            "raw again": raw_loop(work, accumulation, runtime.world, Path(folder) / "raw2.jsonl"),
        }
        found = take_turns(loops, repeats).values()
        everybody = runtime.collectives.gather_json([[(t.seconds, t.cpu_seconds) for t in turns] for turns in found])
        if runtime.is_main:
            out.write_text(json.dumps(everybody))


def ratios(everybody: list, index: int, against: int) -> tuple[float, float]:
    """Median over turns of (wall ratio, CPU ratio), CPU time added over ranks."""
    wall, cpu = [], []
    for turn in range(len(everybody[0][0])):
        mine, other = ([rank[loop][turn] for rank in everybody] for loop in (index, against))
        wall.append(max(t[0] for t in mine) / max(t[0] for t in other))
        cpu.append(sum(t[1] for t in mine) / sum(t[1] for t in other))
    return statistics.median(wall), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{m}:{r}x{a}" for m, r, a in itertools.product(("mlp", "gpt"), (1, 2), (1, 4))]
    parser.add_argument("--cases", nargs="*", default=every, metavar="MODEL:RANKSxACCUMULATION")
    parser.add_argument("--repeats", type=int, default=60, help="turns of 50 steps for each loop")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help="write the ratios as JSON here")
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.repeats, options.out)

    columns = ("raw us/step", "fit cpu", "fit wall", "own loop cpu", "own loop wall", "raw/raw cpu")
    print(f"{'case':10}", *(f"{column:>13}" for column in columns))
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            out = Path(folder) / case.replace(":", "-")
            ranks = int(case.split(":")[1].split("x")[0])
            repeats = options.repeats if case.startswith("mlp") else max(6, options.repeats // 6)  # a GPT step is long
            on_ranks(ranks, __file__, "--worker", case, "--repeats", str(repeats), "--out", str(out))
            everybody = json.loads(out.read_text())
            wall, cpu = ratios(everybody, 1, 0)
            own_wall, own_cpu = ratios(everybody, 2, 0)
            noise = ratios(everybody, 3, 0)[1]
            raw = statistics.median(t[0] for t in everybody[0][0]) / BLOCK * 1e6
            numbers = (cpu, wall, own_cpu, own_wall, noise)
            print(f"{case:10} {raw:13.0f}", *(f"{number:13.3f}" for number in numbers), flush=True)
            table[case] = {
                "raw_us": raw,
                "cpu_ratio": cpu,
                "wall_ratio": wall,
                "own_cpu_ratio": own_cpu,
                "own_wall_ratio": own_wall,
                "noise": noise,
            }
    if options.out:
        options.out.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
