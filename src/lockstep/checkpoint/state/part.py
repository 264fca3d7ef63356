"""A part of a run: any object besides the model and the optimizers whose state is saved with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lockstep.checkpoint.load import CheckpointReader


class Part(Protocol):
    """An object whose state is saved with the run, under a name: the task, the data source or a scheduler, for example.

    It may have the members of `OptionalMembers` in addition. Most parts are objects of the user's, so there is no base
    class.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class OptionalMembers(NamedTuple):
    """What a part may have besides its state, with a default where it has none."""

    # read_shard(name, reader) reads this rank's shard of a tensor. None: the state is the same on every rank.
    read_shard: Callable[[str, CheckpointReader], Tensor] | None

    # changes_since(state) lists what the user's code has changed since `state` was saved.
    changes_since: Callable[[dict[str, Any]], list[str]]

    # As in `Task`.
    lasting: tuple[str, ...]
    frozen_advice: str | None


def optional_members(part: object) -> OptionalMembers:
    """Return the optional members of a part. This is the only place that looks for them."""
    return OptionalMembers(
        read_shard=getattr(part, "read_shard", None),
        changes_since=getattr(part, "changes_since", None) or (lambda state: []),
        lasting=getattr(part, "lasting", ()),
        frozen_advice=getattr(part, "frozen_advice", None),
    )
