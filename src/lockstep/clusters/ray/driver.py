"""The driver of a job on a Ray cluster: where its agents are, and what follows when nodes come and go.

Ray places the agents, one per node, and replaces lost bundles of the placement group. The agents' launchers run the
job: they find the first failure, take over from a lost coordinating node, and restart ranks. What neither does is done
here: a node that appears later gets a placement group of its own, and an agent; a node that Ray drains is left after a
save. A *round* lasts from the start of the launchers until all of them have ended. Another round follows if the job has
ended for want of a node, or to leave one.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.clusters.ray.agent import Report
from lockstep.clusters.ray.cluster import AgentLost, Need, NoAnswer, RayNode, describe, state_of, too_small
from lockstep.clusters.ray.merged_output import MergedOutput
from lockstep.clusters.ray.round import FAILURES, Round
from lockstep.clusters.request import Request
from lockstep.errors import ExitCode, Preempted, UserError, plural
from lockstep.launch.job import RESUME_COMMAND
from lockstep.launch.terminal import say
from lockstep.launch.wire.secret import SECRET, SECRET_FILE

# The pause between two looks at the agents, and between two looks at the cluster.
TURN_S = 0.2
LOOK_S = 1.0

# If Ray's control service does not answer for so long, the job saves: Ray itself ends all its processes after a minute.
SAVE_S = 30.0

# How long a node may take to take over from a lost one. Then a Ctrl-C goes to all launchers.
TAKEOVER_S = 20.0

# How long a job waits for nodes that others use, unless --wait says otherwise; and before it says what it waits for.
WAIT_S = 300.0
SAY_S = 2.0

# How long Ray may take to start the first actor, on a node where its resources are reserved.
ACTOR_S = 120.0

# A launcher that ends leaves this long for the others to end as well. If they do not, it has ended for itself alone.
ALONE_S = 15.0

# An agent that does not answer for so long when the others have ended is given up; Ray may still believe in its node.
SILENT_S = 120.0

# A failed agent is replaced after this, and if that one fails within a minute after twice as long, up to a minute.
RETRY_S = 2.0
LONGEST_RETRY_S = 60.0

# For so long after a loss a job that asks to be restarted lacks nodes: its launchers wait five minutes for them.
LOSS_S = 400.0

# What Ray has not given for so long, although it seemed to be free, is not waited for.
UNPLACED_S = 10.0

# Rounds that begin because nodes were lost, in an hour.
MOST_ROUNDS = 10
HOUR_S = 3600.0

# The variables of the driver that the agents get, besides those that begin with one of these.
PASSED_ON = ("OMP_NUM_THREADS", "PYTHONPATH")
PASSED_ON_PREFIXES = ("LOCKSTEP_", "NCCL_", "GLOO_", "TORCH_")


class Agent(Protocol):
    """See `RemoteAgent`."""

    def address(self, host: str) -> str | None: ...
    def start(self, words: Sequence[str]) -> None: ...
    def poll(self) -> Report | None: ...
    def signal(self, name: str) -> None: ...
    def kill(self) -> None: ...


class Cluster(Protocol):
    """See `RayCluster`."""

    @property
    def address(self) -> str: ...
    @property
    def uploaded_folder(self) -> bool: ...
    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def nodes(self) -> list[RayNode]: ...
    def reserve(self, count: int, need: Need, node: str | None = None) -> Any: ...
    def placed(self, group: Any) -> list[str]: ...
    def release(self, group: Any) -> None: ...
    def make_agent(self, group: Any, bundle: int, need: Need, arguments: Sequence[Any]) -> Agent: ...


@dataclass(eq=False)
class Slot:
    """A place for one agent: a bundle of a placement group.

    It outlives its agent: after a failure another agent is made in the same bundle, after a pause that grows. Ray may
    move the bundle to another node meanwhile: `placed` is where it is now, `node` where the last agent was.
    """

    group: Any
    bundle: int
    since: float
    own_group: bool = False  # the group has this bundle only, on one node

    placed: str = ""  # the node where Ray has put the bundle
    agent: Agent | None = None
    node: RayNode | None = None  # where the agent is
    began: float = 0.0  # when the agent was made
    heard: float = 0.0  # when it last answered
    tries: int = 0  # agents that have failed here, one soon after the other
    not_before: float = 0.0


class Driver:
    """Runs one job on a cluster until it ends.

    `need` is what each node must have. `signals` gets the names of the signals that this process receives. `wait` is
    --wait, None if it was not given; `resume_command` is what to type to resume the job.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        need: Need,
        signals: list[str],
        wait: float | None = None,
        resume_command: str = "",
    ):
        # What was asked for.
        self._request = request
        self._need = need
        self._wait = wait
        self._resume_command = resume_command

        # The outside world.
        self._cluster = cluster
        self._signals = signals
        self._output = MergedOutput()

        # The live nodes, by id, and when they were looked at.
        self._nodes: dict[str, RayNode] = {}
        self._looked = float("-inf")

        # Since when Ray's control service has not answered.
        self._silent_since: float | None = None

        # Places for agents, and when rounds began because nodes were lost.
        self._slots: list[Slot] = []
        self._lost_rounds: list[float] = []

        # The first signal that this process received.
        self._stop: str | None = None
        self._interrupted = False  # one of them was a Ctrl-C
        self._arguments: Sequence[Any] = ()

    def run(self) -> int:
        """Return the exit code of the job: 0 finished, 75 or 130 saved and to be resumed, 1 or 2 failed."""
        try:
            self._check_size()
            self._prepare()
            self._reserve()

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
        marker = run_dir / "launch" / f".shared-{secrets.token_hex(4)}"
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            for old in marker.parent.glob(".shared-*"):
                old.unlink()

            marker.touch()
        except OSError as error:
            raise UserError(
                f"the run folder {run_dir} cannot be written to", error.strerror or str(error), "set another run_dir"
            ) from None

        # A folder that Ray has uploaded has another path on each node.
        uploaded = self._cluster.uploaded_folder
        folder = None if uploaded else os.getcwd()
        variables = environment(os.environ, uploaded) | {RESUME_COMMAND: self._resume_command}
        self._arguments = (secrets.token_hex(32), variables, folder, str(marker))

    def _check_size(self) -> None:
        """Raise a UserError if the cluster has too few nodes for this job, even when nothing else runs there."""
        self._look()
        if self._silent_since is not None:
            raise UserError(
                f"the Ray cluster at {self._cluster.address} does not say which nodes it has",
                "its control service, on the head node, does not answer",
                "run the same command again when it does; `ray status` says whether it does",
            )

        least = self._request.nnodes.least
        nodes = list(self._nodes.values())
        large_enough = [node for node in nodes if node.drained_at is None and not node.lacks(self._need)]

        # With --wait, nodes may still be added, by an autoscaler for example, which sees what is asked for.
        if len(large_enough) < least and self._wait is None:
            raise too_small(self._cluster.address, least, self._need, nodes)

        if "GPU" not in self._need and any(node.total.get("GPU") for node in nodes):
            say("lockstep: the cluster has GPUs, and this job asks for none: it trains on CPUs (see --gpus-per-node)")

    def _reserve(self) -> None:
        """Ask Ray for as many nodes as are free now, within --nnodes, instead of what the job has. No agent runs."""
        bounds = self._request.nnodes
        count = max(bounds.least, min(bounds.most, len(self._available())))
        try:
            for slot in list(self._slots):
                self._release(slot)

            group = self._cluster.reserve(count, self._need)
        except NoAnswer as error:
            self._note_silence(error)
            return

        now = self._cluster.now()
        self._slots = [Slot(group, bundle, now) for bundle in range(count)]
        self._looked = float("-inf")

    def _available(self) -> list[RayNode]:
        """Return the nodes that stay, and that are free or reserved for this job."""
        held = {slot.placed for slot in self._slots}
        staying = [node for node in self._nodes.values() if node.drained_at is None]
        return [node for node in staying if node.id in held or node.has_free(self._need)]

    def _release(self, slot: Slot) -> None:
        """Give the group of a slot back, and with it all its slots. Raises NoAnswer."""
        if slot in self._slots:
            self._cluster.release(slot.group)
            self._slots = [other for other in self._slots if other.group is not slot.group]

    def _gather(self) -> bool:
        """Wait until enough nodes can be used. Returns False if that takes too long, or on a signal."""
        began = self._cluster.now()
        patience = WAIT_S if self._wait is None else self._wait
        said = False

        while True:
            self._look()
            if self._take_signals():
                say(f"lockstep: {self._stop}: ended while no agent runs; to resume: {self._resume_command}")
                return False

            self._leave_drained_bundles()
            if len(self._usable()) >= self._request.nnodes.least and self._silent_since is None:
                return True

            waited = self._cluster.now() - began
            if waited >= patience:
                say(f"lockstep: given up after {waited:.0f} s: {self._what_is_missing()}")
                say(f"lockstep: to resume: {self._resume_command}")
                return False

            if not said and waited >= SAY_S:
                said = True
                say(f"lockstep: {self._what_is_missing()}; waiting for {patience:.0f} s at most")

            self._ask_for_less()
            self._grow()
            self._cluster.sleep(TURN_S)

    def _ask_for_less(self) -> None:
        """Ask anew if Ray has not placed the first group for a while: another job may have been faster."""
        placed = any(slot.placed or slot.own_group for slot in self._slots)
        could_be_less = len(self._slots) > self._request.nnodes.least
        if placed or not could_be_less:
            return

        if self._cluster.now() - self._slots[0].since >= UNPLACED_S:
            self._reserve()

    def _leave_drained_bundles(self) -> None:
        """Ask anew if a bundle of the first group is on a node that is drained, and the job can go on without it.

        Ray would put that bundle on another node once the drained one is gone, for which the job may have no use. One
        bundle of a group cannot be given back.
        """
        drained = [slot for slot in self._slots if not slot.own_group and self._drained_node(slot.placed)]
        if not self._slots or (drained and len(self._available()) >= self._request.nnodes.least):
            self._reserve()

    def _what_is_missing(self) -> str:
        """Return how many nodes are ready, and what each node of the cluster has, for a message."""
        usable = len(self._usable())
        least = self._request.nnodes.least
        rest = "; ".join(state_of(node, self._need) for node in self._nodes.values())
        return (
            f"{plural(usable, 'node is', 'nodes are')} ready of {least} that are needed, with {describe(self._need)} "
            f"each. The cluster: {rest or 'no nodes'}"
        )

    # ---- the cluster ----

    def _look(self) -> None:
        """Look at the cluster, at most once a second."""
        now = self._cluster.now()
        if now - self._looked < LOOK_S:
            return

        self._looked = now
        try:
            self._see(now)
            self._silent_since = None
        except NoAnswer as error:
            self._note_silence(error)

    def _note_silence(self, error: NoAnswer) -> None:
        """Go on with what is known of the cluster: agents and launchers do not need Ray's control service."""
        if self._silent_since is None:
            self._silent_since = self._cluster.now()
            say(f"lockstep: Ray's control service does not answer ({error}): going on as before")

    def _see(self, now: float) -> None:
        """Note what Ray says of the nodes and of this job's groups. Raises NoAnswer."""
        nodes = {node.id: node for node in self._cluster.nodes()}
        placed = {id(slot.group): self._cluster.placed(slot.group) for slot in self._slots}
        self._nodes = nodes
        for slot in self._slots:
            slot.placed = placed[id(slot.group)][slot.bundle]

        # A group for one node goes with the node.
        for slot in list(self._slots):
            if not slot.own_group or slot.agent is not None:
                continue

            where = slot.placed or (slot.node.id if slot.node else "")
            unplaced = not where and now - slot.since >= UNPLACED_S
            leaves = bool(where) and (where not in nodes or self._drained_node(where) is not None)
            if unplaced or leaves:
                self._release(slot)

    @property
    def _active(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.agent is not None]

    def _usable(self) -> list[Slot]:
        """Return the slots where an agent may start now: one on each node, and none on a node that has an agent."""
        taken = {slot.node.id for slot in self._active if slot.node}
        usable = []

        for slot in self._slots:
            node = self._nodes.get(slot.placed)
            if slot.agent is not None or node is None or node.drained_at is not None:
                continue

            if node.id not in taken:
                taken.add(node.id)
                usable.append(slot)

        return usable

    def _grow(self) -> None:
        """Ask for a node that has room and no agent, if the job may have more nodes."""
        # Ray puts lost bundles of the group there first, and later also those on nodes that are drained.
        waiting = any(slot.placed not in self._nodes for slot in self._slots)
        if waiting or self._silent_since is not None or len(self._slots) >= self._request.nnodes.most:
            return

        # One node at a time: the next look shows whether Ray has given it.
        taken = {slot.placed for slot in self._slots}
        for node in self._nodes.values():
            if node.id not in taken and node.drained_at is None and node.has_free(self._need):
                try:
                    group = self._cluster.reserve(1, self._need, node.id)
                except NoAnswer as error:
                    self._note_silence(error)
                else:
                    self._slots.append(Slot(group, 0, self._cluster.now(), own_group=True))
                    self._looked = float("-inf")

                return

    # ---- a round ----

    def _run_round(self) -> int | None:
        """Start the agents, and run until all have ended. Returns an exit code, or None if another round follows."""
        join = self._begin()
        if join is None:
            return None if self._signals else self._again("no agent could be started: trying again")

        current = Round(join)
        while True:
            self._look()
            for name in self._take_signals():
                self._pass_on(name, current)

            for slot in self._active:
                self._poll(slot, current)

            if current.port_taken:
                return self._elsewhere(current)

            if not self._active:
                return self._verdict(current)

            # Act on what has changed: signals, launchers that have ended, nodes that leave, a silent Ray.
            self._interrupt(current)
            self._end_what_is_left(current)
            self._leave_drained(current)
            self._save_in_time(current)

            # While the job runs, lost agents are replaced, and new nodes are used.
            if current.ended_at is None and not current.leaving and self._stop is None:
                self._start_agents(join)
                self._grow()

            self._cluster.sleep(TURN_S)

    def _begin(self) -> str | None:
        """Make the first agent, and ask it where the others can join. Returns None if it is lost, or on a signal."""
        slot = min(self._usable(), key=lambda slot: slot.not_before)
        while self._cluster.now() < slot.not_before and not self._signals:
            self._cluster.sleep(TURN_S)

        if not self._make(slot):
            return None

        assert slot.agent is not None
        assert slot.node is not None

        # Ray may need a while to start the actor.
        deadline = self._cluster.now() + ACTOR_S
        try:
            while (join := slot.agent.address(slot.node.host)) is None:
                if self._signals or self._cluster.now() > deadline:
                    raise AgentLost("interrupted" if self._signals else f"Ray has not started it in {ACTOR_S:.0f} s")
                self._cluster.sleep(TURN_S / 4)
        except AgentLost as lost:
            self._drop(slot, f"could not be started: {lost}", retry=True)
            return None

        self._start(slot, join)
        return join

    def _start_agents(self, join: str) -> None:
        """Start an agent in each slot that is free and due, as far as the job may have more nodes."""
        room = self._request.nnodes.most - len(self._active)
        now = self._cluster.now()
        for slot in [slot for slot in self._usable() if now >= slot.not_before][: max(0, room)]:
            if self._make(slot):
                self._start(slot, join)

    def _make(self, slot: Slot) -> bool:
        """Make the agent of a slot. Returns False if Ray does not answer."""
        slot.began = slot.heard = self._cluster.now()
        try:
            slot.agent = self._cluster.make_agent(slot.group, slot.bundle, self._need, self._arguments)
        except NoAnswer as error:
            self._note_silence(error)
            self._pause(slot)
            return False

        slot.node = self._nodes[slot.placed]
        return True

    def _start(self, slot: Slot, join: str) -> None:
        """Have the agent of a slot start its launcher, which joins the others."""
        assert slot.agent is not None
        slot.agent.start(self._request.train_command("--join", join, program=()))

    def _poll(self, slot: Slot, current: Round) -> None:
        """Print what the agent's launcher has said, and note its end."""
        assert slot.agent is not None
        try:
            # Ray may start an actor that it has not started yet on another node instead.
            if slot.node and slot.node.id not in self._nodes:
                raise AgentLost("its node is gone")
            report = slot.agent.poll()
        except AgentLost as lost:
            self._lose(slot, current, str(lost))
            return

        if report is None:
            return

        slot.heard = self._cluster.now()
        self._output.add(slot, report.lines, self._cluster.now())

        # A launcher that was killed is lost like its node: another one is started.
        if report.code is not None and report.code < 0:
            self._lose(slot, current, f"its launcher was ended by {signal.Signals(-report.code).name}")
            return

        current.note(slot, report, self._cluster.now())
        if report.code is not None:
            self._drop(slot, "", retry=report.code in FAILURES)

    def _lose(self, slot: Slot, current: Round, why: str) -> None:
        """Note that an agent is lost, with its node or without it. Another one follows."""
        current.lose(slot, self._cluster.now())
        self._drop(slot, f"is lost: {why}", retry=True)

    def _drop(self, slot: Slot, why: str, retry: bool) -> None:
        """Forget an agent. `retry`: it has failed, and another one follows after a pause."""
        assert slot.agent is not None
        if why and slot.node:
            say(f"lockstep: the agent on {slot.node.host} {why}")

        slot.agent.kill()
        slot.agent = None
        if retry:
            self._pause(slot)
        else:
            slot.not_before, slot.tries = self._cluster.now(), 0

        # Where its bundle is now is not known.
        self._looked = float("-inf")

    def _pause(self, slot: Slot) -> None:
        """Let some time pass before the next agent of a slot, and more if this one has failed soon."""
        now = self._cluster.now()
        soon = now - slot.began < LONGEST_RETRY_S
        slot.not_before = now + min(RETRY_S * 2**slot.tries, LONGEST_RETRY_S)
        slot.tries = slot.tries + 1 if soon else 0

    def _end_what_is_left(self, current: Round) -> None:
        """Act on launchers that go on although one has ended."""
        if current.ended_at is None:
            return

        now = self._cluster.now()
        waited = now - current.ended_at
        if waited < ALONE_S:
            return

        # What is lost with its node does not go on. Ray may need a while to notice.
        if all(now - slot.heard > ALONE_S / 2 for slot in self._active):
            if waited >= SILENT_S:
                for slot in self._active:
                    self._lose(slot, current, f"no answer for {SILENT_S:.0f} s")

            return

        # One that failed has done so for itself, as a node does whose disk is full. It is started again.
        if not current.over(asked_to_end=self._stop is not None or current.leaving):
            current.restart()

        # The job is over. What goes on is asked to end, and is killed if it does not.
        elif not current.asked_others:
            current.asked_others = True
            self._signal_all("SIGTERM")
        elif waited >= 2 * ALONE_S:
            for slot in self._active:
                self._drop(slot, "did not end with the job: killed", retry=False)

    def _leave_drained(self, current: Round) -> None:
        """If Ray drains a node of this job, have the job save: the next round goes on without that node."""
        if current.leaving or self._stop or current.ended_at is not None:
            return

        leaving = [node for slot in self._active if slot.node and (node := self._drained_node(slot.node.id))]
        if leaving:
            current.leaving = True
            for node in leaving:
                assert node.drained_at is not None
                left = f", in {max(0.0, node.drained_at - time.time()):.0f} s" if node.drained_at else ""
                say(f"lockstep: Ray takes the node {node.host} away{left}: saving, to go on without it")

            self._signal_all("SIGTERM")

    def _drained_node(self, node_id: str) -> RayNode | None:
        """Return a node if Ray is about to take it away."""
        node = self._nodes.get(node_id)
        return node if node and node.drained_at is not None else None

    def _save_in_time(self, current: Round) -> None:
        """If Ray's control service stays away, have the job save: the next round begins when it answers again."""
        if current.leaving or self._stop or current.ended_at is not None or self._silent_since is None:
            return

        silent = self._cluster.now() - self._silent_since
        if silent >= SAVE_S:
            current.leaving = True
            say(f"lockstep: Ray's control service has not answered for {silent:.0f} s: saving, to go on when it does")
            self._signal_all("SIGTERM")

    def _elsewhere(self, current: Round) -> int | None:
        """End a round in which the nodes could not meet. Nothing was trained."""
        for slot in self._active:
            self._drop(slot, "", retry=False)

        return self._again(f"another program has taken the port of {current.join}: trying another one")

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

        # The launchers say whether a restart makes sense. Without a loss, something else has ended them.
        recently = current.lost_at is not None and self._cluster.now() - current.lost_at <= LOSS_S
        if code is not None and not (restart and recently):
            return code

        return self._again("too few nodes were left: starting again as soon as Ray has enough of them")

    def _again(self, what: str) -> int | None:
        """Return None, for another round after a loss, or an exit code if there were too many of them."""
        now = self._cluster.now()
        recent = [when for when in self._lost_rounds if now - when < HOUR_S]
        self._lost_rounds = [*recent, now]

        # A job that loses nodes again and again does not get anywhere: its user must look.
        if len(self._lost_rounds) > MOST_ROUNDS:
            say(f"lockstep: nodes were lost {MOST_ROUNDS} times in an hour; to resume: {self._resume_command}")
            return ExitCode.RESTART

        say(f"lockstep: {what}")
        return None

    # ---- signals, and the end ----

    def _take_signals(self) -> list[str]:
        """Return the signals that came since the last look, and remember the first of all."""
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
        if current.interrupt_since is None:
            return

        coordinator = current.coordinator
        if coordinator in self._active:
            coordinator.agent.signal("SIGINT")
            current.interrupted = coordinator
            current.interrupt_since = None
        elif self._cluster.now() - current.interrupt_since >= TAKEOVER_S:
            current.interrupt_since = None
            self._signal_all("SIGINT")

    def _signal_all(self, name: str) -> None:
        """Send a signal to all launchers. Each passes it on to the whole job, which takes the first."""
        for slot in self._active:
            assert slot.agent is not None
            slot.agent.signal(name)

    def _give_back(self) -> None:
        """End all agents, and give all nodes back to Ray."""
        for slot in self._active:
            assert slot.agent is not None
            slot.agent.kill()

        # What Ray does not hear of now it gives back itself, when this process ends.
        with suppress(NoAnswer):
            for slot in list(self._slots):
                self._release(slot)


def environment(env: Mapping[str, str], uploaded: bool) -> dict[str, str]:
    """Return the driver's variables that agents get. The secret is not one of them: each job has its own.

    If Ray has `uploaded` the working folder, it has also set the PYTHONPATH of each node, to the copy there.
    """
    passed_on = {}
    for name, value in env.items():
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES):
            passed_on[name] = value

    passed_on.pop(SECRET, None)
    passed_on.pop(SECRET_FILE, None)
    if uploaded:
        passed_on.pop("PYTHONPATH", None)

    return passed_on
