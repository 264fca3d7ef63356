"""Where the ranks of a real launcher meet, and what an unknown peer on the same machine can do there."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest
from launchers import Launcher, events, pid_of, until

from faults import intruder
from lockstep.launch.wire.secret import find_secret
from lockstep.runtime.rendezvous import handshake
from ports import free_port

# Ranks join as in a run, say where, and train. What a rank believes is read again after the unknown peer was there.
MEET = """
import torch, torch.distributed as dist
from lockstep.runtime import context
from lockstep.runtime import environments
context.join(environments.detect(), torch.device("cpu"))
store = dist.distributed_c10d._get_default_store()
store.set(f"address of {me.rank}", f"here is {me.rank}")
store.wait(["address of 0", "address of 1"])
(me.run_dir / f"variables-{me.rank}").write_text(repr(dict(os.environ)))
me.note(f"{os.environ.get('LOCKSTEP_STORE_PORT')} {me.folder}")
while not (me.run_dir / "attacked").exists():
    me.train(0.1)
assert store.get(f"address of {1 - me.rank}").decode() == f"here is {1 - me.rank}"
assert store.add("count", 1) in (1, 2)
group = dist.new_group([0, 1])
one = torch.ones(1)
dist.all_reduce(one, group=group)
assert one.item() == 2.0

# A script may train twice: nobody takes the addresses of the first process group for those of the second.
dist.destroy_process_group()
context.join(environments.detect(), torch.device("cpu"))
dist.all_reduce(one)
assert one.item() == 4.0

# A script may also make the process group itself, as torch's documentation has it.
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="env://")
dist.all_reduce(one)
assert one.item() == 8.0
"""


@pytest.fixture
def launch(tmp_path):
    started: list[Launcher] = []

    def start(**job) -> Launcher:
        started.append(Launcher(tmp_path, MEET, f"node-{len(started)}", with_torch=True, **job))
        return started[-1]

    yield start
    for launcher in started:
        launcher.end()


def listening(pid: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Return the addresses at which a process listens."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                digits, port = fields[1].split(":")
                # The kernel prints words of four bytes, each in the order of the machine.
                raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
                found.append((ipaddress.ip_address(raw), int(port, 16)))
    return found


def test_ranks_of_one_machine_meet_at_no_port(launch, tmp_path):
    """Only gloo listens, at an address of this machine that no other can reach; no process has a store."""
    launcher = launch(nproc=(2, 2))
    ranks = [pid_of(tmp_path, 0, rank) for rank in (0, 1)]
    assert listening(launcher.process.pid) == listening(launcher.zygote()) == []

    folder = Path((tmp_path / "0-0").read_text().split()[2])
    assert (folder / "store").is_file()
    assert folder.stat().st_mode & 0o777 == 0o700

    # Rank 0 would listen at one place more if it had a store.
    places = [listening(rank) for rank in ranks]
    assert [len(of_rank) for of_rank in places] == [1, 1], places
    assert all(address.is_loopback for of_rank in places for address, _ in of_rank), places
    (tmp_path / "attacked").touch()
    assert launcher.wait() == 0, launcher.said
    assert not folder.exists()


def test_an_unknown_peer_at_the_store_of_two_machines_changes_nothing(launch, tmp_path):
    join = f"127.0.0.1:{free_port()}"
    both = [launch(nproc=(1, 1), nnodes=(2, 2), join=join) for _ in range(2)]
    for rank in (0, 1):
        pid_of(tmp_path, 0, rank)
    port = int((tmp_path / "0-1").read_text().split()[1])
    assert intruder.visit_store(port) == []
    intruder.wrong_proofs(port, 2)

    # Programs may record the variables of a rank: neither the job's secret nor the store's key is among them.
    secret = find_secret(tmp_path / ".secret").key.decode()
    for rank in (0, 1):
        key = (Path((tmp_path / f"0-{rank}").read_text().split()[2]) / "store.key").read_text()
        variables = (tmp_path / f"variables-{rank}").read_text()
        assert secret not in variables
        assert len(key) == handshake.DIGITS
        assert key not in variables

    until(
        lambda: {handshake.NOT_AN_ANSWER, handshake.WRONG_SECRET} <= {event.get("reason") for event in events(tmp_path)}
    )
    (tmp_path / "attacked").touch()
    assert [node.wait() for node in both] == [0, 0], both[0].said + both[1].said
    assert "an unknown peer from 127.0.0.1 at the ranks' store" in both[0].said + both[1].said
    assert [event["event"] for event in events(tmp_path)] == ["unknown_peer", "unknown_peer"]
