"""The private members of torch's DataLoader that Lockstep uses. No other module knows them (torch 2.11 to 2.15).

torch's public interface neither names the worker processes of a DataLoader nor ends them at a given time, lets no
dataset be read whole in a worker process, and has no function that pins a batch.
`tests/unit/data/test_data_torch_private.py` fails when torch changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory


def worker_processes(loader: DataLoader, batches: Iterator[Any]) -> list[BaseProcess]:
    """Return the worker processes of `batches`, which is `iter(loader)`."""
    return list(batches._workers) if loader.num_workers else []  # pyrefly: ignore[missing-attribute]


def shut_down_workers(batches: Iterator[Any]) -> None:
    """Ask the worker processes of an iterator to end, and wait for them for a few seconds."""
    batches._shutdown_workers()  # pyrefly: ignore[missing-attribute]


def forget_worker() -> None:
    """Let `get_worker_info` return None from now on, as it does outside a worker process."""
    torch_worker._worker_info = None
    assert get_worker_info() is None, "torch keeps what `get_worker_info` returns in another place"


def pin_other(part: Any) -> Any:
    """Pin the tensors in a part of a batch as torch's DataLoader does. Unknown objects stay as they are."""
    return pin_memory(part)
