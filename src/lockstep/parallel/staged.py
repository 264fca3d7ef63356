"""A pipeline as a Driver: every rank holds the tensors of its stages only, and of nothing else but the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.drivers import CutDriver
from lockstep.parallel.mesh import Axes
from lockstep.parallel.pipeline import SCHEDULES, Pipeline
from lockstep.parallel.stages import keep_only, whereabouts
from lockstep.parallel.staging import make_stages
from lockstep.parallel.word import LENGTH, Word
from lockstep.precision import choose
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.world import World


class StagedDriver(CutDriver):
    """Stages along pp, copied along dp. A weight that two stages use (a tied embedding) is held by both; its two
    gradients are added, so that both make the same step."""

    def __init__(
        self,
        model: nn.Module,
        task: Any,
        config: RunConfig,
        axes: Axes,
        runtime: Runtime,
        compiled: bool,
        data: Callable[[], Any] | None,
    ):
        """`model` is still whole, and on the CPU. `data` gives the samples, two of which may be looked at."""
        _check(config, axes, runtime, compiled)
        self.mesh = axes.mesh
        self._stages, self._copies = axes.along("pp"), axes.along("dp")
        ranks = self.mesh.sizes["pp"]
        per_rank = config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1]
        chunks, used = make_stages(model, task, config, data, ranks * per_rank, runtime.device)
        places = {name: {n % ranks for n in numbers} for name, numbers in whereabouts(model, used).items()}
        here = self.mesh.coordinate("pp")
        _agree_on_start(model, runtime)
        changing = {id(b) for chunk in chunks[here::ranks] for b in chunk.changing()}
        real = {name for name, b in model.named_buffers(remove_duplicate=False) if id(b) in changing}
        keep_only(model, lambda name: not places[name] or here in places[name] or name in real, runtime.device)
        super().__init__(model, runtime)
        self.holders = {name: self._ranks_at(used) for name, used in places.items() if 0 < len(used) < ranks}
        self._held = [here in places[name] for name in self.names]
        self._counts = [here == min(places[name]) for name in self.names]  # of several holders, one adds its length
        self._shared = self._share(places)
        self._flow = Pipeline(model, chunks, config.pp.schedule, self._stages, choose(config, runtime.device).autocast)
        if compiled:
            for chunk in self._flow.mine.values():
                chunk.compile()
        self.pipeline = self
        self.run, self.forward = self._flow.run, self._flow.forward

    def backward(self, total: Tensor, start: Tensor, word: Word | None) -> None:
        raise AssertionError("a pipeline runs all micro-batches of a step at once")

    def exchange(self, word: Word) -> None:
        """After the last micro-batch: the word and who has used what; then the gradients, then their lengths."""
        used = [held and p.grad is not None for held, p in zip(self._held, self.parameters, strict=True)]
        packed = self.codec.pack(word, times=1.0)
        everything = torch.cat([packed, torch.tensor(used, dtype=torch.float64).to(packed.device)])
        self.runtime.collectives.sum_(everything)
        self._word, users = everything[:LENGTH], everything[LENGTH:].tolist()
        self._add_gradients([count > 0 for count in users])
        squared = torch.zeros(len(self.names), dtype=torch.float64, device=self.runtime.device)
        for place, parameter in enumerate(self.parameters):
            if self._counts[place] and parameter.grad is not None:
                squared[place] = parameter.grad.detach().double().square().sum()
        self._squared = self._stages.sum_(squared)

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_norm(tensors)) if tensors else []  # what a stage has, it has whole

    def sync_buffers(self) -> None:
        if self._copies.world.alone:
            return
        elsewhere = self.elsewhere
        self._copies.broadcast_([b for name, b in self.model.named_buffers() if name not in elsewhere])

    @property
    def elsewhere(self) -> frozenset[str]:
        """The parameters and buffers that this rank has only the names of."""
        return frozenset(name for name, ranks in self.holders.items() if self.runtime.world.rank not in ranks)

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself, from a rank that holds it. All ranks must call this."""
        if name not in self.holders:
            return tensor
        absent = self.runtime.world.rank not in self.holders[name]
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if absent else tensor.contiguous()
        self.runtime.collectives.broadcast_([found], source=self.holders[name][0])
        return found

    def _add_gradients(self, live: list[bool]) -> None:
        """Over the copies first, and only then between the stages that share a weight: like this all of them hold the
        same bits. What nobody has used keeps no gradient."""
        mine = [p for p, held, used in zip(self.parameters, self._held, live, strict=True) if held and used]
        for p in mine:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        _add(mine, self._copies)
        used_names = {name for name, used in zip(self.names, live, strict=True) if used}
        parameters = dict(zip(self.names, self.parameters, strict=True))
        for names, owners in self._shared:
            _add([parameters[name] for name in names if name in used_names], owners)

    def _share(self, places: dict[str, set[int]]) -> list[tuple[list[str], Collectives]]:
        """The trainable parameters that this rank shares with other stages. All ranks must make all groups."""
        found = []
        sets = dict.fromkeys(tuple(sorted(places[name])) for name in self.names if len(places[name]) > 1)
        for stages in sets:
            names = [name for name in self.names if tuple(sorted(places[name])) == stages]
            for copy in range(self.mesh.sizes["dp"]):
                ranks = [stage * self.mesh.sizes["dp"] + copy for stage in stages]
                group = dist.new_group(ranks)
                if isinstance(group, dist.ProcessGroup) and self.runtime.world.rank in ranks:
                    place = World(ranks.index(self.runtime.world.rank), len(ranks))
                    found.append((names, Collectives(place, self.runtime.device, self.runtime.pulse, group)))
        return found

    def _ranks_at(self, stages: set[int]) -> tuple[int, ...]:
        copies = self.mesh.sizes["dp"]
        return tuple(stage * copies + copy for stage in sorted(stages) for copy in range(copies))


def _add(parameters: list[nn.Parameter], group: Collectives) -> None:
    """One sum for each number format."""
    if group.world.alone:
        return
    for dtype in dict.fromkeys(p.dtype for p in parameters):  # in one order on all ranks
        some = [p for p in parameters if p.dtype == dtype]
        flat = group.sum_(torch.cat([p.grad.flatten() for p in some if p.grad is not None]))
        for p, part in zip(some, flat.split([p.numel() for p in some]), strict=True):
            p.grad = part.view_as(p)


def _agree_on_start(model: nn.Module, runtime: Runtime) -> None:
    """Rank 0's weights, everywhere; one by one, so that a device never holds the whole model."""
    for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        moved = tensor.detach().to(runtime.device)
        runtime.collectives.broadcast_([moved])
        tensor.detach().copy_(moved)


def _check(config: RunConfig, axes: Axes, runtime: Runtime, compiled: bool) -> None:
    pp = f"mesh.pp={axes.mesh.sizes['pp']}"
    if config.strategy not in ("ddp", "pp") or axes.mesh.sizes["tp"] > 1:
        tp = axes.mesh.sizes["tp"] > 1
        other = f"mesh.tp={axes.mesh.sizes['tp']}" if tp else f"strategy={config.strategy}"
        fix = "leave mesh.tp out" if tp else "type strategy=pp"
        raise UserError(
            f"{pp} with {other}", "stages that are cut once more", f"{fix}; mesh.dp makes copies of the stages"
        )
    if runtime.device.type == "cuda" and runtime.backend == "gloo":
        raise UserError(
            f"{pp} on GPUs over gloo",
            "gloo, which cannot send a GPU's tensors from one rank to another",
            "give every rank a GPU of its own (nccl), or type device=cpu",
        )
    if compiled and config.pp.schedule == "zero-bubble":
        raise UserError(
            f"pp.schedule=zero-bubble with compile={str(config.compile).lower()}",
            "a backward in two halves, which torch cannot take from a compiled module",
            "type compile=false, or pp.schedule=1f1b",
        )
