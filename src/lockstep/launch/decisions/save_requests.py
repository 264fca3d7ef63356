"""Requests to running ranks to save and exit: to end the job, to resize it, or to include a new node."""

from __future__ import annotations

import math

from lockstep.errors import Preempted, plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import JobStatus
from lockstep.launch.times import OTHER_SAVES_S
from lockstep.launch.wire.messages import JobEnd, Prepare, SaveAndExit


class SaveRequests:
    """Asks the ranks to save and exit, and notes the signal that asks the whole job to end."""

    def __init__(self, state: JobState):
        self._state = state

        # When Ctrl-C was first typed, None if it was not, and the nodes that have received it. One that was typed
        # before a takeover is long ago, and its nodes are not known.
        self._sigint_at: float | None = -math.inf if state.preempt_signal == "SIGINT" else None
        self._sigint_nodes: set[int] = set()

        # The step of the newest checkpoint when the ranks were asked to save: they have yet to save another one.
        self._newest_when_asked: int | None = None

    # ---- reasons to ask ----

    def note_signal(self, signal: str, node: int, now: float) -> bool:
        """Note a signal at a node. Return whether it is a second Ctrl-C; one that was sent to all nodes counts once."""
        self._state.preempt_signal = self._state.preempt_signal or signal

        # Schedulers send SIGTERM more than once, so a second SIGTERM means nothing new.
        if signal != "SIGINT":
            return False

        # The first one. Some tools send the same Ctrl-C to all nodes: another node may receive it within a second.
        if self._sigint_at is None:
            self._sigint_at = now
            self._sigint_nodes.add(node)
            return False

        is_second = node in self._sigint_nodes or now - self._sigint_at >= 1.0
        self._sigint_nodes.add(node)
        return is_second

    def include_new_node(self, now: float) -> None:
        """Have running ranks save, so that the next attempt can include a node that has joined."""
        # If a rank has failed, they cannot save together any more. The restart includes the node.
        if self._state.status is JobStatus.RUN and self._state.healthy_attempt is not None:
            self._state.outbox.announce("asking the ranks to save, to continue with the new node")
            self.ask_ranks(now)

    def resize(self, ranks: int, now: float) -> None:
        """Continue with another number of ranks, after a save."""
        nodes, outbox = self._state.nodes, self._state.outbox
        bounds = nodes.rank_bounds

        # No other attempt will start.
        if self._state.preempt_signal or self._state.final_end:
            outbox.announce(f"not resized to {plural(ranks, 'rank')}: the job is ending")
            return

        # A number that the nodes cannot run is refused, and the job goes on as it is.
        if not bounds.least <= ranks <= bounds.most:
            outbox.announce(f"not resized to {plural(ranks, 'rank')}: --nproc allows {bounds} in all")
            return

        # The same number may be divided over the nodes in another way; that waits for the next attempt.
        before = nodes.world_size
        if before == ranks:
            nodes.resize(ranks)
            return

        outbox.announce(f"from {before} to {plural(ranks, 'rank')}: asking the ranks to save")
        nodes.resize(ranks)
        outbox.record_resize(before, nodes.world_size)

        # The size of this attempt is known to work, if there is one.
        if self._state.attempt is not None:
            self._state.before_resize = self._state.attempt

        # Nodes can import torch for the new ranks while the current ranks still save.
        for node, count in nodes.ranks_per_node.items():
            outbox.send([node], Prepare(count))

        if self._state.status is JobStatus.RUN:
            self.ask_ranks(now)

    def undo_resize(self) -> None:
        """Return to the size before the last resize, and say so."""
        nodes, outbox, before = self._state.nodes, self._state.outbox, self._state.before_resize
        assert before is not None
        failed = nodes.world_size
        nodes.ranks_per_node = dict(before.counts)
        self._state.before_resize = None

        ranks = nodes.world_size
        outbox.announce(f"not resized to {plural(failed, 'rank')}: continuing with {plural(ranks, 'rank')}")
        outbox.record_resize(failed, ranks)

    # ---- asking, and the end ----

    def ask_ranks(self, now: float) -> None:
        """Have the ranks save and exit; they are killed when the grace period is over."""
        self._await_exits(now)

        attempt = self._state.attempt
        assert attempt is not None, "there are ranks to ask"
        self._state.order(SaveAndExit(attempt.number, self._state.preempt_signal))

    def rank_exited_as_asked(self, now: float) -> None:
        """A rank has saved and exited, so the others must follow soon. If it was not asked here, the job ends."""
        # The scheduler has signalled the ranks directly, bypassing the launcher. They do not say which signal it was.
        if self._state.status is not JobStatus.SAVE_AND_EXIT:
            self._state.preempt_signal = "SIGTERM"
            self._await_exits(now)

        # Ranks that save exit together, unless the signal came before the process group existed: then the rest
        # never will.
        self._state.shorten_deadline(now + OTHER_SAVES_S)

    @property
    def nothing_to_save(self) -> bool:
        """Whether the ranks were asked to save before any of them has ended a step: they may still compile for long."""
        state, attempt = self._state, self._state.healthy_attempt
        if state.status is not JobStatus.SAVE_AND_EXIT or attempt is None:
            return False

        return attempt.watchdog.nothing_to_save(attempt.running_ranks)

    def _await_exits(self, now: float) -> None:
        """Wait for the ranks to save and exit."""
        self._newest_when_asked = self._state.checkpoints.newest_step
        self._state.enter(JobStatus.SAVE_AND_EXIT, now + self._state.settings.restart.grace)

    def end_job(self) -> None:
        """End the job as preempted, because a signal asked for it and no rank runs any more."""
        state = self._state
        step = state.checkpoints.newest_step

        state.outbox.announce(f"{self._describe_end(step)}; to resume: {state.job.resume_command}")
        state.outbox.record_event("preempted", signal=state.preempt_signal, step=step)
        state.end(JobEnd(Preempted.code_of(state.preempt_signal)))

    def _describe_end(self, newest_step: int | None) -> str:
        """Return whether the job has saved before its end. `newest_step` is that of the newest checkpoint."""
        attempt = self._state.attempt

        if newest_step is None:
            return "ended before anything was saved"

        # The ranks of a lost coordinator may have saved it, or not.
        if attempt is None and self._state.last_attempt_number is not None:
            return f"ended after a takeover; the newest checkpoint is of step {newest_step}"

        if attempt is not None and self._saved_as_asked(attempt, newest_step):
            return f"saved at step {newest_step}"

        return f"ended without another save; the newest checkpoint is of step {newest_step}"

    def _saved_as_asked(self, attempt: Attempt, newest_step: int) -> bool:
        """Return whether the newest checkpoint is the one that the ranks were asked for, and not an older one."""
        if attempt.save_outcome == "saved":
            return True

        # The ranks may have saved, and then not have exited as they were asked to.
        is_new = newest_step != self._newest_when_asked
        return is_new and attempt.has_saved(newest_step) and attempt.save_outcome != "failed"
