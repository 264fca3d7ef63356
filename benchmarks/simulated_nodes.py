"""Nodes of a job that run no process: each speaks the launchers' protocol to a real coordinator, over a real socket.

A simulated node proves that it knows the secret, joins, sends heartbeats with the views of its ranks, and answers
orders as an `Agent` does whose ranks obey at once. Many of them live in one process, and so do the connections of
their ranks to the store. The coordinator, its hub, its door and its store are those of a real job; only the agent of
its own node is simulated as well.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.launch.coordinator import Coordinator
from lockstep.launch.failure import PREEMPTED, RankExit
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import Bounds, Job
from lockstep.launch.nodes import election
from lockstep.launch.wire.connections import Connection, ConnectionLost, Hub, NoAnswer, address_of, claim, reach
from lockstep.launch.wire.door import Door
from lockstep.launch.wire.messages import (
    Hello,
    JobEnd,
    Kill,
    Message,
    NodeBeat,
    Preempt,
    RankExited,
    RanksGone,
    Start,
    Welcome,
    encode,
)
from lockstep.launch.wire.store_server import store_secret
from lockstep.runtime.rendezvous.proof import Secret, TurnedAway, prove

SECRET = Secret(b"0" * 64, "the simulation")
PATIENCE_S = 300.0  # longer than this is a hang, and ends the simulation with an error
THREADS = 32  # that connect at the same time
LONGEST = {"data": 0.02, "compute": 0.31, "exchange": 0.42, "update": 0.03, "collective": 0.1, "snapshot": 0.8}


def allow_files() -> None:
    """Let this process open as many files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Ranks:
    """The ranks of one simulated node, which train until they are told otherwise."""

    def __init__(self, host: str):
        self.host = host
        self.start: Start | None = None
        self._beats = 0

    def carry_out(self, order: Message) -> list[Message]:
        """Carry out an order, and return the messages of the node that follow from it."""
        start = self.start
        match order:
            case Start():
                self.start = order
            case Kill():
                self.start = None
                return [RanksGone(order.attempt)]
            case Preempt() if start and start.attempt == order.attempt:
                return self.exits(PREEMPTED)
        return []

    def exits(self, code: int) -> list[Message]:
        """All ranks end with this code."""
        assert self.start is not None
        start, last = self.start, self.beat()
        self.start = None
        numbers = range(start.first_rank, start.first_rank + start.count)
        return [last, *(RankExited(start.attempt, number, RankExit(code)) for number in numbers)]

    def beat(self) -> NodeBeat:
        self._beats += 1
        start = self.start
        if start is None:
            return NodeBeat()
        views = [
            RankView(
                rank=number,
                host=self.host,
                pid=1000 + number,
                state="S",
                beats=4 * self._beats,
                age=0.05,
                step=self._beats,
                steps_done=self._beats,
                phase="exchange",
                detail="",
                longest=LONGEST,
            )
            for number in range(start.first_rank, start.first_rank + start.count)
        ]
        return NodeBeat(views, {}, start.attempt)


class SimulatedAgent:
    """The agent of the coordinating node."""

    def __init__(self, nproc: Bounds):
        self.name, self.nproc, self.secret = "host-0", nproc, SECRET
        self.ranks = Ranks(self.name)
        self._messages: list[Message] = []

    def carry_out(self, message: Message) -> None:
        self._messages += self.ranks.carry_out(message)

    def poll(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def finish(self) -> None:
        self._messages += self.ranks.exits(0)

    def node_beat(self) -> NodeBeat:
        return self.ranks.beat()

    def sockets(self) -> list[Any]:
        return []

    def stop(self) -> None:
        pass


def make_job(run_dir: Path, nodes: int, ranks: int, join: str | None = None) -> Job:
    return Job({"resume_command": "again"}, run_dir, Bounds(1, ranks, ranks), Bounds(1, nodes), join)


def make_coordinator(run_dir: Path, nodes: int, ranks: int) -> tuple[Coordinator, SimulatedAgent, str]:
    """Return a coordinator that listens, its agent, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listener = claim(f"127.0.0.1:{port}")
    assert listener is not None
    address = address_of(listener)
    job = make_job(run_dir, nodes, ranks, address)
    agent = SimulatedAgent(job.nproc)
    term = election.begin_term(run_dir, None, agent.name, address)
    hub = Hub(Door.for_nodes(listener, SECRET, nodes))
    coordinator = Coordinator(job, agent, [], hub, "127.0.0.1", term)  # pyrefly: ignore[bad-argument-type]
    return coordinator, agent, address


class Node:
    def __init__(self, host: str, connection: Connection):
        self.connection = connection
        self.ranks = Ranks(host)
        self.number: int | None = None
        self.next_beat = 0.0


class Nodes:
    """All nodes of a job but the coordinating one."""

    def __init__(self, address: str, run_dir: Path, count: int, ranks: int):
        self._address = address
        self._hello = make_job(run_dir, count + 1, ranks, address)
        self._epoll = select.epoll()
        self.nodes: dict[int, Node] = {}  # by file descriptor
        self.ended: JobEnd | None = None

        # What the coordinator has sent: messages by kind, and their bytes.
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def join(self, numbers: Iterable[int]) -> None:
        """Connect these nodes, as many at once as there are threads, and have them ask to join."""
        with ThreadPoolExecutor(THREADS) as pool:
            futures = {pool.submit(_reach, self._address): number for number in numbers}
            while futures:
                for future in [future for future in futures if future.done()]:
                    self._join(futures.pop(future), future.result())
                self.turn(0.01)

    def _join(self, number: int, connection: Connection) -> None:
        node = Node(f"host-{number}", connection)
        self.nodes[connection.fileno()] = node
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        node.next_beat = time.monotonic() + number % 100 / 100
        connection.send(Hello(node.ranks.host, self._hello.nproc, self._hello.identity))

    def lose(self) -> Node:
        """Cut the connection of one node."""
        descriptor, node = next(iter(self.nodes.items()))
        self._epoll.unregister(descriptor)
        del self.nodes[descriptor]
        node.connection.close()
        return node

    def turn(self, seconds: float) -> None:
        for descriptor, _ in self._epoll.poll(seconds):
            self._receive(descriptor)

        now = time.monotonic()
        for node in self.nodes.values():
            if now >= node.next_beat and node.number is not None:
                node.next_beat = max(node.next_beat + 1.0, now)
                node.connection.send(node.ranks.beat())

    def _receive(self, descriptor: int) -> None:
        node = self.nodes[descriptor]
        try:
            messages = node.connection.receive(time.monotonic())
        except ConnectionLost:
            if self.ended is None:
                raise
            self._epoll.unregister(descriptor)
            del self.nodes[descriptor]
            node.connection.close()
            return

        for message in messages:
            kind = type(message).__name__
            self.messages[kind] += 1
            self.bytes[kind] += len(encode(message))
            if isinstance(message, Welcome):
                node.number = message.number
            elif isinstance(message, JobEnd):
                self.ended = message
            for answer in node.ranks.carry_out(message):
                node.connection.send(answer)

        # A launcher hangs up when the job is over.
        if any(isinstance(message, JobEnd) for message in messages):
            self._epoll.unregister(descriptor)
            del self.nodes[descriptor]
            node.connection.close()

    def until(self, condition: Callable[[], bool]) -> float:
        """Take turns until the condition holds, and return how many seconds that took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < PATIENCE_S, f"still waiting after {PATIENCE_S:.0f} s"
            self.turn(0.02)
        return time.monotonic() - began

    def all_started(self, attempt: int) -> bool:
        return all(node.ranks.start and node.ranks.start.attempt == attempt for node in self.nodes.values())

    def finish(self) -> None:
        """All ranks end with code 0."""
        for node in self.nodes.values():
            for message in node.ranks.exits(0):
                node.connection.send(message)


def _reach(address: str) -> Connection:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            return reach(address, None, SECRET)
        except NoAnswer:
            time.sleep(0.2)  # as a launcher does
    raise TimeoutError(f"no answer from {address}")


class StoreRanks:
    """The connections of all ranks to the store of their attempt."""

    def __init__(self, start: Start):
        self._start = start
        self._secret = store_secret(SECRET, start.store_nonce)
        self._clients: deque[tuple[socket.socket, Any]] = deque()

    def meet(self) -> None:
        """Each rank connects, sets its address and counts itself; then all wait for a key that the last one sets."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._arrive, range(self._start.world_size)))
            last, seal = self._clients[-1]
            _answer(last, seal)
            _ask(last, seal, what="set", key="complete", value="")
            list(pool.map(lambda client: _answer(*client), list(self._clients)[:-1]))

    def _arrive(self, rank: int) -> None:
        connection, seal = self._connect()
        address = b64encode(b"an address of 64 bytes".ljust(64)).decode()
        _ask(connection, seal, what="set", key=f"address/{rank}", value=address)
        total = _ask(connection, seal, what="add", key="count", amount=1)["answer"]
        _ask(connection, seal, what="get", keys=[f"address/{rank}"], seconds=300)
        wait = {"what": "wait", "keys": ["complete"], "seconds": 300.0}
        if total == self._start.world_size:
            wait = {"what": "wait", "keys": ["count"], "seconds": 300.0}
        connection.sendall(seal.sign(json.dumps(wait).encode()) + b"\n")
        if total == self._start.world_size:
            self._clients.append((connection, seal))
        else:
            self._clients.appendleft((connection, seal))

    def _connect(self) -> tuple[socket.socket, Any]:
        while True:
            try:
                connection = socket.create_connection((self._start.address, self._start.store_port), 60.0)
                seal = prove(connection, self._secret)
                connection.settimeout(PATIENCE_S)
                return connection, seal
            except (TurnedAway, TimeoutError, ConnectionError):
                time.sleep(0.1)

    def close(self) -> None:
        for connection, _ in self._clients:
            connection.close()


def _ask(connection: socket.socket, seal: Any, **request: Any) -> Any:
    connection.sendall(seal.sign(json.dumps(request).encode()) + b"\n")
    return _answer(connection, seal)


def _answer(connection: socket.socket, seal: Any) -> Any:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(65536)
        if not data:
            raise ConnectionError("the store hung up")
        line += data
    return json.loads(seal.check(line[:-1]))
