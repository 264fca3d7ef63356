"""Ends an attempt: because of a failure, because it was asked to save and exit, or at once.

`recovery.py` decides what follows. Here that decision is noted and announced, and all ranks are killed; `NextAttempt`
carries it out when they are gone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.commands import DismissNode, HangUp
from lockstep.launch.decisions.kill_order import KillOrder
from lockstep.launch.decisions.next_attempt import NextAttempt
from lockstep.launch.decisions.recovery import (
    Continue,
    Decision,
    End,
    EndPreempted,
    NodeLoss,
    NodeSituation,
    Restart,
    UndoResize,
    after_failure,
    after_request,
    after_second_ctrl_c,
    node_loss,
)
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import JobStatus
from lockstep.launch.failure import Failure
from lockstep.launch.hangs.suspicion import raise_factor
from lockstep.launch.job import COORDINATOR
from lockstep.launch.wire.messages import JobEnd


class AttemptEnd:
    """Decides what follows the end of an attempt, announces that, and has its ranks killed."""

    def __init__(self, state: JobState, save_requests: SaveRequests, next_attempt: NextAttempt, kill_order: KillOrder):
        self._state = state
        self._save_requests = save_requests
        self._next_attempt = next_attempt
        self._kill_order = kill_order

    # ---- what calls for a decision ----

    def follow_failure(self, failure: Failure, now: float, reached_timeout: bool = False) -> None:
        """Follow a failure: go on without its node, or end the attempt, announce what follows, and kill all ranks.

        `reached_timeout`: ranks hang, or are slow: the next attempt has more time.
        """
        # First the node. If no rank ran there, the job goes on; otherwise its loss is the failure of the attempt.
        state = self._state
        loss = node_loss(failure, self._node_situation(failure.node))
        if loss is not None:
            failure = self._lose_node(failure, loss, now)
            if not self._has_running_ranks(failure.node):
                self._go_on_without(failure, now)
                return

        # Then the attempt, which is over. A smaller micro-batch is asked for only a few times, so that does not count.
        situation = replace(self._state.situation(now), reached_timeout=reached_timeout)
        state.decided = after_failure(failure, situation)
        if isinstance(state.decided, Restart) and not failure.traits.asks_for_smaller_micro_batch:
            state.restarts.count(now, reached_timeout)

        self._show_failure_on_all_nodes(failure, state.decided, now)
        if isinstance(state.decided, UndoResize):
            self._save_requests.undo_resize()

        # In JOIN there are no ranks, and `NextAttempt.tick` carries out the decision.
        if state.status is not JobStatus.JOIN:
            self._kill_order.give(now)

    def _show_failure_on_all_nodes(self, failure: Failure, decision: Decision, now: float) -> None:
        """Show the failure that ends the attempt on the screens of all nodes, and what follows it."""
        match decision:
            case Restart():
                self.announce_failure(failure, self._describe_restart(decision, failure, now))

            # Ranks that took too long to save have not failed: the lines say what they were doing.
            case Continue():
                head = f"{failure.message}; continuing from {self._state.where_to_resume}"
                lines = (f"  {line}" for line in failure.traceback.splitlines())
                self._state.outbox.announce("\n".join([head, *lines]))

            # The size to which the job returns is announced when it is known.
            case UndoResize():
                self.announce_failure(failure)

            case EndPreempted():
                self.announce_failure(failure, f"not restarted: {decision.reason}")

            case End():
                self.announce_failure(failure, self._describe_end(decision, failure))

            case _:
                assert_never(decision)

    def follow_request(self, now: float) -> None:
        """Decide what follows a request to save and exit. It is not a failure: nothing is announced or counted."""
        self._state.decided = after_request(self._state.situation(now), self._state.final_end)

    def end_with_nothing_to_save(self, now: float) -> None:
        """Kill ranks that were asked to save before any of them has ended a step."""
        attempt = self._state.attempt
        assert attempt is not None, "there are ranks to kill"
        attempt.had_nothing_to_save = True
        self.follow_request(now)
        self._kill_order.give(now)

    def call_off_next_attempt(self, now: float) -> None:
        """Follow a signal that comes while no rank trains: no other attempt starts."""
        before = self._state.decided
        self.follow_request(now)

        # A restart may have been announced.
        decided = self._state.decided
        if isinstance(decided, End) and decided != before:
            self._state.outbox.announce(f"not restarted: {decided.reason}. {self._state.how_to_resume}")

    def end_at_once(self, now: float) -> None:
        """End the job after a second Ctrl-C, without a save."""
        self._state.decided = after_second_ctrl_c(self._state.situation(now))
        self._kill_order.give(now)

    def _node_situation(self, node: int | None) -> NodeSituation:
        """Return what decides whether the job loses this node. None: the failure is not that of a node."""
        nodes = self._state.nodes
        in_job = node in nodes.joined
        return NodeSituation(in_job, can_be_spared=in_job and node != COORDINATOR and nodes.can_spare_a_node)

    # ---- a node fewer ----

    def _lose_node(self, failure: Failure, loss: NodeLoss, now: float) -> Failure:
        """Remove the node that has failed from the job. Return its loss as a failure."""
        state, node = self._state, failure.node
        assert node is not None

        # A launcher that is dismissed gets the failure, and ends: that closes its connection.
        if loss.dismissed:
            state.outbox.put(DismissNode(node, JobEnd(ExitCode.FAILED, failure)))
            state.dismissals.count(state.nodes.joined[node].host, now)
            failure = state.nodes.loss_of(node, failure.message)
        else:
            state.outbox.put(HangUp(node))

        # The job no longer waits for this node. (`HangCheck` and the check of slow starts ask who belongs to the job.)
        state.nodes.remove(node, now)

        return failure

    def _has_running_ranks(self, node: int | None) -> bool:
        """Return whether ranks still run on the node that is lost."""
        attempt = self._state.active_attempt
        if attempt is None or node is None:
            return False

        return bool(attempt.running_ranks.intersection(attempt.ranks_on(node)))

    def _go_on_without(self, failure: Failure, now: float) -> None:
        """Announce the loss of a node on which no rank ran. It matters only if too few remain for the next attempt."""
        assert failure.node is not None
        self._state.node_news.announce("lost", failure.host, failure.message, now)
        self._next_attempt.end_if_too_few(now)
        self._kill_order.node_gone(failure.node, now)

    # ---- the announcement ----

    def _describe_restart(self, restart: Restart, failure: Failure, now: float) -> str:
        """Describe the restart that was just counted."""
        state = self._state
        # After a takeover the other nodes have yet to join, so the number of ranks is not known.
        is_known = state.attempt is not None
        what = plural(state.nodes.world_size, "rank") if is_known else "the nodes that are left"

        limits = state.settings.restart
        budget = f"restart {state.restarts.recent(now)} of {limits.per_hour} in an hour"
        in_a_row = state.restarts.in_a_row

        if failure.traits.asks_for_smaller_micro_batch:
            budget = "not counted as a restart"
        elif in_a_row > 1:
            budget += f", {in_a_row} of {limits.max_in_a_row} in a row without a new checkpoint"

        more_time = ""
        if restart.longer_timeouts:
            times = f"{raise_factor(state.restarts.timeouts_reached):,.0f} times as long (hang.first at most)"
            more_time = f"; hang timeouts are {times} until the next checkpoint"

        return f"restarting {what} from {state.where_to_resume} ({budget}){more_time}"

    def _describe_end(self, end: End, failure: Failure) -> str:
        """Return why the job is not restarted, and what to type."""
        # If the same error would most likely recur, no command is suggested.
        would_recur = self._state.checkpoints.newest_step is None and failure.likely_to_repeat
        hint = "" if would_recur else f". {self._state.how_to_resume}"

        return f"not restarted: {end.reason}{hint}"

    def announce_failure(self, failure: Failure, what_follows: str = "") -> None:
        """Announce a failure of the current attempt."""
        # Only ranks that run can end because of it.
        attempt = self._state.active_attempt
        others = attempt.count_ended_by(failure) if attempt is not None else 0

        self._state.outbox.announce_failure(failure, self._state.last_attempt_number, others, what_follows)
