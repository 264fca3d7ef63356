"""Ranks of other launchers wait for each other for a stated time, and then say who is missing."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import pytest

from lockstep.errors import ExitCode, PeersMissing, UserError
from lockstep.runtime.rendezvous import store
from lockstep.runtime.world import World
from ports import free_port

SHORT = timedelta(seconds=0.3)


def test_rank_0_names_the_ranks_that_did_not_come(monkeypatch, capfd) -> None:
    monkeypatch.setattr(store, "PATIENCE_S", 0.1)
    world = World(0, 3, 0, 3, "127.0.0.1", free_port(), launcher="srun")
    with pytest.raises(PeersMissing, match=r"^ranks 1, 2 of 3 did not come within 0\.3 s") as missing:
        store.open_store(world, SHORT)
    assert missing.value.found == "3 ranks are announced by srun"
    assert missing.value.exit_code == ExitCode.RESTART

    # torch may warn that it does not find the name of a client.
    ours = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lockstep:")]
    assert ours == ["lockstep: waiting for ranks 1, 2 of 3, up to 0.3 s"]


@pytest.mark.parametrize(
    ("host", "problem"), [("127.0.0.1", "Connection refused"), ("nobody.invalid", "Name or service not known")]
)
def test_a_rank_says_that_rank_0_is_missing(host: str, problem: str) -> None:
    world = World(1, 2, 1, 2, host, free_port())
    with pytest.raises(PeersMissing, match=r"rank 0 of 2 is missing: it did not answer rank 1 at ") as missing:
        store.open_store(world, SHORT)
    assert problem in missing.value.found or "resolution" in missing.value.found


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"the ranks' store cannot be served at 127.0.0.1:{port}") as taken:
            store.open_store(World(0, 2, 0, 2, "127.0.0.1", port), SHORT)
    assert "address already in use" in taken.value.found
    assert "MASTER_PORT" in taken.value.fix


def test_a_rank_that_comes_late_is_waited_for() -> None:
    port = free_port()
    opened: list[int] = []

    def be(rank: int) -> None:
        store.open_store(World(rank, 2, rank, 2, "127.0.0.1", port), timedelta(seconds=60))
        opened.append(rank)

    # Both prefixes of this process count its stores, so the ranks have to be in step: both open their first one here.
    times = iter([0, 0])
    original, store._TIMES_OPENED = store._TIMES_OPENED, times  # pyrefly: ignore
    try:
        late = threading.Timer(0.2, be, [1])
        late.start()
        be(0)
        late.join()
    finally:
        store._TIMES_OPENED = original
    assert sorted(opened) == [0, 1]
