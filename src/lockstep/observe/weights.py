"""Files of weights in the safetensors format: `model.safetensors` of a run, and what `lockstep ckpt export` writes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lockstep.errors import UserError, shell_word
from lockstep.files import delete_old_temporaries, replacing

if TYPE_CHECKING:
    from torch import Tensor


def save_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Save weights under the model's own names, tied weights once. An older file is replaced atomically."""
    from safetensors import SafetensorError

    try:
        write_weights(path, weights, aliases)
    except (OSError, SafetensorError) as error:
        run_dir = path.parent
        raise UserError(
            f"the final weights cannot be written to {run_dir}: {error}",
            "",
            f"make room, then add --resume {shell_word(run_dir)} to the same command: "
            "it resumes from the last checkpoint",
        ) from error


def write_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Write a safetensors file, which is replaced as a whole or not at all. Its metadata map aliases to names.

    The same weights always make the same bytes: safetensors itself writes metadata in a random order.
    """
    from safetensors.torch import save_file

    # Each is as large as the weights.
    delete_old_temporaries(path)

    with replacing(path) as temporary:
        # safetensors makes a file that only its owner can read; this one has the mode that the user's umask gives.
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        save_file(weights, str(temporary), metadata={**aliases, "format": "pt"})
        temporary.chmod(mode)

        with temporary.open("r+b") as file:
            _sort_metadata(file)

            # Without the fsync, a power failure after the rename could leave a file without its contents.
            os.fsync(file.fileno())


def _sort_metadata(file: BinaryIO) -> None:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))

    # Another order takes the same room; the format pads with spaces.
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= size, "the header would run into the data"

    file.seek(8)
    file.write(text.ljust(size))
    file.flush()
