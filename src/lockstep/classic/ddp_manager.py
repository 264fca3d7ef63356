"""A process group, wrapped models and sharded batches, for a training loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from lockstep.classic.process_group import GroupMembership, check_announced, current_world, time_limit
from lockstep.data.samplers import make_sampler
from lockstep.data.windows import rank_range
from lockstep.errors import UserError
from lockstep.parallel.ddp.torch_private import BUFFERS_OPTION, free_group_last
from lockstep.runtime.context import choose_device
from lockstep.runtime.world import World

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class DDPManager:
    """One process, until `initialize` finds other ranks. The loop, the loss and the optimizer stay yours.

    A wrapped model leaves the MEAN of the ranks' gradients, which is right for mean losses over batches of one size.
    """

    def __init__(self) -> None:
        self.world = World()
        self.device = torch.device("cpu")
        self.backend = "none"
        self._membership = GroupMembership()

    def initialize(self, backend: str = "nccl", timeout_mins: float = 30) -> bool:
        """Join the ranks that the environment announces. Return whether there are several.

        `nccl` means gloo where ranks share a GPU or have none.
        """
        limit = time_limit(timeout_mins)

        # Train alone only if nothing announces other ranks. A process group that the script has joined counts.
        if not dist.is_initialized():
            check_announced()

        self.world = current_world()
        self.device = choose_device("auto", self.world)
        self.backend = self._membership.join(self.world, self.device, backend, limit)
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
        """Move a model to the device and wrap it in DDP if it has something to train; a frozen one is only moved."""
        model.to(self.device)
        if self.world.alone:
            return model

        return wrap_in_ddp(model, find_unused_parameters, broadcast_buffers, gradient_as_bucket_view)

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
        """Return this rank's batches of `batch_size`: each sample goes to one rank, in a new order every epoch."""
        return DataLoader(
            dataset,
            batch_sampler=RankBatches(len(dataset), batch_size, self.world, shuffle, drop_last, seed),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=self.device.type == "cuda",
        )

    def set_epoch(self, loader: DataLoader, epoch: int) -> None:
        """Set the epoch of the next pass over `loader`, on resume. Otherwise every pass advances it by itself."""
        if not isinstance(loader.batch_sampler, RankBatches):
            raise UserError(
                "set_epoch(loader) got a loader that get_dataloader did not make", "", "make it with get_dataloader"
            )

        loader.batch_sampler.epoch = epoch

    def all_reduce(self, tensor: Tensor, op: str | dist.ReduceOp.RedOpType = "mean") -> Tensor:
        """Reduce `tensor` over all ranks in place: mean, sum, max or min, or one of torch's ReduceOps."""
        if isinstance(op, str) and op not in (*OPERATIONS, "mean"):
            raise UserError(f"all_reduce(op={op!r}) does not exist", "", f"use mean, {', '.join(OPERATIONS)}")

        mean = op in ("mean", dist.ReduceOp.AVG)
        if mean and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UserError(
                f"a tensor of {tensor.dtype} has no mean", "", "pass tensor.float(), or all_reduce(tensor, 'sum')"
            )

        if self.world.alone:
            return tensor

        # Not every backend has a mean: it is the sum, divided.
        if mean:
            reduction = dist.ReduceOp.SUM
        else:
            reduction = OPERATIONS[op] if isinstance(op, str) else op

        dist.all_reduce(tensor, reduction)
        return tensor.div_(self.world.size) if mean else tensor

    def barrier(self) -> None:
        if not self.world.alone:
            dist.barrier()

    def cleanup(self) -> None:
        """Leave the process group together with the other ranks."""
        self._membership.leave(self.world, self.device)


def wrap_in_ddp(
    model: nn.Module, find_unused_parameters: bool, broadcast_buffers: bool, gradient_as_bucket_view: bool
) -> nn.Module:
    """Return the model under torch's DDP; a frozen one as it is, since DDP refuses to wrap it."""
    if not any(p.requires_grad for p in model.parameters()):
        return model

    # The name of DDP's argument for buffers depends on the version of torch.
    options: dict[str, Any] = {
        "find_unused_parameters": find_unused_parameters,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        BUFFERS_OPTION: broadcast_buffers,
    }
    ddp = DistributedDataParallel(model, **options)
    free_group_last(ddp)
    return ddp


class RankBatches(Sampler[list[int]]):
    """One rank's batches. An epoch's order, the same for all ranks, is split into global batches, and these by rank."""

    def __init__(self, length: int, batch_size: int, world: World, shuffle: bool, drop_last: bool, seed: int):
        self.order = make_sampler(length, seed, shuffle)
        self.length = length
        self.world = world

        # Samples of all ranks in one step.
        self.batch = batch_size * world.size
        self.drop_last = drop_last

        self.epoch = 0

        rest = length % self.batch
        if drop_last and length < self.batch:
            raise UserError(
                f"{length} samples fill no batch of batch_size={batch_size} on {world.size} ranks",
                "",
                "choose a smaller batch_size, or drop_last=False",
            )

        # A rank without a batch would leave the others waiting in their all-reduce.
        if not drop_last and 0 < rest < world.size:
            raise UserError(
                f"the last batch has {rest} samples for {world.size} ranks, so some rank would get none",
                f"{length} samples, batch_size={batch_size}, drop_last=False",
                "choose another batch_size, or drop_last=True",
            )

    def __len__(self) -> int:
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        # Every pass advances the epoch by itself: set_epoch cannot be forgotten.
        epoch = self.epoch
        self.epoch += 1
        for number in range(len(self)):
            # Every rank gets a contiguous range of the global batch; the last one may be smaller.
            start = number * self.batch
            shard = rank_range(min(self.batch, self.length - start), self.world.rank, self.world.size)
            yield self.order.ids(epoch, start + shard.start, start + shard.stop).tolist()


def log_gpu_memory(device: torch.device | None = None) -> str:
    """Print and return what this process holds on its GPU."""
    text = "GPU memory: no GPU here"
    if torch.cuda.is_available():
        held = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "highest": torch.cuda.max_memory_allocated(device),
        }
        text = "GPU memory: " + ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in held.items())

    print(text, flush=True)
    return text
