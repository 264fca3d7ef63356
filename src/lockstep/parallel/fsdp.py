"""Parameters, gradients and optimizer state cut over the ranks: torch's FSDP2 (`fully_shard`), driven for sums.

fsdp         every block is gathered for its forward and its backward, and let go again
fsdp-grads   parameters stay whole from the forward to the end of the backward; the rest is cut
hsdp         cut inside a group of ranks, copied between groups
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lockstep.config import FSDPConfig
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.drivers import trainable
from lockstep.parallel.layout import squared_lengths
from lockstep.parallel.word import LENGTH, Word, WordCodec
from lockstep.runtime.context import Runtime


class FSDPDriver:
    gradient_factor = 1.0  # gradients are summed, and never divided
    in_step, replicated = True, False

    def __init__(self, model: nn.Module, strategy: str, config: FSDPConfig, runtime: Runtime):
        self.model = self.call = model
        self.runtime = runtime
        _agree_on_start(model, runtime)
        offload: OffloadPolicy = CPUOffloadPolicy() if config.offload else OffloadPolicy()
        mesh, keep = make_mesh(strategy, config, runtime), strategy == "fsdp-grads"
        for block in find_blocks(model, config.blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep, offload_policy=offload)
        fully_shard(model, mesh=mesh, reshard_after_forward=not keep, offload_policy=offload)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
        self.names, self.parameters = trainable(model)
        self.codec = WordCodec(runtime.device, torch.float64)

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, last: bool) -> None:
        """Every micro-batch's gradients are cut at once and added to this rank's part: no full-size copy is kept."""

    def backward(self, total: Tensor, start: Tensor, word: Word | None) -> None:
        torch.autograd.backward(total, start)
        if word is not None:
            self._exchange(word)

    def word(self) -> Tensor:
        return self._word

    def norms(self, grads: list[Tensor]) -> Tensor:
        return self._squared.sqrt()

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        squared = squared_lengths(tensors).to(self.runtime.device)
        return list(self.runtime.collectives.sum_(squared).sqrt().unbind())

    def sync_buffers(self) -> None:
        self.runtime.collectives.broadcast_(list(self.model.buffers()))

    def _exchange(self, word: Word) -> None:
        """The word and the gradients' squared lengths, in one sum."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        packed = self.codec.pack(word, times=1.0)
        everything = torch.cat([packed, squared_lengths(grads).to(packed.device)])
        self.runtime.collectives.sum_(everything)
        self._word, self._squared = everything[:LENGTH], everything[LENGTH:]


def make_mesh(strategy: str, config: FSDPConfig, runtime: Runtime) -> DeviceMesh:
    kind, size = runtime.device.type, runtime.world.size
    if strategy != "hsdp":
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    copies = config.replicas or max(2, size // runtime.world.local_size)
    return init_device_mesh(kind, (copies, size // copies), mesh_dim_names=("replicate", "shard"))


def _agree_on_start(model: nn.Module, runtime: Runtime) -> None:
    """Every rank begins with rank 0's weights, as under DDP; what is frozen must be equal by itself."""
    runtime.collectives.broadcast_([p.detach() for p in model.parameters() if p.requires_grad])
    runtime.collectives.broadcast_(list(model.buffers()))
