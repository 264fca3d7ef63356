"""Collectives that Lockstep calls itself; torch's DDP and FSDP have their own. In a world of one they return at once.

Decisions and small values, such as names, positions and digests, travel as JSON, never as pickles: those
could run code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.shards import as_bytes
from lockstep.runtime.world import World

SMALL = 2**16  # bytes; below this size the overhead of a message dominates, so small tensors share a message
SHORT = 512  # bytes of a JSON message that is sent together with its length


class Collectives:
    """Collectives between the ranks of `world`: all ranks of the job, or the ranks of a process group `group`.

    All of these ranks must call the same methods in the same order.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        heartbeat: Heartbeat | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.world = world
        self.device = device
        self.heartbeat = heartbeat or Heartbeat()
        self.group = group
        self._ended_at: float | None = None  # when `final_barrier` was passed

    @contextmanager
    def _waiting_in(self, collective: str) -> Iterator[None]:
        """Show the launcher where this rank waits for the others."""
        # The phase is restored afterwards, so that the time of a collective is not counted as time of its caller.
        with self.heartbeat.visit("collective"):
            self.heartbeat.set_detail(collective)
            yield
            self.heartbeat.set_detail("")

    def all_gather_json(self, value: Any, caller: str = "") -> list[Any]:
        """Return every rank's `value`, by rank. As JSON, not as a pickle: received data can never run code.

        `caller`: the function of the user's code that needs it. If only some ranks have called it, all raise an error.
        """
        if self.world.alone:
            return [value]

        with self._waiting_in("all_gather_json"):
            # all_gather needs equal sizes. Most messages are short: they go with their lengths, in one collective.
            message = f"{caller}\n{json.dumps(value)}".encode()
            texts = self._gather_bytes(len(message).to_bytes(8, "big") + message[:SHORT], 8 + SHORT)
            sizes = [int.from_bytes(text[:8], "big") for text in texts]
            texts = [text[8:] for text in texts]

            # All ranks see the same lengths, so all of them take part in the second one.
            if max(sizes) > SHORT:
                texts = self._gather_bytes(message, max(sizes))

            messages = [text[:size].decode() for text, size in zip(texts, sizes, strict=True)]

        callers, values = zip(*(message.split("\n", 1) for message in messages), strict=True)
        _check_callers(callers)
        return [json.loads(value) for value in values]

    def any(self, value: bool, caller: str = "") -> bool:
        """Return whether `value` is true on any rank. `caller`: see `all_gather_json`."""
        return any(self.all_gather_json(value, caller))

    def max(self, value: float) -> float:
        """Return the largest `value` of all ranks."""
        return max(self.all_gather_json(value))

    def _gather_bytes(self, data: bytes, size: int) -> list[bytes]:
        """Return every rank's `data`, by rank, padded to `size`. It waits for the device."""
        padded = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(self.device)
        texts = [torch.empty_like(padded) for _ in range(self.world.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [text.cpu().numpy().tobytes() for text in texts]

    def all_reduce_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` (any shape) over all ranks, in place and on their device: no host synchronization."""
        if not self.world.alone:
            with self._waiting_in("all_reduce"):
                dist.all_reduce(values, group=self.group)

        return values

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather every rank's `values` (*shape, equal on all ranks) into a tensor (ranks, *shape) on their device."""
        if self.world.alone:
            return values.unsqueeze(0)

        gathered = values.new_empty(self.world.size, *values.shape)
        with self._waiting_in("all_gather"):
            dist.all_gather(list(gathered.unbind()), values, group=self.group)

        return gathered

    def all_gather_tensors(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return every rank's `tensors`, by rank. Their number, shapes and dtypes may differ between ranks."""
        if self.world.alone:
            return [tensors]

        # As bytes, padded to the longest, because all_gather needs equal sizes.
        layouts = self.all_gather_json([[str(tensor.dtype), list(tensor.shape), tensor.nbytes] for tensor in tensors])
        size = max(sum(nbytes for *_, nbytes in layout) for layout in layouts)
        message = torch.zeros(size, dtype=torch.uint8, device=self.device)
        start = 0
        for tensor in tensors:
            message[start : start + tensor.nbytes] = as_bytes(tensor)
            start += tensor.nbytes

        return [_unpack(received, layout) for received, layout in zip(self.all_gather(message), layouts, strict=True)]

    def broadcast_(self, tensors: list[torch.Tensor], source: int = 0) -> None:
        """Overwrite the `tensors` (any shapes and dtypes) of all ranks with the tensors of rank `source`."""
        if self.world.alone:
            return

        with self._waiting_in("broadcast"):
            for batch in _batches(tensors):
                # As bytes: gloo does not support every dtype.
                contents = [as_bytes(tensor) for tensor in batch]
                message = torch.cat(contents) if len(contents) > 1 else contents[0]
                dist.broadcast(message, group=self.group, group_src=source)

                # A single contiguous tensor was received in place; the others are copied out of the message.
                for tensor, content in zip(batch, message.split([len(content) for content in contents]), strict=True):
                    if content.data_ptr() != tensor.data_ptr():
                        tensor.detach().copy_(content.view(tensor.dtype).view_as(tensor))

    def run_on_rank0(self, act: Callable[[], Any]) -> Any:
        """Run `act` on rank 0 and return its result, plain JSON, on every rank. A UserError is raised everywhere."""
        result: Any = None
        error: UserError | None = None
        if self.world.rank == 0:
            try:
                result = act()
            except UserError as caught:
                error = caught

        # All ranks take part, so that an error on rank 0 is raised on the others too, which would otherwise wait.
        result, error_args = self.all_gather_json([result, list(error.args) if error else None])[0]
        if error_args:
            raise error or UserError(*error_args)

        return result

    def final_barrier(self) -> None:
        """Wait for all ranks, as the last collective of a run. Before the process ends, `pause` must follow."""
        if not self.world.alone:
            with self._waiting_in("final_barrier"):
                dist.barrier(self.group)

            self._ended_at = time.monotonic()

    def pause(self) -> None:
        """Wait until gloo's threads have released the tensors of all collectives before `final_barrier`.

        This works around pytorch/pytorch#179291: the threads release a collective's tensors a moment after it has ended
        and need the GIL for that; if the interpreter is already shutting down, the process aborts. The barrier itself
        has no tensor. What was done since then counts as a part of the pause.
        """
        if self._ended_at is not None:
            time.sleep(max(0.0, self._ended_at + 0.05 - time.monotonic()))


def _unpack(message: torch.Tensor, layout: list[Any]) -> list[torch.Tensor]:
    """Return the tensors in a message of bytes. `layout` has (dtype, shape, bytes) of each."""
    pieces = message[: sum(nbytes for *_, nbytes in layout)].split([nbytes for *_, nbytes in layout])
    # A copy begins at a multiple of any element size.
    return [
        piece.clone().view(getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
        for piece, (dtype, shape, _) in zip(pieces, layout, strict=True)
    ]


def _batches(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors into messages: all small tensors together, and each large tensor alone, without a copy."""
    # A tensor without elements needs no message.
    small = [tensor for tensor in tensors if 0 < tensor.nbytes <= SMALL]
    large = [[tensor] for tensor in tensors if tensor.nbytes > SMALL]
    if not small:
        return large

    # Wide dtypes first, so that each tensor begins at a multiple of its element size and can be viewed in place.
    return [sorted(small, key=lambda tensor: -tensor.element_size()), *large]


def _check_callers(callers: Sequence[str]) -> None:
    """Raise if the user's code called a collective function on some ranks only: the others are in another one."""
    if len(set(callers)) == 1:
        return

    caller = next(filter(None, callers))
    ranks = [str(rank) for rank, other in enumerate(callers) if other == caller]
    raise UserError(
        f"{caller} was called on rank {', '.join(ranks)}, and not on the others",
        "it is collective: all ranks wait for each other in it",
        f"call {caller} on every rank, outside of conditions such as `if run.is_main`",
    )
