"""Virtual shards: a stream in a fixed number of parts, each of which is read in order.

The samples of a shard depend on the data, the seed and the epoch, never on ranks or worker processes. Each step takes
the same number of samples from every shard, so the steps are the same on any number of ranks, and the position in the
stream is the position in each of its shards.
"""

from __future__ import annotations

import json
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.data.packing import Row, RowPacker, as_document
from lockstep.errors import UserError

DROPPED = object()  # a filter returns this for a sample that it drops


class Packer(Protocol):
    """Makes rows of samples. Samples that do not fill a row yet are part of its state."""

    def add(self, sample: Any) -> None: ...

    def flush(self) -> None:
        """Complete the last rows: the shard has ended."""

    def pop(self) -> Any:
        """Return the next complete row, or None."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _itself(file: Any) -> Iterable[Any]:
    return file


@dataclass(frozen=True)
class Shards:
    """A stream in `shards` virtual shards: `Task.data` may return it.

    `files` are paths, or anything else that `read` turns into an iterable of samples; without `read` they are iterables
    themselves. Every epoch shuffles the files (`data.shuffle`) and deals them to the shards. If an iterable has
    `state_dict()` and `load_state_dict(state)`, it resumes by them; otherwise its samples are counted, and those
    already trained are read again.

    `map`, `filter`, `chunk` and `pack` return a new stream. They apply in the order of the calls, inside each shard.
    """

    files: Sequence[Any]
    read: Callable[[Any], Iterable[Any]] = _itself
    shards: int = 1

    # Functions of a sample, before and after packing. A filter returns DROPPED.
    before: tuple[Callable[[Any], Any], ...] = ()
    make_packer: Callable[[], Packer] | None = None
    after: tuple[Callable[[Any], Any], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.files, str | PurePath) or not hasattr(self.files, "__len__"):
            raise UserError(
                f"Shards needs a list of files; it got a {type(self.files).__name__}",
                f"{self.files!r}",
                "pass a list: [path], or sorted(folder.glob('*.jsonl'))",
            )

        if not 1 <= self.shards <= len(self.files):
            raise UserError(
                f"{len(self.files)} files cannot be dealt to {self.shards} virtual shards",
                "every shard needs a file in every epoch",
                f"set shards={max(1, len(self.files))} or less, or split the data into more files",
            )

    def map(self, function: Callable[[Any], Any]) -> Shards:
        """Replace each sample by `function(sample)`."""
        return self._with(function)

    def filter(self, keep: Callable[[Any], bool]) -> Shards:
        """Leave out the samples for which `keep(sample)` is false."""
        return self._with(_Filter(keep))

    def chunk(self, length: int, end: int | None = None, pad: int | None = None) -> Shards:
        """Join token lists, and cut them into rows: int64 tensors (length,).

        `end` is added after each list. The last row of a shard is filled up with `pad`; without it, an incomplete last
        row is dropped.
        """
        _check_length("chunk(length)", length)
        return self._with_packer(partial(TokenChunks, length, end, pad))

    def pack(self, row_length: int) -> Shards:
        """Put whole documents into rows of at most `row_length` tokens, for `packed_batch` in `Task.collate`."""
        _check_length("pack(row_length)", row_length)
        return self._with_packer(partial(DocumentRows, row_length))

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of all files, in the order of the list: for a look at them, or an evaluation."""
        from lockstep.data.streams.cursor import Cursor, ShardEpoch

        cursor = Cursor(ShardEpoch(self, list(self.files), seed=0, epoch=0, shard=0))
        while samples := cursor.take(1):
            yield from samples

    def _with(self, function: Callable[[Any], Any]) -> Shards:
        if self.make_packer is None:
            return replace(self, before=(*self.before, function))
        return replace(self, after=(*self.after, function))

    def _with_packer(self, maker: Callable[[], Packer]) -> Shards:
        if self.make_packer is not None:
            raise UserError("a stream can be packed once", "chunk or pack was called before", "remove one of the calls")
        return replace(self, make_packer=maker)


def _check_length(name: str, length: int) -> None:
    if not isinstance(length, int) or length < 1:
        raise UserError(f"{name} must be at least 1 token; it is {length!r}", "", "pass the number of tokens in a row")


def apply(functions: Iterable[Callable[[Any], Any]], sample: Any) -> Any:
    """Return the sample after all functions, or DROPPED."""
    for function in functions:
        sample = function(sample)
        if sample is DROPPED:
            break

    return sample


# No closure: worker processes that are not forked get it as a pickle.
@dataclass(frozen=True)
class _Filter:
    keep: Callable[[Any], bool]

    def __call__(self, sample: Any) -> Any:
        return sample if self.keep(sample) else DROPPED


# ---- packers ----


class TokenChunks:
    """Joins token lists and cuts them into rows (length,)."""

    def __init__(self, length: int, end: int | None = None, pad: int | None = None):
        self.length = length
        self.end = end
        self.pad = pad
        self._tokens = torch.empty(0, dtype=torch.int64)

    def add(self, sample: Any) -> None:
        tokens = _as_tokens(sample)
        if tokens is None:
            raise UserError(
                "chunk() needs token lists: integers, in one dimension",
                f"it got a {type(sample).__name__}: {str(sample)[:60]!r}",
                "return the tokens of one document, for example with map(lambda sample: sample['input_ids'])",
            )

        end = [] if self.end is None else [torch.tensor([self.end])]
        self._tokens = torch.cat([self._tokens, tokens, *end])

    def flush(self) -> None:
        # How many tokens the last row lacks.
        rest = -len(self._tokens) % self.length
        if self.pad is None:
            self._tokens = self._tokens[: len(self._tokens) // self.length * self.length]
        else:
            self._tokens = torch.cat([self._tokens, torch.full((rest,), self.pad)])

    def pop(self) -> Tensor | None:
        if len(self._tokens) < self.length:
            return None

        # A copy, because the row is a view of all tokens, and would be sent with all of them.
        row = self._tokens[: self.length].clone()
        self._tokens = self._tokens[self.length :]
        return row

    def state_dict(self) -> dict[str, Any]:
        # An array: a worker process sends it as a part of a message, and a tensor in shared memory of its own.
        return {"tokens": self._tokens.numpy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tokens = torch.as_tensor(state["tokens"])


def _as_tokens(sample: Any) -> Tensor | None:
    """Return tokens (tokens,) as int64, or None if they are something else: numbers with a fraction, text."""
    try:
        tokens = torch.as_tensor(sample)
    except (TypeError, ValueError, RuntimeError):
        return None

    # An empty list has torch's default dtype.
    whole = not tokens.numel() or not (tokens.is_floating_point() or tokens.is_complex())
    return tokens.to(torch.int64) if tokens.dim() == 1 and whole else None


class DocumentRows:
    """Puts whole documents into rows, which `packed_batch` turns into batches."""

    def __init__(self, row_length: int):
        self._packer = RowPacker(row_length)
        self._complete: deque[list[dict[str, np.ndarray]]] = deque()

    def add(self, sample: Any) -> None:
        # Arrays, for the same reason as in `TokenChunks.state_dict`.
        document = {name: tensor.numpy() for name, tensor in as_document(sample).items()}
        self._complete.extend(self._packer.add(document, len(document["input_ids"])))

    def flush(self) -> None:
        self._complete.extend(self._packer.flush())

    def pop(self) -> Row | None:
        return Row(self._complete.popleft()) if self._complete else None

    def state_dict(self) -> dict[str, Any]:
        return {"packer": self._packer.state_dict(), "complete": list(self._complete)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._packer.load_state_dict(state["packer"])
        self._complete = deque(state["complete"])


# ---- readers of files ----


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text file without their line ends."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield line.rstrip("\n")


def read_jsonl(path: str | Path) -> Iterator[Any]:
    """Yield the value of each line of a JSON Lines file."""
    for line in read_lines(path):
        if line.strip():
            yield json.loads(line)


def read_tar(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar file in WebDataset's layout: files with one name and different extensions.

    A sample is a dictionary of bytes by extension, with the name as `__key__`. The files of a sample must be
    neighbours.
    """
    # As a stream, without seeking: the file may be a pipe, and is read once from front to back.
    sample: dict[str, Any] = {}
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if not member.isfile():
                continue

            # "images/0001.seg.png" has the key "images/0001" and the extension "seg.png".
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}" if folder else stem

            # Another key: the sample before it is complete.
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}

            content = archive.extractfile(member)
            assert content is not None, "a regular file has content"
            sample |= {"__key__": key, extension: content.read()}

    if sample:
        yield sample
