"""Exact mode under FSDP: the ranks take micro-batches in turn, and the owner of a shard adds them along the tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UserError, some_names
from lockstep.parallel.exact.norms import norm_of_rows, row_norms
from lockstep.parallel.exact.reducers import Gradients, add_gradients_, count_micro_batches
from lockstep.parallel.exact.tree import Subtree, TreeSum
from lockstep.parallel.fsdp import torch_private
from lockstep.parallel.gradients import clear_gradients, no_gradient
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.control_word import LENGTH
from lockstep.runtime.shards import to_local
from lockstep.task import MicroBatch


class Turn(NamedTuple):
    """The next backward of a pass: one micro-batch on each rank."""

    number: int
    total: int  # micro-batches in the whole step
    is_last: bool


class ShardReducer(StepPart):
    """Sharded parameters, whose gradients FSDP reduce-scatters after every micro-batch.

    So the ranks take micro-batches in turn: with N ranks, turn k of a pass computes micro-batches kN .. kN+N-1, one on
    each rank. The owner of a shard adds their gradients in order along a tree.
    """

    slot = "reduce"

    def __init__(self, parameters: Mapping[str, nn.Parameter], sharded: Sequence[FSDPModule], ranks: Collectives):
        """`parameters` are those of the `sharded` modules, over all `ranks`."""
        self.turn: Turn | None = None  # None outside a pass
        self._parameters = parameters
        self._scalars = [p for p in parameters.values() if p.dim() == 0]
        self._ranks = ranks

        # One for each parameter group, since each needs its own tree.
        self._reductions = [_OrderedReduceScatter(self, module) for module in sharded]
        for module, reduction in zip(sharded, self._reductions, strict=True):
            module.set_custom_reduce_scatter(reduction)

    def begin_pass(self) -> None:
        self.turn = None
        self._scalar_terms: list[Tensor] = []  # [2, scalars] for each turn, see _store_scalar_gradients

        # An abandoned pass may have left sums behind.
        for reduction in self._reductions:
            reduction.clear()

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        # The reduce-scatter of this turn runs inside its backward, and reads what is set here.
        number = self.turn.number + 1 if self.turn else 0
        self.turn = Turn(number, count_micro_batches(progress), progress.is_last_micro_batch)

        # FSDP would add to the gradients, but only the last turn leaves the sum.
        clear_gradients(self._parameters)

    def after_backward(self, progress: PassProgress) -> None:
        if self._scalars:
            self._store_scalar_gradients()

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        no_word = torch.zeros(LENGTH, dtype=torch.float64, device=self._ranks.device)
        return [norm_of_rows(rows) for rows in self._gather_rows(tensors, no_word)[1]]

    def reduce(self, packed_word: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the sums of a pass. Return the summed control word [LENGTH], and the norm of each gradient."""
        # The last backward finishes the tree of every module that it reaches, so an unfinished tree was not reached.
        if any(tree.partial_sums for reduction in self._reductions for tree in reduction.trees.values()):
            raise UserError(
                "exact=true cannot be used under fsdp: the last micro-batch leaves a part of the model unused",
                "earlier micro-batches of the step use it",
                "use every part of the model for every micro-batch, or set strategy=ddp",
            )

        if self._scalars:
            self._reduce_scalars()

        # The norms of shards, and the control word, in one collective.
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not grads:
            raise no_gradient()

        words, rows = self._gather_rows(grads, packed_word)
        packed_sum = words.sum(0)  # exact in any order: integers, and numbers rounded to a grid
        self.turn = None
        return packed_sum, torch.stack([norm_of_rows(norms) for norms in rows])

    def _store_scalar_gradients(self) -> None:
        """Store this turn's gradients of the zero-dimensional parameters, which FSDP does not reduce.

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
        assert self.turn is not None
        gathered = self._ranks.all_gather(torch.stack(self._scalar_terms))
        by_turn = gathered.transpose(0, 1)  # [turns, ranks, 2, scalars], the order of micro-batches
        terms = by_turn.flatten(0, 1)[: self.turn.total]  # the rest is padding

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

    def _gather_rows(self, tensors: Sequence[Tensor], packed_word: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return every rank's `packed_word` [ranks, LENGTH], and for each tensor the norms [rows] of all its rows.

        One collective gathers both. FSDP shards by rows: the first ranks hold the same number of rows, the last ones
        fewer or none. A scalar counts as one row. Every rank holds it, and rank 0's is used.
        """
        row_counts = [len(tensor) if tensor.dim() else 1 for tensor in tensors]

        # An all-gather needs messages of the same length from all ranks, so shorter shards are padded with zeros.
        shard_sizes = [-(-count // self._ranks.world.size) for count in row_counts]
        message = torch.zeros(LENGTH + sum(shard_sizes), dtype=torch.float64, device=self._ranks.device)
        message[:LENGTH] = packed_word

        for slot, tensor in zip(message[LENGTH:].split(shard_sizes), tensors, strict=True):
            norms = row_norms(to_local(tensor))
            slot[: len(norms)] = norms

        # The shards of all ranks one after the other are the rows in order, and then what was padded.
        gathered = self._ranks.all_gather(message)
        shards = gathered[:, LENGTH:].split(shard_sizes, dim=1)
        rows = [norms.flatten()[:count] for norms, count in zip(shards, row_counts, strict=True)]
        return gathered[:, :LENGTH], rows


class _OrderedReduceScatter(torch_private.ReduceScatter):
    """The reduce-scatter of one parameter group. Unlike torch's, it adds the terms in the order of the tree.

    It is called once for each dtype of the group's gradients.
    """

    def __init__(self, reducer: ShardReducer, module: FSDPModule) -> None:
        self.trees = defaultdict[torch.dtype, TreeSum[Tensor]](partial(TreeSum, Tensor.add_))
        self._reducer = reducer
        self._last: dict[torch.dtype, Turn] = {}  # the last turn whose gradients of the dtype were reduced

        # Which parameters have a gradient in this turn, and had one in the first turn of the pass.
        self._parameters = torch_private.grouped_parameters(module)
        self._present: list[bool] = []
        self._first: list[bool] | None = None
        if self._parameters:
            torch_private.call_before_reduction(module, self._note_gradients)

    def clear(self) -> None:
        self.trees.clear()
        self._first = None

    def _note_gradients(self) -> None:
        # It is judged in the reduction itself, when all ranks have found that they agree.
        self._present = list(map(torch_private.has_gradient, self._parameters))

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add what all ranks have in `input_tensor` for this rank's shard. The last turn writes `output_tensor`."""
        # Outside a pass there are no turns: every backward is a whole sum, of one micro-batch on each rank.
        current = self._reducer.turn or Turn(0, group.size(), is_last=True)

        if current is self._last.get(input_tensor.dtype):
            raise UserError(
                "exact=true cannot be used under fsdp: a block of the model is called more than once in a forward",
                "the gradients of that block come in parts, one for each call",
                "set strategy=ddp; or blocks=[...] with the class of a module around it that is called once",
            )

        # The terms of all turns are packed in the same way only if they belong to the same parameters.
        if current.number == 0:
            self._first = self._present
        elif self._first != self._present:
            raise self._different_parameters()

        self._last[input_tensor.dtype] = current
        tree = self.trees[input_tensor.dtype]

        # Every rank receives all terms of its own shard and adds them in the order of the micro-batches.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for index, term in enumerate(received.chunk(group.size()), current.number * group.size()):
            if index < current.total:  # the rest is padding
                tree.push(Subtree(index, 0), term)

        if current.is_last:
            output_tensor.copy_(tree.finish())
            return

        # Clone the terms that are views of `received`, so that they do not keep all of its memory alive.
        storage = received.untyped_storage().data_ptr()
        tree.partial_sums = [
            (subtree, term.clone() if term.untyped_storage().data_ptr() == storage else term)
            for subtree, term in tree.partial_sums
        ]

    def _different_parameters(self) -> UserError:
        first = self._first or [False] * len(self._present)
        pairs = zip(self._parameters, first, self._present, strict=True)
        differing = [torch_private.name_in_module(p) for p, before, now in pairs if before != now]
        return UserError(
            "exact=true cannot be used under fsdp: the micro-batches of a step use different parameters of a block",
            f"only some of them have a gradient for {some_names(differing, 4)}",
            "use every parameter for every micro-batch, or set strategy=ddp",
        )
