"""A rank of one node that has ended."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.launch.failure import Failure
from lockstep.launch.ranks import oom_kills, rank_record
from lockstep.launch.ranks.local_ranks import LocalRank
from lockstep.launch.ranks.post_mortem import examine


@pytest.fixture
def local_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalRank:
    monkeypatch.setattr(oom_kills, "so_far", lambda: 0)
    return LocalRank(1, "node-a", tmp_path, tmp_path / "rank-1.log")


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[int, Exception], Failure | None]:
    """Return a function that raises an error in a rank, and returns the failure that its launcher finds."""

    def raise_and_examine(rank: int, error: Exception) -> Failure | None:
        try:
            raise error
        except Exception as caught:
            rank_record.write(tmp_path, rank, rank_record.ended_by(caught, rank))
        return examine(LocalRank(rank, "node-a", tmp_path, None), 1, time.time()).failure

    return raise_and_examine
