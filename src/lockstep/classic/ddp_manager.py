"""A process group, wrapped models and dealt batches, for a training loop of plain PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from lockstep.classic.distributed_config import world_size_not_set
from lockstep.data.samplers import make_sampler
from lockstep.data.shard import deal
from lockstep.errors import UserError
from lockstep.parallel.ddp.driver import BUFFERS_OPTION
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import choose_device, join
from lockstep.runtime.world import World

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class DDPManager:
    """One process until `initialize` finds out otherwise. The loop, the loss and the optimizer stay yours: a wrapped
    model leaves the MEAN of the ranks' gradients, which is right for mean losses over batches of one size."""

    def __init__(self) -> None:
        self.world, self.device, self.backend = World(), torch.device("cpu"), "none"
        self._joined = False

    def initialize(self, backend: str = "nccl", timeout_mins: float = 30) -> bool:
        """Join the ranks that the environment announces. Whether there are several. It never makes up a WORLD_SIZE,
        and never goes on alone after a failure. `nccl` means gloo where ranks have no GPU of their own."""
        if "WORLD_SIZE" not in os.environ and {"RANK", "LOCAL_RANK"} & os.environ.keys():
            raise world_size_not_set(os.environ)
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            self.world = World.from_env() if World.launched() else World(rank, size, rank, size)
        else:
            self.world = World.from_env()
        self.device = choose_device("auto", self.world)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            self.backend = dist.get_backend()
        else:
            asked, limit = "gloo" if backend == "gloo" else "auto", timedelta(minutes=timeout_mins)
            self.backend = join(self.world, self.device, asked=asked, timeout=limit)
            self._joined = self.backend != "none"
        return not self.world.alone

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def is_main(self) -> bool:
        """Whether this process logs and saves."""
        return self.world.rank == 0

    def wrap_model(
        self,
        model: nn.Module,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
    ) -> nn.Module:
        """On the device, and under DDP if it has something to train; a frozen model is only moved."""
        model.to(self.device)
        if self.world.alone or not any(p.requires_grad for p in model.parameters()):
            return model
        options: dict[str, Any] = {BUFFERS_OPTION: broadcast_buffers, "find_unused_parameters": find_unused_parameters}
        return DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view, **options)

    def get_dataloader(
        self,
        dataset: Any,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> DataLoader:
        """Batches of this rank: `batch_size` samples each, every sample to one rank only, a new order every epoch."""
        batches = RankBatches(len(dataset), batch_size, self.world, shuffle, drop_last, seed)
        pinned = self.device.type == "cuda"
        return DataLoader(
            dataset, batch_sampler=batches, num_workers=num_workers, collate_fn=collate_fn, pin_memory=pinned
        )

    def set_epoch(self, loader: DataLoader, epoch: int) -> None:
        """The next pass over `loader` is epoch `epoch`: on resume. Passes count themselves otherwise."""
        if not isinstance(loader.batch_sampler, RankBatches):
            raise UserError("set_epoch(loader)", "a loader that is not ours", "make it with get_dataloader")
        loader.batch_sampler.epoch = epoch

    def all_reduce(self, tensor: Tensor, op: str | dist.ReduceOp.RedOpType = "mean") -> Tensor:
        """`tensor` of all ranks together, in place: mean, sum, max or min, or one of torch's ReduceOps."""
        if isinstance(op, str) and op not in (*OPERATIONS, "mean"):
            raise UserError(f"all_reduce(op={op!r})", "no such operation", f"type mean, {', '.join(OPERATIONS)}")
        if self.world.alone:
            return tensor
        dist.all_reduce(tensor, OPERATIONS.get(op, dist.ReduceOp.SUM) if isinstance(op, str) else op)
        return tensor.div_(self.world.size) if op == "mean" else tensor

    def barrier(self) -> None:
        if not self.world.alone:
            dist.barrier()

    def cleanup(self) -> None:
        """Leave together."""
        if self._joined:
            Collectives(self.world, self.device).farewell()
            dist.destroy_process_group()
            self._joined = False


class RankBatches(Sampler[list[int]]):
    """One rank's batches. An epoch cuts one order, the same for all ranks, into global batches, and deals each."""

    def __init__(self, length: int, batch_size: int, world: World, shuffle: bool, drop_last: bool, seed: int):
        self.order, self.length, self.world = make_sampler(length, seed, shuffle), length, world
        self.batch, self.drop_last, self.epoch = batch_size * world.size, drop_last, 0
        rest = length % self.batch
        if drop_last and length < self.batch:
            raise UserError(
                f"batch_size={batch_size} on {world.size} ranks",
                f"{length} samples, which fill no batch for all of them",
                "choose a smaller batch_size, or drop_last=False",
            )
        if not drop_last and 0 < rest < world.size:
            raise UserError(
                f"batch_size={batch_size} on {world.size} ranks, drop_last=False",
                f"a last batch of {rest} samples: some rank would get none, and the others would wait for it",
                "choose another batch_size, or drop_last=True",
            )

    def __len__(self) -> int:
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for number in range(len(self)):
            start, stop = number * self.batch, min((number + 1) * self.batch, self.length)
            mine = deal(stop - start, self.world.rank, self.world.size)
            yield self.order.ids(epoch, start + mine.start, start + mine.stop).tolist()


def log_gpu_memory(device: torch.device | None = None) -> str:
    """What this process holds on its GPU, printed and returned."""
    if not torch.cuda.is_available():
        text = "GPU memory: no GPU here"
    else:
        held, kept, most = torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated
        found = {"allocated": held(device), "reserved": kept(device), "highest": most(device)}
        text = "GPU memory: " + ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in found.items())
    print(text, flush=True)
    return text
