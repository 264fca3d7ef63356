"""The training mode of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def restore_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context after which each module is in the mode that it was in before.

    `model.train()` would not do: some modules may be in eval mode on purpose, and a module may override `train`.
    """
    modes = [(module, module.training) for module in modules]

    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
