"""The reducer for DDP's buckets, with its hook, which adds gradients in the order of the tree (tree.py).

Every rank owns a slice of each chunk of a bucket. All ranks send their terms of that slice to its owner, which adds
them in order and sends the sum back to all. Gradients are sent without a copy, and sums are received in place.

With one partial sum on each of N ranks, every rank sends and receives 2(N-1)/N of the gradient, as in a ring
all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.windows import rank_range
from lockstep.parallel.ddp.comm_hooks import Bucket, CommHook
from lockstep.parallel.exact.reducers import Gradients, TreeReducer
from lockstep.parallel.exact.tree import Subtree, TreeSum
from lockstep.parallel.gradients import check_reached
from lockstep.parallel.progress import PassProgress
from lockstep.runtime.control_word import ControlWord

CHUNK = 2**20  # elements that are reduced at once: one chunk is added while others are being sent


class _Chunk(NamedTuple):
    """A contiguous range of a bucket that is being reduced."""

    slices: list[Tensor]  # the chunk as views of the bucket, one per rank
    own: Tensor  # the slice that this rank owns; the sum is left in it
    terms: list[tuple[Subtree, Tensor]]  # the terms of `own` from all ranks, in order
    works: list[dist.Work]


class BucketReducer(TreeReducer):
    """The sums of replicas under DDP, whose `OrderedHook` adds the partial sums of all ranks in the last backward."""

    def after_backward(self, progress: PassProgress) -> None:
        # The hook has added the last micro-batch.
        if progress.is_last_micro_batch:
            return

        check_reached([name for name, p in self.parameters.items() if p.grad is None], len(self.parameters))
        super().after_backward(progress)


class OrderedHook(CommHook):
    """Leaves in every bucket the sum over all micro-batches of the step, not a mean.

    The reducer has the gradients of this rank's earlier micro-batches. DDP passes the gradients of the last one, bucket
    by bucket.
    """

    def __init__(self, word_parameter: nn.Parameter, group: dist.ProcessGroup, reducer: BucketReducer):
        super().__init__(word_parameter, group)
        self._reducer = reducer
        self.rank = group.rank()
        self.others = [rank for rank in range(self.ranks) if rank != self.rank]

        # Ranks that share a GPU use gloo, which supports GPU tensors in collectives, but not point to point.
        self.through_host = word_parameter.device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._free_buffers: list[Tensor] = []  # receive buffers that are not in use

    def prepare(self, grad_output: Tensor, control_word: ControlWord | None) -> None:
        # DDP runs the hook only in the last backward of a pass, which has the control word.
        if control_word is not None:
            self._subtrees_by_rank = self._reducer.subtrees_by_rank(self.ranks)

    def finish(self) -> None:
        self._reducer.tree.clear()

    def reduce_bucket(self, bucket: Bucket) -> Iterator[None]:
        # There is one control word per rank, not per micro-batch, so all words are gathered. A copy is sent, since the
        # gather may run while the reduction below overwrites the word's bucket.
        words = self.words_in(bucket)
        gathered = [word.new_empty(self.ranks, *word.shape) for word in words]
        works = [
            cast(dist.Work, dist.all_gather([*per_rank.unbind()], word.clone(), self.group, async_op=True))
            for per_rank, word in zip(gathered, words, strict=True)
        ]

        # A bucket may contain only the control word.
        if len(words) < len(bucket.gradients):
            yield from self._reduce_gradients(bucket)
        else:
            yield

        for work in works:
            work.wait()

        for word, per_rank in zip(words, gathered, strict=True):
            word.copy_(per_rank.sum(0))  # exact in any order: integers, and numbers rounded to a grid

    def _reduce_gradients(self, bucket: Bucket) -> Iterator[None]:
        """Replace the gradients in a bucket by their sums over all micro-batches, in two collectives.

        Every rank owns a slice of each chunk: it receives all terms of its slice, adds them, and sends the sum.
        """
        buffer = bucket.buffer
        local_sums = self._local_sums(bucket)
        if self.through_host:
            local_sums = [flat.to("cpu", copy=True) for flat in local_sums]
            buffer = local_sums[-1] if local_sums else torch.empty_like(buffer, device="cpu")

        # Each slice of a partial sum goes to the rank that owns it.
        received = self._take_buffer(buffer)
        chunks = list(self._start_chunks(buffer, local_sums, received))
        yield

        # Add the terms of this rank's own slices, and send the sums to all ranks.
        for chunk in chunks:
            for work in chunk.works:
                work.wait()

            _add_up(chunk)
            receives = [(dist.irecv, chunk.slices[rank], rank) for rank in self.others]
            sends = [(dist.isend, chunk.own, rank) for rank in self.others]
            chunk.works[:] = self._start(receives + sends)

        # All terms have been added, so the next bucket may use the memory.
        self._free_buffers.append(received)
        yield

        for chunk in chunks:
            for work in chunk.works:
                work.wait()

        if self.through_host:
            bucket.buffer.copy_(buffer)

    def _start_chunks(self, buffer: Tensor, local_sums: list[Tensor], received: Tensor) -> Iterator[_Chunk]:
        """Start the transfers of all chunks. Other ranks' terms are received into consecutive parts of `received`."""
        taken = 0  # elements of `received` in use
        for begin in range(0, buffer.numel(), CHUNK):
            # The last chunk may be short, and the last slices of a chunk shorter than the others, or empty.
            size = min(CHUNK, buffer.numel() - begin)
            ranges = [rank_range(size, rank, self.ranks) for rank in range(self.ranks)]
            slices = [slice(begin + elements.start, begin + elements.stop) for elements in ranges]
            own = buffer[slices[self.rank]]

            # All terms of this rank's own slice, from all ranks, in the order of their micro-batches.
            terms: list[tuple[Subtree, Tensor]] = []
            transfers: list[tuple[Any, Tensor, int]] = []
            for rank, subtrees in enumerate(self._subtrees_by_rank):
                for index, subtree in enumerate(subtrees):
                    if rank == self.rank:
                        # `own` itself if possible: _add_up compares by identity.
                        term = own if local_sums[index] is buffer else local_sums[index][slices[self.rank]]
                    else:
                        term = received[taken : taken + len(own)]
                        taken += len(own)
                        transfers.append((dist.irecv, term, rank))

                    terms.append((subtree, term))

            # Send this rank's partial sums to the owners of all other slices.
            transfers += [(dist.isend, flat[slices[rank]], rank) for rank in self.others for flat in local_sums]
            yield _Chunk([buffer[part] for part in slices], own, terms, self._start(transfers))

    def _start(self, transfers: list[tuple[Any, Tensor, int]]) -> list[dist.Work]:
        """Start transfers (isend or irecv, tensor, peer rank). Both sides skip empty tensors."""
        # In one batch, so that nccl can match the sends and receives of all ranks in any order.
        operations = [
            dist.P2POp(kind, tensor, group=self.group, group_peer=rank)
            for kind, tensor, rank in transfers
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def _take_buffer(self, buffer: Tensor) -> Tensor:
        """Return a buffer for the terms of a bucket that other ranks send.

        Buffers are reused in later steps: allocating takes as long as the additions.
        """
        terms = sum(len(subtrees) for rank, subtrees in enumerate(self._subtrees_by_rank) if rank != self.rank)
        chunks = -(-buffer.numel() // CHUNK)

        # One more element per chunk, because the sizes of slices are rounded up.
        size = terms * (buffer.numel() // self.ranks + chunks)

        for index, free in enumerate(self._free_buffers):
            if free.numel() >= size and free.dtype == buffer.dtype:
                return self._free_buffers.pop(index)

        # All free buffers of this dtype are too small. Release them.
        self._free_buffers = [free for free in self._free_buffers if free.dtype != buffer.dtype]
        return buffer.new_empty(size)

    def _local_sums(self, bucket: Bucket) -> list[Tensor]:
        """Return this rank's partial sums, laid out like the bucket: copies, and last the bucket itself."""
        subtree = self._reducer.subtree
        if subtree is None:
            return []

        # The control word is left out: it has no earlier sums.
        views = {id(p): view for p, view in bucket.gradients if p is not self.word_parameter}
        earlier = list(self._reducer.tree.partial_sums)

        # Additions that need no other rank's terms are done here, in the bucket itself.
        while earlier and subtree.completes(earlier[-1][0]):
            left, gradients = earlier.pop()
            torch._foreach_add_(list(views.values()), [gradients[key] for key in views])
            subtree = Subtree(left.start, left.level + 1)

        return [_laid_out(bucket.buffer, views, gradients) for _, gradients in earlier] + [bucket.buffer]


def _add_up(chunk: _Chunk) -> None:
    """Add the terms into the rank's own slice, without a copy if that slice is itself one of the terms.

    It may then be on either side of an addition, since a + b and b + a have the same bits.
    """

    def add(left: Tensor, right: Tensor) -> Tensor:
        return right.add_(left) if right is chunk.own else left.add_(right)

    tree: TreeSum[Tensor] = TreeSum(add)
    for subtree, term in chunk.terms:
        tree.push(subtree, term)

    total = tree.finish()
    if total is not chunk.own:
        chunk.own.copy_(total)


def _laid_out(buffer: Tensor, views: Gradients, gradients: Gradients) -> Tensor:
    """Return a flat copy of `gradients` in which each has the position of its view in the bucket."""
    flat = torch.zeros_like(buffer)
    targets = [
        flat.as_strided(view.shape, view.stride(), view.storage_offset() - buffer.storage_offset())
        for view in views.values()
    ]
    torch._foreach_copy_(targets, [gradients[key] for key in views])
    return flat
