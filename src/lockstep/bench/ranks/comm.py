"""One rank of `bench comm`: times single collectives of many sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import resolve
from lockstep.engine.profile.flops import wait_for_device
from lockstep.runtime import context, environments
from lockstep.runtime.world import World

SECONDS = 0.02  # about how long one size of one operation is repeated in a round
MOST = 20  # repetitions

Call = Callable[[], Any]


def measure(arguments: dict[str, Any]) -> Generator[Any, str, None]:
    """Yield the operations that this backend has, then for each "turn" the seconds of every operation and size."""
    values: dict[str, Any] = {"backend": arguments["backend"], "device": arguments["device"]}
    with context.start(environments.detect(), resolve([("bench", values)]).config) as runtime:
        device = runtime.device
        calls, missing = _prepare(arguments["sizes"], runtime.world, device)

        # Repetitions are chosen once, on rank 0, so that all ranks repeat alike.
        mine = {name: _repetitions(call, device) for name, call in calls.items()}
        counts = runtime.collectives.all_gather_json(mine)[0]

        yield {"backend": runtime.backend, "device": str(device), "missing": missing, "torch": torch.__version__}

        # Each rank has its own seconds. The parent takes the slowest one.
        while True:
            yield {name: _seconds(call, counts[name], device) for name, call in calls.items()}


def _prepare(sizes: Sequence[int], world: World, device: torch.device) -> tuple[dict[str, Call], dict[str, str]]:
    """Return a call for each operation and size, and why an operation is missing, by its name."""
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}

    # Some backends lack some operations, or some types: a first call finds out.
    for operation, make in OPERATIONS.items():
        # A first call would not do here: it breaks the connection.
        if operation == "send_recv" and device.type == "cuda" and "gloo" in dist.get_backend():
            missing[operation] = "gloo cannot send GPU tensors from rank to rank"
            continue

        for size in sizes:
            call = make(size, world, device)
            try:
                call()
            except RuntimeError as error:
                missing[operation] = str(error).partition("\n")[0]
                break

            calls[f"{operation} {size}"] = call

    return calls, missing


def _repetitions(call: Call, device: torch.device) -> int:
    """Return how often a call fits into SECONDS."""
    # Large transfers once, small ones often: their time is close to the noise of the clock.
    once = max(1e-6, _seconds(call, 1, device))
    return max(1, min(MOST, int(SECONDS / once)))


def _seconds(call: Call, count: int, device: torch.device) -> float:
    """Return the seconds of one call, from all ranks together to the end on this rank."""
    # All ranks begin together, with nothing left on the device.
    wait_for_device(device)
    dist.barrier()
    began = time.perf_counter()

    for _ in range(count):
        call()

    # On a GPU a collective is only launched by its call. On a CPU it has ended when the call returns.
    wait_for_device(device)
    return (time.perf_counter() - began) / count


# ---- operations ----
#
# Each function makes its tensors once, and returns a call that is repeated. Tensors are float32, 4 bytes an element.
# `size`, in the table of results, is the bytes of the whole tensor, over all ranks if it is sharded.


def _part(size: int, world: World) -> int:
    """Return the number of floats of one rank's part of `size` bytes."""
    return max(1, size // 4 // world.size)


def _all_reduce(size: int, world: World, device: torch.device) -> Call:
    """Every rank gets the sum of a tensor [size / 4]. It is summed in place, so its values grow: that costs nothing."""
    tensor = torch.ones(size // 4, device=device)
    return lambda: dist.all_reduce(tensor)


def _reduce_scatter(size: int, world: World, device: torch.device) -> Call:
    """Each rank gets its part of a sum; `size` are the bytes of the whole tensor."""
    part = _part(size, world)
    whole = torch.ones(part * world.size, device=device)
    out = torch.empty(part, device=device)
    return lambda: dist.reduce_scatter_tensor(out, whole)


def _all_gather(size: int, world: World, device: torch.device) -> Call:
    """Every rank gets the parts of all; `size` are the bytes of the whole tensor."""
    part = _part(size, world)
    whole = torch.empty(part * world.size, device=device)
    mine = torch.ones(part, device=device)
    return lambda: dist.all_gather_into_tensor(whole, mine)


def _all_to_all(size: int, world: World, device: torch.device) -> Call:
    """Every rank sends an equal part of `size` bytes to each rank."""
    given = torch.ones(_part(size, world) * world.size, device=device)
    taken = torch.empty_like(given)
    return lambda: dist.all_to_all_single(taken, given)


def _send_recv(size: int, world: World, device: torch.device) -> Call:
    """Every rank sends to the next one and receives from the one before it."""
    given = torch.ones(size // 4, device=device)
    taken = torch.empty_like(given)

    def call() -> None:
        # Both at once: a ring in which every rank sent first would wait for itself.
        operations = [
            dist.P2POp(dist.isend, given, (world.rank + 1) % world.size),
            dist.P2POp(dist.irecv, taken, (world.rank - 1) % world.size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


OPERATIONS: dict[str, Callable[[int, World, torch.device], Call]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
