"""Requests to running ranks to save and exit: to end the job, to resize it, or to include a new node."""

from __future__ import annotations

import math

from lockstep.errors import Preempted, plural
from lockstep.launch.decisions.attempt import Attempt, Attempts
from lockstep.launch.decisions.commands import Outbox
from lockstep.launch.decisions.job_facts import JobFacts
from lockstep.launch.decisions.job_nodes import JobNodes
from lockstep.launch.decisions.status import CurrentStatus, JobStatus
from lockstep.launch.times import OTHER_SAVES_S
from lockstep.launch.wire.messages import JobEnd, Prepare, SaveAndExit


class SaveRequests:
    """Asks the ranks to save and exit, and notes the signal that asks the whole job to end."""

    def __init__(
        self,
        facts: JobFacts,
        status: CurrentStatus,
        nodes: JobNodes,
        attempts: Attempts,
        outbox: Outbox,
        preempt_signal: str | None,
    ):
        self._facts = facts
        self._status = status
        self._nodes = nodes
        self._attempts = attempts
        self._outbox = outbox

        # The first signal that asks the whole job to end, perhaps before a takeover. From then on no attempt starts.
        self.preempt_signal = preempt_signal

        # The last attempt before a resize: if the one after it fails, the job returns to its size.
        self._before_resize: Attempt | None = None

        # When Ctrl-C was first typed, None if it was not, and the nodes that have received it. If that was before a
        # takeover, neither is known: it counts as long ago.
        self._sigint_at: float | None = -math.inf if preempt_signal == "SIGINT" else None
        self._sigint_nodes: set[int] = set()

        # The step of the newest checkpoint when the ranks were asked to save: they have yet to save another one.
        self._newest_when_asked: int | None = None

    # ---- reasons to ask ----

    def note_signal(self, signal: str, node: int, now: float) -> bool:
        """Note a signal at a node. Return whether it is a second Ctrl-C; one that was sent to all nodes counts once."""
        self.preempt_signal = self.preempt_signal or signal

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
        if self._status.current is JobStatus.RUN and self._attempts.healthy is not None:
            self._outbox.announce("asking the ranks to save, to continue with the new node")
            self.ask_ranks(now)

    def resize(self, ranks: int, now: float) -> None:
        """Continue with another number of ranks, after a save."""
        nodes, outbox = self._nodes, self._outbox
        bounds = nodes.rank_bounds

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
        self._before_resize = self._attempts.newest or self._before_resize

        # Nodes can import torch for the new ranks while the current ranks still save.
        for node, count in nodes.ranks_per_node.items():
            outbox.send([node], Prepare(count))

        if self._status.current is JobStatus.RUN:
            self.ask_ranks(now)

    @property
    def first_after_resize(self) -> bool:
        """Whether the newest attempt is the first one after a resize, on the same nodes as before it."""
        before = self._before_resize
        if before is None or self._attempts.last_number != before.number + 1:
            return False

        return before.counts.keys() == self._nodes.ranks_per_node.keys()

    def undo_resize(self) -> None:
        """Return to the size before the last resize, and say so."""
        nodes, outbox, before = self._nodes, self._outbox, self._before_resize
        assert before is not None
        failed = nodes.world_size
        nodes.ranks_per_node = dict(before.counts)
        self._before_resize = None

        ranks = nodes.world_size
        outbox.announce(f"not resized to {plural(failed, 'rank')}: continuing with {plural(ranks, 'rank')}")
        outbox.record_resize(failed, ranks)

    # ---- asking, and the end ----

    def announce_signal(self, signal: str) -> None:
        """Announce that the ranks are asked to save and exit because of a signal."""
        attempt = self._attempts.newest
        ranks = plural(len(attempt.ranks) if attempt is not None else 0, "rank")
        grace = f"{self._facts.settings.restart.grace:g} s, restart.grace"
        self._outbox.announce(f"{signal}: asking {ranks} to save and exit ({grace}; Ctrl-C twice: at once)")

    def ask_ranks(self, now: float) -> None:
        """Have the ranks save and exit; they are killed when the grace period is over."""
        self._await_exits(now)

        attempt = self._attempts.newest
        assert attempt is not None, "there are ranks to ask"
        self._outbox.send(self._attempts.nodes, SaveAndExit(attempt.number, self.preempt_signal))

    def rank_exited_as_asked(self, now: float) -> None:
        """A rank has saved and exited, so the others must follow soon. If it was not asked here, the job ends."""
        # The scheduler has signalled the ranks directly, bypassing the launcher. They do not say which signal it was.
        if not self._attempts.asked_to_save:
            self.preempt_signal = "SIGTERM"
            self._await_exits(now)

        # Ranks that save exit together, unless the signal came before the process group existed: then the rest
        # never will.
        self._status.shorten_deadline(now + OTHER_SAVES_S)

    @property
    def nothing_to_save(self) -> bool:
        """Whether the ranks were asked to save before any of them has ended a step: they may still compile for long."""
        attempt = self._attempts.healthy
        if not self._attempts.asked_to_save or attempt is None:
            return False

        return attempt.watchdog.nothing_to_save(attempt.running_ranks)

    def _await_exits(self, now: float) -> None:
        """Wait for the ranks to save and exit."""
        self._newest_when_asked = self._facts.newest_step
        self._status.enter(JobStatus.SAVE_AND_EXIT, now + self._facts.settings.restart.grace)

    def announce_end(self) -> JobEnd:
        """Announce that the job ends because a signal asked for it, and return that end. No rank runs any more."""
        step = self._facts.newest_step
        self._outbox.announce(f"{self._describe_end(step)}; to resume: {self._facts.job.resume_command}")
        self._outbox.record_event("preempted", signal=self.preempt_signal, step=step)
        return JobEnd(Preempted.code_of(self.preempt_signal))

    def _describe_end(self, newest_step: int | None) -> str:
        """Return whether the job has saved before its end. `newest_step` is that of the newest checkpoint."""
        attempt = self._attempts.newest

        if newest_step is None:
            return "ended before anything was saved"

        # The ranks of a lost coordinator may have saved it, or not.
        if attempt is None and self._attempts.last_number is not None:
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
