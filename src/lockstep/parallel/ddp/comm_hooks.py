"""DDP communication hooks: how replicas reduce the buckets of their gradients.

fp16, bf16    gradients are sent in half precision (`HalfHook`)
powersgd      matrices are sent as products of low rank (powersgd.py)
wide          gradients in bf16 are added in float32 (`WideHook`); where parameters are stored in bf16

DDP passes one bucket after another to the hook while the backward runs, in the same order on all ranks. A reduction may
need several collectives, each of which depends on the previous one. If a collective were started in a callback of the
previous one, the ranks would start them in different orders, and gloo would deadlock. So a reduction is a generator
that yields after each collective it starts, and is advanced once when the next bucket comes. That order is the same on
all ranks, and the network is busy while the backward continues.

Like DDP itself, these hooks leave the mean over ranks; the one of exact mode leaves sums (exact/buckets.py). The
control word is the gradient of one of the parameters, and is never compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lockstep.runtime.control_word import ControlWord


class Bucket(NamedTuple):
    """A bucket of gradients, as DDP passes it to the hook."""

    buffer: Tensor  # (elements,): all gradients, one after another
    gradients: list[tuple[Tensor, Tensor]]  # each parameter with its gradient, a view of the buffer


class CommHook:
    """A DDP communication hook. DDP calls it with each bucket and waits for the future that it returns.

    A reduction is a generator: it starts a collective and yields, and continues when the next bucket comes. So several
    buckets are under way at the same time, and the backward never waits for one.
    """

    def __init__(self, word_parameter: nn.Parameter, group: dist.ProcessGroup):
        """`word_parameter` is the parameter whose gradient is the control word."""
        self.word_parameter = word_parameter
        self.group = group
        self.ranks = group.size()
        self._pending: list[Iterator[None]] = []  # reductions that have started, the oldest first

    def reduce_bucket(self, bucket: Bucket) -> Iterator[None]:
        """Replace the bucket's buffer with its mean over ranks.

        It yields after it has started a collective, and is advanced when the next bucket comes.
        """
        raise NotImplementedError

    def prepare(self, grad_output: Tensor, control_word: ControlWord | None) -> None:
        """Prepare for a backward. `grad_output` is the loss scale, or 0 for padding.

        Only the last backward of a pass, which reduces, has a control word.
        """

    @property
    def stateful(self) -> dict[str, Any]:
        """The objects that a checkpoint must hold, by name."""
        return {}

    def finish(self) -> None:
        """End a pass: its last bucket has been reduced."""

    def __call__(self, ddp_bucket: dist.GradBucket) -> Future[Tensor]:
        pairs = zip(ddp_bucket.parameters(), ddp_bucket.gradients(), strict=True)
        bucket = Bucket(ddp_bucket.buffer(), [(p, _in_layout_of(p, gradient)) for p, gradient in pairs])
        device = bucket.buffer.device
        done: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)

        # Start the new reduction first, so that the network is never idle while we wait for an older one.
        started = _advance([self._complete(bucket, done)])
        self._pending = _advance(self._pending) + started

        # After the last bucket, no further call will advance the reductions.
        if ddp_bucket.is_last():
            while self._pending:
                self._pending = _advance(self._pending)

            self.finish()

        return done

    def _complete(self, bucket: Bucket, done: Future[Tensor]) -> Iterator[None]:
        yield from self.reduce_bucket(bucket)
        done.set_result(bucket.buffer)

    def start_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work:
        # torch returns None only on ranks outside the group, which run no hook.
        return cast(dist.Work, dist.all_reduce(tensor, op, group=self.group, async_op=True))

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Iterator[None]:
        """Reduce `tensor` over all ranks, in place. Yields once, while the collective runs."""
        work = self.start_reduce(tensor, op)
        yield
        work.wait()

    def words_in(self, bucket: Bucket) -> list[Tensor]:
        """Return the view of the control word in a list, which is empty if the word is in another bucket."""
        # Compare by identity: `==` compares tensors by elements.
        return [gradient for parameter, gradient in bucket.gradients if parameter is self.word_parameter]


class HalfHook(CommHook):
    """Sends gradients as bf16 or fp16: half the bytes of float32.

    bf16 keeps 8 significant bits, fp16 11, and every addition on the way rounds again: with N ranks, the error of a sum
    is at most N x 2^-8 (fp16: 2^-11) times the sum of the absolute values.

    bf16 has the range of float32. fp16 does not: gradients below 6e-8 would become 0, and sums below 6e-5 would lose
    bits. So a bucket is first multiplied by a power of two that brings its largest element, over all ranks, just below
    the upper end of the range. Then an element loses bits only if it is 2^29 / N times smaller than the largest one,
    and becomes 0 if it is 2^39 / N times smaller. This costs one small collective per bucket.
    """

    def __init__(self, word_parameter: nn.Parameter, group: dist.ProcessGroup, dtype: torch.dtype):
        super().__init__(word_parameter, group)
        self.dtype = dtype

    def reduce_bucket(self, bucket: Bucket) -> Iterator[None]:
        # The control word is sent separately, in full precision, and does not influence the scale.
        words = self.words_in(bucket)
        mean_words = [word / self.ranks for word in words]
        works = [self.start_reduce(word) for word in mean_words]

        for word in words:
            word.zero_()

        scale = None
        if self.dtype == torch.float16:
            # MAX keeps inf but may drop NaN, so NaN becomes inf.
            largest = bucket.buffer.abs().max().float().nan_to_num(nan=torch.inf)
            yield from self.reduce(largest, dist.ReduceOp.MAX)
            scale = fp16_scale(largest, self.ranks).to(bucket.buffer.dtype)

        half = (bucket.buffer if scale is None else bucket.buffer * scale).to(self.dtype)
        yield from self.reduce(half)
        for work in works:
            work.wait()

        # One division after the other: the scale of a bucket of tiny gradients times the ranks may be inf.
        bucket.buffer.copy_(half)
        if scale is not None:
            bucket.buffer.div_(scale)

        bucket.buffer.div_(self.ranks)
        for word, mean in zip(words, mean_words, strict=True):
            word.copy_(mean)


class WideHook(CommHook):
    """Sums bf16 gradients in float32, and rounds once."""

    def reduce_bucket(self, bucket: Bucket) -> Iterator[None]:
        # Other buckets keep their dtype: that of the control word may be float64.
        wide = bucket.buffer.to(torch.promote_types(bucket.buffer.dtype, torch.float32)) / self.ranks
        yield from self.reduce(wide)
        bucket.buffer.copy_(wide)


def _in_layout_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the view of a bucket in which DDP has put the gradient of `parameter`.

    A gradient lies in memory like its parameter (channels_last, transposed), unless that leaves gaps. `gradient` is the
    view that DDP passes to hooks, which always reads the same memory as if it were contiguous.
    """
    if parameter.is_contiguous():
        return gradient

    # Tensors that leave gaps, or overlap, are the ones whose strides an empty copy does not have.
    strides = parameter.stride()
    leaves_no_gaps = torch.empty_like(parameter, device="meta").stride() == strides
    return gradient.as_strided(parameter.shape, strides) if leaves_no_gaps else gradient


def _advance(reductions: list[Iterator[None]]) -> list[Iterator[None]]:
    """Advance each reduction to its next collective, and return the reductions that have not ended."""
    return [reduction for reduction in reductions if next(reduction, "ended") != "ended"]


def fp16_scale(largest: Tensor, ranks: int) -> Tensor:
    """Return the power of two () with which the sum of `ranks` numbers, none above `largest` (), stays below 2^15."""
    # A power of two, so that scaling itself does not round. frexp gives largest <= 2^exponent. The result is at most
    # 2^126, because its double must still be a float32.
    exponent = 15 - (ranks - 1).bit_length() - torch.frexp(largest).exponent
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(max=126))

    # A bucket of zeros, or with inf or NaN in it, is sent unscaled.
    return torch.where((largest > 0) & torch.isfinite(largest), scale, torch.ones_like(scale))
