"""The pool itself: a harness that hides failures would make every test of this folder worthless."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pool as pool_module
from faults.launchers import alive, until
from lockstep.config import RunConfig
from lockstep.errors import ConfigError, UserError
from lockstep.runtime import context
from lockstep.runtime.world import World
from pool import Pool, WorkerLost


def add_ranks(world: World, store: Any, start: float) -> tuple[int, float]:
    with context.start(world, RunConfig(), store=store) as runtime:
        return os.getpid(), float(runtime.collectives.all_reduce_(torch.tensor(start + world.rank)))


def test_results_come_by_rank_from_new_processes(pool: Pool) -> None:
    for size in (1, 2, 3, 4):
        found = pool.run(add_ranks, 10.0, world=size)
        assert [total for _, total in found] == [10.0 * size + sum(range(size))] * size
        again = pool.run(add_ranks, 0.0, world=size)
        assert not {pid for pid, _ in again} & {pid for pid, _ in found}


def test_local_functions_travel_too(pool: Pool) -> None:
    factor = 3
    assert pool.run(lambda world, store: world.rank * factor, world=4) == [0, 3, 6, 9]


def fail_on(world: World, store: Any, rank: int, error: BaseException) -> None:
    with context.start(world, RunConfig(), store=store) as runtime:
        if world.rank == rank:
            raise error
        runtime.collectives.all_gather_json(None)  # waits for the one that has gone


@pytest.mark.parametrize("error", [ValueError("no"), UserError("a", "b", "c"), ConfigError([UserError("a", "b", "c")])])
def test_the_first_error_is_raised_with_its_rank_and_traceback(pool: Pool, error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        pool.run(fail_on, 2, error, world=3)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    note = caught.value.__notes__[0]
    assert "on rank 2" in note
    assert "in fail_on" in note
    assert pool.run(add_ranks, 0.0, world=3)[0][1] == 3.0


def test_a_zygote_that_dies_takes_one_job_along(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.run(add_ranks, 0.0, world=2)
    first, last = pool._zygotes
    started: list[int] = []
    start = type(last).start

    def dying(self: Any, job: Any) -> Any:
        if self is last:
            last.process.kill()
        members = start(self, job)
        started.extend(rank.pid for rank in members)
        return members

    with monkeypatch.context() as patch:
        patch.setattr(type(last), "start", dying)
        with pytest.raises((WorkerLost, BrokenPipeError, ConnectionError)):
            pool.run(sleep_long, world=2)
    assert until(lambda: not any(map(alive, started)))
    assert len(started) == 1
    assert pool.run(add_ranks, 0.0, world=2)[0][1] == 1.0
    assert first in pool._zygotes


def sleep_long(world: World, store: Any) -> None:
    time.sleep(600)


def leave_the_group(world: World, store: Any) -> None:
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    dist.barrier()  # whoever left sooner would close a connection that the other is still making


def test_what_a_job_leaves_behind_does_not_reach_the_next(pool: Pool) -> None:
    pool.run(leave_the_group, world=2)
    assert pool.run(add_ranks, 0.0, world=2)[0][1] == 1.0


def wait_for_ever(world: World, store: Any, folder: Path) -> None:
    with context.start(world, RunConfig(), store=store) as runtime:
        (folder / str(world.rank)).write_text(str(os.getpid()))
        if world.rank == 1:
            time.sleep(1000)
        runtime.collectives.all_gather_json(None)


def die(world: World, store: Any) -> None:
    os._exit(7)


def test_a_hang_is_killed_with_its_stacks_and_the_pool_recovers(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time begins when both ranks are where they hang."""
    both = [tmp_path / "0", tmp_path / "1"]

    def monotonic() -> float:
        until(lambda: all(path.exists() for path in both))
        return time.monotonic()

    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
        with pytest.raises(WorkerLost, match=r"ranks \[0, 1\] of 2 still running") as caught:
            pool.run(wait_for_ever, tmp_path, world=2, limit=timedelta(seconds=3))
    assert "in wait_for_ever" in str(caught.value)
    assert "in all_gather_json" in str(caught.value)
    until(lambda: not any(alive(int((tmp_path / str(rank)).read_text())) for rank in range(2)))
    with pytest.raises(WorkerLost, match=r"ranks \[0\] of 1 died"):
        pool.run(die, world=1)
    assert pool.run(lambda world, store: world.size, world=1) == [1]
