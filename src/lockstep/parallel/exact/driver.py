"""Drivers that add gradients along one tree (tree.py), so that their bits do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from lockstep.config import DDPConfig, RunConfig
from lockstep.data.windows import rank_range
from lockstep.errors import UserError
from lockstep.parallel.ddp.driver import DDPDriver, FlatReduceDriver, check_reached
from lockstep.parallel.driver import Driver, Progress, ShardedDriver, SingleDriver, no_gradient, sum_with_word
from lockstep.parallel.exact.hook import Gradients, OrderedHook, add_gradients_
from lockstep.parallel.exact.row_norms import norm_of_rows, row_norms
from lockstep.parallel.exact.tree import Subtree, TreeSum, roots_of
from lockstep.parallel.fsdp.collective_check import END
from lockstep.parallel.fsdp.driver import FSDPDriver
from lockstep.parallel.mesh import Axes
from lockstep.runtime.context import Runtime
from lockstep.runtime.control_word import LENGTH, ControlWord
from lockstep.runtime.layout import local
from lockstep.task import MicroBatch


class _FullParameters(Driver):
    """The base class of drivers with full parameters on every rank: a tree of gradients, and norms.

    Norms are computed by rows, as for sharded parameters, so that they have the same bits.
    """

    tree: TreeSum[Gradients]  # the gradients of this rank's micro-batches

    def begin(self) -> None:
        super().begin()
        self.tree.roots.clear()

    def before_forward(self, micro: MicroBatch, progress: Progress) -> None:
        super().before_forward(micro, progress)
        self._subtree = None if micro.padding else Subtree(micro.index, 0)

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        return [norm_of_rows(row_norms(tensor)) for tensor in tensors]

    def _push_gradients(self) -> None:
        """Move the gradients of the last backward into the tree, so that the next one does not add to them."""
        assert self._subtree is not None, "padding is the only micro-batch of its rank"
        self.tree.push(self._subtree, {id(p): p.grad for p in self.parameters if p.grad is not None})
        for parameter in self.parameters:
            parameter.grad = None


class OrderedSingleDriver(_FullParameters, SingleDriver):
    """One process. It runs all micro-batches in order and keeps at most log2(number of micro-batches) partial sums."""

    def __init__(self, model: nn.Module, runtime: Runtime):
        super().__init__(model, runtime)
        self.tree = TreeSum(add_gradients_)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, grad_output, word)
        self._push_gradients()

    def _reduce(self, word: ControlWord) -> tuple[Tensor, None]:
        # A parameter that no micro-batch has reached keeps no gradient.
        summed = self.tree.finish()
        for parameter in self.parameters:
            parameter.grad = summed.get(id(parameter))

        return super()._reduce(word)


class OrderedDDPDriver(_FullParameters, DDPDriver):
    """Replicas. In the last backward, the hook adds the partial sums of all ranks."""

    leaves_sums = True  # dividing by 3 ranks would round, while dividing by 2 does not
    word_dtype = torch.float64

    def before_forward(self, micro: MicroBatch, progress: Progress) -> None:
        super().before_forward(micro, progress)
        self._total = _micro_batches(progress)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        # The control word comes with the last backward of a step, in which DDP runs the hook.
        if word is not None:
            self._ordered.expect(self._total, self._subtree)

        super()._backward(total, grad_output, word)

        # The gradients of earlier micro-batches go into the hook's tree. The hook itself adds the last micro-batch.
        if word is None:
            missed = [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is None]
            check_reached(missed, len(self.names))
            self._push_gradients()

    def _make_hook(self, group: dist.ProcessGroup, config: DDPConfig, seed: int) -> OrderedHook:
        self._ordered = OrderedHook(self._word_parameter, group)
        self.tree = self._ordered.tree
        return self._ordered


class OrderedFlatReduceDriver(_FullParameters, FlatReduceDriver):
    """Replicas that exchange the roots of all ranks after the last backward.

    A parameter may have no gradient in some micro-batches, or in all of them.
    """

    def __init__(self, model: nn.Module, runtime: Runtime):
        super().__init__(model, runtime)
        self.tree = TreeSum(add_gradients_)

    def before_forward(self, micro: MicroBatch, progress: Progress) -> None:
        super().before_forward(micro, progress)
        self._total = _micro_batches(progress)

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, grad_output, word)

        # Padding has gradients of zeros, which are no part of the sum.
        if self._subtree is not None:
            self._push_gradients()

    def _reduce(self, word: ControlWord) -> tuple[Tensor, None]:
        """Add the roots of all ranks in the order of the tree. One collective, and two more for each group below."""
        world = self.runtime.world

        # The roots of every rank follow from the number of micro-batches; `first` is the index of this rank's first
        # root among all of them.
        ranges = [rank_range(self._total, rank, world.size) for rank in range(world.size)]
        roots_by_rank = [roots_of(micros.start, micros.stop) for micros in ranges]
        first = sum(len(roots) for roots in roots_by_rank[: world.rank])

        # Whether a root has a gradient for a parameter [roots, parameters]. Adding zeros for a missing gradient instead
        # would turn -0.0 into 0.0.
        local_flags = torch.zeros(sum(map(len, roots_by_rank)), len(self.parameters), dtype=torch.float64)
        for index, (_, gradients) in enumerate(self.tree.roots, first):
            local_flags[index] = torch.tensor([id(p) in gradients for p in self.parameters])

        # On a GPU the host waits here, because the sizes of the messages below depend on the result.
        packed, counts = sum_with_word(self, word, local_flags.flatten())
        has_gradient = counts.view_as(local_flags).bool().cpu()

        # Parameters of the same dtype, with gradients in the same roots, are exchanged together.
        groups: dict[tuple[torch.dtype, tuple[bool, ...]], list[nn.Parameter]] = {}
        for parameter, present in zip(self.parameters, has_gradient.T.tolist(), strict=True):
            parameter.grad = None
            if any(present):
                groups.setdefault((parameter.dtype, tuple(present)), []).append(parameter)

        # The groups come in the same order on all ranks, since they follow from flags that all ranks have.
        for (_, present), parameters in groups.items():
            local_roots = [gradients for index, (_, gradients) in enumerate(self.tree.roots, first) if present[index]]
            self._add_in_order(parameters, local_roots, roots_by_rank, present)

        self.tree.roots.clear()
        return packed, None

    def _add_in_order(
        self,
        parameters: list[nn.Parameter],
        local_roots: list[Gradients],
        roots_by_rank: list[list[Subtree]],
        present: Sequence[bool],
    ) -> None:
        """Add the gradients of `parameters`, which have one dtype, and set their `grad` to the sums.

        local_roots: this rank's roots that have gradients for the parameters
        roots_by_rank: the roots of every rank
        present: for each root of every rank, whether it has gradients for the parameters
        """
        ranks = len(roots_by_rank)
        sizes = [p.numel() for p in parameters]
        width = -(-sum(sizes) // ranks)  # elements of the slice that each rank owns

        # One row for each of this rank's roots: the gradients of all parameters, one after another.
        rows = parameters[0].new_zeros(len(local_roots), ranks * width)
        for row, gradients in zip(rows, local_roots, strict=True):
            torch.cat([gradients[id(p)].flatten() for p in parameters], out=row[: sum(sizes)])

        # Every rank receives all terms of its own slice, ordered by rank and then by root.
        to_send = rows.view(len(local_roots), ranks, width).transpose(0, 1).flatten()

        # How many terms each rank sends.
        counts = [sum(flags) for flags in _split(present, [len(roots) for roots in roots_by_rank])]
        received = to_send.new_empty(sum(counts) * width)
        receive_sizes = [count * width for count in counts]
        send_sizes = [len(local_roots) * width] * ranks
        dist.all_to_all_single(received, to_send, receive_sizes, send_sizes, group=self.runtime.collectives.group)

        # Add the terms of this rank's slice along the tree. A root without gradients has none.
        tree: TreeSum[Tensor | None] = TreeSum(_add_present)
        terms = iter(received.view(-1, width))
        all_roots = [root for roots in roots_by_rank for root in roots]
        for subtree, has_term in zip(all_roots, present, strict=True):
            tree.push(subtree, next(terms) if has_term else None)

        local_sum = tree.finish()
        assert local_sum is not None, "some root has a gradient"

        # All ranks get the sums of all slices.
        summed = self.runtime.collectives.gather(local_sum).flatten()[: sum(sizes)]
        for parameter, gradient in zip(parameters, summed.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


class OrderedFSDPDriver(FSDPDriver):
    """Sharded parameters, whose gradients FSDP reduce-scatters after every micro-batch.

    So the ranks take micro-batches in turn: with N ranks, round k of a step computes micro-batches kN .. kN+N-1, one on
    each rank. The owner of a shard adds their gradients in order along a tree.
    """

    role = replace(ShardedDriver.role, in_turn=True)

    def __init__(self, model: nn.Module, config: RunConfig, runtime: Runtime, axes: Axes | None = None):
        super().__init__(model, config, runtime, axes)

        # One for each parameter group, since each needs its own tree.
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reductions = [_OrderedReduceScatter() for _ in sharded]
        for module, reduction in zip(sharded, self._reductions, strict=True):
            module.set_custom_reduce_scatter(reduction)

    @contextmanager
    def many_forwards(self) -> Iterator[str | None]:
        # A gradient that such a forward takes is not one of a step's.
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
        self._scalar_terms: list[Tensor] = []  # [2, scalars] for each round, see _store_scalar_gradients

        # An abandoned step may have left sums behind.
        for reduction in self._reductions:
            reduction.tree.roots.clear()

    def before_forward(self, micro: MicroBatch, progress: Progress) -> None:
        super().before_forward(micro, progress)
        self._round += 1

        # The reduce-scatter of this round runs inside its backward, and reads what is set here.
        self._total = _micro_batches(progress)
        for reduction in self._reductions:
            reduction.expected = _Round(self._round, self._total, progress.is_last_micro_batch)

        for parameter in self.parameters:
            parameter.grad = None  # FSDP would add to it, but only the last round leaves the sum

    def _backward(self, total: Tensor, grad_output: Tensor, word: ControlWord | None) -> None:
        super()._backward(total, grad_output, word)
        if self._scalars:
            self._store_scalar_gradients()

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        no_word = torch.zeros(LENGTH, dtype=torch.float64, device=self.runtime.device)
        return [norm_of_rows(rows) for rows in self._gather_rows(tensors, no_word)[1]]

    def _reduce(self, word: ControlWord) -> tuple[Tensor, Tensor]:
        self._collective_check.compare(END)

        # The last backward finishes the tree of every module that it reaches, so an unfinished tree was not reached.
        if any(reduction.tree.roots for reduction in self._reductions):
            raise UserError(
                "exact=true cannot be used under fsdp: the last micro-batch leaves a part of the model unused",
                "earlier micro-batches of the step use it",
                "use every part of the model for every micro-batch, or set strategy=ddp",
            )

        if self._scalars:
            self._reduce_scalars()

        # The norms of shards, and the control word, in one collective.
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            raise no_gradient()

        words, rows = self._gather_rows(grads, self.codec.pack(word))
        packed = words.sum(0)  # exact in any order: integers, and numbers rounded to a grid
        return packed, torch.stack([norm_of_rows(norms) for norms in rows])

    def _store_scalar_gradients(self) -> None:
        """Store this round's gradients of the zero-dimensional parameters, which FSDP does not reduce.

        They become two rows [2, scalars]: the gradients, and whether there is one. float64 holds the values of every
        dtype exactly.
        """
        rows = self._scalars[0].new_zeros(2, len(self._scalars), dtype=torch.float64)
        for index, parameter in enumerate(self._scalars):
            if parameter.grad is not None:
                rows[0, index] = parameter.grad
                rows[1, index] = 1.0

        self._scalar_terms.append(rows)

    def _reduce_scalars(self) -> None:
        """Add the gradients of the zero-dimensional parameters over all micro-batches, along the tree."""
        gathered = self.runtime.collectives.gather(torch.stack(self._scalar_terms))
        by_round = gathered.transpose(0, 1)  # [rounds, ranks, 2, scalars], the order of micro-batches
        terms = by_round.flatten(0, 1)[: self._total]  # the rest is padding

        # On a GPU the host waits here, for models that have such parameters.
        present = terms[:, 1].bool().tolist()
        tree: TreeSum[Gradients] = TreeSum(add_gradients_)
        for index, (values, flags) in enumerate(zip(terms[:, 0], present, strict=True)):
            triples = zip(self._scalars, values, flags, strict=True)
            gradients = {id(p): value.to(p.dtype) for p, value, has_gradient in triples if has_gradient}
            tree.push(Subtree(index, 0), gradients)

        summed = tree.finish()
        for parameter in self._scalars:
            parameter.grad = summed.get(id(parameter))

    def _gather_rows(self, tensors: Sequence[Tensor], packed: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return every rank's `packed` [ranks, LENGTH], and for each tensor the norms [rows] of all its rows.

        One collective gathers both. FSDP shards by rows: the first ranks hold the same number of rows, the last ones
        fewer or none. A scalar counts as one row. Every rank holds it, and rank 0's is used.
        """
        row_counts = [len(tensor) if tensor.dim() else 1 for tensor in tensors]

        # An all-gather needs messages of the same length from all ranks, so shorter shards are padded with zeros.
        shard_sizes = [-(-count // self.runtime.world.size) for count in row_counts]
        message = torch.zeros(LENGTH + sum(shard_sizes), dtype=torch.float64, device=self.runtime.device)
        message[:LENGTH] = packed

        for slot, tensor in zip(message[LENGTH:].split(shard_sizes), tensors, strict=True):
            norms = row_norms(local(tensor))
            slot[: len(norms)] = norms

        # The shards of all ranks one after the other are the rows in order, and then what was padded.
        gathered = self.runtime.collectives.gather(message)
        shards = gathered[:, LENGTH:].split(shard_sizes, dim=1)
        rows = [norms.flatten()[:count] for norms, count in zip(shards, row_counts, strict=True)]
        return gathered[:, :LENGTH], rows


class _Round(NamedTuple):
    """The next backward of a step under FSDP: one micro-batch on each rank."""

    number: int
    total: int  # micro-batches in the whole step
    is_last: bool


class _OrderedReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group. Unlike torch's, it adds the terms in the order of the tree."""

    def __init__(self) -> None:
        self.tree: TreeSum[Tensor] = TreeSum(Tensor.add_)

        # The round of the next backward; None once its gradients were reduced.
        self.expected: _Round | None = None

        # Outside a step there are no rounds: every backward is a whole sum, of one micro-batch on each rank.
        self.in_a_step = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add what all ranks have in `input_tensor` for this rank's shard. The last round writes `output_tensor`."""
        if not self.in_a_step:
            self.expected = _Round(0, group.size(), is_last=True)

        if self.expected is None:
            raise UserError(
                "exact=true cannot be used under fsdp: a block of the model is called more than once in a forward",
                "the gradients of that block come in parts, one for each call",
                "set strategy=ddp; or blocks=[...] with the class of a module around it that is called once",
            )

        # A second call in the same backward finds None.
        current = self.expected
        self.expected = None

        # Every rank receives all terms of its own shard and adds them in the order of the micro-batches.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for index, term in enumerate(received.chunk(group.size()), current.number * group.size()):
            if index < current.total:  # the rest is padding
                self.tree.push(Subtree(index, 0), term)

        if current.is_last:
            output_tensor.copy_(self.tree.finish())
            return

        # Clone the terms that are views of `received`, so that they do not keep all of its memory alive.
        storage = received.untyped_storage().data_ptr()
        self.tree.roots = [
            (subtree, term.clone() if term.untyped_storage().data_ptr() == storage else term)
            for subtree, term in self.tree.roots
        ]


def _add_present(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of the terms that are not None."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def _split(values: Sequence[bool], lengths: Sequence[int]) -> list[Sequence[bool]]:
    """Split `values` into consecutive runs of these lengths."""
    ends = list(accumulate(lengths))
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _micro_batches(progress: Progress) -> int:
    count = progress.batches.count_all_ranks
    assert count is not None, "exact mode needs a source with a known number of micro-batches"
    return count
