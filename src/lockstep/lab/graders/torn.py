"""A save that dies in the middle, for the graders of checkpoints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

_save = torch.save


def half_of_a_save(state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for torch.save: write half of the bytes, and end as a machine does that loses power."""
    whole = io.BytesIO()
    _save(state, whole)
    half = whole.getvalue()[: len(whole.getvalue()) // 2]
    if hasattr(file, "write"):
        file.write(half)
        file.flush()
    else:
        Path(file).write_bytes(half)

    raise KeyboardInterrupt
