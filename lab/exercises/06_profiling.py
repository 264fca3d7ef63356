"""Exercise 6: profiling. docs/lab/06_profiling.md explains it.

BucketedDDP gives the right gradients on one rank only: TODO 1 to 3 say what is wrong with it. TODO 4 to 6 are functions
to fill in. Then type

lockstep lab check 6 lab/exercises/06_profiling.py

`python lab/solution/06_profiling.py` shows what a finished exercise does.
"""

import time
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

Interval = tuple[float, float]  # begin and end


def make_buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Group parameters, in the order in which backward makes their gradients.

    A bucket is closed when it holds at least `bucket_bytes`.
    """
    # TODO 1: this is one bucket, in the wrong order.
    return [list(parameters)]


@dataclass(frozen=True)
class Event:
    """Something that happened in a backward: a gradient is there ("gradient"), or its bucket is sent ("all_reduce")."""

    name: str
    bytes: int
    at: float = field(default_factory=time.perf_counter)


class BucketedDDP:
    """Averages gradients over the ranks, bucket by bucket, while the backward is still making others."""

    def __init__(self, model: nn.Module, bucket_bytes: float):
        self.buckets = make_buckets(list(model.parameters()), bucket_bytes)
        self.events: list[Event] = []
        self._missing = [len(bucket) for bucket in self.buckets]
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, index))

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Note that a gradient is there; send its bucket if it was the last one missing."""
        self.events.append(Event("gradient", parameter.numel() * parameter.element_size()))
        self._missing[index] -= 1
        # TODO 2: send the bucket here, as soon as none of its gradients is missing, without waiting for it.

    def finish(self) -> None:
        """Wait for all buckets, and put the averages into the gradients. Call it before optimizer.step()."""
        # TODO 3: wait here for what was sent. The sums are no averages yet, and the next step needs a new count.
        for bucket in self.buckets:
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            self.events.append(Event("all_reduce", flat.numel() * flat.element_size()))
            dist.all_reduce(flat)
            offset = 0
            for parameter in bucket:
                parameter.grad.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
                offset += parameter.numel()


def overlap(events: list[Event]) -> float:
    """Return the share of bytes whose all-reduce began before the last gradient was there. Only the order counts."""
    raise NotImplementedError("TODO 4: bytes that were sent early, divided by all bytes that were sent")


def communication_fraction(compute: list[Interval], communication: list[Interval], step: float) -> float:
    """Return the share of a step in which it communicates and does not compute: the exposed communication."""
    raise NotImplementedError("TODO 5: intervals may overlap; time that two of them share counts once")


def advice(fraction: float) -> str:
    """Return a warning if more than 20 % of a step is exposed communication; otherwise nothing."""
    raise NotImplementedError("TODO 6: name three things to do about it")


if __name__ == "__main__":
    print(__doc__)
