"""Read the weights of `init_from` into a model that is already placed: replicated, sharded, or a stage of a pipeline.

Every rank reads the slices that it holds, one tensor at a time, from a file system that all ranks see. So the peak of
host memory is the largest tensor of a rank, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.init_from.match import Match, match
from lockstep.checkpoint.init_from.sources import WeightSource, open_source
from lockstep.config import RunConfig
from lockstep.errors import UserError, plural
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.runtime.shards import shard_of


class InitialWeights:
    """The weights from which a run started. Checkpoints hold this record, so that a resumed run still knows it."""

    def __init__(self, path: str, digest: str | None = None, **facts: Any):
        self.record: dict[str, Any] = {"path": path, "digest": digest, **facts}

    def state_dict(self) -> dict[str, Any]:
        return self.record

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record = dict(state)

    def describe(self, resumed: bool) -> str:
        """Return a line for the banner."""
        digest = str(self.record["digest"])[:12]
        if resumed:
            return f"{self.record['path']} (digest {digest}) at the start of this run; not read again"

        text = f"{plural(self.record['tensors'], 'tensor')} of {self.record['path']} (digest {digest})"

        kept, unused = len(self.record["kept"]), len(self.record["unused"])
        if kept:
            text += f"; {plural(kept, 'tensor')} of the model not in it"

        if unused:
            text += f"; {plural(unused, 'tensor')} left out"

        return text


def load_initial_weights(
    state: Mapping[str, Tensor],
    path: Path,
    config: RunConfig,
    runtime: Runtime,
    log_event: EventLogger,
    held_elsewhere: Collection[str] = (),
    only: Collection[str] | None = None,
) -> InitialWeights:
    """Read the weights at `path` into the tensors of `state`, a model's state dict. Collective.

    `path` is the full path of `init_from`, which may have been typed in another working folder.

    `held_elsewhere`: names whose tensors other ranks hold. `only`: read just these names, which no checkpoint holds.
    """
    typed = config.init_from
    assert typed is not None
    runtime.heartbeat.beat("load")

    source = open_source(path, runtime, config.checkpoint.timeout, log_event)
    matched = match(state, source, config.weights)

    # Other files on another machine would give the ranks different weights.
    world, gather = runtime.world, runtime.collectives.all_gather_json
    digest = source.digest(world.rank, world.size, gather)
    taken = [sorted(matched.taken.items()), [source.shape(name) for name in matched.taken.values()]]
    _check_same(gather(taken), typed)

    # One tensor at a time, and of a sharded one only this rank's shard.
    for name, original in matched.taken.items():
        if name not in held_elsewhere and (only is None or name in only):
            _copy(state[name], source, original)

    # The source may have different values under two names of a tied tensor, of which only one was read.
    if only is None:
        _check_ties(state, source, matched, held_elsewhere)

    return InitialWeights(
        typed,
        digest,
        location=source.location,
        tensors=len(matched.taken),
        kept=matched.kept,
        unused=matched.unused,
        reshaped=matched.reshaped,
    )


def _check_same(by_rank: list[Any], path: str) -> None:
    """Refuse ranks that find different weights, because their machines have different files."""
    for rank, names in enumerate(by_rank):
        if names != by_rank[0]:
            raise UserError(
                f"rank {rank} finds other weights at init_from={path} than rank 0",
                "",
                "put the file on a file system that all machines share",
            )


def _copy(target: Tensor, source: WeightSource, name: str) -> None:
    """Copy a tensor of the source, or this rank's shard of it, in the dtype of the model."""
    shard = shard_of(target)
    full_shape = source.shape(name)

    with torch.no_grad():
        if full_shape == shard.full_shape:
            shard.local.copy_(source.read_slice(name, shard.offset, shard.local.shape))
            return

        # The same elements in another shape: (1, 768) -> (768,).
        full = source.read_slice(name, (0,) * len(full_shape), full_shape)
        if full.numel() == target.numel():
            region = full.reshape(shard.full_shape)

            ends = [start + n for start, n in zip(shard.offset, shard.local.shape, strict=True)]
            inside = tuple(slice(start, end) for start, end in zip(shard.offset, ends, strict=True))
            shard.local.copy_(region[inside])
            return

        _copy_overlap(shard.local, shard.offset, full, name)


def _copy_overlap(local: Tensor, offset: tuple[int, ...], full: Tensor, name: str) -> None:
    """Copy the region that both tensors have, as for a larger vocabulary. The rest keeps the values of the model."""
    if full.dim() != local.dim():
        raise UserError(
            f"{name!r} of shape {list(full.shape)} cannot become a tensor of {plural(local.dim(), 'dimension')}",
            "weights.allow_reshape needs the same number of elements, or of dimensions",
            f"let the model keep its own values: 'weights.allow_missing=[\"{name}\"]'",
        )

    # A shard may lie outside the smaller tensor: its slice is then empty.
    ends = [min(start + n, size) for start, n, size in zip(offset, local.shape, full.shape, strict=True)]
    lengths = [max(end - start, 0) for start, end in zip(offset, ends, strict=True)]

    if all(lengths):
        theirs = tuple(slice(start, start + n) for start, n in zip(offset, lengths, strict=True))
        local[tuple(slice(0, n) for n in lengths)] = full[theirs].to(local.device, local.dtype)


def _check_ties(
    state: Mapping[str, Tensor], source: WeightSource, matched: Match, held_elsewhere: Collection[str]
) -> None:
    """Raise if the source has different values for two names of one tensor."""
    for name, original in matched.tied.items():
        if name in held_elsewhere:
            continue

        shard = shard_of(state[name])
        # Values of another shape were reshaped, and are not compared.
        if source.shape(original) != shard.full_shape:
            continue

        other = source.read_slice(original, shard.offset, shard.local.shape)
        if not torch.equal(shard.local, other.to(shard.local.device, shard.local.dtype)):
            raise UserError(
                f"{name!r} is tied to another parameter in this model, but has its own values in {source.location}",
                "",
                "build the model without tying them (Hugging Face: tie_word_embeddings=False)",
            )
