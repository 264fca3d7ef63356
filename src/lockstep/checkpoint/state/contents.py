"""What one rank writes to a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from lockstep.runtime.shards import LocalShard


class Rank0Contents(NamedTuple):
    """What rank 0 writes to the manifest besides the files and their tensors. It must not change meanwhile."""

    # For tied tensors: other name -> name among the shards.
    aliases: Mapping[str, str] = {}

    # `Manifest.values`, encoded by `encoding.pack`.
    values: Mapping[str, Any] = {}


class RankContents(NamedTuple):
    """What one rank writes to a checkpoint. Nothing is copied yet."""

    # The shards that this rank writes, by tensor name.
    shards: Mapping[str, LocalShard]

    # Unused on other ranks.
    of_rank0: Rank0Contents = Rank0Contents()

    # The names of tensors to copy while training continues; they must not change before `Save.wait_for_copy`.
    copy_later: Collection[str] = ()
