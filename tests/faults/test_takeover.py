"""The machine that coordinates a job is lost: another one takes over, and the lost one may come back."""

from __future__ import annotations

import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest
from launchers import alive, events, pid_of, until

from faults import intruder
from faults.conftest import SOON
from faults.runs import TINY, Started, read_events, train
from faults.torture import digests
from lockstep.faults import Fault
from lockstep.launch import election
from ports import free_port
from saved import newest_step

# A rank that notes how many there are, and trains until the test has seen enough.
ENOUGH = "me.note(str(me.world)); me.train(0 if (me.run_dir / 'enough').exists() else 600)"


def whole_attempt(run_dir: Path, world: int) -> int:
    """Wait until the newest attempt has this many ranks, all of which are there, and return its number."""

    def found() -> int:
        here = [tuple(map(int, path.name.split("-"))) for path in run_dir.glob("[0-9]*-[0-9]*")]
        last = max((attempt for attempt, _ in here), default=0)
        notes = [(run_dir / f"{last}-{rank}").read_text() for attempt, rank in here if attempt == last]
        return last + 1 if len(notes) == world and all(note.endswith(f" {world}") for note in notes) else 0

    return until(found) - 1


@pytest.mark.long
def test_a_survivor_takes_over_and_the_others_join_it(nodes, tmp_path):
    first, second, third = nodes(3, ENOUGH, (1, 3), **SOON)
    attempt = whole_attempt(tmp_path, 3)
    ranks = [pid_of(tmp_path, attempt, rank) for rank in range(3)]
    first.signal(signal.SIGKILL)
    assert whole_attempt(tmp_path, 2) == attempt + 1
    assert not any(alive(pid) for pid in ranks)
    takeover, failure, restart = events(tmp_path)
    assert [event["event"] for event in (takeover, failure, restart)] == ["takeover", "failure", "restart"]

    # The lowest number takes over; numbers are given in the order in which nodes came.
    new, follower = (second, third) if takeover["node"] == "127.0.0.2" else (third, second)
    assert f"{takeover['node']} takes over from 127.0.0.1 (127.0.0.1:" in new.said
    assert "restarting the nodes that are left from the " in new.said
    assert "(restart 1 of 10 in an hour)" in new.said
    assert f"{takeover['node']} ({takeover['address']}) has taken over: joining it" in follower.said

    # A signal at any node still reaches all.
    follower.signal(signal.SIGTERM)
    assert [new.wait(), follower.wait()] == [75, 75]
    assert not list(tmp_path.glob(".coordinator*"))


@pytest.mark.long
def test_too_few_survivors_wait_for_the_lost_machine(nodes, tmp_path):
    first, second = nodes(2, ENOUGH, **SOON)
    whole_attempt(tmp_path, 2)
    first.signal(signal.SIGKILL)
    until(lambda: "waiting for 1 more node at 127.0.0.2:" in second.said)

    # The same command as at first: its own address is where the job began, and not where it is now.
    (tmp_path / "enough").touch()
    (again,) = nodes(1, ENOUGH, host="127.0.0.1", **SOON)
    assert [second.wait(), again.wait()] == [0, 0]
    assert (tmp_path / "1-1").read_text().endswith(" 2")


def test_a_suspended_coordinator_finds_that_it_was_superseded(nodes, tmp_path):
    first, second = nodes(2, ENOUGH, (1, 2), **SOON)
    rank = pid_of(tmp_path, whole_attempt(tmp_path, 2), 0)
    first.signal(signal.SIGSTOP)
    whole_attempt(tmp_path, 1)

    # Its own launcher could not stop it: the rank itself saw that another node coordinates now.
    until(lambda: not alive(rank))
    assert "another node coordinates this job now" in first.said
    assert "no heartbeat for 5 s, and no sign of life in the run folder for 5 s" in second.said

    # It comes back, ends nothing of the other's, and joins it.
    (tmp_path / "enough").touch()
    first.signal(signal.SIGCONT)
    assert [first.wait(), second.wait()] == [0, 0]
    assert "another node took over this job" in first.said
    assert "127.0.0.2 (127.0.0.2:" in first.said


@pytest.mark.long
def test_a_node_that_only_lost_its_connection_returns(nodes, tmp_path):
    """The coordinator lives, as the run folder shows: it is not replaced, and the node comes back."""
    (first,) = nodes(1, ENOUGH, (1, 2), **SOON)
    record = until(lambda: election.newest_term(tmp_path))
    broken = threading.Event()

    def relay(data: bytes) -> bytes:
        if broken.is_set():
            raise ConnectionResetError
        return data

    with closing(intruder.Tap(int(record.address.rpartition(":")[2]), relay)) as tap:
        (second,) = nodes(1, ENOUGH, (1, 2), join=f"127.0.0.1:{tap.port}", **SOON)
        attempt = whole_attempt(tmp_path, 2)
        broken.set()
        until(lambda: " is lost: the connection was closed" in second.said)
    until(lambda: whole_attempt(tmp_path, 2) > attempt)
    first.signal(signal.SIGTERM)
    assert [first.wait(), second.wait()] == [75, 75]
    assert "takes over" not in second.said


@pytest.mark.long
def test_late_and_lost_and_back_with_the_same_weights(tmp_path, request):
    """A machine comes late, the one that coordinates is killed, and comes back: each sample is trained once."""
    exact = (*TINY, "exact=true")
    whole = train(tmp_path / "whole", *exact, nproc=1)
    assert whole.code == 0, whole.output

    words = (*exact, "--nnodes", "1:2", "--join", f"127.0.0.1:{free_port()}")
    slow = Fault("slow", rank=0, phase="data", seconds=0.3)
    checkpoints = tmp_path / "run" / "checkpoints"

    def start() -> Started:
        started = Started(tmp_path, *words, nproc=1, faults=(slow,))
        request.addfinalizer(lambda: started.send(signal.SIGKILL))
        return started

    first = start()
    first.wait_until(lambda: newest_step(checkpoints))
    late = start()
    late.wait_until(lambda: "joined; 2 nodes" in first.text() and "2 ranks" in first.text())
    before = newest_step(checkpoints)
    late.wait_until(lambda: newest_step(checkpoints) > before)
    first.send(signal.SIGKILL)
    late.wait_until(lambda: " takes over from " in late.text())
    back = start()
    ended = [late.end(), back.end()]
    assert [one.code for one in ended] == [0, 0], ended[0].output + ended[1].output
    assert " takes over from " in ended[0].output
    assert digests(ended[0].run) == digests(whole.run)
    kinds = [event["event"] for event in read_events(ended[0].run)]
    assert kinds.count("takeover") == kinds.count("restart") == 1
