"""Unknown peers at the join port of a job: it goes on, says one line about each kind, and ends with the same weights.

`python tests/faults/intruder.py` does the same with thousands of connections, and as another user.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
from contextlib import ExitStack, closing

import pytest
from launchers import Launcher, events, pid_of, until

from faults import intruder
from faults.runs import TINY, Started
from faults.torture import digests
from lockstep.launch.wire import acceptor
from lockstep.runtime.rendezvous import handshake
from ports import free_port

STAY = "me.note(); me.train(600)"
WAIT = "me.note(); me.train(0 if (me.run_dir / 'enough').exists() else 600)"


@pytest.fixture
def launchers(tmp_path):
    started: list[Launcher] = []

    def start(port: int, code: str = STAY, host: str = "127.0.0.1", nnodes=(2, 2), run_dir=tmp_path) -> Launcher:
        name = f"node-{len(started)}"
        join = f"{host}:{port}"
        started.append(Launcher(run_dir, code, name, nproc=(1, 1), nnodes=nnodes, join=join))
        return started[-1]

    yield start
    for launcher in started:
        launcher.end()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_under_attack_ends_with_the_same_weights(tmp_path, undisturbed):
    port = free_port()
    words = (*TINY, "--nnodes", "2", "--join", f"127.0.0.1:{port}")
    with ExitStack() as stack:
        first = Started(tmp_path, *words, nproc=1)
        first.wait_until(lambda: listens(port))
        tap = stack.enter_context(closing(intruder.Tap(port)))

        # Before the second node comes, so that the job cannot end first: the node must find its way through the crowd.
        for line in (*intruder.slow_readers(port, 5), *intruder.crowd(port, 80)):
            stack.enter_context(line)
        intruder.noise(port, 100_000)
        intruder.half_lines(port, 3)
        intruder.wrong_proofs(port, 2)
        second = Started(tmp_path, *words[:-1], f"127.0.0.1:{tap.port}", nproc=1)

        # While it trains, for as long as it does.
        first.wait_until(lambda: tap.recorded.count(b"\n") > 2)
        intruder.replays(port, tap.recorded)
        intruder.noise(port, 100_000)
        intruder.half_lines(port, 3)
        intruder.endless_line(port, 3)
        ended = [first.end(), second.end()]

    assert [one.code for one in ended] == [0, 0], ended[0].output + ended[1].output
    assert digests(ended[0].run) == undisturbed
    kinds = [event["reason"] for event in ended[0].events("unknown_peer")]
    assert sorted(kinds) == sorted(set(kinds))
    assert {acceptor.TOO_MANY, handshake.WRONG_SECRET, handshake.NOT_AN_ANSWER, acceptor.HUNG_UP} <= set(kinds)
    said = [line for line in ended[0].output.splitlines() if "an unknown peer" in line]
    assert len(said) == len(kinds)
    assert "evil" not in ended[0].output


def test_a_launcher_with_few_descriptors_survives_a_crowd(launchers, tmp_path):
    """A launcher that may open 40 files, and a hundred unknown peers: it lives, and the second node comes in."""
    port = free_port()
    first = launchers(port, STAY)
    until(lambda: listens(port))
    resource.prlimit(first.process.pid, resource.RLIMIT_NOFILE, (40, 40))
    with ExitStack() as stack:
        for line in intruder.crowd(port, 100):
            stack.enter_context(line)
        until(lambda: "an unknown peer" in first.said)
        launchers(port)
        pid_of(tmp_path, 0, 1)
    assert first.process.poll() is None


def test_a_node_with_another_secret_learns_only_that(launchers, tmp_path):
    port = free_port()
    first = launchers(port)
    until(lambda: listens(port))
    other = launchers(port, run_dir=tmp_path / "elsewhere")
    assert other.wait() == 2
    assert "the two nodes do not share a secret" in other.said
    assert f"the secret here is from {tmp_path / 'elsewhere' / '.secret'}" in other.said
    assert first.said.count(handshake.WRONG_SECRET) == 1
    launchers(port)
    pid_of(tmp_path, 0, 1)
    assert [event["reason"] for event in events(tmp_path)] == [handshake.WRONG_SECRET]


def test_what_is_changed_on_the_way_is_not_obeyed(launchers, tmp_path):
    """Whoever relays the connection may read it, but a changed order ends it."""
    port = free_port()
    first = launchers(port, nnodes=(1, 2))
    until(lambda: listens(port))
    tap = intruder.Tap(port, lambda data: data.replace(b'"world_size"', b'"world_sizE"'))
    second = launchers(tap.port, nnodes=(1, 2))
    assert second.wait() == 1
    assert "its signature is wrong" in second.said
    assert first.process.poll() is None
    tap.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_node_that_nobody_answers(launchers, number, code):
    """192.0.2.1 is nobody's address: this node cannot coordinate, and finds nobody who does."""
    node = launchers(free_port(), host="192.0.2.1")
    until(lambda: "no answer from 192.0.2.1" in node.said)
    node.signal(number)
    assert node.wait() == code
    assert f"{number.name}: ended while no node coordinates" in node.said


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_nodes_meet_at_an_ipv6_address(launchers, tmp_path):
    port = free_port()
    both = [launchers(port, "me.note(os.environ['MASTER_ADDR'])", host="[::1]") for _ in range(2)]
    assert [node.wait() for node in both] == [0, 0]
    assert (tmp_path / "0-1").read_text().split()[1] == "::1"


def test_control_characters_of_a_rank_are_shown_escaped(launchers, tmp_path):
    port = free_port()
    first = launchers(port, r"raise UserError('title \x1b]0;evil\x07', 'clear \x1b[2J', 'now')", nnodes=(1, 1))
    assert first.wait() == 2
    assert "\x1b" not in first.said
    assert r"title \x1b]0;evil\x07" in first.said
    assert json.dumps("\x1b")[1:-1] in (tmp_path / "events.jsonl").read_text()
