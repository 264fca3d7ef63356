"""Nodes of a job that run no process: each speaks the launchers' protocol to a real coordinator, over a real socket.

A simulated node proves that it knows the secret, joins, sends heartbeats with the views of its ranks, and answers
orders as an `Agent` does whose ranks obey at once. Many of them live in one process, and so do the connections of
their ranks to the store. The coordinator, its hub, its acceptor and its store are those of a real job; only the agent
of its own node is simulated as well.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.launch import election
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.election import TakeoverWatch
from lockstep.launch.failure import RankExit
from lockstep.launch.hangs import flight_recorder, stacks
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.job import Bounds, Job
from lockstep.launch.nodes.search import SEARCH_RETRY_S, CoordinatorRole, JoinedTerm, Search
from lockstep.launch.times import LOST_AFTER_S, STAGGER_S
from lockstep.launch.wire.connections import (
    Connection,
    ConnectionLost,
    NoAnswer,
    address_of,
    bind_join_address,
    reach,
)
from lockstep.launch.wire.messages import (
    CollectStacks,
    CoordinatorState,
    Hello,
    JobEnd,
    Kill,
    Message,
    NodeHeartbeat,
    RankExited,
    RanksGone,
    SaveAndExit,
    Stacks,
    Start,
    Welcome,
    encode,
)
from lockstep.launch.wire.store_server import store_secret
from lockstep.runtime.rendezvous.handshake import HandshakeUnanswered, Secret, authenticate

SECRET = Secret(b"0" * 64, "the simulation")
PATIENCE_S = 300.0  # longer than this is a hang, and ends the simulation with an error
HEARTBEAT_S = 1.0  # between two heartbeats of a node
THREADS = 32  # that connect at the same time
CULPRIT = 5  # the rank for which the others wait in a hang
LAST = 10_000  # the collective in which they wait
LONGEST = {"data": 0.02, "compute": 0.31, "all-reduce": 0.42, "update": 0.03, "collective": 0.1, "snapshot": 0.8}


def allow_files() -> None:
    """Let this process open as many files as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Ranks:
    """The ranks of one simulated node, which train until they are told otherwise."""

    def __init__(self, host: str):
        self.host = host
        self.start: Start | None = None
        self.hangs_since: float | None = None
        self._beats = 0

    def carry_out(self, order: Message) -> list[Message]:
        """Carry out an order, and return the messages of the node that follow from it."""
        start = self.start
        match order:
            case Start():
                self.start, self.hangs_since = order, None
            case Kill():
                self.start = None
                return [RanksGone(order.attempt)]
            case SaveAndExit() if start and start.attempt == order.attempt:
                return self.exits(RankExit.as_asked("saved"))
            case CollectStacks() if start and start.attempt == order.attempt:
                return [self.stacks(start, order.request)]
        return []

    def stacks(self, start: Start, request: int) -> Stacks:
        """Answer as a node does whose ranks wait in an all-reduce, but for the culprit, which reads a file."""
        ranks = range(start.first_rank, start.first_rank + start.count)
        texts = {rank: _stack(rank == CULPRIT) for rank in ranks}
        collectives = {rank: _collectives(rank == CULPRIT) for rank in ranks}
        return Stacks.of(start.attempt, request, texts, collectives)

    def exits(self, rank_exit: RankExit) -> list[Message]:
        """All ranks end like this."""
        assert self.start is not None
        start, last = self.start, self.beat()
        self.start = None
        numbers = range(start.first_rank, start.first_rank + start.count)
        return [last, *(RankExited(start.attempt, number, rank_exit) for number in numbers)]

    def beat(self) -> NodeHeartbeat:
        age = 0.05 if self.hangs_since is None else time.monotonic() - self.hangs_since
        self._beats += self.hangs_since is None
        step = self._beats if self.hangs_since is None else LAST
        start = self.start
        if start is None:
            return NodeHeartbeat()
        views = [
            RankView(
                rank=number,
                host=self.host,
                pid=1000 + number,
                state="S",
                beats=4 * self._beats,
                age=age,
                step=step,
                steps_here=step,
                phase="compute" if number == CULPRIT else "all-reduce",
                detail="",
                longest=LONGEST,
            )
            for number in range(start.first_rank, start.first_rank + start.count)
        ]
        return NodeHeartbeat(views, start.attempt)


def _stack(culprit: bool) -> str:
    """Return what faulthandler writes for a process with six threads."""
    frames = "".join(f'  File "/usr/lib/python3/dist-packages/torch/part{n}.py", line {n} in run\n' for n in range(12))
    where = f'  File "/home/user/train.py", line 100 in {"read" if culprit else "all_reduce"}\n'
    threads = [f"Thread 0x{number:016x} (most recent call first):\n{frames}\n" for number in range(5)]
    return stacks.comparable("".join([*threads, "Current thread 0x7 (most recent call first):\n", where, frames]))


def _collectives(culprit: bool) -> list[dict[str, Any]]:
    """Return the last 100 entries of a rank's flight recorder, as torch writes them. The culprit lacks the last one."""
    last = LAST - culprit
    entries = [
        {
            **{"collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[4096, 1024]], "is_p2p": False},
            **{"op_id": number, "output_dtypes": ["Float"], "output_sizes": [[4096, 1024]], "p2p_seq_id": 0},
            **{"pg_id": 0, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce"},
            **{"record_id": number, "retired": number < LAST, "state": "scheduled", "thread_id": "139861031852928"},
            **{"thread_name": "python", "time_created_ns": 1_794_949_550_831_761_655, "timeout_ms": 1_800_000},
            **{"time_discovered_completed_ns": 0, "time_discovered_started_ns": 0},
        }
        for number in range(last - 99, last + 1)
    ]
    return flight_recorder.comparable(entries)


class SimulatedAgent:
    """The agent of the coordinating node."""

    def __init__(self, nproc: Bounds):
        self.host, self.nproc, self.secret = "host-0", nproc, SECRET
        self.ranks = Ranks(self.host)
        self._messages: list[Message] = []

    def carry_out(self, message: Message) -> None:
        self._messages += self.ranks.carry_out(message)

    def poll(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def finish(self) -> None:
        self._messages += self.ranks.exits(RankExit(0))

    def hang(self) -> None:
        self.ranks.hangs_since = time.monotonic()

    def heartbeat(self) -> NodeHeartbeat:
        return self.ranks.beat()

    def sockets(self) -> list[Any]:
        return []

    def kill_and_wait(self) -> None:
        pass


def make_job(run_dir: Path, nodes: int, ranks: int, join: str | None = None) -> Job:
    return Job({}, run_dir, Bounds(1, ranks, ranks), Bounds(1, nodes), join)


def make_coordinator(run_dir: Path, nodes: int, ranks: int) -> tuple[Coordinator, SimulatedAgent, str]:
    """Return a coordinator that listens, its agent, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listener = bind_join_address(f"127.0.0.1:{port}")
    assert listener is not None
    address = address_of(listener)
    job = make_job(run_dir, nodes, ranks, address)
    agent = SimulatedAgent(job.nproc)
    term = election.begin_term(run_dir, None, agent.host, address)
    coordinator = Coordinator(job, agent, [], listener, term)  # pyrefly: ignore[bad-argument-type]
    return coordinator, agent, address


def make_successor(run_dir: Path, nodes: int, ranks: int, last: JoinedTerm) -> tuple[Coordinator, SimulatedAgent]:
    """Wait until the lost coordinator may be succeeded, as a real node does, and return the new one."""
    job = make_job(run_dir, nodes, ranks, last.term.address)
    agent = SimulatedAgent(job.nproc)
    role = Search(job, agent.host, [], SECRET).after_loss(last, "the connection was closed")
    assert isinstance(role, CoordinatorRole)
    assert role.failure is not None
    job = replace(job, join=role.lease.term.address)
    coordinator = Coordinator(
        job,
        agent,  # pyrefly: ignore[bad-argument-type]
        [],
        role.listener,
        role.lease,
        role.inherited,
        role.failure,
    )
    return coordinator, agent


class Node:
    def __init__(self, host: str, connection: Connection):
        self.connection = connection
        self.ranks = Ranks(host)
        self.number: int | None = None
        self.term: election.Term | None = None
        self.state = CoordinatorState([])  # the last one that was received
        self.next_beat = 0.0


class Nodes:
    """All nodes of a job but the coordinating one."""

    def __init__(self, address: str, run_dir: Path, count: int, ranks: int):
        self._address = address
        self._hello = make_job(run_dir, count + 1, ranks, address)
        self._epoll = select.epoll()
        self.nodes: dict[int, Node] = {}  # by file descriptor
        self.ended: JobEnd | None = None
        self._lost: list[Node] = []  # without a coordinator
        self._stacks: dict[tuple[int, int, int], bytes] = {}

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

    def lose_coordinator(self) -> Node:
        """Cut all connections. Return the node with the lowest number, which is no longer simulated."""
        lost = sorted(self.nodes.values(), key=lambda node: node.number or 0)
        for descriptor, node in self.nodes.items():
            self._epoll.unregister(descriptor)
            node.connection.close()
        self.nodes.clear()
        self._lost = lost[1:]
        return lost[0]

    def find_successor(self) -> float:
        """All nodes watch the run folder as a real one does, and join the successor. Return the CPU seconds of a look.

        Each node looks five times a second, at the newest term file, its counter and the files of nodes that are cut
        off. None may take over before the node with the lowest number.
        """
        run_dir, began, looks = self._hello.run_dir, time.process_time(), 0
        watches = [
            (node, TakeoverWatch(node.number or 0, node.state.numbers, LOST_AFTER_S, STAGGER_S)) for node in self._lost
        ]
        while (term := self._look_all(run_dir, watches)) is None:
            looks += len(watches)
            time.sleep(SEARCH_RETRY_S)

        cost = (time.process_time() - began) / max(looks, 1)
        self._address = term.address
        with ThreadPoolExecutor(THREADS) as pool:
            futures = {pool.submit(_reach, self._address): node for node, _ in watches}
            while futures:
                for future in [future for future in futures if future.done()]:
                    self._return(futures.pop(future), future.result())
                self.turn(0.01)
        return cost

    def _look_all(self, run_dir: Path, watches: list[tuple[Node, TakeoverWatch]]) -> election.Term | None:
        """Have every node look once. Return the successor's term, if there is one."""
        for node, watch in watches:
            term = election.newest_term(run_dir)
            assert term is not None
            assert node.term is not None
            if term.number > node.term.number:
                return term

            now = time.monotonic()
            watch.note(term.number, election.read_counter(run_dir, term.number), now)
            reason = watch.reason(election.cut_off_nodes(run_dir, term.number), now)
            assert reason is None, f"node {node.number} would take over as well: {reason}"
        return None

    def _return(self, node: Node, connection: Connection) -> None:
        """Join again, as a node does that belonged to an earlier term."""
        assert node.term is not None
        again = Node(node.ranks.host, connection)
        self.nodes[connection.fileno()] = again
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        again.next_beat = time.monotonic() + (node.number or 0) % 100 / 100
        hello = Hello(node.ranks.host, self._hello.nproc, self._hello.identity)
        connection.send(replace(hello, term=node.term.number, number=node.number or 0))

    def turn(self, seconds: float) -> None:
        for descriptor, _ in self._epoll.poll(seconds):
            self._receive(descriptor)

        now = time.monotonic()
        for node in self.nodes.values():
            if now >= node.next_beat and node.number is not None:
                node.next_beat = max(node.next_beat + HEARTBEAT_S, now)
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
                node.number, node.term = message.number, message.term
            elif isinstance(message, CoordinatorState):
                node.state = message
            elif isinstance(message, JobEnd):
                self.ended = message
            if isinstance(message, CollectStacks) and node.ranks.start:
                node.connection.send_line(self._stacks_line(node.ranks.start, message.request))
                continue
            for answer in node.ranks.carry_out(message):
                node.connection.send(answer)

        # A launcher hangs up when the job is over.
        if any(isinstance(message, JobEnd) for message in messages):
            self._epoll.unregister(descriptor)
            del self.nodes[descriptor]
            node.connection.close()

    def _stacks_line(self, start: Start, request: int) -> bytes:
        """Return the stacks of a node. They are made once, because all nodes of the simulation share a process."""
        ranks = range(start.count)
        if start.first_rank <= CULPRIT < start.first_rank + start.count:
            return encode(Ranks("").stacks(start, request))

        key = (start.attempt, request, start.count)
        if key not in self._stacks:
            self._stacks[key] = encode(Ranks("").stacks(replace(start, first_rank=CULPRIT + 1), request))
        made = json.dumps([CULPRIT + 1 + rank for rank in ranks]).encode()
        return self._stacks[key].replace(made, json.dumps([start.first_rank + rank for rank in ranks]).encode())

    def until(self, condition: Callable[[], bool]) -> float:
        """Take turns until the condition holds, and return how many seconds that took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < PATIENCE_S, f"still waiting after {PATIENCE_S:.0f} s"
            self.turn(0.02)
        return time.monotonic() - began

    def all_killed(self, attempt: int) -> bool:
        """Return whether no node has ranks of this attempt any more. Some may have those of the next one."""
        return not any(node.ranks.start and node.ranks.start.attempt == attempt for node in self.nodes.values())

    def all_started(self, attempt: int) -> bool:
        return all(node.ranks.start and node.ranks.start.attempt == attempt for node in self.nodes.values())

    def hang(self) -> None:
        """No rank advances any more: all wait for one."""
        for node in self.nodes.values():
            node.ranks.hangs_since = time.monotonic()

    def finish(self) -> None:
        """All ranks end with code 0."""
        for node in self.nodes.values():
            for message in node.ranks.exits(RankExit(0)):
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
        self._secret = store_secret(SECRET, start.rendezvous.store_nonce)
        self._clients: deque[tuple[socket.socket, Any]] = deque()

    def meet(self) -> None:
        """Each rank connects, sets its address and counts itself; then all wait for a key that the last one sets."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(self._arrive, range(self._start.world_size)))
            last, signer = self._clients[-1]
            _answer(last, signer)
            _ask(last, signer, what="set", key="complete", value="")
            list(pool.map(lambda client: _answer(*client), list(self._clients)[:-1]))

    def _arrive(self, rank: int) -> None:
        connection, signer = self._connect()
        address = b64encode(b"an address of 64 bytes".ljust(64)).decode()
        _ask(connection, signer, what="set", key=f"address/{rank}", value=address)
        total = _ask(connection, signer, what="add", key="count", amount=1)["answer"]
        _ask(connection, signer, what="get", keys=[f"address/{rank}"], seconds=300)
        wait = {"what": "wait", "keys": ["complete"], "seconds": 300.0}
        if total == self._start.world_size:
            wait = {"what": "wait", "keys": ["count"], "seconds": 300.0}
        connection.sendall(signer.sign(json.dumps(wait).encode()) + b"\n")
        if total == self._start.world_size:
            self._clients.append((connection, signer))
        else:
            self._clients.appendleft((connection, signer))

    def _connect(self) -> tuple[socket.socket, Any]:
        rendezvous = self._start.rendezvous
        while True:
            try:
                connection = socket.create_connection((rendezvous.address, rendezvous.store_port), 60.0)
                signer = authenticate(connection, self._secret)
                connection.settimeout(PATIENCE_S)
                return connection, signer
            except (HandshakeUnanswered, TimeoutError, ConnectionError):
                time.sleep(0.1)

    def close(self) -> None:
        for connection, _ in self._clients:
            connection.close()


def _ask(connection: socket.socket, signer: Any, **request: Any) -> Any:
    connection.sendall(signer.sign(json.dumps(request).encode()) + b"\n")
    return _answer(connection, signer)


def _answer(connection: socket.socket, signer: Any) -> Any:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(65536)
        if not data:
            raise ConnectionError("the store hung up")
        line += data
    return json.loads(signer.check(line[:-1]))
