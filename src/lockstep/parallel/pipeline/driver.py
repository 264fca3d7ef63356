"""A pipeline as a Driver: every rank holds the tensors of its stages only, and of nothing else but the names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.driver import Control, LossFn, Reduced, ShardedDriver
from lockstep.parallel.fsdp.driver import describe_blocks
from lockstep.parallel.fsdp.same_parts import END, SameParts
from lockstep.parallel.mesh import Axes
from lockstep.parallel.pipeline.absent import Absent
from lockstep.parallel.pipeline.pipeline import SCHEDULES, Pipeline, Stage
from lockstep.parallel.pipeline.stage_shards import shard_stage
from lockstep.parallel.pipeline.stages import keep_only, whereabouts
from lockstep.parallel.pipeline.staging import blocks_of, make_stages
from lockstep.parallel.strategy import strategy_of
from lockstep.parallel.tensor.driver import agree_on_plain, apply_plan, explain_mixtures, settle_gradient, sum_gradients
from lockstep.parallel.tensor.plans import Cut, choose_plan
from lockstep.precision import choose
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord
from lockstep.runtime.layout import full_tensor, squared_norms
from lockstep.runtime.world import World
from lockstep.task import Loss, MicroBatch, StepBatches


class PipelineDriver(ShardedDriver):
    """Stages along pp, copied or cut along dp, their layers cut along tp. A weight that two stages use (a tied
    embedding) is held by both; its two gradients are added, so that both make the same step."""

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
        self.mesh = axes.mesh
        ranks, here = self.mesh.sizes["pp"], self.mesh.coordinate("pp")
        per_rank = config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1]
        self._sharded = strategy_of(config).shards_parameters and self.mesh.sizes["dp"] > 1
        _check(config, self._sharded, runtime, compiled)
        self._stages, self._copies, self._parts = (axes.along(axis) for axis in ("pp", "dp", "tp"))
        ways = self.mesh.sizes["tp"]
        # Made while the model is whole; empty: nothing is cut along tp.
        plan = choose_plan(model, task, ways, runtime.world.size // ways) if ways > 1 else {}
        chunks, used = make_stages(model, task, config, data, ranks * per_rank, runtime.device)
        stages = whereabouts(model, used)
        places = {name: {n % ranks for n in numbers} for name, numbers in stages.items()}
        _agree_on_start(model, runtime)
        mine = chunks[here::ranks]
        changing = {id(buffer) for chunk in mine for buffer in chunk.changing()}
        held = {name for name, stages in places.items() if not stages or here in stages}
        real = {name for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in changing}
        keep_only(model, held | real, runtime.device)
        if plan:
            self._cut_layers(model, plan, held, mine, axes, runtime)
        if compiled:
            for chunk in mine:
                chunk.compile()
        facts: dict[str, str] = {}
        if self._sharded:
            facts = self._shard(model, config, held, mine, axes)
        self._same = SameParts(model, runtime, mine, self._copies) if self._sharded else None
        super().__init__(model, runtime)
        holders = {name: self._ranks_at(used) for name, used in places.items() if 0 < len(used) < ranks}
        duplicates = frozenset(name for name, stages in places.items() if stages and here > min(stages))
        self._held = [name in held for name in self.names]
        self._users = [len(places[name]) or ranks for name in self.names]
        self._shared = self._share(places)
        partly = {name: stages[name] for name in holders}
        self._absent = Absent(model, partly, lambda name: name in held | real)
        autocast, copies = choose(config, runtime.device).autocast, self._copies if self._sharded else None
        self._flow = Pipeline(model, chunks, config.pp.schedule, self._stages, autocast, self._absent, copies)
        self.placement = replace(
            self.placement,
            runs_whole_model=False,
            pipeline_depth=ranks,
            holders=holders,
            duplicates=duplicates,
            facts=facts,
        )

    def begin(self) -> None:
        super().begin()
        self._absent.steps += 1
        if self._same is not None:
            self._same.steps += 1

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, control: Control) -> Reduced:
        """Run all micro-batches of the step at once, stage by stage, in the order of the schedule."""
        self.begin()
        micros = list(batches)

        def finish(micro: MicroBatch, loss: Loss) -> Tensor:
            start = control.record(loss)  # may put another total in its place: a fault on purpose
            return loss.total * start

        # The first stages need the loss scale of fp16 before any loss is known.
        if control.needs_unit:
            control.micro = micros[0]
            loss = self.evaluate(loss_fn, micros[0].data)
            control.find_unit(0.0 if loss is None else loss.weight)
        self._flow.run(micros, loss_fn, control.before_forward, finish)
        control.backwards_done = batches.count
        self._reduce(control.word())
        return self.reduced()

    def reduced(self) -> Reduced:
        found = super().reduced()
        return replace(found, names=self.names)  # norms are those of all stages

    def _reduce(self, word: ControlWord) -> None:
        """After the last micro-batch: the word and who has used what; then the gradients, then their lengths."""
        if self._same is not None:
            self._same.compare(END)
        used = [held and p.grad is not None for held, p in zip(self._held, self.parameters, strict=True)]
        packed = self.codec.pack(word, times=1.0)
        marks = torch.tensor(used + self._absent.used(), dtype=torch.float64)
        everything = torch.cat([packed, marks.to(packed.device)])
        self.runtime.collectives.sum_(everything)
        self._word, anywhere = everything[:LENGTH], [count > 0 for count in everything[LENGTH:].tolist()]
        self._absent.check(anywhere[len(used) :])
        self._add_gradients(anywhere[: len(used)])
        squared = torch.zeros(len(self.names), dtype=torch.float64, device=self.runtime.device)
        trained = {n: p.grad for n, p in enumerate(self.parameters) if self._held[n] and p.grad is not None}
        if trained:
            stages = torch.tensor([self._users[n] for n in trained], device=squared.device)
            squared[[*trained]] = self._squared_here([*trained.values()]) / stages
        self._squared_norms = self.runtime.collectives.sum_(squared)

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._parts.world.alone and not self._sharded:
            return list(torch._foreach_norm(tensors)) if tensors else []  # what a stage has, it has whole
        squared = self._squared_here(tensors)
        return list(self._parts.sum_(self._copies.sum_(squared)).sqrt().unbind())

    def sync_buffers(self) -> None:
        elsewhere = self.elsewhere
        buffers = [buffer for name, buffer in self.model.named_buffers() if name not in elsewhere]
        for group in (self._copies, self._parts):
            group.broadcast_(buffers)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The parameters and buffers that this rank has only the names of."""
        return frozenset(name for name, ranks in self.placement.holders.items() if self.runtime.world.rank not in ranks)

    def evaluate(self, loss_fn: LossFn, data: Any) -> Loss | None:
        return self._flow.forward(loss_fn, data)

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself, from a rank that holds it. All ranks must call this."""
        absent = name in self.elsewhere
        if name not in self.placement.holders:
            return full_tensor(tensor)
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if absent else full_tensor(tensor)
        full = full.contiguous()
        self.runtime.collectives.broadcast_([full], source=self.placement.holders[name][0])
        return full

    def _cut_layers(
        self,
        model: nn.Module,
        plan: Mapping[str, Cut],
        held: Collection[str],
        mine: Sequence[Stage],
        axes: Axes,
        runtime: Runtime,
    ) -> None:
        """Of the plan, the layers that are here."""

        def is_here(layer: str) -> bool:
            return all(f"{layer}.{own}" in held for own, _ in model.get_submodule(layer).named_parameters())

        apply_plan(model, {layer: cut for layer, cut in plan.items() if is_here(layer)}, axes, runtime)
        for chunk in mine:
            explain_mixtures(chunk)

    def _shard(
        self, model: nn.Module, config: RunConfig, held: Collection[str], mine: Sequence[Stage], axes: Axes
    ) -> dict[str, str]:
        """Over the copies of each stage. What is told of it, of all stages."""
        keep = strategy_of(config).keeps_gathered
        owned = [p for name, p in model.named_parameters() if name in held]
        blocks = [blocks_of(chunk, model, config.blocks) for chunk in mine]
        alone = [
            shard_stage(chunk, model, inside, owned, axes.devices["dp"], keep)
            for chunk, inside in zip(mine, blocks, strict=True)
        ]
        counts = self._stages.gather_json([sum(map(len, blocks)), sum(alone)])
        return describe_blocks(sum(found for found, _ in counts), sum(own for _, own in counts))

    def _squared_here(self, grads: list[Tensor]) -> Tensor:
        """Terms of a sum over the copies and parts of this stage."""
        return squared_norms(grads, self._copies.world.size * self._parts.world.size).to(self.runtime.device)

    def _add_gradients(self, live: list[bool]) -> None:
        """Over the copies first, and only then between the stages that share a weight: like this all of them hold the
        same bits. What nobody has used keeps no gradient."""
        mine = [p for p, held, used in zip(self.parameters, self._held, live, strict=True) if held and used]
        for p in mine:
            settle_gradient(p)
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if not self._sharded:
            sum_gradients(mine, self._copies)
        used_names = {name for name, used in zip(self.names, live, strict=True) if used}
        parameters = dict(zip(self.names, self.parameters, strict=True))
        for names, owners in self._shared:
            sum_gradients([parameters[name] for name in names if name in used_names], owners)
        if not self._parts.world.alone:
            agree_on_plain(mine, self._parts)

    def _share(self, places: dict[str, set[int]]) -> list[tuple[list[str], Collectives]]:
        """The trainable parameters that this rank shares with other stages. All ranks must make all groups."""
        found = []
        sets = dict.fromkeys(tuple(sorted(places[name])) for name in self.names if len(places[name]) > 1)
        for stages in sets:
            names = [name for name in self.names if tuple(sorted(places[name])) == stages]
            for ranks in zip(*(self._ranks_at({stage}) for stage in stages), strict=True):
                group = dist.new_group(list(ranks))
                if isinstance(group, dist.ProcessGroup) and self.runtime.world.rank in ranks:
                    place = World(ranks.index(self.runtime.world.rank), len(ranks))
                    found.append((names, Collectives(place, self.runtime.device, self.runtime.heartbeat, group)))
        return found

    def _ranks_at(self, stages: set[int]) -> tuple[int, ...]:
        inside = self.mesh.sizes["dp"] * self.mesh.sizes["tp"]
        return tuple(stage * inside + place for stage in sorted(stages) for place in range(inside))


def _agree_on_start(model: nn.Module, runtime: Runtime) -> None:
    """Rank 0's weights, everywhere; one by one, so that a device never holds the whole model."""
    for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        moved = tensor.detach().to(runtime.device)
        runtime.collectives.broadcast_([moved])
        tensor.detach().copy_(moved)


def _check(config: RunConfig, sharded: bool, runtime: Runtime, compiled: bool) -> None:
    if runtime.device.type == "cuda" and runtime.backend == "gloo":
        raise UserError(
            "a pipeline (mesh.pp) on GPUs over gloo",
            "gloo, which cannot send a GPU's tensors from one rank to another",
            "give every rank a GPU of its own (nccl), or type device=cpu",
        )
    schedule = f"pp.schedule={config.pp.schedule}"
    if sharded and config.pp.schedule in ("interleaved", "zero-bubble"):
        raise UserError(
            f"{schedule} with strategy={config.strategy}",
            "a schedule for stages whose parameters stay whole from forward to backward",
            "type pp.schedule=1f1b, or strategy=pp",
        )
    if compiled and config.pp.schedule == "zero-bubble":
        raise UserError(
            f"{schedule} with compile={str(config.compile).lower()}",
            "a backward in two halves, which torch cannot take from a compiled module",
            "type compile=false, or pp.schedule=1f1b",
        )
