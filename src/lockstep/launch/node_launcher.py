"""The launcher of one node of a job on several machines.

Each node's launcher either coordinates the job or follows the node that does. At first the node that can bind the first
address of `--join` coordinates. If that node is lost, another node takes over; `election.py` says which. Each node has
an `Agent`, which owns the node's ranks and stays the same when another node takes over.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import Preempted, UserError
from lockstep.launch import election, records
from lockstep.launch.agent import Agent
from lockstep.launch.coordinator import COORDINATOR, TURN_S, Coordinator, say
from lockstep.launch.election import CounterWatch, TakeoverWatch, Term, TermInfo
from lockstep.launch.failure import Failure, Kind
from lockstep.launch.job import FROM_LAUNCHER, Job, append_event, parse_address
from lockstep.launch.run_dir import break_locks, hold, prepare, remove_old_requests
from lockstep.launch.wire.connections import (
    BEAT_S,
    LOST_AFTER_S,
    Connection,
    ConnectionLost,
    Garbled,
    Hub,
    NoAnswer,
    address_of,
    claim,
    listen_at,
    own_host,
    reach,
)
from lockstep.launch.wire.door import Door, find_secret
from lockstep.launch.wire.messages import (
    Announce,
    CoordinatorState,
    Hello,
    JobEnd,
    Message,
    Refused,
    SignalReceived,
    Welcome,
)

# How long a node tries to reach the coordinating node.
CONNECT_S = 300.0

# The pause between two tries.
RETRY_S = 0.2

# How long a starting node waits for a sign of life from the coordinator recorded in the run folder before it treats
# that record as stale.
STALE_S = 10.0

# Each node waits this much longer than the node numbered below it before it takes over, so that they do not compete.
STAGGER_S = 2.0

# How long the run folder must have no term file before a node concludes that the job is over.
GONE_S = 3.0

# How long a node that has received a signal tries to reach the successor of its coordinator, to send it the signal.
DELIVER_S = 20.0

# How many times an hour a node reconnects to the same live coordinator: each time, the training is interrupted.
MAX_RECONNECTS = 3
HOUR_S = 3600.0

# Environment variable: the launchers of all nodes write to the same log. What concerns the job is then printed by the
# coordinating node only, and not once for each node.
ONE_LOG = "LOCKSTEP_ONE_LOG"


@dataclass
class CoordinatorRole:
    """What a node needs to coordinate: a listening socket, its term, and the state of the previous coordinator."""

    resources: ExitStack  # holds the run folder, and after a takeover the listening socket, until it is closed
    listener: socket.socket
    term: Term
    inherited: CoordinatorState | None = None
    failure: Failure | None = None  # the loss of the previous coordinator


# What a node does next: follow the coordinator at the other end of a connection, coordinate, or end.
NextStep = Connection | CoordinatorRole | JobEnd


class NodeLauncher:
    """The launcher of one node of a job on several machines."""

    def __init__(self, job: Job, name: str, signals: list[str]):
        # The job as this node's command describes it, until a coordinator has welcomed the node.
        self._job = job
        self._name = name
        self._signals = signals
        self._agent: Agent | None = None
        self._addresses = job.addresses

        # With run_dir on the command line all nodes share it; otherwise the coordinator chooses it.
        if not job.decided:
            prepare(job.run_dir)

        self._secret = find_secret(job.secret_path)

        # The coordinator that this node followed last, this node's number in that term, the last state received from
        # that coordinator, and this machine's address on the connection to it.
        self._followed: TermInfo | None = None
        self._number = COORDINATOR
        self._last_state: CoordinatorState | None = None
        self._own_host = ""

        # Whether the job has ended while this node coordinated it.
        self.ended_job = False

        # When this node reconnected to the coordinator that it follows.
        self._reconnects: list[float] = []

        # Why the last try to reach a coordinator, or to become one, failed.
        self._last_problem = ""

    def run(self) -> JobEnd:
        try:
            next_step = self._join_or_coordinate()
            while not isinstance(next_step, JobEnd):
                if isinstance(next_step, CoordinatorRole):
                    next_step = self._coordinate(next_step)
                else:
                    next_step = self._follow(next_step)

            return next_step
        finally:
            if self._agent is not None:
                self._agent.close()

    # ---- the start: find the coordinator ----

    def _join_or_coordinate(self) -> NextStep:
        """Connect to the coordinating node; coordinate if there is none and this node has the first address."""
        began = now = time.monotonic()
        announced = False
        watch = CounterWatch()
        while now - began < CONNECT_S:
            if self._signals:
                return self._stopped()

            # The node that can bind the first address coordinates a new job. But that node may be coming back after
            # another node has taken over, whose address is in the list or in the run folder.
            listener = self._claim_first()
            info, readable = self._newest_term()
            others = self._addresses[1:] if listener else self._addresses
            if info and not (listener and info.address == address_of(listener)):
                others = [*others, info.address]
            if connection := self._reach(*others):
                if listener:
                    listener.close()
                return connection

            # A term file whose counter stands still was left by a job that has died.
            if info:
                watch.look(info.term, election.read_counter(self._job.run_dir, info.term), now)
            else:
                watch.reset()
            free = readable and (info is None or watch.still_for(now) >= STALE_S)
            if listener and free and (role := self._begin_to_coordinate(listener)):
                return role

            if not announced and now - began > 1.0:
                announced = True
                where = info.address if info else ", ".join(self._addresses)
                problem = f"no answer from {where} yet ({self._last_problem})"
                say(f"lockstep: {problem}; trying for {CONNECT_S / 60:.0f} minutes")

            if listener:
                listener.close()
            time.sleep(RETRY_S)
            now = time.monotonic()

        raise UserError(
            f"--join {self._job.join}: no answer within {CONNECT_S / 60:.0f} minutes",
            self._last_problem,
            f"start the same command on the node that has the address {self._addresses[0]}",
        )

    def _claim_first(self) -> socket.socket | None:
        """Bind the first address of --join, if it is this machine's."""
        try:
            return claim(self._addresses[0])
        except UserError:
            # The name of a lost machine may no longer resolve.
            info, readable = self._newest_term()
            if len(self._addresses) > 1 or info or not readable:
                return None
            raise

    def _newest_term(self) -> tuple[TermInfo | None, bool]:
        """Return the newest term in the run folder, and whether the folder could be read."""
        try:
            return election.newest(self._job.run_dir), True
        except OSError as error:
            self._last_problem = f"the run folder cannot be read: {error.strerror or error}"
            return None, False

    def _reach(self, *addresses: str) -> Connection | None:
        for address in dict.fromkeys(addresses):
            try:
                return reach(address, self._job.host, self._secret)
            except NoAnswer as error:
                self._last_problem = str(error)

        return None

    def _begin_to_coordinate(self, listener: socket.socket) -> CoordinatorRole | None:
        """Begin a term of a job that no other node coordinates. Returns None if another node was faster."""
        with ExitStack() as resources:
            # This comes first: it raises if another job holds the folder, whose term file must stay.
            resources.enter_context(hold(self._job.run_dir))
            remove_old_requests(self._job.run_dir)
            try:
                term = election.begin_term(self._job.run_dir, None, self._name, address_of(listener))
            except OSError as error:
                self._last_problem = error.strerror or str(error)
                return None

            return CoordinatorRole(resources.pop_all(), listener, term) if term else None

    def _stopped(self) -> JobEnd:
        """End because of a signal, while this node has no connection to a coordinator."""
        say(f"lockstep: {self._signals[0]}: stopped while no node coordinates; to resume: {self._job.resume_command}")
        return JobEnd(Preempted.code_of(self._signals[0]))

    # ---- coordinating ----

    def _coordinate(self, role: CoordinatorRole) -> NextStep:
        """Coordinate the job until it ends, or until another node has taken over."""
        run_dir, info = self._job.run_dir, role.term.info
        if self._agent is None:
            self._agent = Agent(self._job, self._name, self._secret)

        self._agent.term_file = role.term.path
        address = own_host(role.listener)
        hub = Hub(Door(role.listener, self._secret))
        with role.resources:
            job = replace(self._job, join=info.address)
            coordinator = Coordinator(job, self._agent, self._signals, hub, address, role.term, role.inherited)
            if role.failure:
                event = {"event": "takeover", "term": info.term, "node": info.host, "address": info.address}
                append_event(run_dir, {**event, "from": role.failure.host})
                coordinator.took_over(role.failure)

            if ending := coordinator.run():
                self.ended_job = True
                return ending

        # The successor has not received the signals that this launcher received: they are sent again.
        self._signals[:0] = coordinator.received_signals
        say("lockstep: another node has taken over this job while this one did not answer: the ranks here were stopped")
        self._followed, self._number, self._last_state = info, COORDINATOR, coordinator.state
        self._own_host = address
        return self._find_coordinator("it was superseded")

    # ---- following ----

    def _follow(self, connection: Connection) -> NextStep:
        """Carry out the orders of the coordinating node, until it ends the job or its connection is lost."""
        with closing(connection):
            try:
                orders = self._join(connection)
                assert self._agent is not None
                return self._execute_orders(self._agent, connection, orders)
            except ConnectionLost as lost:
                if self._agent is not None:
                    self._agent.stop()

                # If messages are being tampered with, reconnecting will not help.
                if isinstance(lost, Garbled):
                    return self._end_alone(str(lost))

                return self._find_coordinator(str(lost)) if self._followed else self._join_or_coordinate()

    def _join(self, connection: Connection) -> list[Message]:
        """Join the job and adopt the coordinator's choices. Returns the first orders."""
        term = self._followed.term if self._followed else 0
        nproc = self._agent.nproc if self._agent else self._job.nproc
        connection.send(Hello(self._name, nproc, self._job.identity, term, self._number))

        # Orders may arrive before the two messages that are the answer.
        welcome: Welcome | None = None
        state: CoordinatorState | None = None
        orders: list[Message] = []
        while welcome is None or state is None:
            for message in received(connection):
                match message:
                    case Refused():
                        raise UserError(message.problem, message.found, message.fix)
                    case Welcome():
                        welcome = message
                    case CoordinatorState():
                        state = message
                    case _:
                        orders.append(message)

        self._adopt(welcome)
        self._last_state = state
        self._own_host = connection.own_host
        return orders

    def _adopt(self, welcome: Welcome) -> None:
        # The report was made under the node's old number; a node gets a new number each time that it joins.
        if self._followed:
            election.withdraw_report(self._job.run_dir, self._followed.term, self._number)

        job = adopt(self._job, welcome)
        if self._agent is not None and job != self._job:
            self._agent.close()
            self._agent = None

        self._job = job
        self._agent = self._agent or Agent(job, self._name, self._secret)
        if self._followed and self._followed.term != welcome.term:
            self._reconnects = []

        info, _ = self._newest_term()
        named = info if info and info.term == welcome.term else None
        self._followed = named or TermInfo(welcome.term, "the coordinating node", self._addresses[0])
        self._number = welcome.number

    def _execute_orders(self, agent: Agent, connection: Connection, orders: list[Message]) -> JobEnd:
        """Carry out orders and send what happens on this node. `orders` came with the welcome."""
        next_beat = 0.0
        while True:
            for message in orders:
                match message:
                    case JobEnd():
                        return message
                    case Announce():
                        if ONE_LOG not in os.environ:
                            say(message.text)
                    case CoordinatorState():
                        self._last_state = message
                    case _:
                        agent.do(message)

            # A signal at any node is meant for the whole job.
            while self._signals:
                connection.send(SignalReceived(self._signals.pop(0)))

            for event in agent.poll():
                connection.send(event)

            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                connection.send(agent.node_beat())

            orders = received(connection, *agent.sockets())

    # ---- after the connection to the coordinator was lost ----

    def _find_coordinator(self, why: str) -> NextStep:
        """Reconnect to the coordinator, join its successor, or become the successor, as the run folder says."""
        assert self._followed is not None
        assert self._last_state is not None
        followed = self._followed
        where = f"{followed.host} ({followed.address})"
        say(f"lockstep: the coordinating node {where} is lost: {why}; the ranks here were stopped")

        watch = TakeoverWatch(self._number, self._last_state.members, LOST_AFTER_S, STAGGER_S)
        began = last_seen = now = time.monotonic()
        while now - began < CONNECT_S:
            info, readable = self._newest_term()
            if info is not None:
                last_seen = now
                if next_step := self._look_at_term(info, watch, now, why):
                    return next_step
            elif readable and now - last_seen >= GONE_S:
                # There has been no term file for a while: the job is over.
                return self._end_alone(why)
            else:
                # A folder that cannot be read says nothing about the job.
                if not readable:
                    last_seen = now
                watch.reset()

            # Last, so that a signal is sent to a successor if there is one, which may take a moment to answer.
            newer = info is not None and info.term > followed.term
            has_successor = newer and watch.still_for(now) < LOST_AFTER_S
            if self._signals and not (has_successor and now - began < DELIVER_S):
                return self._stopped()

            time.sleep(RETRY_S)
            now = time.monotonic()

        return self._end_alone(why)

    def _look_at_term(self, info: TermInfo, watch: TakeoverWatch, now: float, why: str) -> NextStep | None:
        """Act on the newest term: connect to its coordinator or take over. Returns None to wait and look again."""
        assert self._followed is not None
        run_dir = self._job.run_dir
        watch.look(info.term, election.read_counter(run_dir, info.term), now)
        still_lives = info.term == self._followed.term and watch.alive
        if still_lives and self._reconnected_too_often(now):
            return self._end_alone(f"{why}; this node has returned to it {MAX_RECONNECTS} times within an hour")

        if connection := self._reconnect(info, watch.alive):
            return connection

        if still_lives:
            election.report_cut_off(run_dir, info.term, self._number)

        reason = watch.reason(election.cut_off_nodes(run_dir, info.term), time.monotonic())
        return self._take_over(info, f"{why}, and {reason}") if reason and not self._signals else None

    def _reconnected_too_often(self, now: float) -> bool:
        self._reconnects = [when for when in self._reconnects if now - when < HOUR_S]
        return len(self._reconnects) >= MAX_RECONNECTS

    def _reconnect(self, info: TermInfo, alive: bool) -> Connection | None:
        """Try to connect to a successor, or, if its counter grows, to the coordinator that this node followed."""
        assert self._followed is not None
        is_successor = info.term > self._followed.term
        connection = self._reach(info.address) if is_successor or alive else None
        if connection is None:
            return None

        if is_successor:
            say(f"lockstep: {info.host} ({info.address}) has taken over: joining it")
        else:
            self._reconnects.append(time.monotonic())

        return connection

    def _take_over(self, info: TermInfo, why: str) -> CoordinatorRole | None:
        """Begin the next term, in place of the coordinator of `info`. Returns None if another node was faster."""
        run_dir = self._job.run_dir
        with ExitStack() as resources:
            try:
                listener = resources.enter_context(listen_at(*self._own_address()))
                term = election.begin_term(run_dir, info.term, self._name, address_of(listener))
            except OSError as error:
                self._last_problem = error.strerror or str(error)
                return None

            if term is None:
                return None

            break_locks(run_dir)
            resources.enter_context(hold(run_dir))
            text = f"{self._name} takes over from {info.host} ({info.address}): {why}"
            failure = Failure(-1, info.host, time.time(), Kind.NODE, text)
            return CoordinatorRole(resources.pop_all(), listener, term, self._last_state, failure)

    def _own_address(self) -> tuple[str, int]:
        """Return where this node listens as a successor: its own entry in --join, or the port of the first entry."""
        _, port = parse_address(self._addresses[0])
        for address in self._addresses:
            host, its_port = parse_address(address)
            with suppress(OSError):
                if self._own_host in {info[4][0] for info in socket.getaddrinfo(host, None)}:
                    return self._own_host, its_port

        return self._own_host, port

    def _end_alone(self, why: str) -> JobEnd:
        """End this launcher, because it has no coordinator and does not take over."""
        where = f"{self._followed.address}" if self._followed else ", ".join(self._addresses)
        text = f"the coordinating node ({where}) is gone: {why}; the ranks here were stopped"
        say(f"lockstep: {text}. To resume, on every node: {self._job.resume_command}")
        return JobEnd(1, Failure(-1, self._name, time.time(), Kind.NODE, text))


def adopt(job: Job, welcome: Welcome) -> Job:
    """Return the job with the coordinator's choice of the run folder."""
    # The coordinator's choices replace the choices of this node's launcher.
    layers = [layer for layer in job.spec.get("layers", []) if layer[0] != FROM_LAUNCHER]
    spec = {**job.spec, "layers": layers + welcome.decided, "resume_command": welcome.resume_command}

    return replace(job, run_dir=Path(welcome.run_dir), spec=spec)


def received(connection: Connection, *others: Any) -> list[Message]:
    """Return the messages that arrive within a moment; return early if one of the `others` becomes readable."""
    records.wait_readable([connection, *others], TURN_S)
    return connection.receive(time.monotonic())
