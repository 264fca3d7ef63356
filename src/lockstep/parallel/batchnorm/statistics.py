"""The running statistics of BatchNorm, combined over micro-batches and ranks as one process would compute them.

A forward in train mode replaces a running value r by (1 - momentum) r + momentum s, with the statistic s of its
micro-batch. So after a step, a micro-batch counts (1 - momentum) to the power of the updates that came after it, in the
order of the global step. Each rank adds up what its own micro-batches contribute with this power. The sum over the
ranks is what one process has: one collective when the buffers are needed, and none in a step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError, some_names
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import EventLogger
from lockstep.task import MicroBatch, StepBatches

UNEVEN = 1e-6  # weights that sum up to 1 within this do so but for rounding


class RunningStatistics:
    """What this rank's micro-batches contribute to the running statistics of a model.

    Padding, which repeats a micro-batch with weight 0, leaves no trace in them. All numbers are float64.
    """

    def __init__(self, model: nn.Module, replicas: Collectives, held: Collection[str] | None = None):
        """Find the layers.

        replicas: the ranks that train on different samples with the same layers
        held: the names of the tensors that this rank holds; None: it holds all
        """
        named = [
            (name, module)
            for name, module in model.named_modules()
            if _keeps_own_statistics(module) and (held is None or f"{name}.running_mean".lstrip(".") in held)
        ]
        self.names = [name for name, _ in named]
        self.layers: list[Any] = [module for _, module in named]
        self.replicas = replicas
        self.log_event: EventLogger = lambda *_, **__: None

        self._micro: MicroBatch | None = None  # the one whose forward may be running
        self._trains = False  # whether a layer was in train mode when it began
        self._steps = 0  # since the statistics were combined: the same number on all ranks
        self._warned = False

        # The buffers as they were last seen: the values (E,) of all layers, the updates (L,), and torch's versions.
        self._values = self._updates = torch.empty(0)
        self._versions: list[tuple[int, int]] = []
        self._counter_versions: list[int] = []
        self._momenta: tuple[float | None, ...] = ()

    # ---- in a step ----

    def begin(self, micro: MicroBatch) -> None:
        """Note that the next forward is that of `micro`."""
        # In one process nothing need be combined.
        if not self.layers or (self.replicas.world.alone and not micro.padding and self._micro is None):
            return

        self._end_micro_batch()
        if self.replicas.world.alone:
            self._see()
        elif self._changed_outside():
            self._start_afresh()
        self._micro = micro
        self._trains = any(layer.training for layer in self.layers)

    def end_step(self, batches: StepBatches) -> None:
        """Count what the other ranks ran after this one's last micro-batch. The last backward has begun."""
        if not self.layers:
            return
        self._end_micro_batch()
        self._steps += 1
        if self.replicas.world.alone or not self._versions:
            return

        # A source that does not know the total assigns the ranks equal numbers.
        total = batches.total or batches.count * self.replicas.world.size
        others = (total - 1 - self._position).clamp(min=0)
        # A layer that this rank did not run in the whole step, not even for padding, no other rank ran either.
        self._fade(torch.where(self._ran, others, 0))
        self._position.fill_(-1)
        self._ran = torch.zeros_like(self._ran)

    def _end_micro_batch(self) -> None:
        micro, self._micro = self._micro, None
        if micro is None or self._all_frozen():
            return

        # No host synchronisation here: all of it stays on the device.
        values_before, updates_before = self._values, self._updates
        self._see()
        runs = self._updates - updates_before
        ran = runs > 0
        if not self.replicas.world.alone:
            self._ran = self._ran | ran
            self._runs = torch.where(ran, runs, self._runs)
        if micro.padding:
            self._write(values_before, updates_before)
            self._see()
            return

        self._fade(torch.where(ran, micro.index - self._position - 1, 0))
        self._position = torch.where(ran, micro.index, self._position)

        # momentum=None is the mean over all updates: every one counts 1, whatever comes after it.
        kept = self._keep**runs
        mean_of_all = self._cumulative[self._layer_of]
        before = torch.where(mean_of_all, updates_before[self._layer_of], kept[self._layer_of])
        after = torch.where(mean_of_all, self._updates[self._layer_of], 1.0)
        self._sum = self._sum * kept[self._layer_of] + (self._values * after - values_before * before)
        self._weight = self._weight * kept + torch.where(self._cumulative, runs, 1 - kept)
        self._own_updates = self._own_updates + runs

    def _fade(self, others: Tensor) -> None:
        """Count the updates of `others` (L,): how many micro-batches of other ranks came after what is summed."""
        kept = self._keep ** (self._runs * others)
        self._sum = self._sum * kept[self._layer_of]
        self._weight = self._weight * kept

    # ---- outside a step ----

    def combine(self) -> None:
        """Write what one process would have into the buffers of all ranks. Collective."""
        if not self._steps or self.replicas.world.alone:
            return
        self._steps = 0
        if self._changed_outside():
            self._start_afresh()

        values = len(self._layer_of)
        packed = self.replicas.sum_(torch.cat([self._sum, self._weight, self._own_updates]))
        total, weight, updates = packed.split([values, len(self.layers), len(self.layers)])
        self._warn_if_uneven(weight)

        # A mean over all updates of a layer that has seen none has weight 0.
        weight = weight[self._layer_of]
        self._write(torch.where(weight > 0, total / weight, self._values), self._updates_at_start + updates)
        self.forget()

    def forget(self) -> None:
        """Start from what the buffers hold now: they are equal on all ranks."""
        self._versions = []

    def _warn_if_uneven(self, weight: Tensor) -> None:
        uneven = ((weight - 1).abs() > UNEVEN) & ~self._cumulative
        if self._warned or not bool(uneven.any()):
            return
        self._warned = True
        names = [name for name, is_uneven in zip(self.names, uneven.tolist(), strict=True) if is_uneven]
        self.log_event(
            "warning",
            reason=f"the running statistics of {some_names(names)} depend on the number of ranks: some micro-batches "
            "ran these layers more often than others (LayerDrop, experts, the end of a stream); use momentum=None, "
            "which counts every update alike, or GroupNorm",
        )

    # ---- the buffers ----

    def _start_afresh(self) -> None:
        """Take the buffers as those of all ranks; the first replica contributes them."""
        first = self.replicas.world.rank == 0
        self._see()
        device = self._values.device
        widths = torch.tensor([2 * layer.running_mean.numel() for layer in self.layers], device=device)
        self._layer_of = torch.arange(len(self.layers), device=device).repeat_interleave(widths)  # (E,)

        # A mean over all updates weighs as many as there were, any other one 1.
        start = torch.where(self._cumulative, self._updates, 1.0) * float(first)
        self._weight = start  # (L,)
        self._sum = self._values * start[self._layer_of]  # (E,)
        self._updates_at_start = self._updates
        self._own_updates = torch.zeros_like(self._updates)
        self._position = torch.full_like(self._updates, -1.0)  # in the global step, of the last micro-batch (L,)
        self._runs = torch.ones_like(self._updates)  # how often a micro-batch runs a layer (L,)
        self._ran = torch.zeros_like(self._updates, dtype=torch.bool)  # in this step, on this rank (L,)

    def _see(self) -> None:
        """Read the buffers and the momenta."""
        tensors = [t for layer in self.layers for t in (layer.running_mean, layer.running_var)]
        self._values = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
        self._updates = torch.stack([layer.num_batches_tracked.detach() for layer in self.layers]).double()
        self._versions = self._versions_now()
        self._counter_versions = [layer.num_batches_tracked._version for layer in self.layers]

        momenta = tuple(layer.momentum for layer in self.layers)
        if momenta != self._momenta:
            kinds = [[momentum is None for momentum in some] for some in (self._momenta, momenta)]
            if self._momenta and kinds[0] != kinds[1]:
                raise UserError(
                    "the momentum of a BatchNorm was changed to or from None while it was trained",
                    "running statistics that are part moving average and part mean cannot be combined over the ranks",
                    "set momentum in model(), and later only to other numbers",
                )
            self._momenta = momenta
            device = self._values.device
            self._cumulative = torch.tensor([momentum is None for momentum in momenta], device=device)
            keep = [1.0 if momentum is None else 1.0 - momentum for momentum in momenta]
            self._keep = torch.tensor(keep, dtype=torch.float64, device=device)

    def _write(self, values: Tensor, updates: Tensor) -> None:
        tensors = [t.detach() for layer in self.layers for t in (layer.running_mean, layer.running_var)]
        for tensor, value in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value.view_as(tensor))
        for layer, count in zip(self.layers, updates.unbind(), strict=True):
            layer.num_batches_tracked.copy_(count)

    def _changed_outside(self) -> bool:
        """Whether somebody wrote into the buffers since they were seen: a checkpoint was loaded, for instance."""
        return self._versions != self._versions_now()

    def _versions_now(self) -> list[tuple[int, int]]:
        # Versions are on the host: comparing values would wait for a GPU.
        return [
            (id(tensor), tensor._version) for layer in self.layers for tensor in (layer.running_mean, layer.running_var)
        ]

    def _all_frozen(self) -> bool:
        """Whether no forward of this micro-batch changed a statistic: all layers are in eval mode, and were."""
        # The user's code may switch to train mode and back within a micro-batch; a forward then counts itself.
        if self._trains or any(layer.training for layer in self.layers):
            return False
        return self._counter_versions == [layer.num_batches_tracked._version for layer in self.layers]


def _keeps_own_statistics(module: nn.Module) -> bool:
    """Whether it is a BatchNorm whose running statistics are those of this rank's micro-batches."""
    return (
        isinstance(module, _BatchNorm)
        and not is_synchronised(module)
        and module.running_mean is not None
        and module.running_var is not None
        and module.num_batches_tracked is not None
    )
