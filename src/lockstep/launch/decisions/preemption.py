"""Running ranks that are asked to save and exit: the job is to end, to have another size, or to include a new node."""

from __future__ import annotations

import math
from functools import partial

from lockstep.errors import Preempted, plural
from lockstep.launch.decisions.phases import JobPhase
from lockstep.launch.decisions.state import JobState
from lockstep.launch.wire.messages import JobEnd, Preempt, Prepare

# A SIGINT at another node within this time is the same Ctrl-C: some tools send it to all nodes.
SAME_SIGINT_S = 1.0

# The phases in which ranks can be asked to save and exit, and have not been.
CAN_PREEMPT = (JobPhase.RUN, JobPhase.COLLECT_STACKS)


class Preemption:
    """Asks the ranks to save and exit, and remembers the signal that asked the whole job to.

    `inherited` is a signal that came before a takeover.
    """

    def __init__(self, state: JobState, inherited: str | None):
        self._state = state

        # The first signal. From then on no attempt is started.
        self.signal = inherited

        # When Ctrl-C was first typed, and the nodes that have received it; after a takeover the nodes are not known.
        self._sigint_at = -math.inf if inherited == "SIGINT" else math.inf
        self._sigint_nodes: set[int] = set()

    # ---- reasons to ask ----

    def note_signal(self, signal: str, node: int, now: float) -> bool:
        """Note a signal at a node. Return whether it is a second Ctrl-C; one that was sent to all nodes counts once."""
        self.signal = self.signal or signal

        # Schedulers send SIGTERM more than once, so a second SIGTERM means nothing new.
        if signal != "SIGINT":
            return False

        is_second = node in self._sigint_nodes or now - self._sigint_at >= SAME_SIGINT_S

        self._sigint_nodes.add(node)
        self._sigint_at = min(self._sigint_at, now)
        return is_second

    def include_new_node(self, now: float) -> None:
        """Have running ranks save, so that the next attempt can include a node that has joined."""
        if self._state.phase in CAN_PREEMPT:
            self._state.outbox.say("asking the ranks to save, to continue with the new node")
            self.ask_ranks(now)

    def resize(self, ranks: int, now: float) -> None:
        """Continue with another number of ranks, after a save."""
        cluster, outbox = self._state.cluster, self._state.outbox
        bounds = cluster.rank_bounds

        # A number that the nodes cannot run is refused, and the job goes on as it is.
        if not bounds.least <= ranks <= bounds.most:
            outbox.say(f"not resized to {plural(ranks, 'rank')}: --nproc allows {bounds} in all")
            return

        # The same number may be divided over the nodes in another way; that waits for the next attempt.
        before = cluster.world_size
        if before == ranks:
            cluster.resize(ranks)
            return

        outbox.say(f"from {before} to {plural(ranks, 'rank')}: asking the ranks to save")
        self._state.recovery.resize(ranks, self._state.attempt)
        outbox.log_resize(before, cluster.world_size)

        # Nodes can import torch for the new ranks while the current ranks still save.
        for node, count in cluster.wanted.items():
            outbox.send([node], Prepare(count))

        if self._state.phase in CAN_PREEMPT:
            self.ask_ranks(now)

    # ---- asking, and the end ----

    def ask_ranks(self, now: float) -> None:
        """Have the ranks save and exit; they are killed when the grace period is over."""
        self._enter_phase(now)
        self._state.order(partial(Preempt, signal=self.signal))

    def ranks_were_signalled(self, now: float) -> None:
        """Note that the scheduler has signalled the ranks directly, bypassing the launcher."""
        # They do not say which signal it was.
        self.signal = "SIGTERM"
        self._enter_phase(now)

    def _enter_phase(self, now: float) -> None:
        """Wait for the ranks to save and exit."""
        state = self._state
        deadline = now + state.settings.restart.grace

        # A failure that has happened is still announced in time.
        if state.attempt.has_failed:
            deadline = min(deadline, state.deadline)

        state.enter(JobPhase.PREEMPT, deadline)
        state.attempt.preempted_at = now

    @property
    def exit_code(self) -> int:
        """The exit code of a job that this signal has ended."""
        return Preempted.code_of(self.signal)

    def end_job(self) -> None:
        """End the job as preempted, because a signal asked for it and no rank runs any more."""
        state = self._state
        step = state.latest_step()

        # The newest checkpoint need not be of this attempt.
        if step is None:
            saved = "ended before anything was saved"
        elif state.attempt.has_saved(step):
            saved = f"saved at step {step}"
        elif state.attempt.number is not None and not state.attempt.started_here:
            # The ranks of a lost coordinator may have saved it, or not.
            saved = f"ended after a takeover; the newest checkpoint is of step {step}"
        else:
            saved = f"ended without another save; the newest checkpoint is of step {step}"

        state.outbox.say(f"{saved}; to resume: {state.job.resume_command}")
        state.outbox.log("preempted", signal=self.signal, step=step)
        state.end(JobEnd(self.exit_code))
