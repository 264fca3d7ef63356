"""Verify the files of a checkpoint: their sizes, their digests, and the pieces that the manifest expects in them.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from lockstep.checkpoint.manifest import Damaged, File, InvalidCheckpoint, Manifest, Piece
from lockstep.checkpoint.manifest_reader import open_file, read_manifest
from lockstep.checkpoint.rank_file import locate, read_header
from lockstep.checkpoint.storage.durable import CHUNK
from lockstep.checkpoint.storage.folder import Checkpoint
from lockstep.errors import UserError


def verify_checkpoint(
    checkpoint: Checkpoint, rank: int = 0, world_size: int = 1, beat: Callable[[], None] = lambda: None
) -> tuple[Manifest | None, Sequence[InvalidCheckpoint]]:
    """Return the manifest, and the problems with it or with this rank's share of its files.

    `beat` is called after each chunk: reading everything may take longer than the hang timeout.
    """
    try:
        manifest = read_manifest(checkpoint)
    except InvalidCheckpoint as problem:
        return None, [problem]

    return manifest, verify_files(checkpoint, manifest, manifest.files[rank::world_size], beat)


def verify_files(
    checkpoint: Checkpoint, manifest: Manifest, files: Sequence[File], beat: Callable[[], None] = lambda: None
) -> list[InvalidCheckpoint]:
    """Return the problems with `files`: no access, a wrong size, a wrong digest, or a missing piece."""
    # The pieces that the manifest expects in each file, with their names and dtypes.
    expected: dict[str, list[tuple[str, Piece, str]]] = {}
    for name, entry in manifest.tensors.items():
        for piece in entry.pieces:
            expected.setdefault(piece.file, []).append((name, piece, entry.dtype))

    # Report one problem per file: a wrong digest explains a wrong header.
    problems = []

    for file in files:
        try:
            verify_file(checkpoint, file, beat)
            header = read_header(checkpoint, file.name)
            for name, piece, dtype in expected.get(file.name, []):
                locate(checkpoint, header, name, piece, dtype)
        except InvalidCheckpoint as problem:
            problems.append(problem)

    return problems


def check_size(checkpoint: Checkpoint, file: File) -> None:
    """Raise Damaged if a file is missing or has the wrong size. Its contents are not read."""
    with open_file(checkpoint, file.name) as stream:
        size = stream.seek(0, 2)

    if size != file.size:
        raise Damaged(checkpoint, file.name, f"has {size:,} bytes, but {file.size:,} were written")


def verify_file(checkpoint: Checkpoint, file: File, beat: Callable[[], None]) -> None:
    """Read a whole file and raise Damaged if its size or digest is wrong. Call `beat` after each chunk."""
    # Check the size first: it needs no reading, and a wrong size says more than a wrong digest.
    check_size(checkpoint, file)

    with open_file(checkpoint, file.name) as stream:
        # Large chunks, because in an object store each one is a request.
        digest = xxhash.xxh3_128()
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            digest.update(chunk)
            beat()

    if digest.hexdigest() != file.digest:
        raise Damaged(checkpoint, file.name, "the bytes changed since they were written (digest differs)")


def deleted_error(checkpoint: Checkpoint) -> UserError:
    """Return the error for a checkpoint that was deleted before all of it was read, and is not damaged."""
    return UserError(
        f"the checkpoint {checkpoint.path} is missing: it was deleted, perhaps by its run, which keeps only some",
        "",
        "choose another checkpoint: lockstep ckpt ls RUN; or let the run keep more of them: checkpoint.keep=10",
    )
