"""Drivers that add gradients along one tree (exact.py), so that the number of ranks leaves no trace in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.config import DDPConfig, RunConfig
from lockstep.errors import UserError
from lockstep.parallel.ddp.driver import DDPDriver, check_reached
from lockstep.parallel.driver import Control, Driver, ShardedDriver, SingleDriver
from lockstep.parallel.exact.hook import Leaf, OrderedHook, add_leaves
from lockstep.parallel.exact.row_norms import length_of, row_lengths
from lockstep.parallel.exact.tree import Counter, Span
from lockstep.parallel.fsdp.driver import FSDPDriver
from lockstep.parallel.fsdp.same_parts import END
from lockstep.parallel.strategy import strategy_of
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord
from lockstep.runtime.layout import local
from lockstep.task import MicroBatch


def exact_driver(model: nn.Module, config: RunConfig, runtime: Runtime) -> Driver:
    """Return the driver for exact mode. `config` has refused the strategies that it does not support."""
    if runtime.world.alone:
        return OrderedSingleDriver(model, runtime.device)
    if strategy_of(config).shards_parameters:
        return OrderedFSDPDriver(model, config, runtime)
    return OrderedDDPDriver(model, config.ddp, runtime, config.seed)


class _ByRows:
    """Lengths as a rank finds them that holds everything, by the formula of those that hold parts."""

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        return [length_of(row_lengths(tensor)) for tensor in tensors]


class OrderedSingleDriver(_ByRows, SingleDriver):
    """One process: it goes through all micro-batches in order, and keeps at most log2(V) partial sums."""

    def __init__(self, model: nn.Module, device: torch.device):
        super().__init__(model, device)
        self.counter: Counter[Leaf] = Counter(add_leaves)

    def begin(self) -> None:
        super().begin()
        self.counter.roots.clear()

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._span = Span(micro.index, 0)

    def _backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, start, word)
        self.counter.push(self._span, _take(self.parameters))
        if word is not None:
            summed = self.counter.finish()
            for parameter in self.parameters:
                parameter.grad = summed.get(id(parameter))


class OrderedDDPDriver(_ByRows, DDPDriver):
    """Replicas. What a rank has added up of its own micro-batches meets the others' in the hook, with the last one."""

    leaves_sums = True  # a mean would be rounded otherwise by 3 ranks than by 2

    def _word_dtype(self) -> torch.dtype:
        return torch.float64

    def _make_hook(self, config: DDPConfig, seed: int) -> OrderedHook:
        group = self._replica.process_group
        assert group is not None
        return OrderedHook(self._word_parameter, group)

    @property
    def order(self) -> OrderedHook:
        assert isinstance(self.hook, OrderedHook)
        return self.hook

    def begin(self) -> None:
        super().begin()
        self.order.counter.roots.clear()

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._span = None if micro.padding else Span(micro.index, 0)
        self._total = _total(control)

    def _backward(self, total: Tensor, start: Tensor, word: ControlWord | None) -> None:
        if word is not None:
            self.order.expect(self._total, self._span)
        super()._backward(total, start, word)
        if word is None:
            check_reached([name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None])
            assert self._span is not None, "a rank without work has one micro-batch, which is its last"
            self.order.counter.push(self._span, _take(self.parameters))


class OrderedFSDPDriver(FSDPDriver):
    """Parameters in parts. FSDP cuts and adds the gradients of every micro-batch at once. So the ranks take turns:
    round k of a step is micro-batches kN .. kN+N-1, one on each rank, and the owner of a part pushes them in order into
    a counter of parts."""

    placement = replace(ShardedDriver.placement, interleaved=True)

    def __init__(self, model: nn.Module, *args: Any):
        super().__init__(model, *args)
        self._reductions: list[_OrderedReduceScatter] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._reductions.append(_OrderedReduceScatter())
                module.set_custom_reduce_scatter(self._reductions[-1])

    def begin(self) -> None:
        super().begin()
        self._round = -1
        for reduction in self._reductions:
            reduction.counter.roots.clear()

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._round += 1
        for reduction in self._reductions:
            reduction.expect(self._round, _total(control), control.last)
        for parameter in self.parameters:
            parameter.grad = None  # FSDP would add what has no meaning before the last round

    def _reduce_gradients(self) -> None:
        if any(reduction.counter.roots for reduction in self._reductions):
            raise UserError(
                "exact=true under fsdp",
                "a part of the model that takes part in the loss of some micro-batches, and not in that of the last",
                "use every part of the model for every micro-batch, or type strategy=ddp",
            )

    def _reduce(self, word: ControlWord) -> None:
        self._same.compare(END)
        self._reduce_gradients()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        every, rows = self._gather_rows(grads, self.codec.pack(word, times=1.0))
        self._word = every.sum(0)  # of numbers whose sum is exact in any order
        self._norms = [length_of(each) for each in rows]

    def _gradient_norms(self, grads: list[Tensor]) -> Tensor:
        return torch.stack(self._norms)

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        nothing = torch.zeros(LENGTH, dtype=torch.float64, device=self.runtime.device)
        return [length_of(rows) for rows in self._gather_rows(tensors, nothing)[1]]

    def _gather_rows(self, tensors: Sequence[Tensor], packed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(every rank's `packed`, the lengths of all rows of each tensor), in one collective. The first ranks hold
        equally many rows, those after them fewer, or none."""
        ranks, device = self.runtime.world.size, self.runtime.device
        most = [-(-len(tensor) // ranks) for tensor in tensors]
        mine = torch.zeros(LENGTH + sum(most), dtype=torch.float64, device=device)
        mine[:LENGTH] = packed
        for place, tensor in zip(mine[LENGTH:].split(most), tensors, strict=True):
            rows = row_lengths(local(tensor))
            place[: len(rows)] = rows
        every = self.runtime.collectives.gather(mine)
        parts = every[:, LENGTH:].split(most, dim=1)
        return every[:, :LENGTH], [part.flatten()[: len(t)] for part, t in zip(parts, tensors, strict=True)]


class _OrderedReduceScatter(ReduceScatter):
    """Of one group of parameters: instead of a sum over ranks in whatever order, this rank's part of every leaf."""

    def __init__(self) -> None:
        self._round, self._total, self._last = 0, 0, False
        self.counter: Counter[Tensor] = Counter(Tensor.add_)
        self._ready = False

    def expect(self, number: int, total: int, last: bool) -> None:
        """A backward comes: round `number` of a step of `total` micro-batches."""
        self._round, self._total, self._last, self._ready = number, total, last, True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if not self._ready:
            raise UserError(
                "exact=true under fsdp",
                "a block whose gradients come in several pieces: it is called more than once in a forward",
                "type strategy=ddp; or blocks=[...] with the class of a module around it that is called once",
            )
        self._ready = False
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first = self._round * group.size()
        for index, part in enumerate(received.chunk(group.size()), first):
            if index < self._total:  # what comes after it is padding, and adds nothing
                self.counter.push(Span(index, 0), part)
        if self._last:
            output_tensor.copy_(self.counter.finish())
            return
        behind = received.untyped_storage().data_ptr()
        self.counter.roots = [  # a part must not keep everything alive that came with it
            (span, part.clone() if part.untyped_storage().data_ptr() == behind else part)
            for span, part in self.counter.roots
        ]


def _total(control: Control) -> int:
    """Return the number of micro-batches of the whole step."""
    total = control.batches.total
    assert total is not None, "exact mode needs a source that knows its micro-batches"
    return total


def _take(parameters: list[nn.Parameter]) -> Leaf:
    """Their gradients, which are theirs no longer."""
    leaf = {id(p): p.grad for p in parameters if p.grad is not None}
    for parameter in parameters:
        parameter.grad = None
    return leaf
