"""What exact mode costs against plain ddp: the time of a step, and the bytes that a rank sends for its gradients.

    python benchmarks/exact_cost.py                     # 2 and 4 ranks, 25 MB of gradients, one micro-batch per rank
    python benchmarks/exact_cost.py --ranks 2 --turns 20

Both runs live in the same processes and take turns of a few steps, so that noise hits them alike. The same model, data,
AdamW and clipping; a micro-batch per rank, so that nothing is accumulated. `ratio` is against the mean of two plain
runs, and `plain/plain` is one of them against the other: the noise of the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainings import on_ranks
from turns import MANY, by_lockstep, median_ratio, settings, take_turns

from lockstep import Loss, Task
from lockstep.config import resolve
from lockstep.runtime import context
from lockstep.runtime.world import World

WIDTH, LAYERS, MICRO_BATCH, BLOCK = 1024, 6, 64, 4


class Layers(Task):
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def data(self) -> TensorDataset:
        return TensorDataset(torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss((model(batch[0]) - batch[0]).square().mean(1).sum(), len(batch[0]))


def loop(exact: bool, runtime: context.Runtime, folder: Path) -> Iterator[int]:
    """A run, stopped after every block of steps to let the others run. Yields the bytes of its gradients."""
    values = settings(
        folder, log_every=MANY, exact=exact, global_batch=MICRO_BATCH * runtime.world.size, micro_batch=MICRO_BATCH,
        clip={"norm": 1.0}, checkpoint={"minutes": None},
    )  # fmt: skip
    blocks = by_lockstep(Layers(), resolve([("argument", values)]), runtime, BLOCK)
    while True:
        torch.use_deterministic_algorithms(exact)  # what `exact` asks for in a process of its own
        yield sum(p.nbytes for p in next(blocks).driver.parameters)


def count_bytes() -> list[int]:
    """From now on, the bytes of everything that goes to one other rank."""
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def counting(transfers: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(each.tensor.nbytes for each in transfers if each.op is dist.isend)
        return original(transfers)

    dist.batch_isend_irecv = counting
    return sent


def worker(turns: int, out: Path) -> None:
    with context.start(World.from_env(), resolve([]).config) as runtime:
        sent = count_bytes()
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]
        kinds = {"plain": False, "exact": True, "again": False}
        loops = {name: loop(exact, runtime, out.parent / f"{out.name}-{name}") for name, exact in kinds.items()}
        take_turns(loops, turns=0)  # warm-up
        sent.clear()
        taken = take_turns(loops, turns, warm_up=0, meet=partial(runtime.collectives.gather_json, None))
        found = {
            "times": {name: [turn.seconds / BLOCK for turn in each] for name, each in taken.items()},
            "sent": sum(sent) / (turns * BLOCK),
            "gradient": taken["exact"][-1].value,
        }
        everybody = runtime.collectives.gather_json(found)
        if runtime.is_main:
            out.write_text(json.dumps(everybody))
        runtime.collectives.final_barrier()
        os._exit(0)  # the runs are left as they are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--turns", type=int, default=30, help=f"turns of {BLOCK} steps for each run")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.turns, options.worker)
    head = ("ranks", "plain ms", "exact ms", "ratio", "plain/plain", "sent/gradient", "2(N-1)/N")
    print("{:>5} {:>9} {:>9} {:>7} {:>12} {:>14} {:>9}".format(*head))
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            out = Path(folder) / str(ranks)
            on_ranks(ranks, __file__, "--worker", str(out), "--turns", str(options.turns))
            everybody = json.loads(out.read_text())
            plain, exact, again = (
                [max(t) for t in zip(*(r["times"][name] for r in everybody), strict=True)]
                for name in ("plain", "exact", "again")
            )
            ratio = median_ratio(exact, ((a + b) / 2 for a, b in zip(plain, again, strict=True)))
            noise = median_ratio(again, plain)
            sent = everybody[0]["sent"] / everybody[0]["gradient"]
            print(
                f"{ranks:5} {1e3 * statistics.median(plain):9.1f} {1e3 * statistics.median(exact):9.1f} {ratio:7.3f} "
                f"{noise:12.3f} {sent:14.3f} {2 * (ranks - 1) / ranks:9.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
