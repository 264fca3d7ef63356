"""Reducers for full parameters: they add gradients along one tree, so that the bits do not depend on the ranks.

There is one for a single process, and one for replicas that reduce after the last backward. The one for DDP's buckets
is in hook.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.windows import rank_range
from lockstep.parallel.exact.tree import Subtree, TreeSum, roots_of
from lockstep.parallel.gradients import sum_with_word
from lockstep.parallel.micro_batches import ExactReducer, MicroBatchDriver, norms_of_gradients
from lockstep.parallel.progress import PassProgress
from lockstep.runtime.control_word import ControlWord
from lockstep.task import MicroBatch

Gradients = dict[int, Tensor]  # gradient sums over one or more micro-batches, by the id of the parameter


def add_gradients_(left: Gradients, right: Gradients) -> Gradients:
    """Add `right` to `left`, in place. A parameter may have a gradient in only one of them."""
    both = [key for key in right if key in left]
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])

    left.update({key: gradient for key, gradient in right.items() if key not in left})
    return left


class OrderedTree(ExactReducer):
    """Adds the micro-batches of this rank, in order, and keeps at most log2(their number) partial sums."""

    def __init__(self, driver: MicroBatchDriver):
        self.driver = driver
        self.tree: TreeSum[Gradients] = TreeSum(add_gradients_)  # the gradients of this rank's micro-batches

    def begin_pass(self) -> None:
        self.tree.roots.clear()

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        self.subtree = None if micro.padding else Subtree(micro.index, 0)
        self._progress = progress

    def after_backward(self, progress: PassProgress) -> None:
        # Padding has gradients of zeros, which are no part of the sum.
        parameters = self.driver.parameters.values()
        if self.subtree is not None:
            self.tree.push(self.subtree, {id(p): p.grad for p in parameters if p.grad is not None})

        # The next backward must not add to them.
        for parameter in parameters:
            parameter.grad = None

    def norms(self, tensors: list[Tensor]) -> list[Tensor]:
        # By rows, as for sharded parameters, so that norms have the same bits.
        return [norm_of_rows(row_norms(tensor)) for tensor in tensors]

    def roots_by_rank(self) -> list[list[Subtree]]:
        """Return the roots that each rank is left with in this step. Every rank can compute those of all ranks."""
        total = count_micro_batches(self._progress)
        size = self.driver.runtime.world.size
        ranges = [rank_range(total, rank, size) for rank in range(size)]
        return [roots_of(indices.start, indices.stop) for indices in ranges]


class OrderedReducer(OrderedTree):
    """The sums of a single process."""

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        # A parameter that no micro-batch has reached keeps no gradient.
        summed = self.tree.finish()
        for parameter in self.driver.parameters.values():
            parameter.grad = summed.get(id(parameter))

        return self.driver.codec.pack(control_word), norms_of_gradients(self.driver.parameters, self.norms)


class OrderedReplicas(OrderedTree):
    """Replicas that reduce the roots of all ranks after the last backward.

    A parameter may have no gradient in some micro-batches, or in all of them.
    """

    def finish_reduction(self, control_word: ControlWord) -> tuple[Tensor, Tensor]:
        """Add the roots of all ranks in the order of the tree, and sum the control word.

        One collective finds out which gradients there are, and two more add those of each group below.
        """
        parameters = [*self.driver.parameters.values()]
        collectives = self.driver.runtime.collectives
        roots_by_rank = self.roots_by_rank()
        first = sum(map(len, roots_by_rank[: collectives.world.rank]))  # the index of this rank's first root

        # Whether a root has a gradient for a parameter [roots, parameters]. Adding zeros for a missing gradient instead
        # would turn -0.0 into 0.0.
        local_flags = torch.zeros(sum(map(len, roots_by_rank)), len(parameters), dtype=torch.float64)
        for index, (_, gradients) in enumerate(self.tree.roots, first):
            local_flags[index] = torch.tensor([id(p) in gradients for p in parameters])

        # On a GPU the host waits here, because the sizes of the messages below depend on the result.
        packed, counts = sum_with_word(self.driver.codec, control_word, local_flags.flatten(), collectives)
        has_gradient = counts.view_as(local_flags).bool().cpu()

        # Parameters of the same dtype, with gradients in the same roots, are reduced together.
        groups: dict[tuple[torch.dtype, tuple[bool, ...]], list[nn.Parameter]] = {}
        for parameter, present in zip(parameters, has_gradient.T.tolist(), strict=True):
            parameter.grad = None
            if any(present):
                groups.setdefault((parameter.dtype, tuple(present)), []).append(parameter)

        # The groups come in the same order on all ranks, since they follow from flags that all ranks have.
        for (_, present), group in groups.items():
            local_roots = [gradients for index, (_, gradients) in enumerate(self.tree.roots, first) if present[index]]
            self._add_in_order(group, local_roots, roots_by_rank, present)

        self.tree.roots.clear()
        return packed, norms_of_gradients(self.driver.parameters, self.norms)

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
        collectives = self.driver.runtime.collectives
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
        flags = iter(present)
        counts = [sum(islice(flags, len(roots))) for roots in roots_by_rank]
        received = to_send.new_empty(sum(counts) * width)
        receive_sizes = [count * width for count in counts]
        send_sizes = [len(local_roots) * width] * ranks
        dist.all_to_all_single(received, to_send, receive_sizes, send_sizes, group=collectives.group)

        # Add the terms of this rank's slice along the tree. A root without gradients has none.
        tree: TreeSum[Tensor | None] = TreeSum(_add_present)
        terms = iter(received.view(-1, width))
        all_roots = [root for roots in roots_by_rank for root in roots]
        for subtree, has_term in zip(all_roots, present, strict=True):
            tree.push(subtree, next(terms) if has_term else None)

        local_sum = tree.finish()
        assert local_sum is not None, "some root has a gradient"

        # All ranks get the sums of all slices.
        summed = collectives.all_gather(local_sum).flatten()[: sum(sizes)]
        for parameter, gradient in zip(parameters, summed.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


def _add_present(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of the terms that are not None."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def count_micro_batches(progress: PassProgress) -> int:
    """Return how many micro-batches the step has on all ranks together."""
    count = progress.batches.global_num_micro_batches
    assert count is not None, "exact mode needs a source with a known number of micro-batches"
    return count


# ---- norms ----
#
# They have the same bits whether a tensor is full or sharded along its first dimension. The order in which a kernel
# adds the elements of a tensor depends on the tensor's shape. So the norm of each row is computed separately, and every
# rank adds the squared norms of all rows in the same order.


def row_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each row of `tensor` (rows, ...), as (rows,) in float64."""
    rows = tensor.detach()

    # A row of a vector is a single number, and a scalar is one row.
    if rows.dim() < 2:
        return rows.abs().double().reshape(-1)

    rows = rows.flatten(1).contiguous()

    # The CPU kernel sums each row separately, in the same way for any number of rows.
    if rows.device.type == "cpu":
        return torch.linalg.vector_norm(rows, dim=1).double()

    return _sum_by_halves(rows.double().square()).sqrt()


def norm_of_rows(norms: Tensor) -> Tensor:
    """Return the norm () of a full tensor from the norms (rows,) of all its rows."""
    return norms.square().sum().sqrt()


def _sum_by_halves(squares: Tensor) -> Tensor:
    """Sum each row of `squares` (rows, columns) by repeatedly adding its two halves.

    The order of a GPU's row sums depends on the number of rows. Elementwise additions do not.
    """
    # Zeros pad the row to a power of two and change no sum.
    width = 1 << (squares.shape[1] - 1).bit_length()
    squares = F.pad(squares, (0, width - squares.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]

    return squares[:, 0]
