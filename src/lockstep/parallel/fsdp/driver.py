"""Parameters, gradients and optimizer state cut over the ranks: torch's FSDP2 (`fully_shard`), driven for sums.

fsdp         every block is gathered for its forward and its backward, and let go again
fsdp-grads   parameters stay whole from the forward to the end of the backward; the rest is cut
hsdp         cut inside a group of ranks, copied between groups
"""

from __future__ import annotations

import socket
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lockstep.config import FSDPConfig, RunConfig
from lockstep.errors import UserError
from lockstep.parallel.blocks import find_blocks, without_shared
from lockstep.parallel.driver import ShardedDriver
from lockstep.parallel.fsdp.same_parts import END, SameParts
from lockstep.parallel.mesh import Axes
from lockstep.parallel.meta_init import fill
from lockstep.parallel.tensor.driver import add_copies, agree_on_plain
from lockstep.precision import BF16_STORED, store
from lockstep.runtime.context import Runtime, device_name
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.machine import available_memory
from lockstep.runtime.world import World

CUT = ("fsdp", "fsdp-grads", "hsdp")  # the strategies of this module


class FSDPDriver(ShardedDriver):
    """Every micro-batch's gradients are cut at once and added to this rank's part: no full-size copy is kept."""

    def __init__(
        self,
        model: nn.Module,
        strategy: str,
        config: FSDPConfig,
        blocks: list[str] | None,
        runtime: Runtime,
        axes: Axes | None = None,
        seed: int = 0,
        precision: str = "fp32",
    ):
        """`axes`: the layers have been cut along tp before, and are now cut once more, along dp. `seed`: of the
        weights, if the model has none yet. `precision`: how these are stored."""
        self._parts = axes.along("tp") if axes else None
        offload: OffloadPolicy = CPUOffloadPolicy() if config.offload else OffloadPolicy()
        mesh = axes.devices["dp"] if axes else make_mesh(strategy, config, runtime)
        self._keeps = strategy == "fsdp-grads"
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=not self._keeps, offload_policy=offload)
        if precision in BF16_STORED:  # gradients of bfloat16 parameters are added in float32, and rounded once
            shard = partial(shard, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))

        def cut(module: nn.Module) -> None:
            store(module, precision)
            shard(module, ignored_params=set(scalars(module)))

        found = find_blocks(model, blocks)
        parts = without_shared(found, model)
        empty = any(p.is_meta for p in model.parameters())
        if empty:
            fill(model, parts, cut, seed, runtime)
        else:
            if axes is None:
                _agree_on_start(model, runtime)
            for block in parts:
                cut(block)
        cut(model)
        prepare(model)
        super().__init__(model, runtime)
        self._copies = axes.along("dp") if axes else runtime.collectives
        self._uncut = [p for p in scalars(model) if p.requires_grad]
        self._same = SameParts(model, runtime)
        self.facts = tell_of_blocks(len(found), len(parts))
        if empty:
            self.sync_buffers()  # each rank has made its own

    def begin(self) -> None:
        super().begin()
        self._same.steps += 1

    def backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        torch.autograd.backward(total, start)
        if word is not None:
            self._same.compare(END)
            self.add_gradients()
            self._exchange(word)

    def add_gradients(self) -> None:
        add_copies(self._uncut, self._copies)
        if self._parts:
            agree_on_plain(self.parameters, self._parts)

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        """What is gathered stays, if there is room for it: every word of a text would gather the whole model anew."""
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        stays = self._keeps or _has_room(self.model, self.runtime)
        for module in modules if stays else []:
            module.set_reshard_after_forward(False, recurse=False)
        try:
            with super().many_forwards():
                yield None if stays else "every forward gathers the model anew: twice its parameters do not fit"
        finally:
            for module in modules:
                module.set_reshard_after_forward(not self._keeps, recurse=False)
                module.reshard()


def _has_room(model: nn.Module, runtime: Runtime) -> bool:
    """For all parameters on every rank, and as much again for the rest. All ranks say the same."""
    needed = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    every = runtime.collectives.gather_json(_free_memory(runtime.device))
    sharing = Counter(where for where, _ in every)
    return all(needed * sharing[where] <= free for where, free in every)


def _free_memory(device: torch.device) -> tuple[str, float]:
    """Which memory, and how much of it this process could still take if it were alone there."""
    if device.type != "cuda":
        return socket.gethostname(), available_memory()
    free, there = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * there - torch.cuda.memory_allocated(device)
    return device_name(device), min(free + unused, allowed)


def prepare(model: nn.Module) -> None:
    """What has been cut, for training: gradients are sums, and weights stay where torch gathers them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # torch would divide by the number of ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _stay  # pyrefly: ignore[bad-assignment]
            # cuDNN copies the weights in every call now, and would advise to move them.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")


def _stay() -> None:
    """Instead of moving the weights of a recurrent layer together, as it does on a GPU when they are other tensors than
    before. torch would go on gathering into their old place, and the layer would compute with those of the first
    step."""


def tell_of_blocks(found: int, alone: int) -> dict[str, str]:
    """For the first screen, if not all of the blocks `found` are gathered `alone`."""
    shared = f"{found - alone} of {found} blocks share a parameter with others"
    return {"fsdp": f"{shared}: they are gathered together with the rest"} if alone < found else {}


def scalars(model: nn.Module) -> list[nn.Parameter]:
    """Single numbers, which have no dimension to cut them along: they stay whole on every rank."""
    return [p for p in model.parameters() if p.dim() == 0]


def check_scalars(model: nn.Module, config: RunConfig) -> None:
    """Where they cannot be added up beside what is cut."""
    name = next((name for name, p in model.named_parameters() if p.dim() == 0), None)
    with_it = "exact=true" if config.exact else "fsdp.offload=true" if config.fsdp.offload else "mesh.pp"
    if name is not None and (config.exact or config.fsdp.offload or (config.mesh.pp or 1) > 1):
        raise UserError(
            f"strategy={config.strategy} with {with_it}",
            f"the parameter {name!r}, a single number without a dimension to cut it along",
            "make it a vector of one number, torch.zeros(1) for instance; or type strategy=ddp",
        )


def check_offload(config: FSDPConfig, runtime: Runtime) -> None:
    if config.offload and (runtime.device.type == "cpu" or runtime.world.alone):
        alone = runtime.device.type != "cpu"
        raise UserError(
            "fsdp.offload=true",
            "one rank: nothing is cut" if alone else "a CPU, where everything lies in the host's memory already",
            "start two ranks: --nproc 2" if alone else "leave fsdp.offload out",
        )


def count_copies(config: FSDPConfig, world: World) -> int:
    """Groups of ranks with a whole copy each, under hsdp."""
    return config.replicas or max(2, world.size // world.local_size)


def make_mesh(strategy: str, config: FSDPConfig, runtime: Runtime) -> DeviceMesh:
    kind, size = runtime.device.type, runtime.world.size
    if strategy != "hsdp":
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    copies = count_copies(config, runtime.world)
    if size % copies:
        divisors = [n for n in range(2, size + 1) if size % n == 0]
        raise UserError(
            f"strategy=hsdp with {copies} copies of the model on {size} ranks",
            f"{size} is not a multiple of {copies}",
            f"type fsdp.replicas={divisors[0]}, or strategy=fsdp" if divisors else "type strategy=ddp",
        )
    return init_device_mesh(kind, (copies, size // copies), mesh_dim_names=("replicate", "shard"))


def _agree_on_start(model: nn.Module, runtime: Runtime) -> None:
    """Every rank begins with rank 0's weights, as under DDP; what is frozen must be equal by itself."""
    runtime.collectives.broadcast_([p.detach() for p in model.parameters() if p.requires_grad])
    runtime.collectives.broadcast_(list(model.buffers()))
