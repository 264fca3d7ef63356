"""The driver of a job on a Ray cluster: where its actors are, and what follows when nodes come and go.

Ray places the actors, one per node (`placement.py`). The actors' launchers run the job: they find the first failure,
take over from a lost coordinating node, and restart ranks. The driver does the rest: it replaces lost actors, gives
nodes that appear later an actor, and has the job save before Ray takes a node away. A *round* lasts from the start of
the launchers until all of them have ended. Another round follows if the job has ended because it lacked a node, or
saved because Ray takes a node away.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lockstep.clusters.ray.cluster import ActorLost, Need, RayCluster, RayUnavailable
from lockstep.clusters.ray.placement import ActorPlacement, Slot
from lockstep.clusters.ray.round import FAILURES, Round
from lockstep.clusters.request import JobRequest
from lockstep.errors import ExitCode, Preempted, UserError, printable
from lockstep.launch.job import RESUME_COMMAND
from lockstep.launch.terminal import ONE_LOG, print_line, write
from lockstep.launch.times import JOIN_S, within_last_hour
from lockstep.launch.wire.secret import SECRET, SECRET_FILE
from lockstep.run_folder.names import LAUNCH

# The pause between two looks at the actors.
TURN_S = 0.2

# If Ray's control service does not answer for so long, the job saves: Ray itself ends all its processes after a minute.
SAVE_S = 30.0

# How long a node may take to take over from a lost one. Then a Ctrl-C goes to all launchers.
TAKEOVER_S = 20.0

# A launcher that ends leaves this long for the others to end as well. If they do not, it has ended for itself alone.
ALONE_S = 15.0

# How long an actor may be silent before it is given up: the first one, while Ray starts it where its resources are
# reserved; and one that is left when the others have ended, because Ray may take a lost node for a live one.
SILENT_S = 120.0

# The longest pause before a failed actor is replaced.
LONGEST_RETRY_S = 60.0

# If a job asks to be restarted this soon after a loss, it lacks nodes: its launchers have waited for them before they
# ended.
LOSS_S = JOIN_S + 100.0

# Rounds that begin because nodes were lost, in an hour. Each costs a start and the steps since the last checkpoint.
MOST_ROUNDS = 10

# The variables of the driver that the actors get, besides those that begin with one of these.
PASSED_ON = ("OMP_NUM_THREADS", "PYTHONPATH")
PASSED_ON_PREFIXES = ("LOCKSTEP_", "NCCL_", "GLOO_", "TORCH_")


class RayDriver:
    """Runs one job on a cluster until it ends.

    `need` is what each node must have. `signals` gets the names of the signals that this process receives. `wait` is
    --wait, None if it was not given; `resume_command` is what to type to resume the job.
    """

    def __init__(
        self,
        cluster: RayCluster,
        request: JobRequest,
        need: Need,
        signals: list[str],
        wait: float | None,
        resume_command: str,
    ):
        # What was asked for.
        self._request = request
        self._need = need
        self._wait = wait
        self._resume_command = resume_command

        # The outside world.
        self._cluster = cluster
        self._signals = signals

        # Places for actors, and when rounds began because nodes were lost.
        self._placement = ActorPlacement(cluster, request.nnodes, need)
        self._lost_rounds: list[float] = []

        # The first signal that this process received, and whether any of them was a Ctrl-C.
        self._stop: str | None = None
        self._interrupted = False

        # What every actor is made with; see `_prepare`.
        self._arguments: Sequence[Any] = ()

    def run(self) -> int:
        """Return the exit code of the job: 0 finished, 75 or 130 saved and to be resumed, 1 or 2 failed."""
        try:
            # What cannot work is refused before Ray is asked for anything.
            self._placement.check_size(may_grow=self._wait is not None)
            self._prepare()
            self._placement.reserve()

            # One round after another, until one ends the job.
            while True:
                if not self._gather():
                    return Preempted.code_of(self._stop)

                code = self._run_round()
                if code is not None:
                    return code
        finally:
            self._give_back()

    # ---- before the first round ----

    def _prepare(self) -> None:
        """Choose the job's secret, and make the file by which a node recognises the run folder."""
        run_dir = self._request.run_dir
        marker = run_dir / LAUNCH / f".shared-{secrets.token_hex(4)}"
        try:
            # A new name at each start, so that no node can take a file of an earlier start for it.
            marker.parent.mkdir(parents=True, exist_ok=True)
            for old in marker.parent.glob(".shared-*"):
                old.unlink()

            marker.touch()
        except OSError as error:
            raise UserError(
                f"the run folder {run_dir} cannot be written to", error.strerror or str(error), "set another run_dir"
            ) from None

        # A folder that Ray has uploaded has another path on each node, and Ray starts the actors in it. Otherwise it is
        # on a shared disk, and has this path everywhere.
        uploaded = self._cluster.uploaded_folder
        folder = None if uploaded else os.getcwd()
        variables = environment(os.environ, uploaded) | {RESUME_COMMAND: self._resume_command, ONE_LOG: "1"}
        self._arguments = (secrets.token_hex(32), variables, folder, str(marker))

    def _gather(self) -> bool:
        """Wait until enough nodes can be used. Return False if that takes too long, or on a signal."""
        began = self._cluster.now()
        patience = JOIN_S if self._wait is None else self._wait
        said = False

        while True:
            self._placement.look()
            if self._take_signals():
                print_line(f"lockstep: {self._stop}: ended while no actor runs; to resume: {self._resume_command}")
                return False

            # If Ray does not answer, the nodes are those of the last look, and some may be gone.
            self._placement.leave_drained_bundles()
            if len(self._placement.usable()) >= self._request.nnodes.least and self._placement.silent_since is None:
                return True

            # Do not wait for ever: other jobs may need what is reserved for this one.
            waited = self._cluster.now() - began
            if waited >= patience:
                print_line(f"lockstep: given up after {waited:.0f} s: {self._placement.what_is_missing()}")
                print_line(f"lockstep: to resume: {self._resume_command}")
                return False

            # Usually Ray has the nodes at once, and there is nothing to say.
            if not said and waited >= 2.0:
                said = True
                print_line(f"lockstep: {self._placement.what_is_missing()}; waiting for {patience:.0f} s at most")

            self._placement.ask_for_less()
            self._placement.grow()
            self._cluster.sleep(TURN_S)

    # ---- a round ----

    def _run_round(self) -> int | None:
        """Start the actors, and run until all have ended. Return an exit code, or None if another round follows."""
        join = self._begin()
        if join is None:
            return None if self._signals else self._next_round("no actor could be started: trying again")

        current = Round(join)
        while True:
            # See what has happened: to the cluster, to this process, to the actors.
            self._placement.look()
            for name in self._take_signals():
                self._pass_on(name, current)

            for slot in self._placement.active:
                self._poll(slot, current)

            # Between `address` and the start of its launcher, another program may take the port: nothing was trained.
            if current.port_taken:
                for slot in self._placement.active:
                    self._drop(slot, "", retry=False)

                return self._next_round(f"another program has taken the port of {join}: trying another one")

            if not self._placement.active:
                return self._verdict(current)

            self._interrupt(current)
            self._end_what_is_left(current)

            # While the job runs, it either saves to leave what Ray takes away, or uses what Ray has: lost actors are
            # replaced, and new nodes get one.
            if current.ended_at is None and not current.leaving and self._stop is None:
                if reasons := self._reasons_to_leave():
                    current.leaving = True
                    for reason in reasons:
                        print_line(f"lockstep: {reason}")

                    self._signal_all("SIGTERM")
                else:
                    self._start_actors(join)
                    self._placement.grow()

            self._cluster.sleep(TURN_S)

    def _begin(self) -> str | None:
        """Make the first actor, and ask it where the others can join. Return None if it is lost, or on a signal."""
        # The first actor chooses where all nodes meet, so the others wait for it. It gets the slot that is due first:
        # all of them may have to pause after a failure.
        slot = min(self._placement.usable(), key=lambda slot: slot.not_before)
        while self._cluster.now() < slot.not_before and not self._signals:
            self._cluster.sleep(TURN_S)

        if not self._make(slot):
            return None

        # `make_actor` returns at once: Ray may first have to start a worker process on the node, and unpack the
        # working folder there.
        assert slot.node is not None
        deadline = self._cluster.now() + SILENT_S
        try:
            while (join := slot.running.address(slot.node.host)) is None:
                if self._signals or self._cluster.now() > deadline:
                    raise ActorLost("interrupted" if self._signals else f"Ray has not started it in {SILENT_S:.0f} s")

                self._cluster.sleep(TURN_S / 4)
        except ActorLost as lost:
            self._drop(slot, f"could not be started: {lost}", retry=True)
            return None

        self._start(slot, join)
        return join

    def _start_actors(self, join: str) -> None:
        """Start an actor in each slot that is free and due. There are no more slots than --nnodes allows."""
        now = self._cluster.now()
        for slot in self._placement.usable():
            if now >= slot.not_before and self._make(slot):
                self._start(slot, join)

    def _make(self, slot: Slot) -> bool:
        """Make the actor of a slot. Return False if Ray does not answer."""
        # An actor that Ray is still starting does not count as silent.
        slot.began = slot.heard = self._cluster.now()
        try:
            slot.actor = self._cluster.make_actor(slot.group, slot.bundle, self._need, self._arguments)
        except RayUnavailable as error:
            self._placement.note_silence(error)
            self._pause(slot)
            return False

        slot.node = self._placement.nodes[slot.placed]
        return True

    def _start(self, slot: Slot, join: str) -> None:
        """Have the actor of a slot start its launcher, which joins the others."""
        slot.running.start(self._request.train_command("--join", join, program=()))

    def _poll(self, slot: Slot, current: Round) -> None:
        """Print what the actor's launcher has said, and note its end."""
        try:
            # Ray may start an actor that it has not started yet on another node instead.
            if slot.node and slot.node.id not in self._placement.nodes:
                raise ActorLost("its node is gone")

            report = slot.running.poll()
        except ActorLost as lost:
            self._lose(slot, current, str(lost))
            return

        if report is None:
            return

        # None means that the actor has not answered; an empty report is an answer.
        slot.heard = self._cluster.now()
        for line in report.lines:
            write(f"{printable(line)}\n", sys.stdout)

        # A launcher that was killed is lost like its node: another one is started.
        if report.code is not None and report.code < 0:
            self._lose(slot, current, f"its launcher was ended by {signal.Signals(-report.code).name}")
            return

        current.note(slot, report, self._cluster.now())
        if report.code is not None:
            self._drop(slot, "", retry=report.code in FAILURES)

    def _lose(self, slot: Slot, current: Round, why: str) -> None:
        """Note that an actor is lost, with its node or without it. Another one follows."""
        current.lose(slot, self._cluster.now())
        self._drop(slot, f"is lost: {why}", retry=True)

    def _drop(self, slot: Slot, why: str, retry: bool) -> None:
        """Forget an actor. `retry`: it has failed, and another one follows after a pause."""
        if why and slot.node:
            print_line(f"lockstep: the actor on {slot.node.host} {why}")

        # Kill it even if it seems to be lost: its launcher may still run, and would write beside its successor.
        slot.running.kill()
        slot.actor = None
        if retry:
            self._pause(slot)
        else:
            slot.not_before = self._cluster.now()
            slot.tries = 0

        # Where its bundle is now is not known.
        self._placement.look_again()

    def _pause(self, slot: Slot) -> None:
        """Let some time pass before the next actor of a slot, and more if this one has failed soon."""
        # 2, 4, 8, ... seconds, as long as actors fail within a minute.
        now = self._cluster.now()
        soon = now - slot.began < LONGEST_RETRY_S
        slot.not_before = now + min(2.0 * 2**slot.tries, LONGEST_RETRY_S)
        slot.tries = slot.tries + 1 if soon else 0

    def _end_what_is_left(self, current: Round) -> None:
        """Act on launchers that go on although one has ended."""
        if current.ended_at is None:
            return

        # The launchers of a job end together, give or take a few seconds.
        now = self._cluster.now()
        waited = now - current.ended_at
        if waited < ALONE_S:
            return

        # Perhaps the others are lost with their nodes, and Ray has not noticed it yet.
        if all(now - slot.heard > ALONE_S / 2 for slot in self._placement.active):
            if waited >= SILENT_S:
                for slot in self._placement.active:
                    self._lose(slot, current, f"no answer for {SILENT_S:.0f} s")

            return

        # The launcher that ended has failed alone, because its disk is full for example: it is started again.
        if not current.over(asked_to_end=self._stop is not None or current.leaving):
            current.restart()

        # The job is over. What goes on is asked to end, and is killed if it does not.
        elif not current.asked_others:
            current.asked_others = True
            self._signal_all("SIGTERM")
        elif waited >= 2 * ALONE_S:
            for slot in self._placement.active:
                self._drop(slot, "did not end with the job: killed", retry=False)

    def _reasons_to_leave(self) -> list[str]:
        """Return why the job must save now. The next round goes on without the node, or when Ray answers again."""
        reasons = []
        for slot in self._placement.active:
            # The node as it was seen last: `slot.node` is from before Ray began to drain it.
            node = self._placement.drained_node(slot.node.id) if slot.node else None
            if node is not None:
                # Ray need not say when: `drained_at` is 0 then, and the node may go at any moment.
                left = f", in {max(0.0, node.drained_at - time.time()):.0f} s" if node.drained_at else ""
                reasons.append(f"Ray takes the node {node.host} away{left}: saving, to go on without it")

        # Ray's processes, and with them the actors, end by themselves if the control service stays away.
        since = self._placement.silent_since
        silent = 0.0 if since is None else self._cluster.now() - since
        if silent >= SAVE_S and not reasons:
            reasons = [f"Ray's control service has not answered for {silent:.0f} s: saving, to go on when it does"]

        return reasons

    def _verdict(self, current: Round) -> int | None:
        """Return the job's exit code, or None if another round must follow."""
        code = current.code
        restart = code is None or code == ExitCode.RESTART

        # The user's signal ends the job, unless it has finished or failed before.
        if self._stop is not None:
            return Preempted.code_of(self._stop) if restart or code == ExitCode.INTERRUPTED else code

        # This driver had the job save, to go on without a node, or when Ray answers again.
        if restart and current.leaving:
            return None

        # The launchers say whether a restart makes sense. Without a loss, something else has ended them, and another
        # round would end like this one: the exit code leaves the decision to what has started this driver.
        recently = current.lost_at is not None and self._cluster.now() - current.lost_at <= LOSS_S
        if code is not None and not (restart and recently):
            return code

        return self._next_round("too few nodes were left: starting again as soon as Ray has enough of them")

    def _next_round(self, what: str) -> int | None:
        """Return None, for another round after a loss, or an exit code if there were too many of them."""
        # Count only the rounds of the last hour that lost nodes have ended.
        now = self._cluster.now()
        self._lost_rounds = [*within_last_hour(self._lost_rounds, now), now]

        # A job that loses nodes again and again makes no progress: its user must look.
        if len(self._lost_rounds) > MOST_ROUNDS:
            print_line(f"lockstep: nodes were lost {MOST_ROUNDS} times in an hour; to resume: {self._resume_command}")
            return ExitCode.RESTART

        print_line(f"lockstep: {what}")
        return None

    # ---- signals, and the end ----

    def _take_signals(self) -> list[str]:
        """Return the signals that came since the last look, and remember the first of all."""
        # One by one: the signal handler may append to the list at any moment.
        taken = []
        while self._signals:
            taken.append(self._signals.pop(0))
            self._stop = self._stop or taken[-1]

        return taken

    def _pass_on(self, name: str, current: Round) -> None:
        """Pass a signal of this process on to the job. The first Ctrl-C asks it to save, another ends it at once."""
        # Every launcher tells the coordinating one, for which a Ctrl-C from each of them is more than one.
        if name == "SIGINT" and current.begun and not self._interrupted:
            current.interrupt_since = self._cluster.now()
        else:
            current.interrupt_since = None
            self._signal_all(name)

        self._interrupted |= name == "SIGINT"

    def _interrupt(self, current: Round) -> None:
        """Send a pending Ctrl-C to the launcher that coordinates; to all, if none does for a while."""
        # It is pending since `_pass_on`, or again since the actor that got it was lost (`Round.lose`).
        if current.interrupt_since is None:
            return

        coordinator = current.coordinator
        if coordinator in self._placement.active:
            coordinator.actor.signal("SIGINT")
            current.interrupted = coordinator
            current.interrupt_since = None
        elif self._cluster.now() - current.interrupt_since >= TAKEOVER_S:
            current.interrupt_since = None
            self._signal_all("SIGINT")

    def _signal_all(self, name: str) -> None:
        """Send a signal to all launchers. Each passes it on to the whole job, which takes the first."""
        for slot in self._placement.active:
            slot.running.signal(name)

    def _give_back(self) -> None:
        """End all actors, and give all nodes back to Ray."""
        for slot in self._placement.active:
            slot.running.kill()

        # If Ray does not answer, it releases them by itself when this process ends.
        with suppress(RayUnavailable):
            self._placement.release_all()


def environment(env: Mapping[str, str], uploaded: bool) -> dict[str, str]:
    """Return the driver's variables that actors get. The secret is not one of them: each job has its own.

    If Ray has `uploaded` the working folder, it has also set the PYTHONPATH of each node, to the copy there.
    """
    chosen = [name for name in env if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)]
    held_back = {SECRET, SECRET_FILE, "PYTHONPATH" if uploaded else ""}
    return {name: env[name] for name in chosen if name not in held_back}
