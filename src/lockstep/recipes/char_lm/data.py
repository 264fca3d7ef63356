"""Text of Python's own standard library as windows of character ids.

Every machine that runs Lockstep has this text, so the demo needs no download. It differs a little from one
Python version to the next, and the loss with it; under one Python it is always the same.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError

# Newline and printable ASCII: 96 symbols, and a multiple of 32 is a shape that matrix kernels like.
SYMBOLS = b"\n" + bytes(range(32, 127))

# All other characters become a question mark, as in str.encode("ascii", "replace").
_TO_ID = bytes(SYMBOLS.index(byte if byte in SYMBOLS else ord("?")) for byte in range(256))

# Packages that are read after the modules at the top level. A distribution without some of them (tkinter, idlelib) has
# less text.
PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "html", "http", "idlelib",
    "importlib", "json", "logging", "multiprocessing", "re", "sqlite3", "tkinter", "tomllib", "turtledemo",
    "unittest", "urllib", "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo",
)  # fmt: skip

# The text is split into chunks of this many characters. One chunk in 20 is validation text.
CHUNK = 4096
VALIDATION_SHARE = 20


def encode(text: str) -> Tensor:
    """Return the ids of the characters, as uint8: an eighth of the bytes of int64 on the way to a GPU."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace").translate(_TO_ID)), dtype=torch.uint8)


def decode(ids: Tensor) -> str:
    return bytes(SYMBOLS[i] for i in ids.tolist()).decode("ascii")


def source_files(root: Path) -> Iterator[Path]:
    """Yield the modules at the top level, then each package, in an order that depends on names only."""
    # _sysconfigdata_* is generated when Python is built: facts about the machine, and no code.
    yield from sorted(path for path in root.glob("*.py") if not path.name.startswith("_sysconfigdata"))

    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py"), key=lambda path: path.relative_to(root).parts):
            if {"test", "tests", "idle_test"}.isdisjoint(path.relative_to(root).parts):
                yield path


def library_text(max_bytes: int) -> str:
    root = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    room = max_bytes

    for path in source_files(root):
        if room <= 0:
            break

        texts.append(path.read_text(encoding="utf-8", errors="replace")[:room])
        room -= len(texts[-1])

    if not texts:
        raise UserError(
            f"the standard library in {root} has no .py file, and char_lm trains on its source text",
            "",
            "run a Python that ships its library as .py files (python.org, pyenv, uv, conda, ...)",
        )

    return "".join(texts)


def split(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return training and validation ids; every 20th chunk is validation.

    Both parts have the style of every file. They are separate tensors, so no window can hold text of both.
    """
    chunks = ids.split(CHUNK)
    validation = chunks[VALIDATION_SHARE - 1 :: VALIDATION_SHARE]
    if not validation:
        raise UserError(
            f"the text has {len(ids)} characters, too few for a chunk of validation text",
            f"one chunk of {CHUNK} characters in {VALIDATION_SHARE} is for validation",
            f"set task.max_bytes={CHUNK * VALIDATION_SHARE} or more",
        )

    training = [chunk for i, chunk in enumerate(chunks) if (i + 1) % VALIDATION_SHARE]
    return torch.cat(training), torch.cat(validation)


class Windows(Dataset[Tensor]):
    """Window i is the `context + 1` ids that start at `i * context`.

    Neighbours share one id, the last target of one and the first input of the next: an epoch predicts each
    character once.
    """

    def __init__(self, ids: Tensor, context: int, limit: int | None = None):
        # (windows, context + 1), a view: nothing is copied.
        windows = ids.unfold(0, context + 1, context)
        if limit is not None and limit < len(windows):
            # Evenly spaced, so that a small evaluation still covers the whole text.
            windows = windows[torch.arange(limit) * len(windows) // limit]

        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]  # (context + 1,) uint8

    def __getitems__(self, ids: Sequence[int]) -> list[Tensor]:
        # One gather for the whole batch.
        return list(self.windows[torch.as_tensor(ids)])
