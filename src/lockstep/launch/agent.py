"""The agent of one node: it starts the node's ranks, watches them, asks them to save and exit, and kills them.

It decides nothing. The coordinator's orders go in (`carry_out`), and messages for the coordinator come out (`poll`,
`heartbeat`). Every node has an agent, including the coordinating node.
"""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from lockstep.errors import UserError
from lockstep.launch.failure import LauncherFailure, RankExit
from lockstep.launch.hangs.suspicion import view_of
from lockstep.launch.job import RESUME_COMMAND, Job
from lockstep.launch.ranks.local_ranks import LocalRank, LocalRanks
from lockstep.launch.ranks.post_mortem import examine
from lockstep.launch.ranks.rank_environment import rank_environment
from lockstep.launch.ranks.zygote import RankChange
from lockstep.launch.ranks.zygote_client import ZygoteClient
from lockstep.launch.times import HEARTBEAT_S, RANKS_KILL_S
from lockstep.launch.wire.messages import (
    CollectStacks,
    Kill,
    NodeFailed,
    NodeHeartbeat,
    Order,
    Prepare,
    RankExited,
    RanksGone,
    SaveAndExit,
    SettingsRead,
    Stacks,
    Start,
    ToCoordinator,
)
from lockstep.launch.wire.secret import SECRET
from lockstep.launch.wire.sockets import wait_readable
from lockstep.run_folder.names import LOGS
from lockstep.run_folder.run_dir import not_writable
from lockstep.runtime.environments.launcher import OF_ONE_JOB, TERM_FILE
from lockstep.runtime.host.threads import share_cores
from lockstep.runtime.rendezvous.handshake import Secret

# How long the agent tries to start a zygote whose process the system refuses. After that the node cannot run ranks.
START_ZYGOTE_S = 30.0


class Agent:
    """Runs the ranks of one node, in one attempt after another."""

    def __init__(self, job: Job, host: str, secret: Secret | None = None):
        self._job = job
        self.host = host
        self.secret = secret  # the job's secret; None on a single node

        # The bounds of this node's ranks; `start_with` is the number it ran last.
        self.nproc = job.nproc

        # On the coordinating node, the path of the term file.
        self.term_file: Path | None = None

        # The first zygote starts at once: it imports torch while the nodes join.
        self._zygote = self._new_zygote(_environment_for(job.nproc.initial))

        # A zygote for another number of ranks, which imports while the current ranks still run.
        self._next_zygote: ZygoteClient | None = None
        self._current: LocalRanks | None = None

        # The newest attempt whose ranks were requested from the zygote.
        self._started: int | None = None

        # Whether the imports of a zygote have failed; those of a new zygote would fail as well.
        self._cannot_import = False

        # When the next housekeeping is due, while ranks run.
        self._housekeeping_due = -math.inf

        # The messages that the next `poll` returns.
        self._messages: list[ToCoordinator] = []

    # ---- orders of the coordinator ----

    def carry_out(self, order: Order) -> None:
        """Carry out an order."""
        current = self._current
        match order:
            case Start():
                self._start(order)
            case Prepare():
                self._prepare(order.count)

            case SaveAndExit() if current and current.attempt == order.attempt:
                self._save_and_exit(current, order.signal)
            case CollectStacks() if current and current.attempt == order.attempt:
                self._collect_stacks(current, order.request)
            case Kill() if current and current.attempt == order.attempt:
                self._begin_kill(current)

            case Kill():
                # The attempt has no ranks on this node, or they are gone already.
                self._messages.append(RanksGone(order.attempt))
            case SaveAndExit() | CollectStacks():
                pass  # for an attempt that is over on this node

            case _:
                assert_never(order)

    def _start(self, start: Start) -> None:
        """Start the ranks of an attempt. Those of an earlier one are gone, or are killed here."""
        self._close_attempt()
        self._prepare(start.count)

        # The zygote for this number of ranks may have been importing while the last attempt was still saving.
        if self._next_zygote is not None:
            self._zygote.close()
            self._zygote, self._next_zygote = self._next_zygote, None

            # The imports of this one may succeed. If they do not, that is reported again.
            self._cannot_import = False

        try:
            self._request_ranks(start)
        except (OSError, UserError) as error:
            self._zygote.drop_unsent()  # a process that is forked later would belong to no attempt
            self._close_attempt()
            self._report_failed_setup(start.attempt, error)

    def _request_ranks(self, start: Start) -> None:
        """Set up the ranks of an attempt, and ask the zygote for their processes."""
        # The run's folder may have been removed, or be on a disk that this node cannot write to.
        logs = self._job.run_dir / LOGS
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_writable(self._job.run_dir, error) from None

        # The environment that all ranks share, and then what is different for each.
        self._current = current = LocalRanks(start, self.host, logs)
        spec = self._job.spec_for_ranks
        shared = rank_environment(start, current.folder, logs, self._zygote.env, self.secret)
        for local_rank, rank in enumerate(current.running.values()):
            env = shared | {"RANK": str(rank.number), "LOCAL_RANK": str(local_rank)}

            # Rank 0 ends if its coordinator is superseded.
            if rank.number == 0 and self.term_file:
                env[TERM_FILE] = str(self.term_file)

            self._zygote.fork(rank.number, env, spec, rank.log, current.lifeline, start.attempt)

        # The coordinator learns from the next heartbeat that the ranks were requested.
        self._started = start.attempt
        self.nproc = replace(self._job.nproc, start_with=start.count)

    def _report_failed_setup(self, attempt: int, error: OSError | UserError) -> None:
        """Report that this node cannot set up its ranks. None of them has a process."""
        for_user = isinstance(error, UserError)
        text = str(error) if for_user else f"{self.host} cannot set up its ranks: {error}"
        self._messages.append(NodeFailed(attempt, LauncherFailure.SETUP, text, for_user))

    def _prepare(self, count: int) -> None:
        """Start a zygote for `count` ranks, unless the newest one will do.

        Torch reads the number of threads when it is imported, so another number of ranks may need another zygote.
        """
        env = _environment_for(count)
        zygote = self._next_zygote or self._zygote
        if zygote.alive and zygote.env == env:
            return

        if self._next_zygote is not None:
            self._next_zygote.close()

        self._next_zygote = self._new_zygote(env)

    def _new_zygote(self, env: dict[str, str]) -> ZygoteClient:
        return ZygoteClient(self._job.entry, self._job.preload, env, START_ZYGOTE_S)

    def _collect_stacks(self, current: LocalRanks, request: int) -> None:
        """Collect the stacks of the ranks. That takes seconds, in which no heartbeat is sent: see `times.py`."""
        # A rank that has failed does not hang, though its clean-up may. It is killed: the report of its exit says more
        # than any stack.
        if current.kill_those_that_failed():
            return

        stacks, collectives = current.stacks_and_collectives()

        # The heartbeat is sent before the stacks: it shows the ranks that have advanced meanwhile.
        self._messages.append(self.heartbeat())
        self._messages.append(Stacks.of(current.attempt, request, stacks, collectives))

    def _save_and_exit(self, current: LocalRanks, signal: str | None) -> None:
        """Ask the ranks to save and exit."""
        # Before the zygote is ready no rank exists, so all count as ranks that have exited as they were asked to.
        if not self._zygote.ready:
            self._zygote.drop_unsent()
            rank_exit = RankExit.as_asked("nothing")
            for number in list(current.running):
                current.ended(number)
                self._messages.append(RankExited(current.attempt, number, rank_exit))

        current.ask_to_save(signal)

    def _begin_kill(self, current: LocalRanks) -> None:
        """Kill the ranks; `poll` says when they are gone."""
        # Before the zygote is ready no rank exists. Their requests were dropped, so nothing will be reported of them.
        self._zygote.drop_unsent()
        current.begin_kill(any_forked=self._zygote.ready)

    def kill_and_wait(self) -> None:
        """Kill the ranks, if there are any, and wait until they are gone. No message about it is sent."""
        if self._current is not None:
            self._begin_kill(self._current)

        # A zygote that does not say that they ended is killed before this deadline, and its ranks die with it.
        deadline = time.monotonic() + 2 * RANKS_KILL_S
        while self._current is not None and time.monotonic() < deadline:
            self.poll()
            wait_readable(self.sockets(), 0.05)

        self._close_attempt()
        self._messages.clear()

    # ---- what happens on the node ----

    def poll(self) -> list[ToCoordinator]:
        """Return the messages about what has happened since the last call."""
        # First the reports of the zygote. If it has died, its last reports may still be the exits of ranks.
        changes = self._zygote.poll()
        if self._current is not None:
            current = self._current
            self._note_changes(current, [change for change in changes if change.attempt == current.attempt])
            self._do_housekeeping(current)

        # The next zygote has no ranks yet, but the system may have refused its process: it tries again.
        if self._next_zygote is not None:
            self._next_zygote.poll()

        # Then the zygote itself. If it has died, its ranks are lost with it, and count as gone below.
        self._check_zygote(self._current)

        # Last, whether ranks that were killed are all gone.
        if self._current is not None and self._current.was_killed and self._current.all_gone:
            self._messages.append(RanksGone(self._current.attempt))
            self._close_attempt()

        messages, self._messages = self._messages, []
        return messages

    def _note_changes(self, current: LocalRanks, changes: list[RankChange]) -> None:
        """Note which ranks of this attempt have started or exited."""
        # The last heartbeat comes before the exits of ranks, and with it the settings, if they were not sent yet.
        if any(change.is_exit for change in changes) and not current.was_killed:
            self._collect_settings(current)
            self._messages.append(self.heartbeat())

        for change in changes:
            rank = current.running.get(change.rank)
            if rank is None:
                continue

            if change.code is None:
                assert change.pid is not None, "a rank that has started has a process"
                current.rank_started(rank, change.pid)
            else:
                self._report_exit(current, rank, change.code)

    def _report_exit(self, current: LocalRanks, rank: LocalRank, code: int) -> None:
        """Find out why a rank has exited, and report that, unless it was killed here."""
        current.ended(rank.number)

        # What follows is decided already, and the log of the rank may be on a disk that does not answer.
        if current.was_killed:
            return

        now = time.time()
        rank_exit = examine(rank, code, now)

        # The clock of the coordinating node may differ, so the message has an age.
        age = max(0.0, now - rank_exit.failure.time) if rank_exit.failure else 0.0
        self._messages.append(RankExited(current.attempt, rank.number, rank_exit, age))

    def _check_zygote(self, current: LocalRanks | None) -> None:
        """Kill a zygote that does not answer, and replace one that has died."""
        # The ranks were killed long ago and have no process any more, but the zygote has not reported it: it is halted,
        # or it stalls.
        if current and current.running and current.seconds_since_kill > RANKS_KILL_S and not current.any_process_left:
            self._zygote.kill_zygote(f"did not report within {RANKS_KILL_S:.0f} s that its killed ranks had ended")

        if not self._zygote.alive and not self._cannot_import:
            self._replace_zygote()

    def _replace_zygote(self) -> None:
        """Kill the ranks of a zygote that has died, because nothing reports their exits any more, and replace it."""
        self._zygote.close()
        self._cannot_import = self._zygote.cannot_import

        if self._current is not None:
            self._current.zygote_lost()

        # If its imports have failed, those of the next one would fail as well, so none is started.
        attempt = self._current.attempt if self._current else None
        process = "the process" if self._zygote.pid is None else f"the process {self._zygote.pid}"
        text = f"{process} that starts the ranks on {self.host} {self._zygote.how_it_ended}"
        kind = LauncherFailure.SETUP if self._zygote.refusal else LauncherFailure.ZYGOTE
        self._messages.append(NodeFailed(attempt, LauncherFailure.IMPORT if self._cannot_import else kind, text))

        if not self._cannot_import:
            self._zygote = self._new_zygote(self._zygote.env)

    def _do_housekeeping(self, current: LocalRanks) -> None:
        """Do what is due about once a second while ranks run."""
        now = time.monotonic()
        if now >= self._housekeeping_due:
            self._housekeeping_due = now + HEARTBEAT_S
            current.do_housekeeping()
            self._collect_settings(current)

    def _collect_settings(self, current: LocalRanks) -> None:
        """Send the task's settings, once in each attempt, when rank 0 has read them."""
        settings = current.take_settings()
        if settings is not None:
            self._messages.append(SettingsRead(settings))

    def heartbeat(self) -> NodeHeartbeat:
        """Return the heartbeat of this node, with those of its ranks."""
        current = self._current
        if current is None:
            return NodeHeartbeat(attempt=self._started)

        # There is no view of a rank that died before its first heartbeat.
        views = [view_of(rank, self.host, pid, current.folder) for rank, pid in current.pids.items()]
        return NodeHeartbeat([view for view in views if view is not None], current.attempt)

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for: reports of the zygote."""
        return self._zygote.sockets

    def _close_attempt(self) -> None:
        """Kill what is left of the current attempt, and remove its folder."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        """End the zygotes and, with them, all ranks."""
        self._close_attempt()
        self._zygote.close()
        if self._next_zygote is not None:
            self._next_zygote.close()


def _environment_for(count: int) -> dict[str, str]:
    """Return the environment of `count` ranks, which share the cores unless the user set OMP_NUM_THREADS."""
    # Ranks must not get the job's secret: programs may record their environment. Nor must they get the variables of
    # another job, one of whose ranks may have started this launcher.
    others = {SECRET, RESUME_COMMAND, *OF_ONE_JOB}
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    share_cores(inherited, count)
    return inherited
