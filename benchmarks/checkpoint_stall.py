"""How long training waits for a checkpoint, and how long until it is committed, against torch.save in the loop.

    python benchmarks/checkpoint_stall.py                # 400 MB of model and AdamW moments, two ranks
    python benchmarks/checkpoint_stall.py --ranks 1 --dcp

Every rank is a process that computes (matrix products) all the time, also while its thread writes. The ways to save
take turns: torch.save of everything by rank 0, which the others wait for, without and with an fsync; Lockstep, where
each rank writes its half; and on request DCP's async_save. Without an fsync, torch.save is a copy to memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.storage import FileSystemStorage, Retention
from lockstep.checkpoint.writer import SaveContext
from lockstep.runtime.layout import LocalShard, shard_of
from lockstep.runtime.machine import available_cores

TOKEN = "be7c4"


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """The tensors of a transformer of this size with AdamW: a third each for weights and the two moments."""
    width = 512
    block = {"attention": (3 * width, width), "up": (4 * width, width), "down": (width, 4 * width), "norm": (width,)}
    state, size, layer = {}, 0, 0
    while size < megabytes << 20:
        for name, shape in block.items():
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                tensor = torch.randn(shape)
                state[f"{kind}.{layer}.{name}"] = tensor
                size += tensor.nbytes
        layer += 1
    return state


class Training:
    """Something for the cores to do; a step takes some milliseconds."""

    def __init__(self) -> None:
        self.a, self.b = torch.randn(2, 400, 400)

    def step(self) -> None:
        self.a = torch.tanh(self.a @ self.b)

    def until(self, done: Callable[[], bool]) -> float:
        began = time.perf_counter()
        while not done():
            self.step()
        return time.perf_counter() - began


def with_torch(state: dict[str, torch.Tensor], path: Path, rank: int, durable: bool) -> tuple[float, float]:
    began = time.perf_counter()
    if rank == 0:
        with open(path, "wb") as file:
            torch.save(state, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    dist.barrier()  # nobody goes on before it is written
    spent = time.perf_counter() - began
    return spent, spent


def with_lockstep(saver: Saver, step: int, mine: dict[str, LocalShard], training: Training) -> tuple[float, float]:
    began = time.perf_counter()
    saver.start(step, mine, {}, {"step": step}, changed_only_by_update={name for name in mine if "exp_avg" in name})
    stall = time.perf_counter() - began
    training.until(iter([False] * 20 + [True]).__next__)  # forward and backward of the next step
    waited = time.perf_counter()
    saver.wait_for_copy()  # before its update
    stall += time.perf_counter() - waited
    reports: list[Any] = []
    training.until(lambda: bool(reports.extend(saver.take_ended(0)) or reports))
    assert reports[0].error is None, reports[0]
    return stall, stall + reports[0].write_s  # committed; deleting the one before comes after that


def with_dcp(state: dict[str, torch.Tensor], folder: Path, training: Training, step: int) -> tuple[float, float]:
    began = time.perf_counter()
    future = dcp.async_save(state, checkpoint_id=folder / f"dcp-{step}")
    stall = time.perf_counter() - began
    training.until(future.done)
    future.result()
    return stall, time.perf_counter() - began


def work(rank: int, options: argparse.Namespace, root: Path, results: Any) -> None:
    torch.set_num_threads(max(1, available_cores() // options.ranks))
    torch.manual_seed(0)
    address = f"file://{root / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.ranks)
    state, training = make_state(options.megabytes), Training()
    storage = FileSystemStorage(root / "checkpoints")
    saver = Saver(SaveContext(storage, rank, options.ranks, TOKEN, Retention(last=1)))
    mine = {name: shard_of(tensor) for name, tensor in list(state.items())[rank :: options.ranks]}
    saver.prepare(mine)
    ways = {
        "torch.save": lambda step: with_torch(state, root / f"everything-{step}.pt", rank, durable=False),
        "and fsync": lambda step: with_torch(state, root / f"durable-{step}.pt", rank, durable=True),
        "lockstep": lambda step: with_lockstep(saver, step, mine, training),
    }
    if options.dcp:
        ways["dcp async"] = lambda step: with_dcp(state, root, training, step)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(-1, options.turns):  # one turn to warm up
        for name, way in ways.items():
            if rank == 0:  # all write into fresh files, and keep the last good one until the new one is there
                for kind in ("everything", "durable"):
                    (root / f"{kind}-{turn}.pt").unlink(missing_ok=True)
                shutil.rmtree(root / f"dcp-{turn}", ignore_errors=True)
                os.sync()  # nobody pays for what another has left to be written
            dist.barrier()
            training.until(iter([False] * 20 + [True]).__next__)
            for tensor in state.values():
                tensor[0] += 1
            found = way(turn + 2)
            dist.barrier()
            if turn >= 0:
                times[name].append(found)
    saver.close()
    everyone: list[Any] = [None] * options.ranks
    dist.all_gather_object(everyone, times)
    if rank == 0:
        size = sum(tensor.nbytes for tensor in state.values())
        turns = {name: list(map(slowest, zip(*(times[name] for times in everyone), strict=True))) for name in ways}
        results.put((size, turns))
    dist.barrier()
    dist.destroy_process_group()


def slowest(turn: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    """Of one turn on all ranks: training waits for the last."""
    return max(stall for stall, _ in turn), max(total for _, total in turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--dcp", action="store_true", help="measure DCP's async_save too")
    parser.add_argument("--folder", type=Path, help="the disk to write to (default: the one of temporary files)")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = context.Queue()
        ranks = [context.Process(target=work, args=(r, options, Path(folder), results)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        size, times = results.get(timeout=600)
        for process in ranks:
            process.join()
    print(f"{size / 1e6:.0f} MB, {options.ranks} ranks, {options.turns} turns, medians (and the slowest turn)")
    base = statistics.median(total for _, total in times["torch.save"])
    for name, turns in times.items():
        stalls, totals = zip(*turns, strict=True)
        stall, total = statistics.median(stalls), statistics.median(totals)
        print(
            f"{name:12} stall {stall:7.3f} s ({max(stalls):6.3f}) = {stall / base:5.2f} of torch.save   "
            f"done after {total:6.2f} s ({max(totals):5.2f}) = {total / base:5.2f}"
        )


if __name__ == "__main__":
    main()
