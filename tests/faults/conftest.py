"""What the tests of this folder compare with, and nodes of one job: launchers on 127.0.0.1, 127.0.0.2, ..."""

from __future__ import annotations

import socket

import pytest
from launchers import Launcher, until

from faults.runs import TINY, train
from faults.torture import digests
from lockstep.launch import times
from ports import free_port

# For tests in which a node that stays silent is to be lost soon: as in a real job.
SOON = {"lost_after_s": times.LOST_AFTER_S}

# A rank that notes where it runs and trains until it is told to stop.
STAY = "me.note(os.environ['GROUP_RANK'] + os.environ['LOCAL_RANK']); me.train(600)"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of what a run of TINY ends with when nothing happens to it."""
    ended = train(tmp_path_factory.mktemp("undisturbed"), *TINY)
    assert ended.code == 0, ended.output
    return digests(ended.run)


@pytest.fixture
def nodes(tmp_path):
    meeting = f"127.0.0.1:{free_port()}"
    started = []

    def start(
        count: int, code: str = STAY, nnodes=(2, 2), host: str = "", join: str = meeting, **described
    ) -> list[Launcher]:
        """The first one coordinates."""
        for _ in range(count):
            name = host or f"127.0.0.{len(started) + 1}"
            job = {"nproc": (1, 1), "nnodes": nnodes, "join": join, "host": name, **described}
            started.append(Launcher(tmp_path, code, f"node-{len(started)}", **job))
            if len(started) == 1 and join == meeting:
                until(lambda: _listens(meeting))
        return started[-count:]

    yield start
    for launcher in started:
        launcher.end()


def _listens(join: str) -> bool:
    host, _, port = join.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
