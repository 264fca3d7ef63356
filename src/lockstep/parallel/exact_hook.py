"""How replicas add their gradients in the order of the tree (exact.py): every rank owns a slice of each bucket. All
send it what they have of that slice, it adds in order, and sends the sum to all.

With one root on every rank that is 2(N-1)/N of the gradient, sent and received: no more than a ring's all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.shard import deal
from lockstep.parallel.exact import Counter, Span, roots_of
from lockstep.parallel.hooks import Bucket, Hook, started

Leaf = dict[int, Tensor]  # gradients of one or more micro-batches, by the id of their parameter


def add_leaves(left: Leaf, right: Leaf) -> Leaf:
    """In place, into the left one. What only one of them has, the sum has as it is."""
    both = [key for key in right if key in left]
    if both:
        torch._foreach_add_([left[key] for key in both], [right[key] for key in both])
    for key in right:
        left.setdefault(key, right[key])
    return left


class OrderedHook(Hook):
    """Leaves the sum over all micro-batches of the step in every bucket, and not a mean."""

    def __init__(self, word: nn.Parameter, group: dist.ProcessGroup):
        super().__init__(word, group)
        self.counter: Counter[Leaf] = Counter(add_leaves)  # this rank's micro-batches but the last

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
        buffer, ranks = bucket.buffer, range(self.ranks)
        slices = [deal(buffer.numel(), rank, self.ranks) for rank in ranks]
        mine = slices[self.group.rank()]
        roots = self._my_roots(bucket)
        sizes = [len(part) for part in slices]
        if len(roots) == 1:
            send = roots[0]
        else:
            pieces = [root[part.start : part.stop] for part in slices for root in roots]
            send = torch.cat(pieces) if pieces else buffer.new_empty(0)
        incoming = [len(spans) * len(mine) for spans in self._everybodys]
        received = buffer.new_empty(sum(incoming))
        work = dist.all_to_all_single(
            received, send, incoming, [len(roots) * size for size in sizes], group=self.group, async_op=True
        )
        yield
        started(work).wait()
        spans = [span for rank in ranks for span in self._everybodys[rank]]
        counter: Counter[Tensor] = Counter(Tensor.add_)
        for span, part in zip(spans, received.split(len(mine)) if len(mine) else [received] * len(spans), strict=True):
            counter.push(span, part)
        # To everybody alike. An all-gather would ask for slices of one size.
        total = counter.finish().repeat(self.ranks)
        work = dist.all_to_all_single(buffer, total, sizes, [len(mine)] * self.ranks, group=self.group, async_op=True)
        yield
        started(work).wait()

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
