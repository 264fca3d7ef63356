"""The store of ranks on several machines: it does what torch's does, and hears nobody without the key."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.launch.wire.acceptor import Rejection
from lockstep.launch.wire.sockets import wait_readable
from lockstep.launch.wire.store_server import FORGED, StoreServer, store_secret
from lockstep.runtime.rendezvous import handshake
from lockstep.runtime.rendezvous.handshake import Secret, authenticate
from lockstep.runtime.rendezvous.store import GuardedStore, wait_for

JOB = Secret(b"the secret of this job", "a test")
OURS = store_secret(JOB, "attempt 0")
SHORT, PATIENT = timedelta(seconds=0.2), timedelta(seconds=60)


@contextmanager
def serving() -> Iterator[tuple[int, list[Rejection]]]:
    """Yield the port of a store, and the peers that it has rejected; a thread takes the launcher's place."""
    listener = socket.create_server(("127.0.0.1", 0))
    over, rejections = threading.Event(), []
    server = StoreServer(listener, OURS, 2, rejections.append)

    def serve() -> None:
        while not over.is_set():
            wait_readable(server.sockets(time.monotonic()), 0.02)
            server.poll(time.monotonic())

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], rejections
    finally:
        over.set()
        thread.join()
        server.close()


def joined(port: int, secret: Secret = OURS) -> GuardedStore:
    return GuardedStore("127.0.0.1", port, secret, timedelta(seconds=60))


def exercised(store: dist.Store) -> list[Any]:
    """What torch's C++ asks of a store, through a PrefixStore: a C++ store that calls the Python one."""
    store = dist.PrefixStore("p", store)
    store.set("key", "one two")
    answers: list[Any] = [store.get("key"), store.check(["key"]), store.check(["key", "absent"])]
    answers += [store.add("count", 2), store.add("count", -5), store.get("count")]
    answers += [store.compare_set("new", "", "first"), store.compare_set("new", "other", "second")]
    answers += [store.compare_set("new", "first", "third"), store.compare_set("absent", "expected", "x")]
    store.multi_set(["a", "b"], ["\0\n", "2"])
    store.append("a", "more")
    answers += [store.multi_get(["a", "b"]), store.delete_key("a"), store.delete_key("a"), store.check(["a"])]
    store.wait(["key", "b"], PATIENT)
    answers += [wait_for(store, ["key"], PATIENT), wait_for(store, ["absent "], SHORT), store.has_extended_api()]
    answers += [store.clone().get("key")]

    # Torch 2.11 has no such method.
    with suppress(ValueError, AttributeError):
        store.barrier("all", 1, PATIENT)
    return answers


def test_it_does_what_the_store_of_torch_does():
    with serving() as (port, rejections):
        ours = exercised(joined(port))
    assert ours == exercised(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    assert rejections == []


def test_a_wait_for_a_file_ends_in_time_too(tmp_path):
    """The store of one machine: torch has no exception of its own for it."""
    store = dist.PrefixStore("p", dist.FileStore(str(tmp_path / "store")))
    store.set("key", "")
    assert wait_for(store, ["key"], PATIENT)
    assert not wait_for(store, ["key", "absent"], SHORT)


def test_waiting_ends_when_another_rank_sets_the_key():
    with serving() as (port, _):
        one, two = joined(port), joined(port)
        waiting = threading.Thread(target=lambda: two.set("found", one.get("late")))
        waiting.start()
        two.set("early", "")
        two.set("late", "here")
        assert two.get("found") == b"here"
        waiting.join()


def test_torchs_own_client_is_no_rank():
    """What `tests/faults/test_store.py` does to a job, here without one."""
    with serving() as (port, rejections):
        rank = joined(port)
        rank.set("address", "of rank 0")
        with pytest.raises(RuntimeError):
            dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        assert rank.get("address") == b"of rank 0"
    assert [rejection.reason for rejection in rejections] == [handshake.NOT_AN_ANSWER]


@pytest.mark.parametrize("other", [JOB, store_secret(JOB, "attempt 1")])
def test_the_key_is_that_of_one_attempt(other):
    """Neither the job's secret itself nor the key of an earlier attempt opens the store."""
    with serving() as (port, rejections):
        with pytest.raises(dist.DistNetworkError, match="listens there does not know the job's secret"):
            joined(port, other)
        assert joined(port).num_keys() == 0
    assert [rejection.reason for rejection in rejections] == [handshake.WRONG_SECRET]


def test_a_changed_request_is_not_obeyed():
    with serving() as (port, rejections):
        with socket.create_connection(("127.0.0.1", port)) as line:
            signer = authenticate(line, OURS)
            request = signer.sign(json.dumps({"what": "set", "key": "key", "value": "QQ=="}).encode())
            line.sendall(request.replace(b"QQ==", b"RVZJTA==") + b"\n")
            line.settimeout(60.0)
            assert line.recv(100) == b""
        assert not joined(port).check(["key"])
    assert [rejection.reason for rejection in rejections] == [FORGED]


def test_a_changed_answer_is_refused_in_words():
    """Somebody between the two who changes what the launcher answers."""
    from faults.intruder import Tap

    with serving() as (port, _):
        joined(port).set("key", "one")
        tap = Tap(port, lambda data: data.replace(b'"b25l"', b'"ZXZpbA=="'))
        rank = joined(tap.port)
        with pytest.raises(dist.DistNetworkError, match=r"store at 127.* cannot be used: its signature is wrong"):
            rank.get("key")
        tap.close()


def test_a_rank_that_dies_after_its_handshake_is_not_the_end_of_the_launcher():
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, OURS, 2, pytest.fail)
    try:
        line = socket.create_connection(listener.getsockname())
        server.poll(time.monotonic())
        theirs, own = line.recv(handshake.DIGITS + 1)[:-1], handshake.new_challenge()
        line.sendall(own + b" " + handshake.sign(OURS.key, handshake.NODE_SIDE, theirs + b"." + own) + b"\n")
        line.close()  # the challenge's answer was not read: the connection is reset
        for _ in range(3):
            server.poll(time.monotonic())
        assert server.sockets(time.monotonic())[:-1] == [listener]
        assert not server._clients
    finally:
        server.close()


def test_ranks_that_come_all_at_once_are_no_crowd():
    ranks = 40
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = StoreServer(listener, OURS, ranks, pytest.fail)
    lines = [socket.create_connection(listener.getsockname()) for _ in range(4 * ranks)]
    try:
        server.poll(time.monotonic())
        assert len(server.sockets(time.monotonic())[:-1]) == 1 + len(lines)
    finally:
        server.close()
        for line in lines:
            line.close()


def test_a_request_that_cannot_be_carried_out_is_no_forgery():
    with serving() as (port, notices):
        rank = joined(port)
        rank.set("word", "text")
        with pytest.raises(dist.DistStoreError, match=r"add of 'word': invalid literal"):
            rank.add("word", 1)
        assert rank.get("word") == b"text"
    assert notices == []
