"""Notes the exits of ranks, finds the one that failed first, and notices when the last one has exited."""

from __future__ import annotations

import math

from lockstep.launch.decisions.attempt import Attempt, Attempts
from lockstep.launch.decisions.attempt_end import AttemptEnd
from lockstep.launch.decisions.job_facts import JobFacts
from lockstep.launch.decisions.job_nodes import JobNodes
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.failure import LostPeer
from lockstep.launch.times import LATE_S
from lockstep.launch.wire.messages import RankExited

# After a failure, how long to wait for the exit of a peer that may have failed first, unless the rank was ended from
# outside. If it seems that a peer is gone, that is longer: a large process takes a while to die.
ROOT_WAIT_S: dict[LostPeer, float] = {"no": 1.0, "unread": 5.0, "yes": 5.0}

# After that wait, or after the death of another rank, how long rank 0 may take to commit a checkpoint that all ranks
# have written.
COMMIT_S = 3.0


class RankExits:
    """Notes how ranks exit. Before it acts on a failure, it waits for exits that may show an earlier one."""

    def __init__(
        self,
        facts: JobFacts,
        nodes: JobNodes,
        attempts: Attempts,
        save_requests: SaveRequests,
        attempt_end: AttemptEnd,
    ):
        self._facts = facts
        self._nodes = nodes
        self._attempts = attempts
        self._save_requests = save_requests
        self._attempt_end = attempt_end

    def rank_exited(self, message: RankExited, now: float) -> None:
        """A rank has exited. A failure is handled at once, unless the exit of another rank may have come first."""
        # Messages of an earlier attempt may still arrive.
        attempt = self._attempts.active
        if attempt is None or message.attempt != attempt.number:
            return

        rank_exit = message.exit
        attempt.exits[message.rank] = rank_exit

        # The exit of a rank that failed earlier must arrive within this time.
        failure = rank_exit.failure
        if failure is not None:
            wait = 0.0 if failure.from_outside else ROOT_WAIT_S[failure.lost_peer]
            attempt.choose_root_at = min(attempt.choose_root_at, now + wait)
        elif rank_exit.save_outcome:
            self._save_requests.rank_exited_as_asked(now)

        if attempt.all_exited:
            self._attempt_end.handle_last_exit(attempt, now)
        elif now >= self.due:
            self.handle_root_failure_if_sure(now)

    @property
    def due(self) -> float:
        """When the wait for the exit of an earlier failure is over; infinite if no rank has failed."""
        attempt = self._attempts.active
        return math.inf if attempt is None else attempt.choose_root_at

    def handle_root_failure_if_sure(self, now: float) -> None:
        """Handle the root failure, unless another cause may still show: `tick` then calls this again."""
        attempt = self._attempts.newest
        assert attempt is not None

        if not self._node_may_be_lost(attempt, now) and not self._commit_is_near(attempt, now):
            self._attempt_end.handle_failure(attempt.root_failure(), now)

    def _node_may_be_lost(self, attempt: Attempt, now: float) -> bool:
        """Return whether a node has gone quiet, whose loss may have caused the exception of a rank.

        The node will answer, or count as lost. A rank that was ended from outside needs no such cause.
        """
        silence = self._nodes.longest_silence(self._attempts.nodes, now)
        return silence > LATE_S and not attempt.any_ended_from_outside

    def _commit_is_near(self, attempt: Attempt, now: float) -> bool:
        """Return whether rank 0 may soon commit a checkpoint that all ranks have written.

        The next attempt can start from it.
        """
        commits = 0 in attempt.running_ranks and self._facts.checkpoints.commit_is_near(len(attempt.ranks))
        return commits and now < attempt.choose_root_at + COMMIT_S
