"""The running statistics of BatchNorm, combined over micro-batches and ranks as one process would compute them.

A forward in train mode replaces a running value r by (1 - momentum) r + momentum s, where s is the statistic of its
micro-batch. So a later value contains s with the factor momentum (1 - momentum)^k, where k is the number of updates
after it, in the order of the global step. Each rank adds up the contributions of its own micro-batches with these
factors. Their sum over the ranks is the running value of a single process. This takes one collective when the buffers
are needed, and none in a step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UserError, some_names
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.batchnorm.user_forwards import UserForwards
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart, StepParts
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import EventLogger, log_nothing
from lockstep.task import MicroBatch

UNEVEN = 1e-6  # factors whose sum over all ranks differs from 1 by more than this are not just rounded


def add_running_statistics(
    parts: StepParts,
    model: nn.Module,
    dp_group: Collectives,
    materialized: Collection[str] | None = None,
    log_event: EventLogger = log_nothing,
) -> RunningStatistics:
    """Return the statistics of the model's BatchNorm layers. They are one of the `parts` if there is such a layer.

    dp_group: the ranks that train the same layers on different samples
    materialized: the names of the tensors that have memory on this rank; None: all of them
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if _keeps_own_statistics(module)
        and (materialized is None or f"{name}.running_mean".lstrip(".") in materialized)
    }
    statistics = RunningStatistics(model, layers, dp_group, log_event)
    if layers:
        parts.add(statistics)

    return statistics


class RunningStatistics(StepPart):
    """The contributions of this rank's micro-batches to the running statistics of a model.

    Padding, which repeats a micro-batch with weight 0, does not change them. Everything is computed in float64, so that
    rounding stays far below the precision of the buffers.
    """

    slot = "statistics"
    runs_in_pipeline = True

    def __init__(
        self, model: nn.Module, layers: Mapping[str, nn.Module], dp_group: Collectives, log_event: EventLogger
    ):
        self.names = list(layers)
        self.layers: list[Any] = list(layers.values())
        self.dp_group = dp_group
        self._buffers = LayerBuffers(self.layers)
        self.log_event = log_event

        self._micro: MicroBatch | None = None  # the micro-batch whose forward may be running
        self._trains = False  # whether a layer was in train mode when that micro-batch began
        self._passes = 0  # passes since the statistics were combined; the same number on all ranks
        self._warned = False  # about forwards that make the statistics depend on the number of ranks

        self._user_forwards = UserForwards(model, self.layers, dp_group.world.rank, log_event)
        self._user_code = False  # whether code of the user may call the model between steps

    # ---- in a pass ----

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        # A single process only has to undo padding: this micro-batch, or the one before it, if `_micro` is still set.
        if self.dp_group.world.alone and not micro.padding and self._micro is None:
            return

        self._user_forwards.end()
        self._end_micro_batch()

        # What this forward will change is the difference from here.
        if self.dp_group.world.alone:
            self._buffers.read()
        elif self._buffers.changed():
            self._restart()

        self._micro = micro
        self._trains = any(layer.training for layer in self.layers)

    def end_pass(self, progress: PassProgress) -> None:
        """Account for the micro-batches that other ranks ran after this rank's last one."""
        self._end_micro_batch()
        self._passes += 1
        if self.dp_group.world.alone or not self._buffers.known:
            return

        # A source that does not know their number gives every rank the same number of micro-batches.
        batches = progress.batches
        count = batches.global_num_micro_batches or batches.num_micro_batches * self.dp_group.world.size
        later = (count - 1 - self._position).clamp(min=0)

        # We assume that a layer which this rank never ran in the pass, not even for padding, ran on no other rank.
        self._fade(torch.where(self._ran, later, 0))
        self._position.fill_(-1)
        self._ran = torch.zeros_like(self._ran)
        if self._user_code:
            self._watch()

    def _end_micro_batch(self) -> None:
        """Add what the forward of the last micro-batch has changed to the sums, or undo it for padding."""
        micro = self._micro
        self._micro = None
        if micro is None or self._all_frozen():
            return

        # Everything below stays on the device: the host does not wait for it.
        buffers = self._buffers
        values_before = buffers.values  # (E,)
        updates_before = buffers.updates  # (L,)
        buffers.read()

        # How often each layer ran in the micro-batch (L,): not at all, once, or several times.
        runs = buffers.updates - updates_before
        ran = runs > 0

        # A single process keeps no sums.
        if not self.dp_group.world.alone:
            self._ran = self._ran | ran
            self._runs = torch.where(ran, runs, self._runs)

        # Padding ran the layers, but must not change the statistics.
        if micro.padding:
            buffers.write(values_before, updates_before)
            buffers.read()
            return

        # The micro-batches between this rank's last one and this one ran on other ranks, and made the sums so far fade.
        self._fade(torch.where(ran, micro.index - self._position - 1, 0))
        self._position = torch.where(ran, micro.index, self._position)

        # With momentum=None a running value is the mean over all updates. So value x updates is a sum, without a decay.
        layer_of = buffers.layer_of
        decay = buffers.decay**runs
        is_mean = buffers.cumulative[layer_of]
        before = torch.where(is_mean, updates_before[layer_of], decay[layer_of])
        after = torch.where(is_mean, buffers.updates[layer_of], 1.0)

        # The contribution of this micro-batch is what its update added: new value - decay x old value.
        self._sum = self._sum * decay[layer_of] + (buffers.values * after - values_before * before)
        self._weight = self._weight * decay + torch.where(buffers.cumulative, runs, 1 - decay)
        self._local_updates = self._local_updates + runs

    def _fade(self, later: Tensor) -> None:
        """Multiply the sums by the decay of `later` (L,) micro-batches, which other ranks ran after them."""
        decay = self._buffers.decay ** (self._runs * later)
        self._sum = self._sum * decay[self._buffers.layer_of]
        self._weight = self._weight * decay

    # ---- outside a pass ----

    def begin_user_code(self) -> None:
        self._user_code = True
        self._watch()

    def end_user_code(self) -> None:
        self._user_code = False
        self._user_forwards.end()

    def close(self) -> None:
        self._user_forwards.end()

    def _watch(self) -> None:
        """Notice forwards of the user's code, if the layers have statistics of this rank only."""
        if self.dp_group.world.alone or not self._passes or not self._buffers.known:
            return

        # A layer that was in eval mode all the time has the same statistics on all ranks.
        counters = self._buffers.counter_versions()
        self._user_forwards.watch(
            [
                layer
                for layer, start, now in zip(self.layers, self._counters_at_start, counters, strict=True)
                if layer.training or now != start
            ]
        )

    def combine(self) -> None:
        """Write the running statistics of a single process into the buffers of all ranks. Collective."""
        self._user_forwards.end()
        if not self._passes or self.dp_group.world.alone:
            return

        # Other code may have written into the buffers since the last forward: then these are what counts.
        self._passes = 0
        if self._buffers.changed():
            self._restart()

        # One all-reduce for everything: (E + 3 L,).
        packed = torch.cat([self._sum, self._weight, self._local_updates, self._trained_by_user()])
        total, *of_layers = self.dp_group.all_reduce_(packed).split([len(self._sum), *[len(self.layers)] * 3])
        weight, updates, trained_by_user = of_layers
        self._warn_if_uneven(weight, trained_by_user > 0)

        # The weight is 0 for a layer with momentum=None that has never run.
        weight = weight[self._buffers.layer_of]
        values = torch.where(weight > 0, total / weight, self._buffers.values)
        self._buffers.write(values, self._updates_at_start + updates)
        self.forget()

    def forget(self) -> None:
        """Drop the sums: the next micro-batch starts from the buffers, which are now equal on all ranks."""
        self._buffers.forget()

    def _trained_by_user(self) -> Tensor:
        """Return (L,): 1 for each layer that the user's code ran in train mode between steps, else 0."""
        trained = self._user_forwards.trained
        flags = [float(index in trained) for index in range(len(self.layers))]
        trained.clear()
        return torch.tensor(flags, dtype=torch.float64, device=self._sum.device)

    def _warn_if_uneven(self, weight: Tensor, trained_by_user: Tensor) -> None:
        """Warn once if forwards make the statistics depend on the number of ranks. Waits for the device."""
        uneven = ((weight - 1).abs() > UNEVEN) & ~self._buffers.cumulative
        if self._warned or not bool((uneven | trained_by_user).any()):
            return

        # A forward between steps makes the weights of a layer uneven, too.
        self._warned = True
        if bool(trained_by_user.any()):
            found = trained_by_user
            cause = (
                "a forward between two steps, in train mode, changed those of one rank (torch.no_grad() does not keep "
                "them as they are); call model.eval() before it and model.train() after it, or call "
                "run.sync_buffers() on every rank before it"
            )
        else:
            found = uneven
            cause = (
                "some micro-batches ran these layers more often than others (LayerDrop, experts, the end of a stream); "
                "use momentum=None, which gives every update the same weight, or GroupNorm"
            )

        names = [name for name, is_found in zip(self.names, found.tolist(), strict=True) if is_found]
        self.log_event(
            "warning", reason=f"the running statistics of {some_names(names)} depend on the number of ranks: {cause}"
        )

    # ---- the sums ----

    def _restart(self) -> None:
        """Start new sums from the buffers, which are equal on all ranks. Only the first replica contributes them."""
        is_first = self.dp_group.world.rank == 0
        buffers = self._buffers
        buffers.read()

        # With momentum=None the present value weighs as much as the updates in it, otherwise 1.
        start = torch.where(buffers.cumulative, buffers.updates, 1.0) * float(is_first)
        self._weight = start  # (L,)
        self._sum = buffers.values * start[buffers.layer_of]  # (E,)
        self._updates_at_start = buffers.updates
        self._counters_at_start = buffers.counter_versions()
        self._local_updates = torch.zeros_like(buffers.updates)

        # Per layer (L,): the last micro-batch that ran it, as an index in the global step; how often a micro-batch runs
        # it; whether this rank ran it in this pass.
        self._position = torch.full_like(buffers.updates, -1.0)
        self._runs = torch.ones_like(buffers.updates)
        self._ran = torch.zeros_like(buffers.updates, dtype=torch.bool)

    def _all_frozen(self) -> bool:
        """Whether the forward changed no statistic: all layers were and are in eval mode, and counted no batch."""
        # The user's code may switch to train mode and back inside a micro-batch. Then `num_batches_tracked` changed.
        if self._trains or any(layer.training for layer in self.layers):
            return False
        return not self._buffers.counters_changed()


def _keeps_own_statistics(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm with running statistics over this rank's micro-batches only."""
    return (
        isinstance(module, _BatchNorm)
        and not is_synchronised(module)
        and module.running_mean is not None
        and module.running_var is not None
        and module.num_batches_tracked is not None
    )


class LayerBuffers:
    """Running statistics, counts of updates and momenta of L layers, as they were when they were last read.

    The layers have E running means and variances in total. Reading stays on the device: the host does not wait for it.
    """

    values: Tensor  # (E,) float64: running means and variances
    updates: Tensor  # (L,) float64: how many there were so far
    cumulative: Tensor  # (L,) bool: momentum is None, so that a running value is the mean over all updates
    decay: Tensor  # (L,) float64: 1 - momentum, or 1 without a momentum

    def __init__(self, layers: list[Any]):
        self._layers = layers
        self._momenta: tuple[float | None, ...] = ()

        # torch's version counters at the last read. Comparing values instead would wait for the GPU.
        self._versions: list[tuple[int, int]] = []
        self._counter_versions: list[int] = []

    @cached_property
    def layer_of(self) -> Tensor:
        """For each running value the index of its layer, (E,): it spreads (L,) to (E,)."""
        widths = torch.tensor([2 * layer.running_mean.numel() for layer in self._layers], device=self.values.device)
        return torch.arange(len(self._layers), device=widths.device).repeat_interleave(widths)

    @property
    def known(self) -> bool:
        """Whether the buffers were read since the last `forget`."""
        return bool(self._versions)

    def read(self) -> None:
        """Read the buffers and the momenta of all layers."""
        self.values = torch.cat([tensor.detach().flatten().double() for tensor in self._statistics()])
        self.updates = torch.stack([layer.num_batches_tracked.detach() for layer in self._layers]).double()
        self._versions = self._versions_now()
        self._counter_versions = self.counter_versions()

        # The momentum of a layer may change between two steps.
        momenta = tuple(layer.momentum for layer in self._layers)
        if momenta != self._momenta:
            self._use(momenta)

    def write(self, values: Tensor, updates: Tensor) -> None:
        """Write running values (E,) and counts of updates (L,) into the layers' buffers."""
        tensors = [tensor.detach() for tensor in self._statistics()]
        for tensor, value in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value.view_as(tensor))

        for layer, count in zip(self._layers, updates.unbind(), strict=True):
            layer.num_batches_tracked.copy_(count)

    def forget(self) -> None:
        """Count the buffers as changed, so that they are read again."""
        self._versions = []

    def changed(self) -> bool:
        """Whether other code wrote into the buffers since they were last read: a checkpoint was loaded, for example."""
        return self._versions != self._versions_now()

    def counters_changed(self) -> bool:
        """Whether a layer has counted an update since the last read."""
        return self._counter_versions != self.counter_versions()

    def _use(self, momenta: tuple[float | None, ...]) -> None:
        cumulative = [momentum is None for momentum in momenta]
        if self._momenta and cumulative != [momentum is None for momentum in self._momenta]:
            raise UserError(
                "the momentum of a BatchNorm was changed to or from None during training",
                "running statistics that are part moving average and part mean cannot be combined over the ranks",
                "set momentum in model(), and later change it only to other numbers",
            )

        self._momenta = momenta
        device = self.values.device
        decay = [1.0 if momentum is None else 1.0 - momentum for momentum in momenta]
        self.cumulative = torch.tensor(cumulative, device=device)
        self.decay = torch.tensor(decay, dtype=torch.float64, device=device)

    def _statistics(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in (layer.running_mean, layer.running_var)]

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(id(tensor), tensor._version) for tensor in self._statistics()]

    def counter_versions(self) -> list[int]:
        """Return torch's version counter of each layer's number of updates: equal as long as it counted none."""
        return [layer.num_batches_tracked._version for layer in self._layers]
