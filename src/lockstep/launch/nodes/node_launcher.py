"""The launcher of one node of a job on several nodes.

Each node's launcher either coordinates the job or follows the node that does; `search.py` finds out which. Each node
has an `Agent`, which runs the node's ranks and stays the same when another node takes over.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import ExitCode, UserError
from lockstep.launch import election
from lockstep.launch.agent import Agent
from lockstep.launch.coordinator import Coordinator
from lockstep.launch.job import COORDINATOR, Job
from lockstep.launch.nodes.search import CoordinatorRole, JoinedTerm, NextStep, Search
from lockstep.launch.terminal import print_line, shares_log
from lockstep.launch.times import HEARTBEAT_S, LOOP_S
from lockstep.launch.wire.connections import Connection, ConnectionLost, Garbled, local_address
from lockstep.launch.wire.messages import (
    Announce,
    CoordinatorState,
    Hello,
    JobEnd,
    Refused,
    SignalReceived,
    ToNode,
    Welcome,
)
from lockstep.launch.wire.secret import find_secret
from lockstep.launch.wire.sockets import wait_readable
from lockstep.run_folder.events import append_event
from lockstep.run_folder.run_dir import prepare
from lockstep.runtime.rendezvous.handshake import Secret


class Outcome(NamedTuple):
    """How a job ended, for the launcher of one node."""

    ending: JobEnd
    ended_here: bool  # whether this node coordinated the job when it ended


def run_node(job: Job, host: str, signals: list[str]) -> Outcome:
    """Run the launcher of this node until the job ends."""
    # With run_dir on the command line all nodes share it; otherwise the coordinator chooses it.
    if not job.run_dir_was_chosen:
        prepare(job.run_dir)

    return NodeLauncher(job, host, signals, find_secret(job.secret_path)).run()


class NodeLauncher:
    """The launcher of one node of a job on several nodes."""

    def __init__(self, job: Job, host: str, signals: list[str], secret: Secret):
        # The job as this node's command describes it, until a coordinator has welcomed the node.
        self._job = job
        self._host = host
        self._signals = signals
        self._secret = secret
        self._agent: Agent | None = None

        # None until the node belongs to the job.
        self._joined: JoinedTerm | None = None

        # The signals that were sent to the coordinator, until its state shows that the job saves and exits.
        self._sent_signals: list[str] = []

        self._search = Search(job, host, signals, secret)
        self._ended_here = False

    def run(self) -> Outcome:
        """Coordinate the job or follow its coordinator, in turns if nodes are lost, until the job ends."""
        try:
            next_step = self._search.find_coordinator()

            # Each of the two returns what comes next: another role, another connection, or the end.
            while not isinstance(next_step, JobEnd):
                if isinstance(next_step, CoordinatorRole):
                    next_step = self._coordinate(next_step)
                else:
                    next_step = self._follow(next_step)

            return Outcome(next_step, self._ended_here)
        finally:
            if self._agent is not None:
                self._agent.close()

    def _coordinate(self, role: CoordinatorRole) -> NextStep:
        """Coordinate the job until it ends, or until another node has taken over."""
        term = role.lease.term
        if self._agent is None:
            self._agent = Agent(self._job, self._host, self._secret)

        # Rank 0 watches this file: it ends if another node takes over.
        self._agent.term_file = role.lease.path
        address = local_address(role.listener)

        with role.resources:
            if role.failure:
                event = {"event": "takeover", "term": term.number, "node": term.host, "address": term.address}
                append_event(self._job.run_dir, {**event, "from": role.failure.host})

            job = replace(self._job, join=term.address)
            coordinator = Coordinator(
                job, self._agent, self._signals, role.listener, role.lease, role.inherited, role.failure
            )

            ending = coordinator.run()
            if ending:
                self._ended_here = True
                return ending

        # The successor has not received the signals that this launcher received: they are sent again.
        self._signals[:0] = coordinator.received_signals
        print_line(
            "lockstep: another node took over this job while this node did not answer; the ranks here were killed"
        )
        self._joined = JoinedTerm(term, COORDINATOR, coordinator.coordinator_state, address)
        return self._search.after_loss(self._joined, "this node was superseded")

    # ---- following ----

    def _follow(self, connection: Connection) -> NextStep:
        """Carry out the orders of the coordinating node, until it ends the job or its connection is lost."""
        with closing(connection):
            try:
                # A coordinator that is lost while this node joins is found by the next search.
                orders = self._join(connection)
                assert self._agent is not None
                return self._carry_out_orders(self._agent, connection, orders)
            except ConnectionLost as lost:
                # Ranks without a coordinator would train on while another attempt starts elsewhere.
                if self._agent is not None:
                    self._agent.kill_and_wait()

                # The coordinator may have been lost before it received a signal, so they are sent again.
                self._signals[:0] = self._sent_signals
                self._sent_signals.clear()

                # If messages are being tampered with, reconnecting will not help.
                last = self._joined
                if isinstance(lost, Garbled):
                    address = last.term.address if last else self._job.join
                    problem = f"messages from the coordinating node ({address}) are not valid: {lost}"
                    return self._search.end_alone(problem, ExitCode.FAILED)

                if last is None:
                    return self._search.find_coordinator()

                where = f"{last.term.host} ({last.term.address})"
                print_line(f"lockstep: the coordinating node {where} is lost: {lost}; the ranks here were killed")
                return self._search.after_loss(last, str(lost))

    def _join(self, connection: Connection) -> list[ToNode]:
        """Join the job and adopt the coordinator's run folder. Return the first orders."""
        nproc = self._agent.nproc if self._agent else self._job.nproc
        hello = Hello(self._host, nproc, self._job.identity)
        # A node that returns says who it was, so that the coordinator closes its old connection.
        last = self._joined
        if last:
            hello = replace(hello, term=last.term.number, number=last.number)

        connection.send(hello)

        # The answer is two messages, and orders may arrive before them.
        welcome: Welcome | None = None
        state: CoordinatorState | None = None
        orders: list[ToNode] = []

        while welcome is None or state is None:
            for message in wait_for_messages(connection):
                match message:
                    case Refused():
                        raise UserError(message.problem, message.found, message.fix)

                    case Welcome():
                        welcome = message

                    case CoordinatorState():
                        state = message

                    case _:
                        orders.append(message)

        self._adopt(welcome, state, connection.local_address)
        return orders

    def _adopt(self, welcome: Welcome, state: CoordinatorState, local_address: str) -> None:
        """Adopt the job as the coordinator describes it, and remember the term in which this node belongs to it."""
        # The file has the node's old number; a node gets a new number each time that it joins.
        last = self._joined
        if last is not None:
            election.remove_cut_off_file(self._job.run_dir, last.term.number, last.number)

        # An agent runs one job only. If the job is another one now, with another run folder, it needs another agent.
        job = replace(self._job, run_dir=Path(welcome.run_dir), resume_command=welcome.resume_command)
        if self._agent is not None and job != self._job:
            self._agent.close()
            self._agent = None

        self._job = job
        self._agent = self._agent or Agent(job, self._host, self._secret)

        # The job saves and exits already. A signal from before would count as a second Ctrl-C.
        if state.preempt_signal:
            self._signals.clear()

        self._search.adopt(job, new_term=last is not None and last.term != welcome.term)
        self._joined = JoinedTerm(welcome.term, welcome.number, state, local_address)

    def _carry_out_orders(self, agent: Agent, connection: Connection, orders: list[ToNode]) -> JobEnd:
        """Carry out orders and send what happens on this node. `orders` came with the welcome."""
        assert self._joined is not None
        next_beat = 0.0

        # Carry out what has arrived, send what has happened, then wait for more.
        while True:
            for message in orders:
                match message:
                    case JobEnd():
                        return message

                    case Announce():
                        if not shares_log():
                            print_line(message.text)

                    case CoordinatorState():
                        self._joined = replace(self._joined, state=message)
                        if message.preempt_signal:
                            self._sent_signals.clear()

                    case Welcome() | Refused():
                        pass  # answers to a node that asks to join: this one has joined already

                    case _:
                        agent.carry_out(message)

            # A signal at any node is meant for the whole job.
            while self._signals:
                self._sent_signals.append(self._signals.pop(0))
                connection.send(SignalReceived(self._sent_signals[-1]))

            for message in agent.poll():
                connection.send(message)

            # A node that is silent for too long is lost.
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + HEARTBEAT_S
                connection.send(agent.heartbeat())

            orders = wait_for_messages(connection, *agent.sockets())


def wait_for_messages(connection: Connection, *others: Any) -> list[ToNode]:
    """Wait a moment, until a message arrives or one of the `others` becomes readable. Return what has arrived.

    Raises Garbled for a message that no coordinator sends.
    """
    wait_readable([connection, *others], LOOP_S)

    messages: list[ToNode] = []
    for message in connection.receive(time.monotonic()):
        if not isinstance(message, ToNode):
            raise Garbled(f"{type(message).__name__} is not for a node")

        messages.append(message)

    return messages
