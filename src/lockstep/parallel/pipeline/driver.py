"""A pipeline as a Driver: every rank holds the tensors of its own stages, and only the names of the others.

Stages lie along pp, are replicated or sharded along dp, and their layers are sharded along tp. A weight that two stages
use (a tied embedding) is held by both; its two gradients are added, so that both take the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.driver import Autocast, Control, LossFn, Reduced, ShardedDriver, no_gradient
from lockstep.parallel.fsdp.uniform_use import END, UniformUse
from lockstep.parallel.inner_gradients import InnerGradient, watch_loss
from lockstep.parallel.mesh import Axes
from lockstep.parallel.pipeline.build import make_stages
from lockstep.parallel.pipeline.foreign_tensors import ForeignTensors
from lockstep.parallel.pipeline.pipeline import SCHEDULES, Pipeline
from lockstep.parallel.pipeline.stages import keep_only, shard_stages, stages_by_tensor
from lockstep.parallel.tensor.driver import (
    agree_on_plain,
    apply_plan,
    explain_mixtures,
    redistribute_gradient,
    sum_gradients,
)
from lockstep.parallel.tensor.plans import choose_plan
from lockstep.precision import choose
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import ControlWord
from lockstep.runtime.layout import full_tensor, squared_norms
from lockstep.runtime.world import World
from lockstep.task import Loss, StepBatches


class PipelineDriver(ShardedDriver):
    """Runs all micro-batches of a step at once, stage by stage."""

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
        """Split `model`, which is still full and on the CPU.

        `data` returns the samples; a trace of the forward reads two of them.
        """
        self.mesh = axes.mesh
        ranks = self.mesh.sizes["pp"]
        position = self.mesh.coordinate("pp")
        self._sharded = config.strategy_record.shards_parameters and self.mesh.sizes["dp"] > 1
        _check(config, self._sharded, runtime, compiled)

        self._replicas = axes.along("dp")
        self._tp = axes.along("tp")

        # Decided while the model is full: how its layers are sharded, and which stages use which tensor.
        ways = self.mesh.sizes["tp"]
        plan = choose_plan(model, task, ways, runtime.world.size // ways) if ways > 1 else {}
        count = ranks * (config.pp.stages_per_rank or SCHEDULES[config.pp.schedule][1])
        stages, used = make_stages(model, task, config, data, count, runtime.device)
        by_tensor = stages_by_tensor(model, used)
        pp_ranks = {name: {number % ranks for number in numbers} for name, numbers in by_tensor.items()}
        _check_norms(model, by_tensor)

        # While every rank still holds every tensor: from here on it keeps only its own.
        _broadcast_one_by_one(model, runtime)

        # This rank keeps the tensors of its own stages, and the buffers that they change.
        local_stages = stages[position::ranks]
        held = {name for name, users in pp_ranks.items() if not users or position in users}
        mutable = {id(buffer) for stage in local_stages for buffer in stage.mutable_buffers()}
        real = held | {name for name, buffer in model.named_buffers(remove_duplicate=False) if id(buffer) in mutable}
        keep_only(model, real, runtime.device)

        # As in apply.py, from the inside out: tensor parallelism, compile, FSDP.
        if plan:
            local_plan = {layer: style for layer, style in plan.items() if _holds(model, layer, held)}
            apply_plan(model, local_plan, axes, runtime)
            for stage in local_stages:
                explain_mixtures(stage)

        if compiled:
            for stage in local_stages:
                stage.compile()

        facts = shard_stages(local_stages, model, held, config, axes) if self._sharded else {}
        self._uniform_use = UniformUse(model, runtime, local_stages, self._replicas) if self._sharded else None

        super().__init__(model, runtime, self._replicas, held=real)
        self._held = [name in held for name in self.names]
        self._copies = [len(pp_ranks[name]) or ranks for name in self.names]  # along pp
        self._tied = self._groups_of_tied([tuple(sorted(pp_ranks[name])) for name in self.names])

        # A tensor that no stage used is on all ranks, like one that all stages use.
        holders = {name: self._ranks_at(users) for name, users in pp_ranks.items() if 0 < len(users) < ranks}
        self.role = replace(
            self.role,
            runs_whole_model=False,
            pipeline_depth=ranks,
            holders=holders,
            duplicates=frozenset(name for name, users in pp_ranks.items() if users and position > min(users)),
            facts=facts,
        )

        self._foreign = ForeignTensors(model, {name: by_tensor[name] for name in holders}, real)
        self._flow = Pipeline(
            model,
            stages,
            config.pp.schedule,
            axes.along("pp"),
            choose(config, runtime.device).autocast,
            self._foreign,
            shard_group=self._replicas if self._sharded else None,
            before_forward=self.statistics.begin,
        )

    def begin(self) -> None:
        super().begin()
        self._foreign.steps += 1
        if self._uniform_use:
            self._uniform_use.steps += 1

    def forward_backward(self, batches: StepBatches, loss_fn: LossFn, control: Control) -> Reduced:
        self.begin()
        loss_fn = watch_loss(loss_fn, self.before_inner_gradient)
        micros = list(batches)

        # The first stages need the loss scale of fp16 before any loss is known.
        if control.needs_reference_weight:
            loss = None
            try:
                loss = self._flow.forward(loss_fn, micros[0].data)
            except UserError as error:
                self._flow.refused = error  # all ranks raise it, at the end of the step
            control.find_reference_weight(micros[0], 0.0 if loss is None else loss.weight)

        self._flow.run(micros, loss_fn, control)
        self.statistics.end_step(batches)
        control.backwards_done = batches.count
        self._reduce(control.before_reduce())
        return self.reduced()

    def before_inner_gradient(self, inner: InnerGradient) -> None:
        raise UserError(
            "the loss computes gradients itself, which a pipeline (mesh.pp) cannot do: the rank of the loss holds the "
            "last stage only",
            inner.call_site,
            "type strategy=ddp, strategy=zero1 or strategy=fsdp, without mesh.pp",
        )

    def reduced(self) -> Reduced:
        return replace(super().reduced(), names=self.names)  # norms are those of all stages

    def evaluate(self, loss_fn: LossFn, data: Any, autocast: Autocast) -> Loss | None:
        return self._flow.forward(loss_fn, data)  # the stages enter autocast; what the task computes before does not

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._tp.world.alone and not self._sharded:
            return list(torch._foreach_norm(tensors)) if tensors else []  # a stage holds its tensors in full
        squared = self._tp.sum_(self._replicas.sum_(self._squared_terms(tensors)))
        return list(squared.sqrt().unbind())

    def fetch(self, name: str, tensor: Tensor) -> Tensor:
        holders = self.role.holders.get(name)
        if holders is None:
            return full_tensor(tensor)

        # The ranks of other stages have only a placeholder and receive the tensor from the first rank that holds it.
        if self.runtime.world.rank in holders:
            full = full_tensor(tensor).contiguous()
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

        self.runtime.collectives.broadcast_([full], source=holders[0])
        return full

    def _broadcast_buffers(self) -> None:
        rank = self.runtime.world.rank
        holders = self.role.holders
        # Placeholders of other stages have no memory to receive into.
        buffers = [b for name, b in self.model.named_buffers() if name not in holders or rank in holders[name]]
        self._replicas.broadcast_(buffers)
        self._tp.broadcast_(buffers)

    # ---- set-up ----

    def _groups_of_tied(self, positions: Sequence[tuple[int, ...]]) -> list[tuple[list[int], Collectives]]:
        """Return which parameters, by index, this rank shares with other stages, and the ranks that share them.

        `positions` holds, for each parameter, the coordinates along pp that hold it. Collective: every rank must take
        part in making every group.
        """
        tied: list[tuple[list[int], Collectives]] = []
        for shared in dict.fromkeys(holders for holders in positions if len(holders) > 1):
            indices = [index for index, holders in enumerate(positions) if holders == shared]
            # Replicas and tp shards of a stage share with their counterparts in the other stages.
            counterparts = zip(*(self._ranks_at([position]) for position in shared), strict=True)
            group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in counterparts])

            if isinstance(group, dist.ProcessGroup):
                world = World(group.rank(), group.size())
                tied.append((indices, Collectives(world, self.runtime.device, self.runtime.heartbeat, group)))

        return tied

    def _ranks_at(self, positions: Collection[int]) -> tuple[int, ...]:
        inside = self.mesh.sizes["dp"] * self.mesh.sizes["tp"]
        return tuple(position * inside + offset for position in sorted(positions) for offset in range(inside))

    # ---- after the last backward ----

    def _reduce(self, word: ControlWord) -> None:
        if self._uniform_use:
            self._uniform_use.compare(END)

        # The first sum: the control word, and which parameters any rank used.
        used = [held and p.grad is not None for held, p in zip(self._held, self.parameters, strict=True)]
        marks = torch.tensor([*self._flow.marks(), *used, *self._foreign.used()], dtype=torch.float64)
        refused, reached, *used_anywhere = [count > 0 for count in self._sum_with_word(word, marks).tolist()]
        if refused:
            self._raise_refusal()
        self._foreign.check(used_anywhere[len(used) :])
        # Without a gradient from the loss, the last stage sends zeros to the others.
        if not (reached and any(used_anywhere[: len(used)])):
            raise no_gradient()

        # Then the gradients, then their norms: a parameter that several stages hold counts once.
        self._sum_gradients(used_anywhere[: len(used)])
        self._call_hooks()

        squared = torch.zeros(len(self.names), dtype=torch.float64, device=self.runtime.device)
        trained = {n: p.grad for n, p in enumerate(self.parameters) if self._held[n] and p.grad is not None}
        if trained:
            copies = torch.tensor([self._copies[n] for n in trained], device=squared.device)
            squared[[*trained]] = self._squared_terms([*trained.values()]) / copies

        self._squared_norms = self.runtime.collectives.sum_(squared)

    def _raise_refusal(self) -> NoReturn:
        """Raise the error of the loss on all ranks: only that of the last stage calls it."""
        own = self._flow.refused
        found = self.runtime.collectives.gather_json(list(own.args) if own else None)
        raise own or UserError(*next(filter(None, found)))

    def _sum_gradients(self, used: list[bool]) -> None:
        """Sum gradients over replicas, and only then between stages that share a weight: all get the same bits.

        `used` says for each parameter whether any rank used it; if none did, it keeps no gradient.
        """
        trained = [p for p, held, live in zip(self.parameters, self._held, used, strict=True) if held and live]
        for p in trained:
            redistribute_gradient(p)
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

        # FSDP already summed over the replicas.
        if not self._sharded:
            sum_gradients(trained, self._replicas)

        for indices, group in self._tied:
            sum_gradients([self.parameters[index] for index in indices if used[index]], group)

        agree_on_plain(trained, self._tp)

    def _squared_terms(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's terms of squared norms, to be summed over the replicas and tp shards of its stage."""
        return squared_norms(tensors, self._replicas.world.size * self._tp.world.size).to(self.runtime.device)


def _check_norms(model: nn.Module, by_tensor: Mapping[str, Collection[int]]) -> None:
    """Refuse a BatchNorm that two stages use: each would keep running statistics of its own use."""
    for name, module in model.named_modules():
        tensors = [f"{name}.{tensor}".lstrip(".") for tensor in ("running_mean", "weight")]
        stages = sorted({number for tensor in tensors for number in by_tensor.get(tensor, ())})
        if isinstance(module, _BatchNorm) and module.running_mean is not None and len(stages) > 1:
            raise UserError(
                f"{name!r} is a {type(module).__name__} that {len(stages)} stages of the pipeline (mesh.pp) share",
                f"stages {', '.join(map(str, stages))}: each would keep running statistics of its own use",
                "give every use a BatchNorm of its own; or type strategy=ddp, or strategy=fsdp",
            )


def _holds(model: nn.Module, layer: str, held: Collection[str]) -> bool:
    return all(name in held for name, _ in model.get_submodule(layer).named_parameters(prefix=layer))


def _broadcast_one_by_one(model: nn.Module, runtime: Runtime) -> None:
    """Start every rank with rank 0's weights, one tensor at a time, so that no device ever holds the full model."""
    for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        moved = tensor.detach().to(runtime.device)
        runtime.collectives.broadcast_([moved])
        tensor.detach().copy_(moved)


def _check(config: RunConfig, sharded: bool, runtime: Runtime, compiled: bool) -> None:
    if runtime.device.type == "cuda" and runtime.backend == "gloo":
        raise UserError(
            "a pipeline (mesh.pp) on GPUs cannot run over gloo, which does not send a GPU's tensors to another rank",
            "",
            "give every rank a GPU of its own (nccl), or type device=cpu",
        )

    if sharded and config.pp.schedule in ("interleaved", "zero-bubble"):
        raise UserError(
            f"pp.schedule={config.pp.schedule} cannot be combined with strategy={config.strategy}",
            "its stages need their parameters in full from forward to backward",
            "type pp.schedule=1f1b, or strategy=pp",
        )

    if compiled and config.pp.schedule == "zero-bubble":
        raise UserError(
            f"pp.schedule={config.pp.schedule} cannot be combined with compile={str(config.compile).lower()}",
            "its backward comes in two halves, which torch cannot take from a compiled module",
            "type compile=false, or pp.schedule=1f1b",
        )
