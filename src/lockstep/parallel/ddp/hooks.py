"""What DDP's replicas send instead of whole gradients: numbers of half the size, or (powersgd.py) thin matrices.

DDP hands over bucket after bucket while backward runs, on all ranks in the same order. An exchange may need several
collectives, each of which depends on the one before; whoever starts the second one in a callback of the first starts
them in another order on every rank, and gloo then waits for ever. So an exchange is a generator that pauses after each
collective it has started, and moves on by one when the next bucket comes: one order on all ranks, and the network is
busy while backward goes on.

Like DDP itself every hook leaves the sum over ranks divided by their number. The control word is one of the gradients,
and always travels as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from lockstep.config import DDPConfig
from lockstep.runtime.control_word import ControlWord


class Bucket(NamedTuple):
    """What DDP exchanges at once."""

    buffer: Tensor  # (elements,): all of it
    parameters: list[Tensor]
    gradients: list[Tensor]  # views of the buffer, one per parameter


class _Exchange(NamedTuple):
    """One that is under way."""

    stages: Iterator[None]
    buffer: Tensor
    done: Future[Tensor]


class Hook:
    """One way to exchange a bucket, and those exchanges that are under way, the oldest first."""

    def __init__(self, word: nn.Parameter, group: dist.ProcessGroup):
        self.word, self.group, self.ranks = word, group, group.size()
        self._under_way: list[_Exchange] = []

    def exchange(self, bucket: Bucket) -> Iterator[None]:
        """Leave the mean over ranks in the bucket's buffer. Pauses (yields) when a collective has been started."""
        raise NotImplementedError

    def prepare(self, start: Tensor, word: ControlWord | None) -> None:
        """Before every backward; `start` is the loss scale, and the last backward of a step has the `word`."""

    def finish(self) -> None:
        """A step's buckets have all been exchanged."""

    def __call__(self, given: dist.GradBucket) -> Future[Tensor]:
        bucket = Bucket(given.buffer(), given.parameters(), given.gradients())
        cuda = bucket.buffer.device.type == "cuda"
        done: Future[Tensor] = Future(devices=[bucket.buffer.device] if cuda else None)
        # The new one first: the network never runs dry while we wait for an older one.
        begun = _advance([_Exchange(self.exchange(bucket), bucket.buffer, done)])
        self._under_way = _advance(self._under_way) + begun
        if given.is_last():
            while self._under_way:
                self._under_way = _advance(self._under_way)
            self.finish()
        return done

    def start_sum(self, tensor: Tensor) -> dist.Work:
        return started(dist.all_reduce(tensor, group=self.group, async_op=True))

    def words_in(self, bucket: Bucket) -> list[Tensor]:
        """The word's place in the bucket, if it is in this one."""
        pairs = zip(bucket.parameters, bucket.gradients, strict=True)
        return [gradient for parameter, gradient in pairs if parameter is self.word]


class HalfHook(Hook):
    """Gradients as bf16 or fp16: half the bytes of float32.

    bf16 keeps 8 bits of every number, fp16 11, and every addition on the way rounds again: with N ranks a sum is off by
    at most N x 2^-8 (2^-11) of the sum of the absolute values.

    bf16 has the range of float32. fp16 has not: as it is, it would lose gradients below 6e-8, and sums below 6e-5 in
    part. So a bucket is first multiplied by a power of two that brings its largest element, on whichever rank, just
    below the upper end. What is smaller than that by a factor of 2^29 / N loses bits, by 2^39 / N everything. This
    costs one small collective per bucket.
    """

    def __init__(self, word: nn.Parameter, group: dist.ProcessGroup, dtype: torch.dtype):
        super().__init__(word, group)
        self.dtype = dtype

    def exchange(self, bucket: Bucket) -> Iterator[None]:
        words = self.words_in(bucket)
        carried = [word / self.ranks for word in words]
        works = [self.start_sum(word) for word in carried]
        for word in words:
            word.zero_()  # it has no say in the scale
        scale = None
        if self.dtype == torch.float16:
            largest = bucket.buffer.abs().max().float().nan_to_num(nan=torch.inf)
            agreed = started(dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True))
            yield
            agreed.wait()
            scale = fp16_scale(largest, self.ranks).to(bucket.buffer.dtype)
        small = (bucket.buffer if scale is None else bucket.buffer * scale).to(self.dtype)
        works.append(self.start_sum(small))
        yield
        for work in works:
            work.wait()
        bucket.buffer.copy_(small).div_(self.ranks if scale is None else scale * self.ranks)
        for word, summed in zip(words, carried, strict=True):
            word.copy_(summed)


class WideHook(Hook):
    """Gradients that are stored in bf16 are added in float32, and rounded once."""

    def exchange(self, bucket: Bucket) -> Iterator[None]:
        wide = bucket.buffer.float() / self.ranks  # the word's bucket is float32 already
        work = self.start_sum(wide)
        yield
        work.wait()
        bucket.buffer.copy_(wide)


def _advance(exchanges: list[_Exchange]) -> list[_Exchange]:
    """Each goes on to its next collective. Those that have not ended."""
    going = []
    for exchange in exchanges:
        if next(exchange.stages, "ended") == "ended":
            exchange.done.set_result(exchange.buffer)
        else:
            going.append(exchange)
    return going


def fp16_scale(largest: Tensor, ranks: int) -> Tensor:
    """The power of two that makes the sum of `ranks` numbers, none above `largest`, at most 2^15."""
    exponent = torch.frexp(largest).exponent  # largest <= 2^exponent
    room = 15 - (ranks - 1).bit_length()
    scale = torch.ldexp(torch.ones_like(largest), (room - exponent).clamp(max=126))  # 2^127 times 2 is too much
    # Nothing but zeros, or a bucket that is spoiled anyway: it must arrive as such.
    return torch.where((largest > 0) & torch.isfinite(largest), scale, torch.ones_like(scale))


def about(config: DDPConfig) -> str:
    """What a hook loses, told before the first step."""
    if config.hook == "powersgd":
        feedback = "is sent later" if config.error_feedback else "is lost (ddp.error_feedback=false)"
        return (
            f"powersgd: from step {config.powersgd_start} on, matrices as products of rank {config.powersgd_rank}; "
            f"what that leaves out {feedback}"
        )
    bits = {"fp16": 11, "bf16": 8}[config.hook]
    return f"{config.hook}: gradients travel rounded to {bits} bits, and are added so; sums differ from exact ones"


def started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work
