"""The files that `init_from` reads: safetensors, torch files, our own runs and checkpoints, Hugging Face folders.

A source reads slices, so that a rank never holds more of a file than the tensor that it is copying. Nothing is
unpickled: torch files are read with weights_only=True.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.checkpoint.choose import checkpoints_at
from lockstep.checkpoint.loading.search import wait_for_newest_valid
from lockstep.checkpoint.manifest import weight_name
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.errors import UserError
from lockstep.run_folder.names import SUMMARY, WEIGHTS
from lockstep.run_folder.paths import read_path
from lockstep.run_folder.run_dir import holds_a_run
from lockstep.runtime.context import EventLogger, Runtime

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")

# Where people keep the weights inside a torch file that holds more than weights.
NESTED = ("state_dict", "model_state_dict", "model", "module")

# The weights in a folder: the first of these files that is there.
IN_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)


class WeightSource(Protocol):
    """Named tensors in files. All methods are local."""

    location: str  # for messages

    def names(self) -> Sequence[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""

    def is_floating_point(self, name: str) -> bool:
        """Return whether its numbers are floating-point numbers."""

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the slice of this shape that begins at `offset` in the full tensor, on the CPU."""

    def digest(self, rank: int, world_size: int, gather: Callable[[Any], list[Any]]) -> str:
        """Return a digest of all files. Collective: each rank reads its share of them."""


def open_source(path: Path, runtime: Runtime, timeout_s: float, log_event: EventLogger) -> WeightSource:
    """Open the weights at `path`. Collective; if a rank cannot open them, all ranks raise its error."""
    # The folder of a run's checkpoints means the run.
    meant = read_path(path)
    if meant.name is None and meant.run is not None:
        path = meant.run

    # A checkpoint of ours is verified by all ranks together, as at a resume.
    if meant.name is not None or _newest_is_meant(path):
        return _open_checkpoint(path, runtime, timeout_s, log_event)

    source, error = None, None
    try:
        source = _open_files(path)
    except UserError as problem:
        error = problem

    # All ranks must go on together, so all of them learn of the first error.
    errors = runtime.collectives.all_gather_json(list(error.args) if error else None)
    for arguments in errors:
        if arguments:
            raise error or UserError(*arguments)

    assert source is not None
    return source


def _newest_is_meant(path: Path) -> bool:
    """Return whether `path` is a run whose newest checkpoint is newer than its model.safetensors, or which has none."""
    # A run writes summary.json last, after the weights, and deletes it when it is resumed.
    ended = (path / SUMMARY).exists() and (path / WEIGHTS).exists()
    return holds_a_run(path) and not ended


def _open_checkpoint(path: Path, runtime: Runtime, timeout_s: float, log_event: EventLogger) -> CheckpointSource:
    """Open one checkpoint, or the newest valid one of a run. Collective."""
    storage, only = checkpoints_at(path)
    found = wait_for_newest_valid(storage, runtime, timeout_s, only)
    if found is None:
        raise UserError(
            f"init_from={path} has no weights: the run has no checkpoint, and has not ended", "", "name another run"
        )

    for skipped in found.skipped:
        log_event("warning", reason=f"{skipped.sentence}; init_from reads {found.reader.checkpoint.name}")

    return CheckpointSource(found.reader)


def _open_files(path: Path) -> WeightSource:
    """Open a file of weights, or find one in a folder. Raise a UserError."""
    if not path.exists():
        raise UserError(
            f"init_from={path} does not exist",
            "",
            "name a file (.safetensors, .pt), the folder of a run or of a checkpoint, or a Hugging Face folder",
        )

    if path.is_dir():
        names = [name for name in IN_FOLDER if (path / name).exists()]
        if not names:
            raise UserError(
                f"init_from={path} is a folder without weights",
                f"none of {', '.join(IN_FOLDER)}, and no checkpoints",
                "name the file with the weights",
            )

        path = path / names[0]

    # An index names the files of a model that was saved in several.
    files = _files_of_index(path) if path.suffix == ".json" else [path]
    if files[0].suffix == ".safetensors":
        return SafetensorsSource(path, files)

    if files[0].suffix in TORCH_FILES:
        return TorchSource(path, files)

    raise UserError(
        f"init_from={path} is not a file of weights that can be read",
        f"its name ends in {path.suffix!r}",
        f"use a .safetensors file, or one of torch's ({', '.join(TORCH_FILES)})",
    )


def _files_of_index(path: Path) -> list[Path]:
    """Return the files that the index of a sharded Hugging Face model lists."""
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        files = [path.parent / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable_error(path, f"{type(error).__name__}: {error}") from None

    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        why = f"it lists {missing[0]}, which is not there" if missing else "it lists no files"
        raise _unreadable_error(path, why)

    return files


def _unreadable_error(path: Path, why: str) -> UserError:
    """Return the error for a file that is damaged, or not what its name says."""
    return UserError(f"init_from={path} cannot be read", why, "download or copy it again")


class CheckpointSource:
    """The model's tensors in one of our checkpoints, without the prefix `model.`"""

    def __init__(self, reader: CheckpointReader):
        self.reader = reader
        self.location = str(reader.checkpoint.path)

    def names(self) -> list[str]:
        return self.reader.weight_names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.shape(weight_name(name))

    def is_floating_point(self, name: str) -> bool:
        return self.reader.dtype(weight_name(name)).is_floating_point

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self.reader.read_slice(weight_name(name), offset, shape)

    def digest(self, rank: int, world_size: int, gather: Callable[[Any], list[Any]]) -> str:
        # It covers the digests of all files, which `newest_valid` has verified.
        return self.reader.manifest.digest


class _Files:
    """A source that consists of files of one kind."""

    def __init__(self, path: Path, files: Sequence[Path]):
        self.location = str(path)
        self.files = files

    def digest(self, rank: int, world_size: int, gather: Callable[[Any], list[Any]]) -> str:
        """Return a digest of the content, the same on all ranks. Collective."""
        # Each rank reads some of the files.
        mine = {}
        for file in self.files[rank::world_size]:
            with file.open("rb") as stream:
                mine[file.name] = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()

        # For one file the digest of its bytes (`xxhsum -H2`); for several files, a digest of the sorted digests.
        digests = {name: digest for by_name in gather(mine) for name, digest in by_name.items()}
        if len(digests) == 1:
            return next(iter(digests.values()))

        return xxhash.xxh3_128(json.dumps(digests, sort_keys=True).encode()).hexdigest()


class SafetensorsSource(_Files):
    """Safetensors files. Only the bytes of a slice are read."""

    def __init__(self, path: Path, files: Sequence[Path]):
        super().__init__(path, files)
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        self._aliases: dict[str, str] = {}

        # Opening a file reads its header only. The handles stay open for as long as the source lives.
        for file in files:
            with _readable(file):
                handle: Any = self._stack.enter_context(safe_open(str(file), framework="pt"))
                self._file_of |= dict.fromkeys(handle.keys(), handle)
                self._aliases |= handle.metadata() or {}

        # Our exports name tied weights in the metadata, other programs may keep anything there.
        self._aliases = {
            name: original
            for name, original in self._aliases.items()
            if name not in self._file_of and original in self._file_of
        }

    def names(self) -> list[str]:
        return [*self._file_of, *self._aliases]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def is_floating_point(self, name: str) -> bool:
        return self._slice(name).get_dtype().startswith(("F", "BF"))

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a slice of a tensor, without reading the rest of it."""
        name = self._aliases.get(name, name)
        if not shape:
            return self._file_of[name].get_tensor(name)  # a scalar has no slices

        region = tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))
        return self._slice(name)[region]

    def _slice(self, name: str) -> Any:
        """Return safetensors' handle of a tensor, which reads nothing yet."""
        name = self._aliases.get(name, name)
        return self._file_of[name].get_slice(name)


class TorchSource(_Files):
    """Files of `torch.save`, mapped into memory."""

    def __init__(self, path: Path, files: Sequence[Path]):
        super().__init__(path, files)
        self._tensors: dict[str, Tensor] = {}
        # Files of a sharded model have different names, so nothing is overwritten.
        for file in files:
            with _readable(file):
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)

            self._tensors |= _tensors_in(loaded, file)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def is_floating_point(self, name: str) -> bool:
        return self._tensors[name].is_floating_point()

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        region = tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))
        return self._tensors[name][region]


def _tensors_in(loaded: Any, file: Path) -> dict[str, Tensor]:
    """Return the state dict in a torch file: the file itself, or one of its entries."""
    candidates = [loaded]
    if isinstance(loaded, Mapping):
        candidates += [loaded[key] for key in NESTED if key in loaded]

    for candidate in candidates:
        if isinstance(candidate, Mapping) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
            return dict(candidate)

    # Name what the file holds instead.
    keys = ", ".join(map(str, loaded))[:300] if isinstance(loaded, Mapping) else ""
    raise UserError(
        f"init_from={file} holds no state dict",
        f"its keys are {keys}" if keys else f"it holds a {type(loaded).__name__}",
        "save the weights alone: torch.save(model.state_dict(), FILE)",
    )


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn the errors of reading a file into one for people."""
    try:
        yield
    except pickle.UnpicklingError:
        # torch refuses whatever is neither a tensor nor a plain value.
        raise UserError(
            f"init_from={file} is refused: reading it might run code",
            "it holds objects besides tensors and plain values, and is only read with weights_only=True",
            "save the weights alone: torch.save(model.state_dict(), FILE), or as safetensors",
        ) from None
    except (OSError, SafetensorError, RuntimeError, EOFError) as error:
        raise _unreadable_error(file, f"{error}".partition("\n")[0]) from None
