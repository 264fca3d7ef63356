"""The ranks' store, in which they find the addresses of each other to make a process group.

Our launcher gives the ranks of one machine a FileStore in a folder that only their user can read, so that there is no
port. The ranks of several machines use a `GuardedStore`, whose server is in the coordinating launcher. Under torchrun
and other launchers the store is torch's TCPStore.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.errors import PeersMissing, UserError, listed_ranks
from lockstep.runtime.environments.launcher import TORCHRUN_RESTARTS
from lockstep.runtime.rendezvous.handshake import HandshakeFailed, HandshakeUnanswered, LineSigner, Secret, authenticate
from lockstep.runtime.world import World

DEFAULT_TIMEOUT = timedelta(minutes=5)

# How long the ranks of another launcher wait for each other before the first collective, and after how long they say
# for whom. The ranks of our launcher need no limit: the launcher sees which of them have ended.
MEET_LIMIT = timedelta(minutes=5)
PATIENCE_S = 15.0

# Torch keeps no reference to the Python object of a store, and every call fails once it is garbage.
_KEPT: list[dist.Store] = []

# A process may join a process group, leave it and join again. Each group has its own prefix in the store, so that no
# rank finds the addresses of an earlier group.
_TIMES_OPENED = count()


def open_store(world: World, timeout: timedelta | None) -> dist.Store:
    """Return the store from which the ranks of `world` make their process group."""
    assert world.master_addr is not None
    assert world.master_port is not None
    timeout = timeout or DEFAULT_TIMEOUT

    if world.store_file is not None:
        store: dist.Store = dist.FileStore(world.store_file)
        store.set_timeout(timeout)
        return dist.PrefixStore(f"lockstep/{next(_TIMES_OPENED)}", store)

    if world.key_file is not None:
        secret = Secret(Path(world.key_file).read_bytes(), world.key_file)
        guarded = GuardedStore(world.master_addr, world.store_port, secret, timeout)
        return dist.PrefixStore(f"lockstep/{next(_TIMES_OPENED)}", guarded)

    limit = min(timeout, MEET_LIMIT)
    store = _torch_store(world, limit)

    # torchrun keeps one store for all its restarts, and new ranks must not read the addresses of dead ranks.
    attempt = os.environ.get(TORCHRUN_RESTARTS, "0")
    store = dist.PrefixStore(f"lockstep/{attempt}/{next(_TIMES_OPENED)}", store)
    try:
        _meet(store, world, limit)
    except dist.DistNetworkError:
        raise PeersMissing(
            f"rank 0 has ended while rank {world.rank} of {world.size} waited for the others",
            f"its store at {world.master_addr}:{world.master_port} is gone",
            "look at the output of rank 0",
        ) from None

    store.set_timeout(timeout)
    return store


def _torch_store(world: World, limit: timedelta) -> dist.Store:
    """Return torch's own store, which rank 0 serves. Raises a UserError if that is not possible within the limit."""
    assert world.master_addr is not None
    assert world.master_port is not None

    # torchrun's agent may already listen on MASTER_PORT and serve the store itself.
    agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.rank == 0 and not agent_hosts_store
    if not serves:
        _wait_for_server(world, limit)

    try:
        # The ranks are not counted here: `_meet` says which of them are missing.
        return dist.TCPStore(world.master_addr, world.master_port, is_master=serves, timeout=limit)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        what = "served" if serves else "used"
        raise UserError(
            f"rank {world.rank}: the ranks' store cannot be {what} at {world.master_addr}:{world.master_port}",
            str(error).partition("\n")[0],
            "set MASTER_ADDR to the machine of rank 0, and MASTER_PORT to a port that is free there, for every rank",
        ) from None


def _wait_for_server(world: World, limit: timedelta) -> None:
    """Wait until something listens where rank 0 should: torch would not say what is wrong with the address."""
    where = f"{world.master_addr}:{world.master_port}"
    began, noted = time.monotonic(), False

    while True:
        try:
            socket.create_connection((world.master_addr, world.master_port), 10.0).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)

        waited = time.monotonic() - began
        if waited > limit.total_seconds():
            raise PeersMissing(
                f"rank 0 of {world.size} is missing: it did not answer rank {world.rank} at {where} within "
                f"{limit.total_seconds():g} s",
                problem,
                "start all ranks; set MASTER_ADDR to the machine of rank 0, by a name that every machine knows",
            )

        if waited > PATIENCE_S and not noted:
            noted = True
            _note(f"rank {world.rank} waits for rank 0 at {where} ({problem}), up to {limit.total_seconds():g} s")

        time.sleep(0.1)


def _meet(store: dist.Store, world: World, limit: timedelta) -> None:
    """Wait until all ranks are here. Raises a UserError that names the missing ranks.

    Torch would wait for them in the first collective, for up to half an hour, and would not say for whom.
    """
    store.set(f"here/{world.rank}", "")
    if store.add("count", 1) == world.size:
        store.set("complete", "")

    began, noted = time.monotonic(), False
    while not store.check(["complete"]):
        waited = time.monotonic() - began
        if waited > limit.total_seconds():
            missing = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
            raise PeersMissing(
                f"{listed_ranks(missing)} of {world.size} did not come within {limit.total_seconds():g} s",
                f"{world.size} ranks are announced by {world.launcher or 'the environment'}",
                "start all ranks, or look at the output of those that are missing",
            )

        if waited > PATIENCE_S and not noted and world.rank == 0:
            noted = True
            missing = [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]
            _note(f"waiting for {listed_ranks(missing)} of {world.size}, up to {limit.total_seconds():g} s")

        # Thousands of ranks ask one server.
        time.sleep(min(0.02 + waited / 50, 1.0))


def _note(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def wait_for(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> bool:
    """Wait until the store has all keys; return False on timeout."""
    try:
        store.wait(list(keys), timeout)
    except dist.DistStoreError:
        return False
    except RuntimeError as error:
        # A FileStore has no exception of its own.
        if str(error).partition("\n")[0] != "Wait timeout":
            raise

        return False

    return True


class GuardedStore(dist.Store):
    """A store whose server is in the coordinating launcher. Both sides prove that they know the attempt's key.

    Each request and each answer is a line of JSON with a signature (`LineSigner`), so that no machine on the way can
    change it, and requests without the key are ignored. Any thread may use the store, including torch's own threads,
    because two calls never share a connection at the same time.
    """

    def __init__(self, host: str, port: int, secret: Secret, timeout: timedelta = DEFAULT_TIMEOUT):
        super().__init__()
        self._address = (host, port)
        self._secret = secret
        self._timeout = timeout
        self._idle: list[_Line] = []
        _KEPT.append(self)

        # Raise now, and not in a later call, if no server answers, or a server with another key.
        self._ask("check", keys=[])

    # ---- the methods of a torch store ----

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_text(value))

    def get(self, key: str) -> bytes:
        return b64decode(self._ask("get", self._timeout, keys=[key])[0])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [b64decode(value) for value in self._ask("get", self._timeout, keys=list(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._ask("add", key=key, amount=value)

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key=key, value=_text(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = _text(expected_value), _text(desired_value)
        return b64decode(self._ask("compare_set", key=key, expected=expected, desired=desired))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys=list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", self._timeout if timeout is None else timeout, keys=list(keys))

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key=key)

    def num_keys(self) -> int:
        return self._ask("count")

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> GuardedStore:
        return GuardedStore(*self._address, self._secret, self._timeout)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # Native code calls two of the methods by these names.
    deleteKey = delete_key
    getNumKeys = num_keys

    # ---- the connection ----

    def _ask(self, what: str, timeout: timedelta | None = None, **fields: Any) -> Any:
        seconds = None if timeout is None else timeout.total_seconds()
        try:
            # After an error the connection is not used again: an answer may still be on its way.
            line = self._idle.pop() if self._idle else _connect(self._address, self._secret, self._timeout)
            # The launcher has a minute beyond the timeout of the request: it may be collecting stacks.
            answer = line.ask({"what": what, "seconds": seconds, **fields}, (seconds or 0.0) + 60.0)
        except (OSError, ValueError, HandshakeFailed) as error:
            host, port = self._address
            raise dist.DistNetworkError(f"the ranks' store at {host}:{port} cannot be used: {error}") from None

        self._idle.append(line)
        if "timeout" in answer:
            raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(fields['keys'])}")

        if "refused" in answer:
            raise dist.DistStoreError(f"the ranks' store cannot do this: {answer['refused']}")

        return answer["answer"]


class _Line:
    """A connection to the store's server, on which both sides have proven that they know the key."""

    def __init__(self, connection: socket.socket, signer: LineSigner):
        self._connection = connection
        self._signer = signer
        self._answers = connection.makefile("rb")

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._connection.settimeout(seconds)
        self._connection.sendall(self._signer.sign(json.dumps(request).encode()) + b"\n")

        answer = self._answers.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionResetError("connection closed by the launcher")

        return json.loads(self._signer.check(answer[:-1]))


def _connect(address: tuple[str, int], secret: Secret, timeout: timedelta) -> _Line:
    """Connect and prove that this rank knows the key; try again while the server has too many connections."""
    deadline = time.monotonic() + timeout.total_seconds()

    while True:
        connection = socket.create_connection(address, timeout.total_seconds())
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _Line(connection, authenticate(connection, secret))
        except HandshakeUnanswered:
            connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no proof within {timeout}") from None

            time.sleep(0.05)
        except HandshakeFailed as why:
            connection.close()
            raise HandshakeFailed(f"the process that listens there {why}") from None


def _text(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()
