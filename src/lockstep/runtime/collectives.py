"""What ranks say to each other outside the gradient exchange. A no-op only in a world of one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.world import World

SMALL = 2**16  # bytes: a tensor below that takes longer to announce than to send


class Collectives:
    """Small agreements between all ranks, or those of a `group`, which are then the `world`. Every method must be
    called by every rank of it, in the same order."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        heartbeat: Heartbeat | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        self.world, self.device, self.heartbeat, self.group = world, device, heartbeat or Heartbeat(), group

    @contextmanager
    def _agreeing(self, place: str) -> Iterator[None]:
        """Whoever looks at this rank from outside sees where it waits for the others."""
        before = self.heartbeat.phase
        self.heartbeat.beat("agree")
        self.heartbeat.place(place)
        yield
        self.heartbeat.place("")
        self.heartbeat.beat(before)

    def gather_json(self, value: Any) -> list[Any]:
        """Everybody's `value`, by rank. Plain JSON: nothing that arrives can run code."""
        if self.world.alone:
            return [value]
        with self._agreeing("gather_json"):
            return self._gather_json(value)

    def _gather_json(self, value: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world.size)]
        dist.all_gather(lengths, torch.tensor([data.numel()], device=self.device), group=self.group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        parts = [torch.empty_like(padded) for _ in range(self.world.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [
            json.loads(bytes(part[: int(length)].cpu().tolist())) for part, length in zip(parts, lengths, strict=True)
        ]

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Add `values` over all ranks, in place and on its device: no host synchronisation."""
        if not self.world.alone:
            with self._agreeing("sum"):
                dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Everybody's `values`, of one shape: (ranks, *shape), on their device."""
        if self.world.alone:
            return values.unsqueeze(0)
        every = values.new_empty(self.world.size, *values.shape)
        with self._agreeing("gather"):
            dist.all_gather(list(every.unbind()), values, group=self.group)
        return every

    def broadcast_(self, tensors: list[torch.Tensor], source: int = 0) -> None:
        if self.world.alone:
            return
        with self._agreeing("broadcast"):
            for batch in _batches(tensors):
                # As bytes: gloo knows not every format.
                parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in batch]
                sent = torch.cat(parts) if len(parts) > 1 else parts[0]
                dist.broadcast(sent, group=self.group, group_src=source)
                for tensor, part in zip(batch, sent.split([len(part) for part in parts]), strict=True):
                    if part.data_ptr() != tensor.data_ptr():
                        tensor.detach().copy_(part.view(tensor.dtype).view_as(tensor))

    def run_on_rank0(self, act: Callable[[], Any]) -> Any:
        """Run `act` on rank 0, and return its result, plain JSON, on every rank. A UserError is raised everywhere."""
        result: Any = None
        error: UserError | None = None
        if self.world.rank == 0:
            try:
                result = act()
            except UserError as problem:
                error = problem

        result, problem = self.gather_json([result, list(error.args) if error else None])[0]
        if problem:
            raise error or UserError(*problem)
        return result

    def any(self, flag: bool) -> bool:
        return any(self.gather_json(bool(flag)))

    def farewell(self) -> None:
        """The last collective of a run: nobody leaves before all are here.

        gloo's threads let go of a collective's tensors a moment after it has ended, and need the interpreter for it;
        if that is already shutting down, the process aborts (pytorch#179291). A barrier carries no tensor, and the
        pause gives the threads time for the collectives before it.
        """
        if not self.world.alone:
            with self._agreeing("farewell"):
                dist.barrier(self.group)
            time.sleep(0.05)


def _batches(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What is sent in one message, without a copy of a large one. Wide numbers first, so that each lies in the bytes at
    a multiple of its width."""
    small = [tensor for tensor in tensors if 0 < tensor.nbytes <= SMALL]
    large = [[tensor] for tensor in tensors if tensor.nbytes > SMALL]
    return [sorted(small, key=lambda tensor: -tensor.element_size()), *large] if small else large
