"""Drivers that add gradients along one tree (tree.py), so that their bits do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.config import DDPConfig, RunConfig
from lockstep.data.shard import rank_range
from lockstep.errors import UserError
from lockstep.parallel.ddp.driver import DDPDriver, UnusedParametersDriver, check_reached
from lockstep.parallel.driver import BaseDriver, Control, ShardedDriver, SingleDriver, no_gradient
from lockstep.parallel.exact.hook import Gradients, OrderedHook, add_gradients_
from lockstep.parallel.exact.row_norms import norm_of_rows, row_norms
from lockstep.parallel.exact.tree import Subtree, TreeSum, roots_of
from lockstep.parallel.fsdp.driver import FSDPDriver
from lockstep.parallel.fsdp.uniform_use import END
from lockstep.parallel.mesh import Axes
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord
from lockstep.runtime.layout import local
from lockstep.task import MicroBatch


class _FullParameters(BaseDriver):
    """The common base of drivers whose ranks hold full parameters: a tree of gradients, and norms.

    Norms are computed with the formula that ranks with shards use.
    """

    tree: TreeSum[Gradients]  # of this rank's micro-batches

    def begin(self) -> None:
        super().begin()
        self.tree.roots.clear()

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._subtree = None if micro.padding else Subtree(micro.index, 0)

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        return [norm_of_rows(row_norms(tensor)) for tensor in tensors]

    def _push_gradients(self) -> None:
        assert self._subtree is not None, "a rank without work has one micro-batch, which is its last"
        self.tree.push(self._subtree, {id(p): p.grad for p in self.parameters if p.grad is not None})
        for parameter in self.parameters:
            parameter.grad = None


class OrderedSingleDriver(_FullParameters, SingleDriver):
    """One process: it runs all micro-batches in order and keeps at most log2(their number) partial sums."""

    def __init__(self, model: nn.Module, runtime: Runtime):
        super().__init__(model, runtime)
        self.tree = TreeSum(add_gradients_)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, grad_output, word)
        self._push_gradients()

        # After the last backward of the step.
        if word is not None:
            summed = self.tree.finish()
            for parameter in self.parameters:
                parameter.grad = summed.get(id(parameter))


class OrderedDDPDriver(_FullParameters, DDPDriver):
    """Replicas. With the last micro-batch, the hook adds this rank's partial sums to those of the others."""

    leaves_sums = True  # a mean would be rounded differently by 3 ranks than by 2
    word_dtype = torch.float64

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._total = _micro_batches(control)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        if word is not None:
            self._ordered.expect(self._total, self._subtree)

        super()._backward(total, grad_output, word)

        # The hook adds the last micro-batch. The earlier ones wait in its tree.
        if word is None:
            missed = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
            check_reached(missed, len(self.names))
            self._push_gradients()

    def _make_hook(self, group: dist.ProcessGroup, config: DDPConfig, seed: int) -> OrderedHook:
        self._ordered = OrderedHook(self._word_parameter, group)
        self.tree = self._ordered.tree
        return self._ordered


class OrderedUnusedParametersDriver(_FullParameters, UnusedParametersDriver):
    """Replicas that exchange the roots of all ranks after the last backward.

    Some parameters may have no gradient in some micro-batches, or in none.
    """

    def __init__(self, model: nn.Module, runtime: Runtime):
        super().__init__(model, runtime)
        self.tree = TreeSum(add_gradients_)

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._total = _micro_batches(control)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, grad_output, None)
        if self._subtree is not None:
            self._push_gradients()
        if word is not None:
            self._reduce(word)

    def _reduce(self, word: ControlWord) -> None:
        ranks, me = self.runtime.world.size, self.runtime.world.rank
        shares = [rank_range(self._total, rank, ranks) for rank in range(ranks)]
        subtrees = [roots_of(micros.start, micros.stop) for micros in shares]  # of every rank, in order
        first = sum(len(of_rank) for of_rank in subtrees[:me])

        # Which root has a gradient for which parameter [roots, parameters]: adding zeros for a missing one would turn
        # -0.0 into 0.0.
        has = torch.zeros(sum(map(len, subtrees)), len(self.parameters), dtype=torch.float64)
        for number, (_, gradients) in enumerate(self.tree.roots, first):
            has[number] = torch.tensor([id(p) in gradients for p in self.parameters])
        # On a GPU the host waits here: what is exchanged depends on it.
        found = self._sum_with_word(word, has.flatten()).view_as(has).bool().cpu()

        groups: dict[tuple[torch.dtype, tuple[bool, ...]], list[nn.Parameter]] = {}
        for parameter, present in zip(self.parameters, found.T.tolist(), strict=True):
            parameter.grad = None
            if any(present):
                groups.setdefault((parameter.dtype, tuple(present)), []).append(parameter)

        for (_, present), parameters in groups.items():
            mine = [gradients for number, (_, gradients) in enumerate(self.tree.roots, first) if present[number]]
            self._add_in_order(parameters, mine, subtrees, present)
        self.tree.roots.clear()

    def _add_in_order(
        self,
        parameters: list[nn.Parameter],
        mine: list[Gradients],
        subtrees: list[list[Subtree]],
        present: Sequence[bool],
    ) -> None:
        """Leave the sums of some parameters of one dtype in their `grad`.

        mine: this rank's roots that have gradients for them
        subtrees: the roots of every rank
        present: which of these have gradients for them
        """
        ranks = len(subtrees)
        sizes = [p.numel() for p in parameters]
        width = -(-sum(sizes) // ranks)  # of the slice that a rank owns

        # Every rank gets all terms of its own slice: first those of rank 0, root by root.
        roots = parameters[0].new_zeros(len(mine), ranks * width)
        for row, gradients in zip(roots, mine, strict=True):
            torch.cat([gradients[id(p)].flatten() for p in parameters], out=row[: sum(sizes)])
        to_send = roots.view(len(mine), ranks, width).transpose(0, 1).flatten()
        counts = [sum(flags) for flags in _split(present, [len(of_rank) for of_rank in subtrees])]
        received = to_send.new_empty(sum(counts) * width)
        splits = [count * width for count in counts], [len(mine) * width] * ranks
        dist.all_to_all_single(received, to_send, *splits, group=self.runtime.collectives.group)

        tree: TreeSum[Tensor | None] = TreeSum(_add_present)
        terms = iter(received.view(-1, width))
        for subtree, is_there in zip([root for of_rank in subtrees for root in of_rank], present, strict=True):
            tree.push(subtree, next(terms) if is_there else None)

        own = tree.finish()
        assert own is not None, "some root has a gradient"
        summed = self.runtime.collectives.gather(own).flatten()[: sum(sizes)]
        for parameter, gradient in zip(parameters, summed.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


class OrderedFSDPDriver(FSDPDriver):
    """Sharded parameters, whose gradients FSDP reduce-scatters after every micro-batch.

    So the ranks take turns: round k of a step computes micro-batches kN .. kN+N-1, one on each rank, and the owner of a
    shard adds them in order along a tree of shards.
    """

    role = replace(ShardedDriver.role, interleaved=True)

    def __init__(self, model: nn.Module, config: RunConfig, runtime: Runtime, axes: Axes | None = None):
        super().__init__(model, config, runtime, axes)

        # One for each group of parameters, since each has its own tree.
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reductions = [_OrderedReduceScatter() for _ in sharded]
        for module, reduction in zip(sharded, self._reductions, strict=True):
            module.set_custom_reduce_scatter(reduction)

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        for reduction in self._reductions:
            reduction.in_a_step = False
        try:
            with super().many_forwards() as warning:
                yield warning
        finally:
            for reduction in self._reductions:
                reduction.in_a_step = True

    def begin(self) -> None:
        super().begin()
        self._round = -1
        self._scalar_terms: list[Tensor] = []  # [2, scalars] for each round, see _keep_scalars

        # An abandoned step may have left sums behind.
        for reduction in self._reductions:
            reduction.tree.roots.clear()

    def before_forward(self, micro: MicroBatch, control: Control) -> None:
        super().before_forward(micro, control)
        self._round += 1

        self._total = _micro_batches(control)
        for reduction in self._reductions:
            reduction.expected = self._round, self._total, control.last

        for parameter in self.parameters:
            parameter.grad = None  # FSDP would add to it, and it has no meaning before the last round

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, grad_output, None)
        if self._scalars:
            self._keep_scalars()
        if word is not None:
            self._reduce(word)

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        no_word = torch.zeros(LENGTH, dtype=torch.float64, device=self.runtime.device)
        return [norm_of_rows(rows) for rows in self._gather_rows(tensors, no_word)[1]]

    def _reduce(self, word: ControlWord) -> None:
        self._uniform_use.compare(END)

        # Only the last backward finishes a tree: what is left belongs to a module that it did not reach.
        if any(reduction.tree.roots for reduction in self._reductions):
            raise UserError(
                "exact=true cannot be used under fsdp: the last micro-batch leaves a part of the model unused",
                "earlier ones use it",
                "use every part of the model for every micro-batch, or type strategy=ddp",
            )

        if self._scalars:
            self._reduce_scalars()

        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            raise no_gradient()
        words, rows = self._gather_rows(grads, self.codec.pack(word, times=1.0))
        self._word = words.sum(0)  # the sum of these numbers is exact in any order
        self._norms = torch.stack([norm_of_rows(norms) for norms in rows])

    def _gradient_norms(self, grads: list[Tensor]) -> Tensor:
        return self._norms

    def _keep_scalars(self) -> None:
        """Keep this round's gradients of the zero-dimensional parameters, which FSDP does not reduce.

        Two rows [2, scalars] of float64, which holds every format: the gradients, and whether there is one.
        """
        rows = self._scalars[0].new_zeros(2, len(self._scalars), dtype=torch.float64)
        for number, parameter in enumerate(self._scalars):
            if parameter.grad is not None:
                rows[0, number] = parameter.grad
                rows[1, number] = 1.0

        self._scalar_terms.append(rows)

    def _reduce_scalars(self) -> None:
        """Add the gradients of the zero-dimensional parameters over all micro-batches, along the tree."""
        gathered = self.runtime.collectives.gather(torch.stack(self._scalar_terms)).transpose(0, 1)  # by round and rank
        terms = gathered.flatten(0, 1)[: self._total]  # the rest is padding, which adds nothing

        # On a GPU the host waits here, for models that have such parameters.
        present = terms[:, 1].bool().tolist()
        tree: TreeSum[Gradients] = TreeSum(add_gradients_)
        for index, (values, has) in enumerate(zip(terms[:, 0], present, strict=True)):
            triples = zip(self._scalars, values, has, strict=True)
            tree.push(Subtree(index, 0), {id(p): value.to(p.dtype) for p, value, there in triples if there})

        summed = tree.finish()
        for parameter in self._scalars:
            parameter.grad = summed.get(id(parameter))

    def _gather_rows(self, tensors: Sequence[Tensor], packed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Gather every rank's `packed` [ranks, LENGTH], and the norms [rows] of all rows of each tensor.

        One collective does both. The first ranks hold the same number of rows, the last ones fewer, or none. A scalar
        is one row, which every rank holds: that of rank 0 counts.
        """
        lengths = [len(tensor) if tensor.dim() else 1 for tensor in tensors]

        # One gather needs messages of the same length from all ranks, so shorter shards are padded with zeros.
        most = [-(-length // self.runtime.world.size) for length in lengths]
        message = torch.zeros(LENGTH + sum(most), dtype=torch.float64, device=self.runtime.device)
        message[:LENGTH] = packed

        for slot, tensor in zip(message[LENGTH:].split(most), tensors, strict=True):
            rows = row_norms(local(tensor))
            slot[: len(rows)] = rows

        gathered = self.runtime.collectives.gather(message)
        shards = gathered[:, LENGTH:].split(most, dim=1)
        return gathered[:, :LENGTH], [rows.flatten()[:n] for rows, n in zip(shards, lengths, strict=True)]


class _OrderedReduceScatter(ReduceScatter):
    """The reduce-scatter of one group of parameters. It adds this rank's shards in order; FSDP's own may not."""

    def __init__(self) -> None:
        self.tree: TreeSum[Tensor] = TreeSum(Tensor.add_)

        # About the next backward: the number of its round, the micro-batches of the step, whether it is the last.
        self.expected: tuple[int, int, bool] | None = None

        # Outside a step there are no rounds: one backward on each rank is all there is.
        self.in_a_step = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if not self.in_a_step:
            self.expected = 0, group.size(), True
        if self.expected is None:
            raise UserError(
                "exact=true cannot be used under fsdp: a block of the model is called more than once in a forward",
                "the gradients of that block come in pieces",
                "type strategy=ddp; or blocks=[...] with the class of a module around it that is called once",
            )

        number, total, last = self.expected
        self.expected = None

        # Every rank gets all terms of its own shard and adds them in the order of the micro-batches.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for index, term in enumerate(received.chunk(group.size()), number * group.size()):
            if index < total:  # the rest is padding, which adds nothing
                self.tree.push(Subtree(index, 0), term)

        if last:
            output_tensor.copy_(self.tree.finish())
            return

        # A term must not keep alive everything that was received with it.
        storage = received.untyped_storage().data_ptr()
        self.tree.roots = [
            (subtree, term.clone() if term.untyped_storage().data_ptr() == storage else term)
            for subtree, term in self.tree.roots
        ]


def _add_present(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def _split(values: Sequence[bool], lengths: Sequence[int]) -> list[Sequence[bool]]:
    """Cut `values` into runs of these lengths."""
    ends = list(accumulate(lengths))
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _micro_batches(control: Control) -> int:
    total = control.batches.total
    assert total is not None, "exact mode needs a source that knows its micro-batches"
    return total
