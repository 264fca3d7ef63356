"""How replicas add their gradients in the order of the tree (exact.py): every rank owns a slice of each piece of a
bucket. All send it what they have of that slice, it adds in order, and sends the sum to all. Everything is sent from
where it lies, and sums arrive where they belong.

With one root on every rank that is 2(N-1)/N of the gradient, sent and received: no more than a ring's all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.shard import deal
from lockstep.parallel.ddp.hooks import Bucket, Hook, started
from lockstep.parallel.exact.tree import Counter, Span, roots_of

PIECE = 2**20  # elements that are exchanged at once: some are added while others travel
Leaf = dict[int, Tensor]  # gradients of one or more micro-batches, by the id of their parameter


def add_leaves(left: Leaf, right: Leaf) -> Leaf:
    """In place, into the left one. What only one of them has, the sum has as it is."""
    both = [key for key in right if key in left]
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
    for key in right:
        left.setdefault(key, right[key])
    return left


class _Piece(NamedTuple):
    """A part of a bucket, on its way."""

    slices: list[Tensor]  # of the bucket, one per rank
    home: Tensor  # the one that this rank owns, and where its sum belongs
    terms: list[tuple[Span, Tensor]]  # what is to be added, in order
    works: list[dist.Work]


def _add_up(piece: _Piece) -> None:
    """Into its home, and without a copy if this rank has a term of its own: a + b and b + a are the same bits."""
    home = piece.home

    def add(left: Tensor, right: Tensor) -> Tensor:
        return right.add_(left) if right is home else left.add_(right)

    counter: Counter[Tensor] = Counter(add)
    for span, term in piece.terms:
        counter.push(span, term)
    total = counter.finish()
    if total is not home:
        home.copy_(total)


class OrderedHook(Hook):
    """Leaves the sum over all micro-batches of the step in every bucket, and not a mean."""

    def __init__(self, word: nn.Parameter, group: dist.ProcessGroup):
        super().__init__(word, group)
        self.counter: Counter[Leaf] = Counter(add_leaves)  # this rank's micro-batches but the last
        self.me = group.rank()
        self.others = [rank for rank in range(self.ranks) if rank != self.me]
        # Ranks that share a GPU: gloo takes its tensors in collectives, and not from rank to rank.
        self.through_host = word.device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._rooms: list[Tensor] = []  # memory for what is received, when it is not in use

    def expect(self, total: int, last: Span | None) -> None:
        """Before the backward that exchanges: the step has `total` micro-batches, and what backward will bring is
        `last` of them; None: nothing, this rank has none."""
        self._last = last
        self._everybodys = [
            roots_of(part.start, part.stop) for part in (deal(total, rank, self.ranks) for rank in range(self.ranks))
        ]

    def finish(self) -> None:
        self.counter.roots.clear()

    def exchange(self, bucket: Bucket) -> Iterator[None]:
        words = self.words_in(bucket)
        # The word is one per rank, not one per micro-batch: it is gathered, whole.
        gathered = [torch.empty(self.ranks, *word.shape, dtype=word.dtype, device=word.device) for word in words]
        works = [
            started(dist.all_gather(list(every.unbind()), word.contiguous(), group=self.group, async_op=True))
            for every, word in zip(gathered, words, strict=True)
        ]
        if len(words) < len(bucket.parameters):
            yield from self._exchange_gradients(bucket)
        else:
            yield
        for work in works:
            work.wait()
        for word, every in zip(words, gathered, strict=True):
            word.copy_(every.sum(0))  # of numbers whose sum is exact in any order

    def _exchange_gradients(self, bucket: Bucket) -> Iterator[None]:
        buffer, roots = bucket.buffer, self._my_roots(bucket)
        if self.through_host:
            roots = [root.to("cpu", copy=True) for root in roots]
            buffer = roots[-1] if roots else torch.empty_like(buffer, device="cpu")
        room = self._take_room(buffer)
        pieces = list(self._start_pieces(buffer, roots, room))
        yield
        for piece in pieces:
            for work in piece.works:
                work.wait()
            _add_up(piece)
            piece.works[:] = self._start_sharing(piece)
        self._rooms.append(room)
        yield
        for work in [work for piece in pieces for work in piece.works]:
            work.wait()
        if self.through_host:
            bucket.buffer.copy_(buffer)

    def _start_pieces(self, buffer: Tensor, roots: list[Tensor], room: Tensor) -> Iterator[_Piece]:
        """Everybody's roots go to the rank that owns their slice. They come into `room`, one after another."""
        taken = 0
        for begin in range(0, buffer.numel(), PIECE):
            size = min(PIECE, buffer.numel() - begin)
            parts = [deal(size, rank, self.ranks) for rank in range(self.ranks)]
            slices = [slice(begin + part.start, begin + part.stop) for part in parts]
            mine = slices[self.me]
            home, terms, transfers = buffer[mine], [], []
            for rank, spans in enumerate(self._everybodys):
                for number, span in enumerate(spans):
                    if rank == self.me:
                        is_home = roots[number] is buffer
                        terms.append((span, home if is_home else roots[number][mine]))
                        continue
                    place = room[taken : taken + len(home)]
                    taken += len(home)
                    terms.append((span, place))
                    transfers.append((dist.irecv, place, rank))
            transfers += [(dist.isend, root[slices[rank]], rank) for rank in self.others for root in roots]
            yield _Piece([buffer[each] for each in slices], home, terms, self._start(transfers))

    def _start_sharing(self, piece: _Piece) -> list[dist.Work]:
        """The owner's sum goes to everybody."""
        transfers = [(dist.irecv, piece.slices[rank], rank) for rank in self.others]
        return self._start(transfers + [(dist.isend, piece.home, rank) for rank in self.others])

    def _start(self, transfers: list[tuple[Any, Tensor, int]]) -> list[dist.Work]:
        """(send or receive, what, with which rank). Both sides leave out what is empty."""
        wanted = [
            dist.P2POp(kind, tensor, group=self.group, group_peer=rank)
            for kind, tensor, rank in transfers
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(wanted) if wanted else []

    def _take_room(self, buffer: Tensor) -> Tensor:
        """For what comes from the others. Kept from step to step: fresh memory costs as much as the additions."""
        theirs = sum(len(spans) for rank, spans in enumerate(self._everybodys) if rank != self.me)
        pieces = -(-buffer.numel() // PIECE)
        size = theirs * (buffer.numel() // self.ranks + pieces)
        for number, room in enumerate(self._rooms):
            if room.numel() >= size and room.dtype == buffer.dtype:
                return self._rooms.pop(number)
        self._rooms = [room for room in self._rooms if room.dtype != buffer.dtype]  # they are too small
        return buffer.new_empty(size)

    def _my_roots(self, bucket: Bucket) -> list[Tensor]:
        """This rank's sums, laid out like the bucket: the last one is in it, those before it are copied."""
        if self._last is None:
            return []
        before, span = list(self.counter.roots), self._last
        while before and span.completes(before[-1][0]):
            left, leaf = before.pop()
            views, grads = self._both(bucket, leaf)
            torch._foreach_add_(views, grads)
            span = span.joined(left)
        return [self._laid_out(bucket, leaf) for _, leaf in before] + [bucket.buffer]

    def _laid_out(self, bucket: Bucket, leaf: Leaf) -> Tensor:
        buffer = bucket.buffer
        flat = torch.zeros_like(buffer)
        views, grads = self._both(bucket, leaf)
        places = [
            flat.as_strided(view.shape, view.stride(), view.storage_offset() - buffer.storage_offset())
            for view in views
        ]
        torch._foreach_copy_(places, grads)
        return flat

    def _both(self, bucket: Bucket, leaf: Leaf) -> tuple[list[Tensor], list[Tensor]]:
        """The places in the bucket, and what an earlier sum has for them."""
        pairs = zip(bucket.parameters, bucket.gradients, strict=True)
        places = [(view, leaf[id(p)]) for p, view in pairs if p is not self.word]
        return [view for view, _ in places], [grad for _, grad in places]
