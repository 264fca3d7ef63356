"""Run a loss on every rank as if there were one rank, to see whether it depends on the number of ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch's collectives, by what they do where there is one rank. Of these the result is there already:
IN_PLACE = (
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "monitored_barrier",
    "reduce",
)

# These copy an argument into another one.
COPIES = {
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather_object": ("obj", "object_list"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_to_all_single": ("input", "output"),
    "gather": ("tensor", "gather_list"),
    "gather_object": ("obj", "object_gather_list"),
    "reduce_scatter": ("input_list", "output"),
    "reduce_scatter_tensor": ("input", "output"),
    "scatter": ("scatter_list", "tensor"),
    "scatter_object_list": ("scatter_object_input_list", "scatter_object_output_list"),
}

# These need another rank.
IMPOSSIBLE = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")


@contextmanager
def as_one_rank() -> Iterator[None]:
    """Patch torch.distributed and the environment to report one rank; collectives return this rank's own tensors.

    No collective may reach another rank: there the loss believes to be rank 0 as well, and both would wait.
    """
    answers = {name: _alone(getattr(dist, name)) for name in (*IN_PLACE, *COPIES, *IMPOSSIBLE)}

    answers |= {"get_world_size": lambda *_, **__: 1, "get_rank": lambda *_, **__: 0}

    # Everything is restored when the context ends, in the opposite order.
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, answer)

        # A loss may also read its rank from the environment.
        for name, text in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
            if name in os.environ:
                stack.callback(os.environ.__setitem__, name, os.environ[name])
                os.environ[name] = text

        yield


class _Done:
    """The result of a collective with async_op=True: here there is nothing to wait for."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes the place of a function of torch.distributed."""
    name = collective.__name__
    parameters = inspect.signature(collective)

    def answer(*args: Any, **kwargs: Any) -> _Done | None:
        if name in IMPOSSIBLE:
            raise RuntimeError(f"torch.distributed.{name} needs another rank")

        given = parameters.bind(*args, **kwargs).arguments

        # The result of one rank is its own argument.
        if name in COPIES:
            source, target = (given.get(argument) for argument in COPIES[name])
            _copy(source, target)

        return _Done() if given.get("async_op") else None

    return answer


def _copy(source: Any, target: Any) -> None:
    """Copy the data of the one rank to where the data of all ranks belongs. Lists have one element for each rank."""
    if target is None:  # this rank receives nothing
        return

    for values in (source, target):
        if isinstance(values, list) and len(values) != 1:
            raise RuntimeError(f"a list for {len(values)} ranks where there is one")

    # A tensor is filled in place. An object in a list is replaced.
    one = source[0] if isinstance(source, list) else source
    place = target[0] if isinstance(target, list) else target

    if isinstance(place, Tensor):
        place.copy_(one.reshape(place.shape))
    else:
        target[0] = one
