"""Run a job to its end, whatever happens to its ranks and nodes on the way.

`supervise` is the entry point. A `Coordinator` runs on the node that can bind the address of `--join`, or on the only
node: the state machine decides, and the coordinator carries out its commands. On every other node `follow` does what
the coordinator says. Each node has an `Agent`, which owns its ranks.
"""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from lockstep.errors import Preempted, UserError, printable
from lockstep.launch import records
from lockstep.launch.agent import Agent
from lockstep.launch.failure import Failure, Kind
from lockstep.launch.job import FROM_LAUNCHER, Job, Node, append_event
from lockstep.launch.run_dir import folder_identity, latest_step
from lockstep.launch.state_machine import JobStateMachine
from lockstep.launch.wire.door import Door, Notice, find_secret
from lockstep.launch.wire.protocol import (
    BEAT_S,
    Announce,
    Command,
    Connection,
    ConnectionLost,
    Drop,
    Exited,
    Hello,
    Hub,
    JobEnd,
    LogEvent,
    Message,
    NodeBeat,
    RanksGone,
    Refused,
    Send,
    SignalReceived,
    Stacks,
    Start,
    StartAttempt,
    Welcome,
    ZygoteLost,
    claim,
    connect,
    difference,
)
from lockstep.launch.wire.store_server import StoreServer, store_secret
from lockstep.runtime.meeting.proof import Secret
from lockstep.runtime.preemption import STOP_SIGNALS, signal_handler

# How long a turn of the loop waits for something to happen.
TURN_S = 0.05

# The coordinating node's number.
COORDINATOR = 0

# Upper bound on the rank count that a remote node may announce.
MAX_RANKS = 4096


def supervise(job: Job) -> JobEnd:
    """Run the job on this node, alone or as one of several, and return how it ended."""
    if job.join is None and job.nnodes.least > 1:
        raise UserError(
            f"--nnodes {job.nnodes} needs --join",
            "no address where the nodes meet",
            "type the same on every node, with one node's address: --join HOST:29400",
        )

    name = job.host or socket.gethostname()
    with collect_signals() as signals:
        if job.join is None:
            return Coordinator(job, name, signals, Hub(), "127.0.0.1").run()

        # The node that can bind the address coordinates; the others follow.
        secret = find_secret(job.secret_path)
        listener = claim(job.join)
        if listener is None:
            return follow(job, job.join, name, signals, secret)

        address, _ = socket.getnameinfo(listener.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
        return Coordinator(job, name, signals, Hub(Door(listener, secret)), address, secret).run()


# ---- the launcher's terminal ----


@contextmanager
def collect_signals() -> Iterator[list[str]]:
    """Yield a list that collects the names of the STOP_SIGNALS that come; outside the main thread it stays empty."""
    received: list[str] = []

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number).name)

    with signal_handler(note, STOP_SIGNALS):
        yield received


def say(text: str) -> None:
    # Show the cursor: a rank 0 that was killed could not restore the terminal after its progress display.
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)

    # Ranks and other nodes had a part in the text.
    print(printable(text), file=sys.stderr, flush=True)


# ---- the coordinating node ----


class Coordinator:
    """Runs the ranks of its node, talks to the other nodes and carries out the state machine's commands."""

    def __init__(self, job: Job, name: str, signals: list[str], hub: Hub, address: str, secret: Secret | None = None):
        self._job = job
        self._signals = signals
        self._hub = hub
        self._address = address  # where the ranks' store is bound
        self._secret = secret
        self._store: StoreServer | None = None  # that of the present attempt, on several nodes
        self._agent = Agent(job, name, secret)

        # This node joins its own job like any other.
        now = time.monotonic()
        self._machine = JobStateMachine(job, partial(latest_step, job.run_dir / "checkpoints"), now)
        self._machine.joined(Node(COORDINATOR, name, job.nproc), now)

        self._next_beat = now
        self._ending: JobEnd | None = None  # set by the last command

        # The run folder, until it is known to be gone.
        self._folder_watched: tuple[int, int] | None = folder_identity(job.run_dir)

    def run(self) -> JobEnd:
        try:
            with closing(self._hub), closing(self._agent):
                while self._ending is None:
                    self._turn()
        finally:
            self._close_store()

        if counts := self._hub.turned_away():
            append_event(self._job.run_dir, {"event": "strangers", "counts": counts})

        return self._ending

    def _turn(self) -> None:
        """Collect what happened, hand it to the state machine and carry out its commands."""
        now = time.monotonic()
        of_store = self._store.files(now) if self._store else []
        records.wait_readable(self._agent.sockets() + self._hub.sockets(now) + of_store, TURN_S)
        now = time.monotonic()

        # Events of this node and of the others.
        while self._signals:
            self._machine.preempt_requested(self._signals.pop(0), now)

        for message in self._agent.poll():
            self._handle(COORDINATOR, message, now)

        for number, message in self._hub.poll(now):
            self._receive(number, message, now)

        for notice in self._hub.take_notices():
            self._tell(notice, f"--join {self._job.join}")

        if self._store is not None:
            self._store.poll(now)
            for notice in self._store.take_notices():
                self._tell(notice, "the ranks' store")

        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._every_second(now)

        # Time passing is an event as well. Then carry out all commands issued in this turn.
        self._machine.tick(now)
        for command in self._machine.take():
            self._carry_out(command)

    def _tell(self, notice: Notice, where: str) -> None:
        """Say once for each kind of stranger that there was one. They cannot choose a word of it."""
        source = f" from {notice.address}" if notice.address else ""
        say(f"lockstep: a stranger{source} at {where} {notice.kind}; others like it are only counted")
        append_event(self._job.run_dir, {"event": "stranger", "kind": notice.kind, "from": notice.address})

    def _every_second(self, now: float) -> None:
        """Exchange heartbeats, check for hangs and look for a request of `lockstep resize`."""
        self._handle(COORDINATOR, self._agent.node_beat(), now)
        self._send_to_nodes(NodeBeat())
        self._machine.check_for_hangs(now)
        self._watch_folder()

        # `lockstep resize` leaves a file with a number, which is consumed here.
        request = self._job.run_dir / "resize"
        if not request.is_file():
            return

        text = records.read(request, most=100).strip()
        with suppress(OSError):
            request.unlink()

        if text.isascii() and text.isdigit():
            self._machine.resize(int(text), now)
        else:
            say(f"lockstep: {request} must hold a number; it held {text[:80]!r}")

    def _watch_folder(self) -> None:
        """Say, once, that the run folder was removed: nothing that is trained from now on can be saved."""
        if self._folder_watched is None or folder_identity(self._job.run_dir) == self._folder_watched:
            return

        self._folder_watched = None
        folder = self._job.run_dir
        fix = "stop the job, or move the folder back, before more is trained in vain"
        say(f"lockstep: run_dir={folder} was removed or replaced while the job runs: nothing can be saved there; {fix}")

    def _receive(self, number: int, message: Message | ConnectionLost, now: float) -> None:
        """Handle a message from another node. A node that sends nonsense is dropped; the job continues."""
        match message:
            case ConnectionLost():
                self._machine.gone(number, f"vanished: {message}", now)
            case Hello():
                self._greet(number, message, now)
            case _ if number in self._machine.cluster.nodes:
                try:
                    self._handle(number, message, now)
                except (ValueError, TypeError, KeyError) as error:
                    self._hub.drop(number)
                    self._machine.gone(number, f"was dropped: it sent an invalid message ({error!r})", now)
            case _:
                pass  # from a node that was refused, or is lost

    def _greet(self, number: int, hello: Hello, now: float) -> None:
        join = f"--join {self._job.join}"
        same = "run the same command on every node"
        count = hello.count

        if different := difference(hello, self._job.identity):
            answer = Refused(f"{join}: the commands of two nodes differ", different, same)
        elif self._machine.cluster.full:
            answer = Refused(
                f"{join}: no more nodes can join",
                f"the job has its {self._job.nnodes.most} nodes already",
                "start the job with a larger --nnodes",
            )
        elif not 1 <= count.least <= count.initial <= count.most <= MAX_RANKS:
            answer = Refused(f"{join}: impossible number of ranks", f"{count}, beginning with {count.initial}", same)
        else:
            answer = Welcome(str(self._job.run_dir), self._job.decided)

        # A refused node prints the reason and ends, which closes the connection.
        self._hub.send(number, answer)
        if isinstance(answer, Welcome):
            self._machine.joined(Node(number, hello.host, count), now)

    def _handle(self, number: int, message: Message, now: float) -> None:
        match message:
            case Exited():
                self._machine.exited(message, now)
            case RanksGone():
                self._machine.ranks_gone(number, message.attempt, now)
            case ZygoteLost():
                self._machine.zygote_lost(number, message, now)
            case Stacks():
                self._machine.stacks(number, message, now)
            case NodeBeat():
                self._machine.beat_received(number, message, now)
            case SignalReceived():
                self._machine.preempt_requested(message.signal, now)
            case _:
                raise ValueError(f"{type(message).__name__} is not for the coordinator")

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartAttempt():
                self._start_attempt(command)
            case Send():
                self._send(command.node, command.message)
            case Drop():
                self._hub.drop(command.node)
            case LogEvent():
                append_event(self._job.run_dir, command.event)
            case Announce():
                say(command.text)
                self._send_to_nodes(command)
            case JobEnd():
                self._send_to_nodes(command)
                self._ending = command
            case _:
                assert_never(command)

    def _start_attempt(self, command: StartAttempt) -> None:
        """Start the ranks on all nodes.

        Each attempt has a store of its own, so that no rank finds what an earlier attempt left: on one node a file,
        on several a server in this process, which listens before any rank starts.
        """
        self._close_store()
        several = len(command.ranks) > 1
        store = secrets.token_hex(16) if several else ""
        address = self._address if several else "127.0.0.1"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        port = listener.getsockname()[1]
        if several:
            assert self._secret is not None
            self._store = StoreServer(listener, store_secret(self._secret, store), sum(command.ranks.values()))
        else:
            # Nobody listens there. A script that makes a process group itself, from MASTER_PORT, finds it free.
            listener.close()

        # Ranks are numbered node by node.
        first_rank = 0
        for group_rank, (number, count) in enumerate(command.ranks.items()):
            start = Start(
                attempt=command.attempt,
                first_rank=first_rank,
                count=count,
                world_size=sum(command.ranks.values()),
                group_rank=group_rank,
                address=address,
                port=port,
                store=store,
            )
            self._send(number, start)
            first_rank += count

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _send(self, number: int, message: Message) -> None:
        if number == COORDINATOR:
            self._agent.do(message)
        else:
            self._hub.send(number, message)

    def _send_to_nodes(self, message: Message) -> None:
        """Send a message to all nodes but this one, which the hub does not know."""
        for number in self._machine.cluster.nodes:
            self._hub.send(number, message)


# ---- every other node ----


def follow(job: Job, join: str, name: str, signals: list[str], secret: Secret) -> JobEnd:
    """Do what the coordinating node says, until it ends the job or is gone."""
    try:
        reached = connect(join, job.host, say, secret, signals)
    except Preempted as stopped:
        say(f"lockstep: {stopped.signal}: stopped before {join} answered")
        return JobEnd(int(stopped.code or 0))

    with closing(reached) as connection:
        try:
            adopted, orders = _introduce(job, name, connection)
            with closing(Agent(adopted, name, secret)) as agent:
                return _obey(agent, connection, signals, orders)
        except ConnectionLost as lost:
            text = f"the coordinating node ({join}) is gone: {lost}; the ranks here were stopped"
            say(f"lockstep: {text}. To resume, on every node: {job.resume_command}")
            return JobEnd(1, Failure(-1, name, time.time(), Kind.NODE, text))


def _introduce(job: Job, name: str, connection: Connection) -> tuple[Job, list[Message]]:
    """Join the job. Returns it with the coordinator's choice of the run folder, and the first orders.

    Orders may arrive together with the welcome.
    """
    connection.send(Hello(name, job.nproc, job.identity))

    adopted: Job | None = None
    orders: list[Message] = []
    while adopted is None:
        for message in _received(connection):
            match message:
                case Refused():
                    raise UserError(message.problem, message.found, message.fix)
                case Welcome():
                    # What the coordinator decided replaces what this node's launcher decided.
                    layers = [layer for layer in job.spec.get("layers", []) if layer[0] != FROM_LAUNCHER]
                    spec = {**job.spec, "layers": layers + message.decided}
                    adopted = replace(job, run_dir=Path(message.run_dir), spec=spec)
                case _:
                    orders.append(message)

    return adopted, orders


def _obey(agent: Agent, connection: Connection, signals: list[str], orders: list[Message]) -> JobEnd:
    next_beat = 0.0
    while True:
        # The first orders came with the welcome.
        for message in orders:
            match message:
                case JobEnd():
                    return message
                case Announce():
                    say(message.text)
                case _:
                    agent.do(message)

        # A signal at any node is meant for the whole job.
        while signals:
            connection.send(SignalReceived(signals.pop(0)))

        for event in agent.poll():
            connection.send(event)

        if time.monotonic() >= next_beat:
            next_beat = time.monotonic() + BEAT_S
            connection.send(agent.node_beat())

        orders = _received(connection, *agent.sockets())


def _received(connection: Connection, *others: Any) -> list[Message]:
    """Wait a moment for messages, or for something on the `others`."""
    records.wait_readable([connection, *others], TURN_S)
    return [message for message in connection.receive(time.monotonic()) if not isinstance(message, NodeBeat)]
