"""How a node of a job on several nodes finds the node that coordinates, or becomes that node.

At first the node that can bind the first address of `--join` coordinates. If that node is lost, another node takes
over. The files in the run folder say which node that is (`election.py`).
"""

from __future__ import annotations

import math
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from lockstep.errors import ExitCode, PeersMissing, Preempted, UserError
from lockstep.launch import election
from lockstep.launch.election import CounterWatch, Lease, TakeoverWatch, Term
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import Job, parse_address
from lockstep.launch.terminal import print_line, shares_log
from lockstep.launch.times import DELIVER_S, JOIN_S, LOST_AFTER_S, NO_ANSWER_S, STAGGER_S, within_last_hour
from lockstep.launch.wire.connections import (
    Connection,
    NoAnswer,
    address_of,
    bind_join_address,
    is_taken,
    listen_at,
    reach,
)
from lockstep.launch.wire.messages import CoordinatorState, JobEnd
from lockstep.run_folder.locks import break_locks, hold
from lockstep.run_folder.names import EVENTS
from lockstep.run_folder.start_from import hold_for_new_job
from lockstep.runtime.rendezvous.handshake import Secret

# The pause between two tries to find the coordinator.
SEARCH_RETRY_S = 0.2

# How long the run folder must have no term file before a node concludes that the job is over.
GONE_S = 3.0

# How many times an hour a node reconnects to the same live coordinator: each time, the training is interrupted.
MAX_RECONNECTS = 3


@dataclass(frozen=True)
class JoinedTerm:
    """What a node knows about the term in which it last belonged to the job."""

    term: Term
    number: int  # the node's number in that term
    state: CoordinatorState  # the last one that was received
    local_address: str  # this machine's address on the connection to the coordinator


@dataclass
class CoordinatorRole:
    """What a node needs to coordinate: a listening socket, its term, and the state of the previous coordinator."""

    resources: ExitStack  # holds the run folder and the listening socket until it is closed
    listener: socket.socket
    lease: Lease
    inherited: CoordinatorState | None = None
    failure: Failure | None = None  # the loss of the previous coordinator


# The next step of a node: it follows the coordinator at the other end of a connection, or coordinates, or ends.
NextStep = Connection | CoordinatorRole | JobEnd


class Search:
    """Finds the coordinator of one node: when the node starts, and whenever it has lost the coordinator."""

    def __init__(self, job: Job, host: str, signals: list[str], secret: Secret):
        self._job = job
        self._host = host
        self._signals = signals
        self._secret = secret
        self._addresses = job.addresses

        # When this node has reconnected to the coordinator of its term.
        self._reconnects: list[float] = []

        # Why the last try to reach a coordinator, or to become one, failed.
        self._last_problem = ""

        # When no other program was last seen at the port of this machine.
        self._last_not_taken = -math.inf

    def adopt(self, job: Job, new_term: bool) -> None:
        """Continue with the job as its coordinator describes it. `new_term`: it is another coordinator than before."""
        self._job = job

        # The limit applies to each coordinator.
        if new_term:
            self._reconnects.clear()

    # ---- at the start ----

    def find_coordinator(self) -> NextStep:
        """Connect to the coordinating node; coordinate if there is none and this node has the first address."""
        # The watch learns over several tries whether a term file that is there belongs to a live coordinator.
        began = time.monotonic()
        now = began

        announced = False
        watch = CounterWatch()
        self._last_not_taken = began
        self._last_problem = ""

        # A node may be started minutes before the others, so one that gets no answer tries again for a while.
        while now - began < JOIN_S:
            if self._signals:
                return self._end_on_signal()

            next_step = self._try_once(watch, now)
            if next_step:
                return next_step

            # Most nodes connect at once, and say nothing.
            if not announced and now - began > 1.0:
                announced = True

                term, _ = self._newest_term()
                where = term.address if term else ", ".join(self._addresses)
                problem = f"no answer from {where} yet ({self._last_problem})"
                print_line(f"lockstep: {problem}; trying for {JOIN_S / 60:.0f} minutes")

            time.sleep(SEARCH_RETRY_S)
            now = time.monotonic()

        raise PeersMissing(
            f"--join {self._job.join}: no answer within {JOIN_S / 60:.0f} minutes",
            self._last_problem,
            f"start the same command on the node that has the address {self._addresses[0]}",
        )

    def _try_once(self, watch: CounterWatch, now: float) -> NextStep | None:
        """Try to connect to a coordinator, or to become the first one. Return None if neither is possible now."""
        with ExitStack() as resources:
            # The node that binds the first address coordinates a new job. But it may be returning to a job that another
            # node has taken over, so it first tries the other addresses and the one in the run folder.
            listener = self._claim_first()
            if listener:
                # Unless this node coordinates: then its role takes the listener over.
                resources.callback(listener.close)

            term, readable = self._newest_term()
            connection = self._reach(*self._other_addresses(listener, term))
            if connection:
                return connection

            # No node coordinates if there is no term file, or if its counter stands still: then the job that left it
            # has died.
            self._note_counter(term, watch, now)
            vacant = readable and (term is None or watch.still_for(now) >= NO_ANSWER_S)
            if vacant and listener:
                role = self._start_job(listener, resources)
                if role:
                    return role

            self._check_port(listener, vacant, now)
            return None

    def _note_counter(self, term: Term | None, watch: CounterWatch, now: float) -> None:
        """Note the counter of the newest term."""
        if term is None:
            watch.reset()
        else:
            watch.note(term.number, election.read_counter(self._job.run_dir, term.number), now)

    def _check_port(self, listener: socket.socket | None, vacant: bool, now: float) -> None:
        """Raise an error if another program has listened at this node's port for a while.

        `vacant`: no node coordinates. A coordinator that listens there would have answered.
        """
        if listener or not is_taken(self._addresses[0]):
            self._last_not_taken = now
        elif vacant and now - self._last_not_taken > NO_ANSWER_S:
            # A node of an earlier job that ends slowly may listen there: another try makes sense.
            raise PeersMissing(
                f"--join {self._job.join}: another program on this machine listens at {self._addresses[0]}",
                f"no launcher of this job answered there within {NO_ANSWER_S:.0f} s",
                "use a free port, the same on all nodes",
            )

    def _other_addresses(self, listener: socket.socket | None, term: Term | None) -> list[str]:
        """Return where a coordinator may listen, without the address that this node has bound itself."""
        addresses = self._addresses[1:] if listener else list(self._addresses)

        is_own = term and listener and term.address == address_of(listener)
        if term and not is_own:
            addresses.append(term.address)

        return addresses

    def _claim_first(self) -> socket.socket | None:
        """Bind the first address of --join, if it is this machine's."""
        # Where a platform numbers its nodes, only number 0 may be meant, even if others could bind the address.
        if self._job.node not in (None, 0):
            return None

        try:
            return bind_join_address(self._addresses[0])
        except UserError as error:
            # The name of a lost node may no longer resolve, and a platform may publish a name only after the start.
            term, readable = self._newest_term()
            self._last_problem = f"{error.problem}: {error.found}"
            if len(self._addresses) > 1 or term or not readable or self._job.node is not None:
                return None

            raise

    def _newest_term(self) -> tuple[Term | None, bool]:
        """Return the newest term in the run folder, and whether the folder could be read."""
        try:
            return election.newest_term(self._job.run_dir), True
        except OSError as error:
            self._last_problem = f"the run folder cannot be read: {error.strerror or error}"
            return None, False

    def _reach(self, *addresses: str) -> Connection | None:
        """Connect to the first of these addresses that answers. Return None if none does."""
        for address in dict.fromkeys(addresses):
            try:
                return reach(address, self._job.host, self._secret)
            except NoAnswer as error:
                self._last_problem = str(error)

        return None

    def _start_job(self, listener: socket.socket, resources: ExitStack) -> CoordinatorRole | None:
        """Begin a term of a job that no other node coordinates. Return None if another node was faster.

        `resources` holds the listener; the role takes it over.
        """
        # This comes first: it raises if another job holds the folder, whose term file must stay.
        resources.enter_context(hold_for_new_job(self._job.run_dir, self._job.goes_back_to))
        lease = self._try_term(None, listener)

        return CoordinatorRole(resources.pop_all(), listener, lease) if lease else None

    def _try_term(self, after: int | None, listener: socket.socket) -> Lease | None:
        """Begin a term. Return None if another node was faster, or if the run folder cannot be written."""
        try:
            return election.begin_term(self._job.run_dir, after, self._host, address_of(listener))
        except OSError as error:
            self._last_problem = error.strerror or str(error)
            return None

    def _end_on_signal(self) -> JobEnd:
        """End because of a signal, while this node has no connection to a coordinator."""
        print_line(
            f"lockstep: {self._signals[0]}: ended while no node coordinates; to resume: {self._job.resume_command}"
        )
        return JobEnd(Preempted.code_of(self._signals[0]))

    # ---- after the coordinator was lost ----

    def after_loss(self, last: JoinedTerm, why: str) -> NextStep:
        """Reconnect to the coordinator, join its successor, or become the successor, as the run folder says."""
        watch = TakeoverWatch(last.number, last.state.numbers, LOST_AFTER_S, STAGGER_S)
        began = time.monotonic()
        now = began
        last_seen = began  # when there was last a term file, or a folder that could not be read

        while now - began < JOIN_S:
            term, readable = self._newest_term()

            # A folder that cannot be read says nothing about the job. One without a term file says that its coordinator
            # has ended the job, unless a successor is about to write the next.
            if term is not None or not readable:
                last_seen = now
            elif now - last_seen >= GONE_S:
                return self._job_has_ended()

            # There is a term: its coordinator may be alive, or replaced, or lost.
            if term is None:
                watch.reset()
            elif next_step := self._look_at_term(term, last, watch, now, why):
                return next_step

            # Checked last: a successor that can be joined soon gets the signal, and ends the job on all nodes. If its
            # counter stands still, it is lost as well.
            has_successor = term is not None and term.number > last.term.number and watch.still_for(now) < LOST_AFTER_S
            if self._signals and not (has_successor and now - began < DELIVER_S):
                return self._end_on_signal()

            time.sleep(SEARCH_RETRY_S)
            now = time.monotonic()

        minutes = f"{JOIN_S / 60:.0f} minutes"
        lost = f"the connection to {last.term.address} was lost: {why}"
        return self.end_alone(f"no coordinating node could be reached within {minutes} ({lost})")

    def _look_at_term(
        self, term: Term, last: JoinedTerm, watch: TakeoverWatch, now: float, why: str
    ) -> NextStep | None:
        """Act on the newest term: connect to its coordinator or take over. Return None to wait and look again."""
        run_dir = self._job.run_dir
        watch.note(term.number, election.read_counter(run_dir, term.number), now)

        # The coordinator that this node has lost may still be alive, or another node may have succeeded it.
        alive = watch.is_alive(now)
        still_alive = term.number == last.term.number and alive

        # A node that comes back too often ends: each time the training of all nodes is interrupted.
        if still_alive and len(within_last_hour(self._reconnects, now)) >= MAX_RECONNECTS:
            often = f"this node has returned to it {MAX_RECONNECTS} times within an hour"
            problem = f"this node cannot stay connected to the coordinating node ({last.term.address}): {why}; {often}"
            return self.end_alone(problem, ExitCode.FAILED)

        connection = self._reconnect(term, last, alive)
        if connection:
            return connection

        # The coordinator is alive, but this node cannot reach it; if most nodes say so, one of them takes over.
        if still_alive:
            election.write_cut_off_file(run_dir, term.number, last.number)

        # The coordinator may be lost, or out of reach of most nodes. `now` is from before the attempt to connect: the
        # counter was not watched since, so that time must not count as standing still.
        reason = watch.reason_to_take_over(election.cut_off_nodes(run_dir, term.number), now)
        if reason is None or self._signals:
            return None

        return self._take_over(term, last, f"{why}, and {reason}")

    def _reconnect(self, term: Term, last: JoinedTerm, alive: bool) -> Connection | None:
        """Try to connect to a successor, or, if its counter grows, to the coordinator that this node followed."""
        is_successor = term.number > last.term.number
        connection = self._reach(term.address) if is_successor or alive else None
        if connection is None:
            return None

        if is_successor:
            print_line(f"lockstep: {term.host} ({term.address}) has taken over: joining it")
        else:
            self._reconnects.append(time.monotonic())

        return connection

    def _take_over(self, term: Term, last: JoinedTerm, why: str) -> CoordinatorRole | None:
        """Begin the term after `term`, whose coordinator is lost. Return None if another node was faster."""
        run_dir = self._job.run_dir
        with ExitStack() as resources:
            # The term file says where the others find this node, so it must listen first.
            try:
                listener = resources.enter_context(listen_at(*self._where_to_listen(last.local_address)))
            except OSError as error:
                self._last_problem = error.strerror or str(error)
                return None

            # The term file decides: only one node can create it.
            lease = self._try_term(term.number, listener)
            if lease is None:
                return None

            # The locks are those of the lost coordinator.
            break_locks(run_dir)
            resources.enter_context(hold(run_dir))

            text = f"{self._host} takes over from {term.host} ({term.address}): {why}"
            failure = Failure.by_launcher(LauncherFailure.NODE, text, host=term.host)
            return CoordinatorRole(resources.pop_all(), listener, lease, last.state, failure)

    def _where_to_listen(self, local_address: str) -> tuple[str, int]:
        """Return where this node listens as a successor: at its entry in --join, or at the port of the first entry."""
        _, port = parse_address(self._addresses[0])

        # This machine may have an entry of its own, by name or by address.
        for address in self._addresses:
            host, its_port = parse_address(address)
            with suppress(OSError):
                if local_address in {info[4][0] for info in socket.getaddrinfo(host, None)}:
                    return local_address, its_port

        return local_address, port

    def _job_has_ended(self) -> JobEnd:
        """End this launcher, because there has been no term file for a while."""
        text = f"the job has ended, and this node did not learn how: see {self._job.run_dir / EVENTS}"
        print_line(f"lockstep: {text}. To resume, if it has not finished: {self._job.resume_command}")

        # If the job is to be started again, this node must be there. A job that has finished has nothing left to do.
        return JobEnd(ExitCode.RESTART, Failure.by_launcher(LauncherFailure.NODE, text, host=self._host))

    def end_alone(self, problem: str, code: ExitCode = ExitCode.RESTART) -> JobEnd:
        """End this launcher, because it has no coordinator and does not take over. `problem` is a whole sentence."""
        text = f"{problem}; the ranks here were killed"

        everywhere = "" if shares_log() else ", on every node"
        print_line(f"lockstep: {text}. To resume{everywhere}: {self._job.resume_command}")
        return JobEnd(code, Failure.by_launcher(LauncherFailure.NODE, text, host=self._host))
