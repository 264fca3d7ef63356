"""One rank of this node, as its launcher knows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class LocalRank:
    """A rank of this node, and the files that show how it ended."""

    number: int
    host: str
    folder: Path
    log: Path | None
    log_began: int = 0  # the size of the log when this rank was started
    oom_kills_before: int | None = None
    pid: int | None = None  # None until the zygote forks it
