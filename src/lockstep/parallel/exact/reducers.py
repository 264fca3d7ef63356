"""Reducers for full parameters: they add gradients along one tree, so that the bits do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.windows import rank_range
from lockstep.parallel.exact.tree import Subtree, TreeSum, subtrees_of
from lockstep.parallel.gradients import clear_gradients, sum_with_word
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.runtime.collectives import Collectives
from lockstep.task import MicroBatch

Gradients = dict[int, Tensor]  # gradient sums over one or more micro-batches, by the id of the parameter


def add_gradients_(left: Gradients, right: Gradients) -> Gradients:
    """Add `right` to `left`, in place. A parameter may have a gradient in only one of them."""
    both = [key for key in right if key in left]
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])

    left.update({key: gradient for key, gradient in right.items() if key not in left})
    return left


class TreeReducer(StepPart):
    """Adds the micro-batches of this rank, in order, and keeps at most log2(their number) partial sums."""

    slot = "reduce"

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = parameters
        self.tree: TreeSum[Gradients] = TreeSum(add_gradients_)  # the gradients of this rank's micro-batches
        self.subtree: Subtree | None = None  # the current micro-batch; None: it is padding

    def begin_pass(self) -> None:
        self.tree.clear()

    def before_forward(self, micro: MicroBatch, progress: PassProgress) -> None:
        self.subtree = None if micro.padding else Subtree(micro.index, 0)
        self._progress = progress

    def after_backward(self, progress: PassProgress) -> None:
        # Padding has gradients of zeros, which are no part of the sum.
        if self.subtree is not None:
            self.tree.push(self.subtree, {id(p): p.grad for p in self.parameters.values() if p.grad is not None})

        # The next backward must not add to them.
        clear_gradients(self.parameters)

    def subtrees_by_rank(self, ranks: int) -> list[list[Subtree]]:
        """Return the subtrees of each rank's partial sums at the end of the pass, which any rank can compute."""
        total = count_micro_batches(self._progress)
        ranges = [rank_range(total, rank, ranks) for rank in range(ranks)]
        return [subtrees_of(indices.start, indices.stop) for indices in ranges]


class SingleReducer(TreeReducer):
    """The sums of a single process."""

    def reduce(self) -> None:
        """Set the gradients to their sums. A parameter that no micro-batch has reached keeps no gradient."""
        summed = self.tree.finish()
        for parameter in self.parameters.values():
            parameter.grad = summed.get(id(parameter))


class ReplicaReducer(TreeReducer):
    """The sums of replicas: the partial sums of all ranks are added after the last backward.

    A parameter may have no gradient in some micro-batches, or in all of them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Collectives):
        super().__init__(parameters)
        self._ranks = ranks

    def reduce(self, packed_word: Tensor) -> Tensor:
        """Set the gradients to their sums over all ranks, and return the summed control word [LENGTH].

        One collective finds out which gradients there are, and two more add those of each group below.
        """
        parameters = [*self.parameters.values()]
        subtrees_by_rank = self.subtrees_by_rank(self._ranks.world.size)
        local_sums = dict(self.tree.partial_sums)

        # Whether a partial sum has a gradient for a parameter [subtrees of all ranks, parameters]. Adding zeros for a
        # missing gradient instead would turn -0.0 into 0.0.
        nothing: Gradients = {}
        rows = [local_sums.get(subtree, nothing) for subtree in chain(*subtrees_by_rank)]
        flags = torch.tensor([[id(p) in gradients for p in parameters] for gradients in rows], dtype=torch.float64)

        # On a GPU the host waits here, because the sizes of the messages below depend on the result.
        packed_sum, counts = sum_with_word(packed_word, flags.flatten(), self._ranks)
        has_gradient = counts.view_as(flags).bool().cpu()

        # Parameters of the same dtype, with gradients in the same partial sums, are reduced together.
        groups: dict[tuple[torch.dtype, tuple[bool, ...]], list[nn.Parameter]] = {}
        for parameter, present in zip(parameters, has_gradient.T.tolist(), strict=True):
            parameter.grad = None
            if any(present):
                groups.setdefault((parameter.dtype, tuple(present)), []).append(parameter)

        # The groups come in the same order on all ranks, since they follow from flags that all ranks have.
        for (_, present), group in groups.items():
            self._reduce_group(group, subtrees_by_rank, present)

        self.tree.clear()
        return packed_sum

    def _reduce_group(
        self, parameters: list[nn.Parameter], subtrees_by_rank: list[list[Subtree]], present: Sequence[bool]
    ) -> None:
        """Set the gradients of `parameters`, which have one dtype, to their sums over all ranks.

        present: for each subtree of every rank, whether its partial sum has gradients for the parameters
        """
        ranks = len(subtrees_by_rank)
        sizes = [p.numel() for p in parameters]
        width = -(-sum(sizes) // ranks)  # elements of the slice that each rank owns

        # This rank's terms: a row for each partial sum, with the gradients of all parameters one after another.
        local_sums = [gradients for _, gradients in self.tree.partial_sums if id(parameters[0]) in gradients]
        rows = parameters[0].new_zeros(len(local_sums), ranks * width)
        for row, gradients in zip(rows, local_sums, strict=True):
            torch.cat([gradients[id(p)].flatten() for p in parameters], out=row[: sum(sizes)])

        # Every rank receives all terms of its own slice, ordered by rank and then by subtree.
        to_send = rows.view(len(local_sums), ranks, width).transpose(0, 1).flatten()
        send_sizes = [len(local_sums) * width] * ranks

        flags = iter(present)
        counts = [sum(islice(flags, len(subtrees))) for subtrees in subtrees_by_rank]  # the terms that each rank sends
        receive_sizes = [count * width for count in counts]

        received = to_send.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, to_send, receive_sizes, send_sizes, group=self._ranks.group)

        # Add the terms of this rank's slice along the tree. A partial sum without gradients has none.
        tree: TreeSum[Tensor | None] = TreeSum(_add_present)
        terms = iter(received.view(-1, width))
        for subtree, has_term in zip(chain(*subtrees_by_rank), present, strict=True):
            tree.push(subtree, next(terms) if has_term else None)

        local_slice = tree.finish()
        assert local_slice is not None, "some partial sum has a gradient"

        # All ranks get the sums of all slices.
        summed = self._ranks.all_gather(local_slice).flatten()[: sum(sizes)]
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
