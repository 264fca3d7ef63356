"""Copies of a dataset in worker processes: they must not share connections, and do not see later changes.

A worker process has a copy of the dataset from the moment it was started. What the main process changes afterwards,
such as the length of a crop, does not reach it. Training would silently go on with old values, so such a change is an
error.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.errors import UserError

MAX_NESTING = 8  # how deep datasets within datasets are searched
MAX_PARTS = 16  # how many datasets side by side are searched: this is done before each step


class WorkerCopies:
    """Detects changes of a dataset in this process. Its worker processes have copies, and do not see them."""

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._copied: dict[str, Any] = {}  # attributes of the dataset, as the workers have them

    def record(self) -> None:
        """Record the dataset's attributes, to compare them later."""
        self._copied = plain_attributes(self._dataset)

    def check(self) -> None:
        """Raise if the dataset has changed since `record`."""
        for name in self._changed():
            raise UserError(
                f"the dataset's {name} was changed after its worker processes had started, and they do not see it",
                "they have copies of the dataset, and prefetch",
                "set data.workers=0; or leave the dataset as it is: what depends on the epoch can be drawn from "
                "torch, numpy or random, which are seeded by epoch and sample. If the workers need not see it, since "
                "only your sampler reads it, say, set checks.first_batch=false",
            )

    @contextmanager
    def ignore_changes(self) -> Iterator[None]:
        """Return a context in which changes to the dataset do not count for `check`. Earlier changes still do."""
        changed_before = {name: self._copied[name] for name in self._changed()}
        try:
            yield
        finally:
            self.record()
            self._copied |= changed_before

    def _changed(self) -> Iterator[str]:
        """Yield the names of attributes that have changed since `record`."""
        now = plain_attributes(self._dataset) if self._copied else {}
        for name, old in self._copied.items():
            # By identity, and by value if that is cheap: a list may hold all samples.
            new = now.get(name)
            equal = new is old or (isinstance(old, int | float | str) and old == new)
            if new is not None and not equal:
                yield name


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """Return the dataset's attributes that are numbers, strings, lists or arrays, by name. Workers have copies."""
    plain = (int, float, str, list, tuple, np.ndarray, Tensor)
    return {name: value for name, value in attributes_of(dataset) if isinstance(value, plain)}


def check_no_connection(dataset: Any) -> None:
    """Refuse an open connection in the dataset: forked workers would share it and receive each other's responses."""
    for name, value in attributes_of(dataset):
        if isinstance(value, socket.socket | Connection):
            raise UserError(
                f"the dataset's {name} is an open connection, which worker processes would share",
                f"{value!r}: a response to one process could reach another",
                "open it when a process reads its first sample, in __getitem__ or __iter__, and not before (compare "
                "os.getpid()); or set data.workers=0",
            )


def attributes_of(dataset: Any, prefix: str = "", depth: int = MAX_NESTING) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes of a dataset, class attributes first, and of the datasets inside it."""
    # From the base class to the class itself and then the instance, so that what overrides an attribute comes later.
    classes = [vars(kind) for kind in reversed(type(dataset).__mro__)]
    for attributes in [*classes, getattr(dataset, "__dict__", {})]:
        # A list, because an attribute may be added during the loop.
        yield from ((f"{prefix}{name}", value) for name, value in list(attributes.items()) if name[:2] != "__")

    if depth <= 1:
        return

    for name, inner in _datasets_inside(dataset):
        yield from attributes_of(inner, f"{prefix}{name}.", depth - 1)


def _datasets_inside(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, dataset): a Subset holds one, a ConcatDataset several."""
    # A dataset with its own __getattr__ may raise anything here.
    try:
        inner = getattr(dataset, "dataset", None)
        parts = getattr(dataset, "datasets", None)
    except Exception:
        return

    if inner is not None:
        yield "dataset", inner
    if isinstance(parts, list | tuple):
        yield from ((f"datasets[{index}]", part) for index, part in enumerate(parts[:MAX_PARTS]))
