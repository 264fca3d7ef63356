"""The weights of a checkpoint, for other programs: the tensors of the model, and no state of optimizers.

`lockstep ckpt export`, the end of a run and the export for Hugging Face use this. It imports torch only when it is
called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.integrity import deleted_error, verify_checkpoint
from lockstep.checkpoint.manifest import InvalidCheckpoint, average_name, weight_name
from lockstep.checkpoint.storage.folder import Checkpoint
from lockstep.errors import UserError
from lockstep.run_folder.names import AVERAGED_WEIGHTS, WEIGHTS


class Weights(NamedTuple):
    """The weights in a checkpoint."""

    tensors: dict[str, Any]  # a tied tensor is in here once
    aliases: dict[str, str]  # of tied tensors: {other name: name in `tensors`}
    frozen_digests: dict[str, str]  # of the frozen parameters that the checkpoint leaves out (checkpoint.frozen=false)


def export_weights(
    checkpoint: Checkpoint, out: Path, ema: bool = False, overwrite: bool = False
) -> tuple[Path, list[str]]:
    """Verify every byte, and write the tensors `model.*` to `out` or to `out`/model.safetensors.

    Tied weights are written once; the metadata maps their other names to that name. With `ema` the averages take the
    place of the parameters, and the file is called ema.safetensors. An older file is refused, unless `overwrite`.

    Return the file, and the names of the frozen parameters that the checkpoint leaves out.
    """
    from lockstep.observe.weights import write_weights  # needs torch

    name = AVERAGED_WEIGHTS if ema else WEIGHTS
    target = out if out.suffix == ".safetensors" else out / name
    if target.exists() and not overwrite:
        raise UserError(f"{target} already exists", "", "name another folder with --out, or add --overwrite")

    weights = read_weights(checkpoint, ema)
    if not weights.tensors:
        raise UserError(
            f"the checkpoint {checkpoint.path} has no weights to export",
            f"no tensor whose name begins with {weight_name('')!r}",
            "list its tensors: lockstep ckpt show CKPT",
        )

    # An older file is replaced as a whole or not at all.
    target.parent.mkdir(parents=True, exist_ok=True)
    write_weights(target, weights.tensors, weights.aliases)
    return target, sorted(weights.frozen_digests)


def read_weights(checkpoint: Checkpoint, ema: bool = False) -> Weights:
    """Verify every byte, and return the tensors `model.*` without that prefix.

    With `ema` the averages of parameters take their places.
    """
    from lockstep.checkpoint.reader import CheckpointReader  # needs torch

    tensors = {}
    aliases = {}

    try:
        manifest, problems = verify_checkpoint(checkpoint)
        if manifest is None or problems:
            raise problems[0]

        reader = CheckpointReader(checkpoint, manifest)

        # {name in the checkpoint: name in the model}
        weights = {weight_name(name): name for name in reader.weight_names()}

        averages = {name for name in weights.values() if average_name(name) in manifest.tensors}
        if ema and not averages:
            raise UserError(
                f"the checkpoint {checkpoint.path} has no averages of the weights",
                "it was saved without ema.decay",
                "leave --ema out; a run with ema.decay=0.999 saves them",
            )

        # Parameters and buffers. What has no average is read from the model's tensors.
        with reader.keeping_open():
            for saved_name, name in weights.items():
                # If a tensor is tied to a tensor outside the model, it is written itself.
                first = weights.get(reader.stored_name(saved_name), name)
                if first != name:
                    aliases[name] = first
                else:
                    tensors[name] = reader.read(average_name(name) if ema and name in averages else saved_name)
    except InvalidCheckpoint as problem:
        if not checkpoint.exists():
            raise deleted_error(checkpoint) from None

        raise UserError(
            f"the checkpoint {checkpoint.path} {problem.predicate} and cannot be exported",
            str(problem),
            "choose another checkpoint: lockstep ckpt ls RUN",
        ) from None

    return Weights(tensors, aliases, manifest.frozen_digests)
