"""Ends an attempt: because of a failure, because it was asked to save and exit, or at once.

`recovery.py` decides what follows. Here that decision is noted and announced, and all ranks are killed; `NextAttempt`
carries it out when they are gone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.attempt import Attempt, Attempts
from lockstep.launch.decisions.commands import DismissNode, HangUp, Outbox
from lockstep.launch.decisions.job_facts import JobFacts
from lockstep.launch.decisions.job_nodes import JobNodes
from lockstep.launch.decisions.next_attempt import NextAttempt
from lockstep.launch.decisions.recovery import (
    Continue,
    Decision,
    End,
    EndPreempted,
    NodeLoss,
    Restart,
    UndoResize,
    after_failure,
    after_request,
    after_second_ctrl_c,
    node_loss,
)
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.decisions.status import CurrentStatus, JobStatus
from lockstep.launch.failure import Failure
from lockstep.launch.hangs.suspicion import raise_factor
from lockstep.launch.restarts import Restarts
from lockstep.launch.times import NODES_KILL_S
from lockstep.launch.wire.messages import JobEnd, Kill


class AttemptEnd:
    """Decides what follows the end of an attempt, announces that, and has its ranks killed."""

    def __init__(
        self,
        facts: JobFacts,
        status: CurrentStatus,
        nodes: JobNodes,
        attempts: Attempts,
        restarts: Restarts,
        outbox: Outbox,
        save_requests: SaveRequests,
        next_attempt: NextAttempt,
    ):
        self._facts = facts
        self._status = status
        self._nodes = nodes
        self._attempts = attempts
        self._restarts = restarts
        self._outbox = outbox
        self._save_requests = save_requests
        self._next_attempt = next_attempt

        # The nodes whose ranks were killed, and that have not reported yet that none is left.
        self._awaited: set[int] = set()

    # ---- what calls for a decision ----

    def handle_failure(self, failure: Failure, now: float, reached_timeout: bool = False) -> None:
        """Act on a failure: go on without its node, or end the attempt, announce what follows, and kill all ranks.

        `reached_timeout`: ranks hang, or are slow: the next attempt has more time.
        """
        # First the node. If no rank ran there, the job goes on; otherwise its loss is the failure of the attempt.
        in_job, can_be_spared = failure.node in self._nodes.joined, self._nodes.can_spare(failure.node)
        loss = node_loss(failure, in_job, can_be_spared)
        if loss is not None:
            failure = self._lose_node(failure, loss, now)
            if not self._has_running_ranks(failure.node):
                self._go_on_without(failure, now)
                return

        # Then the attempt, which is over. A smaller micro-batch is asked for only a few times, so that does not count.
        situation = replace(self._next_attempt.situation(now), reached_timeout=reached_timeout)
        decision = after_failure(failure, situation)
        self._next_attempt.note_decision(decision)
        if isinstance(decision, Restart) and not failure.traits.asks_for_smaller_micro_batch:
            self._restarts.count(now, reached_timeout)

        self._show_failure_on_all_nodes(failure, decision, now)
        if isinstance(decision, UndoResize):
            self._save_requests.undo_resize()

        # In JOIN there are no ranks, and `NextAttempt.tick` carries out the decision.
        if self._status.current is not JobStatus.JOIN:
            self._kill_ranks(now)

    def handle_last_exit(self, attempt: Attempt, now: float) -> None:
        """Act on the exit of the last rank: end the job, or go on with another size or a new node."""
        # The exits of ranks that failed came first: they explain the rest.
        if attempt.has_failed:
            self.handle_failure(attempt.root_failure(), now)
            return

        # The ranks were not asked to save: they have finished.
        if attempt.save_outcome is None:
            self._next_attempt.end_job(JobEnd(ExitCode.FINISHED))
            return

        if attempt.save_outcome == "failed":
            failed = next(rank_exit for rank_exit in attempt.exits.values() if rank_exit.save_outcome == "failed")
            lost = f"the save of step {failed.save_step} failed"
            self._outbox.announce(f"{lost}; the job can only continue from {self._facts.where_to_resume}")

        self.decide_after_request(now)
        self._next_attempt.attempt_is_over(now)

    def decide_after_request(self, now: float) -> None:
        """Decide what follows a request to save and exit. It is not a failure: nothing is announced or counted."""
        situation = self._next_attempt.situation(now)
        self._next_attempt.note_decision(after_request(situation, self._next_attempt.final_end))

    def end_with_nothing_to_save(self, now: float) -> None:
        """Kill ranks that were asked to save before any of them has ended a step."""
        attempt = self._attempts.newest
        assert attempt is not None, "there are ranks to kill"
        attempt.had_nothing_to_save = True
        self.decide_after_request(now)
        self._kill_ranks(now)

    def call_off_next_attempt(self, now: float) -> None:
        """Act on a signal that comes while no rank trains: no other attempt starts."""
        before = self._next_attempt.decision
        self.decide_after_request(now)

        # A restart may have been announced.
        end = self._next_attempt.final_end
        if end is not None and end != before:
            self._outbox.announce(f"not restarted: {end.reason}. {self._facts.how_to_resume}")

    def end_at_once(self, now: float) -> None:
        """End the job after a second Ctrl-C, without a save."""
        self._next_attempt.note_decision(after_second_ctrl_c(self._next_attempt.situation(now)))
        self._kill_ranks(now)

    # ---- a node fewer ----

    def _lose_node(self, failure: Failure, loss: NodeLoss, now: float) -> Failure:
        """Remove the node that has failed from the job. Return its loss as a failure."""
        nodes, node = self._nodes, failure.node
        assert node is not None

        # A launcher that is dismissed gets the failure, and ends: that closes its connection.
        if loss == "dismissed":
            self._outbox.put(DismissNode(node, JobEnd(ExitCode.FAILED, failure)))
            nodes.dismissals.count(nodes.joined[node].host, now)
            failure = nodes.loss_of(node, failure.message)
        else:
            self._outbox.put(HangUp(node))

        # The job no longer waits for this node. (`HangCheck` and the check of slow starts ask who belongs to the job.)
        nodes.remove(node, now)

        return failure

    def _has_running_ranks(self, node: int | None) -> bool:
        """Return whether ranks still run on the node that is lost."""
        attempt = self._attempts.active
        if attempt is None or node is None:
            return False

        return bool(attempt.running_ranks.intersection(attempt.ranks_on(node)))

    def _go_on_without(self, failure: Failure, now: float) -> None:
        """Announce the loss of a node on which no rank ran. It matters only if too few remain for the next attempt."""
        assert failure.node is not None
        self._outbox.node_news.announce("lost", failure.host, failure.message, now)
        self._next_attempt.end_if_too_few(now)
        self.ranks_gone(failure.node, now)

    # ---- the ranks are killed ----

    def _kill_ranks(self, now: float) -> None:
        """Order every node to kill its ranks. When none is left, `NextAttempt` goes on."""
        attempt = self._attempts.newest
        assert attempt is not None, "there are ranks to kill"

        self._status.enter(JobStatus.KILL, now + NODES_KILL_S)
        self._awaited = self._attempts.nodes
        self._outbox.send(self._awaited, Kill(attempt.number))
        self._go_on_if_all_are_gone(now)

    def ranks_gone(self, node: int, now: float) -> None:
        """The ranks of a node are gone: they were killed, or the node is lost."""
        self._awaited.discard(node)
        self._go_on_if_all_are_gone(now)

    def _go_on_if_all_are_gone(self, now: float) -> None:
        if self._status.current is JobStatus.KILL and not self._awaited:
            self._next_attempt.attempt_is_over(now)

    @property
    def overdue_nodes(self) -> list[int]:
        """The nodes that have not reported that their killed ranks are gone, when the deadline has passed."""
        return sorted(self._awaited)

    # ---- the announcement ----

    def _show_failure_on_all_nodes(self, failure: Failure, decision: Decision, now: float) -> None:
        """Show the failure that ends the attempt on the screens of all nodes, and what follows it."""
        match decision:
            case Restart():
                self.announce_failure(failure, self._describe_restart(decision, failure, now))

            # Ranks that took too long to save have not failed: the lines say what they were doing.
            case Continue():
                head = f"{failure.message}; continuing from {self._facts.where_to_resume}"
                lines = (f"  {line}" for line in failure.traceback.splitlines())
                self._outbox.announce("\n".join([head, *lines]))

            # The size to which the job returns is announced when it is known.
            case UndoResize():
                self.announce_failure(failure)

            case EndPreempted():
                self.announce_failure(failure, f"not restarted: {decision.reason}")

            case End():
                self.announce_failure(failure, self._describe_end(decision, failure))

            case _:
                assert_never(decision)

    def _describe_restart(self, restart: Restart, failure: Failure, now: float) -> str:
        """Describe the restart that was just counted."""
        # After a takeover the other nodes have yet to join, so the number of ranks is not known.
        is_known = self._attempts.newest is not None
        what = plural(self._nodes.world_size, "rank") if is_known else "the nodes that are left"

        limits, restarts = self._facts.settings.restart, self._restarts
        budget = f"restart {restarts.recent(now)} of {limits.per_hour} in an hour"

        if failure.traits.asks_for_smaller_micro_batch:
            budget = "not counted as a restart"
        elif restarts.in_a_row > 1:
            budget += f", {restarts.in_a_row} of {limits.max_in_a_row} in a row without a new checkpoint"

        more_time = ""
        if restart.longer_timeouts:
            times = f"{raise_factor(restarts.timeouts_reached):,.0f} times as long (hang.first at most)"
            more_time = f"; hang timeouts are {times} until the next checkpoint"

        return f"restarting {what} from {self._facts.where_to_resume} ({budget}){more_time}"

    def _describe_end(self, end: End, failure: Failure) -> str:
        """Return why the job is not restarted, and what to type."""
        # If the same error would most likely recur, no command is suggested.
        would_recur = self._facts.newest_step is None and failure.likely_to_repeat
        hint = "" if would_recur else f". {self._facts.how_to_resume}"

        return f"not restarted: {end.reason}{hint}"

    def announce_failure(self, failure: Failure, what_follows: str = "") -> None:
        """Announce a failure of the current attempt."""
        # Only ranks that run can end because of it.
        attempt = self._attempts.active
        others = attempt.count_ended_by(failure) if attempt is not None else 0

        self._outbox.announce_failure(failure, self._attempts.last_number, others, what_follows)
