"""Two hosts: network namespaces with their own names and addresses; loopback addresses where those are not allowed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.hosts import Lab, gone, why_not
from cluster.jobs import Hosts, Running, exact
from faults.runs import train
from faults.torture import digests
from lockstep.faults import Fault
from lockstep.testing import faults_environment


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("commands")
    if why := why_not():
        warnings.warn(f"no hosts of their own on this machine, loopback addresses instead: {why}", stacklevel=1)
        yield Hosts(folder, None)
        return

    lab = Lab(2)
    yield Hosts(folder, lab)
    lab.close()


@pytest.fixture
def lab(hosts: Hosts) -> Lab:
    """For tests of the network itself."""
    if hosts.lab is None:
        pytest.skip(f"a network that can be cut or slowed needs namespaces: {why_not()}")
    return hosts.lab


@pytest.fixture
def command(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `lockstep` commands, here or on a host; nothing of them is left when the test ends."""
    started: list[Running] = []

    def start(*words: str, host: int | None = None, faults: tuple[Fault, ...] = ()) -> Running:
        marks = tmp_path / f"marks-{len(started)}"
        marks.mkdir()
        env = faults_environment(marks, *faults)
        to_hosts = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        if host is None:
            started.append(Running(tmp_path, *words, *to_hosts, env={}))
        else:
            started.append(Running(tmp_path, *words, env={**env, **hosts.environment(host)}))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
    assert gone(hosts.processes(), 60.0) == []


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of what one process, here, ends with."""
    ended = train(tmp_path_factory.mktemp("whole"), *exact(), nproc=1)
    assert ended.code == 0, ended.output
    return digests(ended.run)
