"""The coordinator of a job: the state machine decides, and the coordinator carries out its commands.

It runs in the launcher of one node. On several nodes `nodes/search.py` finds out in which.
"""

from __future__ import annotations

import socket
import time
from contextlib import closing
from functools import partial
from typing import assert_never

from lockstep.launch.agent import Agent
from lockstep.launch.decisions.commands import Command, DismissNode, HangUp, RecordEvent, Send, StartAttempt
from lockstep.launch.decisions.job_nodes import Node
from lockstep.launch.decisions.state_machine import JobStateMachine
from lockstep.launch.election import Lease
from lockstep.launch.failure import Failure
from lockstep.launch.folder_watch import FolderWatch
from lockstep.launch.job import COORDINATOR, Job
from lockstep.launch.terminal import print_line
from lockstep.launch.times import HEARTBEAT_S, LATE_S, LOOP_S
from lockstep.launch.validation import problem_with, refusal_of
from lockstep.launch.wire.acceptor import Acceptor, Rejection
from lockstep.launch.wire.connections import ConnectionLost, Hub, local_address
from lockstep.launch.wire.messages import (
    Announce,
    CoordinatorState,
    Hello,
    JobEnd,
    Message,
    NodeHeartbeat,
    Order,
    RankExited,
    Start,
    ToCoordinator,
    ToNode,
    Welcome,
)
from lockstep.launch.wire.sockets import wait_readable
from lockstep.launch.wire.store_server import AttemptStore
from lockstep.run_folder.events import append_event
from lockstep.run_folder.names import RESIZE_REQUEST
from lockstep.run_folder.resize import size_in


class Coordinator:
    """Runs the ranks of its node, exchanges messages with the other nodes and carries out the state machine's commands.

    On several nodes it has a `listener` and a `lease`. After a takeover it has the state of its predecessor
    (`inherited`), and the loss of that predecessor as a `failure`: the state machine decides whether the job restarts.
    """

    def __init__(
        self,
        job: Job,
        agent: Agent,
        signals: list[str],
        listener: socket.socket | None = None,
        lease: Lease | None = None,
        inherited: CoordinatorState | None = None,
        failure: Failure | None = None,
    ):
        self._job = job
        self._agent = agent
        self._signals = signals

        # The other nodes connect to `listener`.
        self._acceptor: Acceptor | None = None
        if listener is not None:
            assert agent.secret is not None
            announce = partial(self._announce_unknown_peer, f"--join {job.join}")
            self._acceptor = Acceptor.for_nodes(listener, agent.secret, job.nnodes.most, announce)

        self._hub = Hub(self._acceptor)

        # Where the ranks of the current attempt meet.
        address = local_address(listener) if listener else "127.0.0.1"
        self._store = AttemptStore(address, agent.secret, partial(self._announce_unknown_peer, "the ranks' store"))

        self._lease = lease
        self._predecessors_loss = failure

        # A thread looks at the run folder, which may be on a disk that answers slowly.
        self._watch = FolderWatch(job.run_dir, lease)

        now = time.monotonic()
        self._state_machine = JobStateMachine(job, self._watch.checkpoints, now, inherited)

        # These change from one iteration to the next.
        self._newcomers: list[int] = []  # nodes that were welcomed in this iteration, and have no state yet
        self._check_due = now
        self._heartbeat_due = now
        self._final_end_sent = False  # whether the other nodes know how the job ends, while ranks are still killed
        self._ending: JobEnd | None = None  # set by the last command

        # The signals that this launcher received. If another node takes over, its coordinator must get them.
        self.received_signals: list[str] = []

    def run(self) -> JobEnd | None:
        """Return how the job ended; None if another node has taken it over."""
        with closing(self._hub):
            with closing(self._watch):
                self._begin()

                # Until the last command, or until another node has taken over. In both cases no rank may be left here.
                self._watch.start()
                while self._ending is None and not self._watch.superseded:
                    self._iterate()

                self._agent.kill_and_wait()
                self._store.close()

            # Removing the term file tells the others that the job has ended. After an exception it stays, so that
            # another node takes over.
            if self._lease and not self._watch.superseded:
                self._lease.end()

        if self._acceptor and self._acceptor.rejected:
            append_event(self._job.run_dir, {"event": "unknown_peers", "counts": self._acceptor.rejected})

        return self._ending

    @property
    def coordinator_state(self) -> CoordinatorState:
        """The state from which a successor of this coordinator would start."""
        return self._state_machine.coordinator_state(time.monotonic())

    def _begin(self) -> None:
        """Join this node to its own job, like any other node, and note the loss of a predecessor."""
        self._watch.refresh()
        now = time.monotonic()
        self._state_machine.note_checkpoints(self._watch.checkpoints)
        self._state_machine.node_joined(Node(COORDINATOR, self._agent.host, self._agent.nproc), now)
        if self._predecessors_loss is not None:
            self._state_machine.took_over(self._predecessors_loss, now)

    # ---- the loop ----

    def _iterate(self) -> None:
        """Collect what happened, hand it to the state machine and carry out its commands."""
        now = time.monotonic()
        wait_readable(self._agent.sockets() + self._hub.sockets(now) + self._store.sockets(now), LOOP_S)

        now = time.monotonic()
        messages = self._agent.poll()
        from_nodes = self._hub.poll(now)

        # A decision needs the newest state of the disk, which may take long to answer. The iteration begins after that
        # wait: it must not look as if this process had been halted.
        if self._must_refresh(messages, from_nodes, now):
            self._send_heartbeat()
            self._watch.refresh()
            now = time.monotonic()

        # A coordinator that was superseded must not act on what has arrived.
        if self._watch.superseded:
            return

        self._watch.note_iteration(now)

        # What happened goes in first, so that the deadlines below are judged by all that is known.
        self._state_machine.note_checkpoints(self._watch.checkpoints)
        self._receive_all(messages, from_nodes, now)
        self._store.poll(now)
        self._poll_folder(now)

        # Once a second take the heartbeat of this node, and look for ranks that have nothing to save, or stall.
        if now >= self._check_due:
            self._check_due = now + HEARTBEAT_S
            self._state_machine.receive(COORDINATOR, self._agent.heartbeat(), now)
            self._state_machine.kill_if_nothing_to_save(now)
            self._state_machine.check_for_hangs(now)

        # Let the state machine check its deadlines, then carry out all commands of this iteration.
        self._state_machine.tick(now)
        self._send_heartbeat()
        for command in self._state_machine.take_commands():
            self._carry_out(command)

    def _send_heartbeat(self) -> None:
        """Send the coordinator's heartbeat to the other nodes, if it is due.

        Two things may hold up the loop: a disk, and the stacks of ranks. This is called before each of them, so that
        the two waits do not add up (`times.py`). It orders nothing, so a superseded coordinator may send it.
        """
        now = time.monotonic()
        # A successor must not restart a job that has failed, if this node is lost before its next heartbeat.
        has_final_end = self._state_machine.final_end is not None
        if now >= self._heartbeat_due or (has_final_end and not self._final_end_sent):
            self._final_end_sent = has_final_end
            self._heartbeat_due = now + HEARTBEAT_S
            self._send_to_nodes(self.coordinator_state)

    def _must_refresh(
        self, messages: list[ToCoordinator], from_nodes: list[tuple[int, Message | ConnectionLost]], now: float
    ) -> bool:
        """Return whether a decision may follow, which must not depend on what the disk showed up to a second ago.

        That is so if anything but heartbeats has arrived, if something is due, or if this process was halted.
        """
        arrived = [*messages, *(message for _, message in from_nodes)]
        news = any(not isinstance(message, NodeHeartbeat) for message in arrived) or self._signals
        return bool(news) or now >= self._state_machine.next_due or now - self._watch.last_iteration_at > LATE_S

    def _receive_all(
        self, messages: list[ToCoordinator], from_nodes: list[tuple[int, Message | ConnectionLost]], now: float
    ) -> None:
        """Handle the signals of this launcher, the messages of its agent, and those of the other nodes."""
        while self._signals:
            self.received_signals.append(self._signals.pop(0))
            self._state_machine.preempt_requested(self.received_signals[-1], now)

        for message in messages:
            self._state_machine.receive(COORDINATOR, message, now)

        for node, message in from_nodes:
            self._receive_from_node(node, message, now)

        # One state for all nodes that have joined in this iteration.
        if self._newcomers:
            self._hub.send_to_all(self._newcomers, self.coordinator_state)
            self._newcomers.clear()

    def _announce_unknown_peer(self, where: str, rejection: Rejection) -> None:
        """Print the first peer that is rejected for each reason, but nothing that it has sent."""
        source = f" from {rejection.address}" if rejection.address else ""
        what = f"an unknown peer{source} at {where} {rejection.reason}"
        print_line(f"lockstep: {what}; later ones of this kind are only counted")
        self._watch.record_event({"event": "unknown_peer", "reason": rejection.reason, "from": rejection.address})

    def _poll_folder(self, now: float) -> None:
        """Act on what the thread has found in the run folder."""
        watch = self._watch
        if watch.error is not None:
            raise watch.error

        folder = self._job.run_dir
        # Report this only once, because the user may move the folder back.
        if watch.take_removed():
            what = f"run_dir={folder} was removed or replaced while the job runs: nothing can be saved there"
            print_line(f"lockstep: {what}; end the job, or move the folder back: anything trained until then is lost")

        # `lockstep resize` leaves a file, whose text the thread has read.
        while watch.resize_requests:
            text = watch.resize_requests.popleft()
            count = size_in(text)
            if count is not None:
                self._state_machine.resize_requested(count, now)
            else:
                print_line(f"lockstep: {folder / RESIZE_REQUEST} must hold a number; it held {text[:80]!r}")

    # ---- messages of nodes ----

    def _receive_from_node(self, node: int, message: Message | ConnectionLost, now: float) -> None:
        """Handle a message from another node. One that sends nonsense is lost; the job continues."""
        match message:
            case ConnectionLost():
                self._state_machine.node_lost(node, str(message), now)

            # If it joined twice, the ranks would be asked to save for nothing.
            case Hello() if node in self._state_machine.nodes.joined:
                self._state_machine.node_lost(node, "it asked to join a second time", now)
            case Hello():
                self._admit(node, message, now)

            case _ if node not in self._state_machine.nodes.joined:
                pass  # from a node that was refused, or that is lost
            case _ if problem := problem_with(message, node, self._state_machine.attempts.newest):
                self._state_machine.node_lost(node, f"it sent an invalid message ({problem})", now)

            # Failures are compared by time, so convert the time to this machine's clock.
            case RankExited():
                self._state_machine.receive(node, message.in_time_of(time.time()), now)

            case _:
                assert isinstance(message, ToCoordinator), "`problem_with` has refused anything else"
                self._state_machine.receive(node, message, now)

    def _admit(self, node: int, hello: Hello, now: float) -> None:
        """Let a node join the job, or refuse it."""
        lease = self._lease
        assert lease is not None, "on a single node no other can join"

        # The node may have reconnected before we noticed that its old connection was dead. Then it replaces itself. In
        # the message of a node that has not joined before, the number is COORDINATOR.
        state_machine, nodes = self._state_machine, self._state_machine.nodes
        had_number = hello.number != COORDINATOR and hello.term == lease.term.number
        returns = had_number and hello.number in nodes.joined

        # A refused node prints the reason and ends, which closes the connection.
        barred = nodes.dismissals.are_too_many(hello.host, now)
        refused = refusal_of(hello, self._job, full=nodes.full and not returns, dismissed=barred)
        if refused:
            if returns:
                state_machine.node_lost(hello.number, "it has made a new connection", now)

            self._hub.send(node, refused)
            return

        job = self._job
        self._hub.send(node, Welcome(str(job.run_dir), job.resume_command, node, lease.term))

        # A node that returns replaces itself: it is not lost, and does not count twice.
        joining = Node(node, hello.host, hello.nproc)
        if returns:
            state_machine.node_returned(hello.number, joining, now)
        else:
            state_machine.node_joined(joining, now)

        self._newcomers.append(node)

    # ---- commands of the state machine ----

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartAttempt():
                self._start_attempt(command)

            case Send():
                self._send(command.node, command.order)

            case DismissNode():
                self._hub.send(command.node, command.ending)

            case HangUp():
                self._hub.hang_up(command.node)

            case RecordEvent():
                self._watch.record_event(command.event)

            case Announce():
                print_line(command.text)
                self._send_to_nodes(command)

            case JobEnd():
                self._send_to_nodes(command)
                self._ending = command

            case _:
                assert_never(command)

    def _start_attempt(self, command: StartAttempt) -> None:
        """Start the ranks on all nodes."""
        # The thread may have noticed it in the meantime. Rank 0 looks as well, once a second.
        if self._watch.superseded:
            return

        # If this node is lost before its next heartbeat, its successor must know the number of this attempt.
        self._send_to_nodes(self.coordinator_state)

        world_size = sum(len(ranks) for ranks in command.ranks_on.values())
        rendezvous = self._store.open(len(command.ranks_on), world_size)

        starts: dict[int, Start] = {}
        for group_rank, (node, ranks) in enumerate(command.ranks_on.items()):
            starts[node] = Start(command.attempt_number, ranks.start, len(ranks), world_size, group_rank, rendezvous)

        # This node comes last: it starts its ranks at once, on a disk that may answer slowly.
        for node in sorted(starts, key=lambda node: node == COORDINATOR):
            self._send(node, starts[node])

    def _send(self, node: int, order: Order) -> None:
        """Send an order to a node; this node's agent carries it out at once."""
        if node == COORDINATOR:
            self._agent.carry_out(order)
        else:
            self._hub.send(node, order)

    def _send_to_nodes(self, message: ToNode) -> None:
        """Send a message to all other nodes; the hub skips this one."""
        self._hub.send_to_all(self._state_machine.nodes.joined, message)
