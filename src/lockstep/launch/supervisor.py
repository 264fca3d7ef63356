"""Run a job to its end, whatever happens to its ranks and nodes on the way.

`supervise` is the entry point. On a single machine a `Coordinator` does everything. On several, each launcher is a
`Member`: one of them coordinates, at first the one that can bind the first address of `--join`, and the others follow.
If the coordinating one is lost, another takes its place; `meeting.py` says how they agree on which. Each node has an
`Agent`, which owns its ranks and outlives these changes.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import Preempted, UserError
from lockstep.launch import meeting, records
from lockstep.launch.agent import Agent
from lockstep.launch.coordinator import COORDINATOR, TURN_S, Coordinator, say
from lockstep.launch.failure import PREEMPTED, Failure, Kind
from lockstep.launch.job import FROM_LAUNCHER, Job, append_event, parse_address
from lockstep.launch.meeting import Record, Term, Vigil
from lockstep.launch.run_dir import break_locks, hold, prepare
from lockstep.launch.wire.door import Door, find_secret
from lockstep.launch.wire.protocol import (
    BEAT_S,
    LOST_AFTER_S,
    Announce,
    Connection,
    ConnectionLost,
    Garbled,
    Handover,
    Hello,
    Hub,
    JobEnd,
    Message,
    NoAnswer,
    Refused,
    SignalReceived,
    Welcome,
    address_of,
    claim,
    listen_at,
    own_host,
    reach,
)
from lockstep.runtime.preemption import STOP_SIGNALS, signal_handler

# How long a node tries to reach the coordinating one.
CONNECT_S = 300.0

# The pause between two tries.
RETRY_S = 0.2

# How long a node that could coordinate a new job waits for a sign of life of the one that coordinates according to the
# run folder, and for another node to take its place.
STALE_S = 10.0

# How much longer than the next lower number a node waits before it takes over, so that they do not compete.
TURN_TO_TAKE_OVER_S = 2.0

# How long a node looks for a record before it believes that the job is over.
GONE_S = 3.0

# How often in an hour a node returns to a coordinator that lives: each return interrupts the training.
MOST_RETURNS = 3
HOUR_S = 3600.0


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
        if job.join is not None:
            return Member(job, name, signals).run()

        with hold(job.run_dir), closing(Agent(job, name)) as agent:
            forget_wishes(job.run_dir)
            ending = Coordinator(job, agent, signals).run()
            assert ending is not None, "only a job on several machines can be taken over"
            return ending


def forget_wishes(run: Path) -> None:
    """Remove what was asked of an earlier job."""
    (run / "resize").unlink(missing_ok=True)


@contextmanager
def collect_signals() -> Iterator[list[str]]:
    """Yield a list that collects the names of the STOP_SIGNALS that come; outside the main thread it stays empty."""
    received: list[str] = []

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number).name)

    with signal_handler(note, STOP_SIGNALS):
        yield received


# ---- one of several nodes ----


@dataclass
class Office:
    """What a node needs to coordinate: the run folder, a place where the others come, its term, and its heritage."""

    folder: ExitStack  # holds the run folder until it is closed
    listener: socket.socket
    term: Term
    inherited: Handover | None = None
    failure: Failure | None = None  # the loss of its predecessor


# What a node does next: it follows a coordinator, coordinates, or ends.
Next = Connection | Office | JobEnd


class Member:
    """One node of a job on several machines."""

    def __init__(self, job: Job, name: str, signals: list[str]):
        # Until it is welcome somewhere, a node knows only its own command.
        self._job = job
        self._name = name
        self._signals = signals
        self._agent: Agent | None = None
        self._addresses = job.addresses

        # A folder that was typed is the same on all nodes. Another one is chosen by whoever coordinates.
        if not job.decided:
            prepare(job.run_dir)
        self._secret = find_secret(job.secret_path)

        # The coordinator that this node followed last, the number that it had there, what it heard from it last, and
        # this machine's address on the way to it.
        self._followed: Record | None = None
        self._number = COORDINATOR
        self._heard: Handover | None = None
        self._own_host = ""
        self._returns: list[float] = []  # when it returned to it

        # Why the last try to reach a coordinator failed.
        self._why = ""

    def run(self) -> JobEnd:
        try:
            following = self._arrive()
            while not isinstance(following, JobEnd):
                following = self._coordinate(following) if isinstance(following, Office) else self._follow(following)

            return following
        finally:
            if self._agent is not None:
                self._agent.close()

    # ---- finding the coordinator ----

    def _arrive(self) -> Next:
        """Find the node that coordinates, or be the one."""
        began = time.monotonic()
        announced = False
        vigil = Vigil(self._number, [], STALE_S, turn=0.0)
        while (waited := (now := time.monotonic()) - began) < CONNECT_S:
            if self._signals:
                return self._stopped()

            # The node that can bind the first address coordinates a new job. But it may be one that comes back: then
            # another node has taken over, whose address is in the list or in the run folder.
            listener = self._claim_first()
            record, readable = self._record()
            others = self._addresses[1:] if listener else self._addresses
            if record and not (listener and record.address == address_of(listener)):
                others = [*others, record.address]
            if connection := self._reach(*others):
                if listener:
                    listener.close()
                return connection

            # A record whose count stands still was left by a job that is no more.
            if record:
                vigil.look(record.term, meeting.count_of(self._job.run_dir, record.term), now)
            else:
                vigil.forget()
            free = readable and (record is None or vigil.reason(set(), now) is not None)
            if listener and free and (office := self._open_office(listener)):
                return office

            if not announced and waited > 1.0:
                announced = True
                where = record.address if record else ", ".join(self._addresses)
                say(f"lockstep: no answer from {where} yet ({self._why}); trying for {CONNECT_S / 60:.0f} minutes")

            if listener:
                listener.close()
            time.sleep(RETRY_S)

        raise UserError(
            f"--join {self._job.join}: no answer within {CONNECT_S / 60:.0f} minutes",
            self._why,
            f"start the same command on the node that has the address {self._addresses[0]}",
        )

    def _claim_first(self) -> socket.socket | None:
        try:
            return claim(self._addresses[0])
        except UserError:
            # A machine that is lost may have taken its name along.
            record, readable = self._record()
            if len(self._addresses) > 1 or record or not readable:
                return None
            raise

    def _record(self) -> tuple[Record | None, bool]:
        """Return the newest record in the run folder, and whether that could be read; if not, one may be there."""
        try:
            return meeting.newest(self._job.run_dir), True
        except OSError as error:
            self._why = f"the run folder cannot be read: {error.strerror or error}"
            return None, False

    def _reach(self, *addresses: str) -> Connection | None:
        for address in dict.fromkeys(addresses):
            try:
                return reach(address, self._job.host, self._secret)
            except NoAnswer as error:
                self._why = str(error)

        return None

    def _open_office(self, listener: socket.socket) -> Office | None:
        """Begin to coordinate a job that no other node coordinates. Returns None if another one was faster."""
        with ExitStack() as folder:
            # This raises if another job is there: before its record is removed.
            folder.enter_context(hold(self._job.run_dir))
            forget_wishes(self._job.run_dir)
            try:
                term = meeting.begin_term(self._job.run_dir, None, self._name, address_of(listener))
            except OSError as error:
                self._why = error.strerror or str(error)
                return None

            return Office(folder.pop_all(), listener, term) if term else None

    def _stopped(self) -> JobEnd:
        say(f"lockstep: {self._signals[0]}: stopped while no node coordinates; to resume: {self._job.resume_command}")
        return JobEnd(Preempted.INTERRUPTED if self._signals[0] == "SIGINT" else PREEMPTED)

    # ---- coordinating ----

    def _coordinate(self, office: Office) -> Next:
        """Coordinate the job until it ends, or until another node turns out to do so."""
        run_dir, record = self._job.run_dir, office.term.record
        if self._agent is None:
            self._agent = Agent(self._job, self._name, self._secret)

        self._agent.record = office.term.path
        address = own_host(office.listener)
        hub = Hub(Door(office.listener, self._secret))
        with office.folder:
            job = replace(self._job, join=record.address)
            coordinator = Coordinator(job, self._agent, self._signals, hub, address, office.term, office.inherited)
            if office.failure:
                event = {"event": "takeover", "term": record.term, "node": record.host, "address": record.address}
                append_event(run_dir, {**event, "from": office.failure.host})
                coordinator.took_over(office.failure)

            if ending := coordinator.run():
                return ending

        say("lockstep: another node has taken over this job while this one did not answer: the ranks here were stopped")
        self._followed, self._number, self._heard = record, COORDINATOR, coordinator.handover
        self._own_host = address
        return self._look_for_another("it was superseded")

    # ---- following ----

    def _follow(self, connection: Connection) -> Next:
        """Do what the coordinating node says, until it ends the job or is lost."""
        with closing(connection):
            try:
                orders = self._introduce(connection)
                assert self._agent is not None
                return self._obey(self._agent, connection, orders)
            except ConnectionLost as lost:
                if self._agent is not None:
                    self._agent.stop()

                # Whoever changes messages on the way would do it again.
                if isinstance(lost, Garbled):
                    return self._alone(str(lost))

                return self._look_for_another(str(lost)) if self._followed else self._arrive()

    def _introduce(self, connection: Connection) -> list[Message]:
        """Join the job and adopt what its coordinator decided. Returns the first orders."""
        term = self._followed.term if self._followed else 0
        count = self._agent.count if self._agent else self._job.nproc
        connection.send(Hello(self._name, count, self._job.identity, term, self._number))

        # Other messages may come before the two that are the answer.
        welcome: Welcome | None = None
        heard: Handover | None = None
        orders: list[Message] = []
        while welcome is None or heard is None:
            for message in received(connection):
                match message:
                    case Refused():
                        raise UserError(message.problem, message.found, message.fix)
                    case Welcome():
                        welcome = message
                    case Handover():
                        heard = message
                    case _:
                        orders.append(message)

        self._adopt(welcome)
        self._heard = heard
        self._own_host = connection.own_host
        return orders

    def _adopt(self, welcome: Welcome) -> None:
        # It said so under the number that it had; it gets a new one each time.
        if self._followed:
            meeting.withdraw(self._job.run_dir, self._followed.term, self._number)

        job = adopt(self._job, welcome)
        if self._agent is not None and job != self._job:
            self._agent.close()
            self._agent = None

        self._job = job
        self._agent = self._agent or Agent(job, self._name, self._secret)
        if self._followed and self._followed.term != welcome.term:
            self._returns = []

        record, _ = self._record()
        named = record if record and record.term == welcome.term else None
        self._followed = named or Record(welcome.term, "the coordinating node", self._addresses[0])
        self._number = welcome.number

    def _obey(self, agent: Agent, connection: Connection, orders: list[Message]) -> JobEnd:
        next_beat = 0.0
        while True:
            # The first orders came with the welcome.
            for message in orders:
                match message:
                    case JobEnd():
                        return message
                    case Announce():
                        say(message.text)
                    case Handover():
                        self._heard = message
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

    # ---- after the loss of the coordinator ----

    def _look_for_another(self, why: str) -> Next:
        """Return to the coordinator, go to its successor, or be the successor, as the run folder says."""
        assert self._followed is not None
        assert self._heard is not None
        followed, run_dir = self._followed, self._job.run_dir
        where = f"{followed.host} ({followed.address})"
        say(f"lockstep: the coordinating node {where} is lost: {why}; the ranks here were stopped")

        vigil = Vigil(self._number, self._heard.members, LOST_AFTER_S, TURN_TO_TAKE_OVER_S)
        began = last_seen = time.monotonic()
        while (now := time.monotonic()) - began < CONNECT_S:
            if self._signals:
                return self._stopped()

            record, readable = self._record()
            if record is None:
                # The job is over if there is no record for a while. What cannot be read says nothing.
                if readable and now - last_seen >= GONE_S:
                    return self._alone(why)

                last_seen = last_seen if readable else now
                vigil.forget()
                time.sleep(RETRY_S)
                continue

            last_seen = now
            vigil.look(record.term, meeting.count_of(run_dir, record.term), now)
            still_lives = record.term == followed.term and vigil.alive
            if still_lives and self._returned_too_often(now):
                return self._alone(f"{why}; this node has returned to it {MOST_RETURNS} times within an hour")

            if connection := self._return_to(record, vigil.alive):
                return connection

            # Others in the same situation count those who are.
            if still_lives:
                meeting.report_lost(run_dir, record.term, self._number)

            reason = vigil.reason(meeting.who_lost(run_dir, record.term), time.monotonic())
            if reason and (office := self._take_over(record, f"{why}; {reason}")):
                return office

            time.sleep(RETRY_S)

        return self._alone(why)

    def _returned_too_often(self, now: float) -> bool:
        self._returns = [when for when in self._returns if now - when < HOUR_S]
        return len(self._returns) >= MOST_RETURNS

    def _return_to(self, record: Record, alive: bool) -> Connection | None:
        """Try to reach the node that coordinates: a successor at once, the one that was lost only if it lives."""
        assert self._followed is not None
        is_successor = record.term > self._followed.term
        connection = self._reach(record.address) if is_successor or alive else None
        if connection is None:
            return None

        if is_successor:
            say(f"lockstep: {record.host} ({record.address}) has taken over: joining it")
        else:
            self._returns.append(time.monotonic())
        return connection

    def _take_over(self, record: Record, why: str) -> Office | None:
        """Begin the next term, in place of the coordinator of `record`. Returns None if another node was faster."""
        run_dir = self._job.run_dir
        with ExitStack() as stack:
            try:
                listener = stack.enter_context(listen_at(*self._own_address()))
                term = meeting.begin_term(run_dir, record.term, self._name, address_of(listener))
            except OSError as error:
                self._why = error.strerror or str(error)
                return None

            if term is None:
                return None

            break_locks(run_dir)
            stack.enter_context(hold(run_dir))
            text = f"{self._name} takes over from {record.host} ({record.address}), which is lost: {why}"
            failure = Failure(-1, record.host, time.time(), Kind.NODE, text)
            return Office(stack.pop_all(), listener, term, self._heard, failure)

    def _own_address(self) -> tuple[str, int]:
        """Return where this node listens if it coordinates: its own address in the list, or the first one's port."""
        _, port = parse_address(self._addresses[0])
        for address in self._addresses:
            host, its_port = parse_address(address)
            with suppress(OSError):
                if self._own_host in {info[4][0] for info in socket.getaddrinfo(host, None)}:
                    return self._own_host, its_port

        return self._own_host, port

    def _alone(self, why: str) -> JobEnd:
        where = f"{self._followed.address}" if self._followed else ", ".join(self._addresses)
        text = f"the coordinating node ({where}) is gone: {why}; the ranks here were stopped"
        say(f"lockstep: {text}. To resume, on every node: {self._job.resume_command}")
        return JobEnd(1, Failure(-1, self._name, time.time(), Kind.NODE, text))


def adopt(job: Job, welcome: Welcome) -> Job:
    """Return the job with the coordinator's choice of the run folder."""
    # What the coordinator decided replaces what this node's launcher decided.
    layers = [layer for layer in job.spec.get("layers", []) if layer[0] != FROM_LAUNCHER]
    spec = {**job.spec, "layers": layers + welcome.decided, "resume_command": welcome.resume_command}

    return replace(job, run_dir=Path(welcome.run_dir), spec=spec)


def received(connection: Connection, *others: Any) -> list[Message]:
    """Wait a moment for messages, or for something on the `others`."""
    records.wait_readable([connection, *others], TURN_S)
    return connection.receive(time.monotonic())
