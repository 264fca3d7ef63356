"""Ranks that end: which of them failed first, and when the last one has ended."""

from __future__ import annotations

from lockstep.errors import ExitCode
from lockstep.launch.decisions.failure_handler import FailureHandler
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import (
    ACTIVE,
    COMMIT_S,
    QUIET_S,
    ROOT_WAIT_S,
    STRAGGLER_GRACE_S,
    JobStatus,
)
from lockstep.launch.failure import RankExit
from lockstep.launch.wire.messages import JobEnd, RankExited


class RankExits:
    """Notes how ranks end, and waits for those whose exits may still arrive before it acts on the first failure."""

    def __init__(self, state: JobState, save_requests: SaveRequests, failure_handler: FailureHandler):
        self._state = state
        self._save_requests = save_requests
        self._failure_handler = failure_handler

    def note(self, message: RankExited, now: float) -> None:
        """A rank has ended. A failure is handled at once, unless the exit of another rank may have come first."""
        # Messages of an earlier attempt may still arrive.
        if not self._state.has_running(message.attempt):
            return

        rank_exit = message.exit
        self._state.attempt.exits[message.rank] = rank_exit

        if not rank_exit.clean:
            self._wait_for_root(rank_exit, now)
        elif rank_exit.save:
            self._wait_for_stragglers(now)

        if self._state.attempt.all_exited:
            self._all_exited(now)
        elif self.root_is_known(now):
            self.handle_root(now)

    def _wait_for_root(self, rank_exit: RankExit, now: float) -> None:
        """Set the time by which the exit of a rank that failed earlier must have arrived."""
        seconds = ROOT_WAIT_S[rank_exit.consequence]
        self._state.attempt.root_known_at = min(self._state.attempt.root_known_at, now + seconds)

    def root_is_known(self, now: float) -> bool:
        """Return whether a rank has failed, and the exit of an earlier failure is waited for no longer."""
        return self._state.status in ACTIVE and now >= self._state.attempt.root_known_at

    def handle_root(self, now: float) -> None:
        """Handle the failure of the rank that failed first, unless there is something else to wait for."""
        state, attempt = self._state, self._state.attempt

        # If a node has gone quiet, its loss may have come before an exception: wait until it shows.
        silence = state.members.longest_silence(state.nodes_of_attempt, now)
        quiet = silence > QUIET_S and not attempt.any_died_by_itself

        # If all ranks have written a checkpoint, let rank 0 commit it: the next attempt can start from it.
        can_commit = 0 in attempt.running and state.checkpoints.commit_is_near(len(attempt.ranks))
        commits = can_commit and now < attempt.root_known_at + COMMIT_S
        if not quiet and not commits:
            self._failure_handler.handle(attempt.root_failure(), now)

    def _wait_for_stragglers(self, now: float) -> None:
        """Wait for the other ranks, after one has saved and exited."""
        if self._state.status is not JobStatus.SAVE_AND_EXIT:
            self._save_requests.ranks_were_signalled(now)

        # Ranks that save exit together, unless the signal came before the process group existed: then the rest
        # never will.
        self._state.deadline = min(self._state.deadline, now + STRAGGLER_GRACE_S)

    def _all_exited(self, now: float) -> None:
        """End the job, or begin the next attempt: after a resize, or with a new node."""
        attempt = self._state.attempt
        # The exits of ranks that failed came first: they explain the rest.
        if attempt.has_failed:
            self._failure_handler.handle(attempt.root_failure(), now)
        elif attempt.save is None:
            self._state.end(JobEnd(ExitCode.FINISHED))
        else:
            if attempt.save == "failed":
                step = next(end.save_step for end in attempt.exits.values() if end.save == "failed")
                lost = f"the save of step {step} failed"
                self._state.outbox.say(f"{lost}; the job can only continue from {self._state.where_to_resume}")

            self._failure_handler.follow_request(now)
            self._failure_handler.continue_without_ranks(now)
