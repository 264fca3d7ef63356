"""Suspicion: whether a job stalls, judged by the heartbeats of all its ranks at one moment.

Three words: ranks *stall* when they do not advance, for whatever reason. A process is *halted* when it is suspended
(SIGSTOP), dead or gone. A *hang* is a failure: the verdict about ranks that have stalled for too long.

Each phase has its own timeout, learnt from how long the phase took before. As long as one rank is within its own
timeout there is no suspicion, because every other rank may be waiting for that rank. A halted process is always a
reason for suspicion.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep import files
from lockstep.config.sections import HangConfig
from lockstep.runtime import attempt_folder, heartbeat

# The phases of ranks that have not yet entered a collective in which other ranks may already wait.
BEFORE_ALL_REDUCE = {name for name, phase in heartbeat.PHASES.items() if phase.before_all_reduce}

# Shortest timeout, in multiples of `hang.least`, of phases that read or write files.
IO_FACTOR = 6.0

# Shortest timeout, in multiples of `hang.least`, of a rank that uses the CPU or a disk, and of all ranks if none waits.
BUSY_FACTOR = 12.0

# Seconds that a process must stay halted before it is suspected: it may continue, or its exit may be reported soon.
HALTED_S = 3.0

# How much longer ranks may take for each attempt that has ended because a timeout was reached, since the newest
# checkpoint. Otherwise slow work that is taken for a hang would end every attempt at the same step.
RAISE_FACTOR = 4.0

# More such attempts raise no timeout any further: `hang.first` limits it long before, and a float would overflow.
MAX_RAISES = 10


# ---- one rank ----


@dataclass(frozen=True, kw_only=True)
class RankView(heartbeat.HeartbeatView):
    """One rank as its launcher sees it: its heartbeat and its process."""

    rank: int
    host: str
    pid: int
    state: str  # the letter in /proc/PID/stat; "" when there is no such process
    halted_s: float = 0.0  # seconds for which a `Watchdog` has seen it halted

    @property
    def halted(self) -> bool:
        """Whether the process is suspended, dead or gone."""
        return self.state in ("T", "Z", "")

    @property
    def phase_info(self) -> heartbeat.Phase:
        """The facts about the rank's phase."""
        # Another node may send anything.
        return heartbeat.PHASES.get(self.phase, heartbeat.Phase())


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state's letter on; [] if there is no such process."""
    # The process's name, in parentheses, may hold spaces.
    return files.read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def view_of(rank: int, host: str, pid: int, folder: Path) -> RankView | None:
    """Read a rank's heartbeat and process state. Return None for a process that is gone and never had a heartbeat.

    Return None as well if the attempt's folder is gone: a rank that trains would seem to be starting forever.
    """
    stat = process_stat(pid)
    view = heartbeat.read(attempt_folder.heartbeat(folder, rank))
    if view is None and not (stat and folder.exists()):
        return None

    # A process without a heartbeat counts as starting, from the moment when it was forked.
    if view is None:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = max(0.0, uptime - int(stat[19]) / os.sysconf("SC_CLK_TCK"))
        view = heartbeat.HeartbeatView(beats=0, age=age, step=0, steps_here=0, phase="start", detail="")

    return RankView(rank=rank, host=host, pid=pid, state=stat[0] if stat else "", **vars(view))


# ---- all ranks at one moment ----


# Why the stacks of all ranks are collected. "halted": a process is halted. "timeout": every rank has reached its
# timeout. "stall": no rank has advanced for a while, and the job fails only if the stacks prove a deadlock. "grace
# exceeded": ranks that were asked to save and exit did not do so in time.
SuspicionKind = Literal["halted", "timeout", "stall", "grace exceeded"]


@dataclass(frozen=True)
class Suspicion:
    """A job that seems to hang."""

    kind: SuspicionKind
    reason: str
    awaited: list[int]  # the ranks that the others wait for; none if all wait at the same point
    views: dict[int, RankView]  # by rank
    remedy: str = ""  # the setting to change if this is not a hang

    @property
    def awaits_halted_rank(self) -> bool:
        """Whether a rank that the others wait for is halted."""
        return any(self.views[rank].halted for rank in self.awaited)


def suspect(views: list[RankView], config: HangConfig, timeouts_reached: int = 0) -> Suspicion | None:
    """Return a suspicion if the job as a whole stalls. `views` are all ranks of the job, on all nodes.

    `timeouts_reached`: how many attempts have reached one since the newest checkpoint. Timeouts are longer then.
    """
    # After its run a rank's process may go on for any time, or be gone.
    working = [view for view in views if not view.phase_info.after_run]
    by_rank = {view.rank: view for view in working}

    # A rank that is traced by a debugger may stall for any time.
    if any(view.state == "t" for view in working):
        return None

    # A halted process is the reason by itself, whatever the others do.
    halted = [view for view in working if view.halted and view.halted_s > HALTED_S]
    if halted:
        what = "suspended by a signal" if halted[0].state == "T" else "gone"
        verb = "is" if len(halted) == 1 else "are"
        reason = f"{len(halted)} of {len(working)} ranks {verb} {what}"

        return Suspicion("halted", reason, [view.rank for view in halted], by_rank)

    # One rank within its timeout is enough: the others may be waiting for it.
    peers = Peers(working)
    timeouts = {view.rank: raised_timeout(view, peers, config, timeouts_reached) for view in working}
    if not working or any(view.age <= timeouts[view.rank].seconds for view in working):
        return None

    # Name the rank with the longest timeout. The others may have entered their phases later, if theirs are shorter.
    last = max(working, key=lambda view: timeouts[view.rank])
    longest = timeouts[last.rank]
    youngest = min(view.age for view in working)
    if youngest > longest.seconds:
        what = f"no rank has advanced for {youngest:.1f} s"
    else:
        what = f"rank {last.rank} has been in phase {last.phase} for {last.age:.1f} s"

    reason = f"{what} (timeout {longest.seconds:.1f} s, by {longest.setting})"
    remedy = f"if this is slow work, not a hang: {longest.setting}={2 * longest.value:g}"

    return Suspicion("timeout", reason, awaited_ranks(working), by_rank, remedy)


class Timeout(NamedTuple):
    """How many seconds a rank may stay in its phase, and the setting that this comes from, with its value."""

    seconds: float
    setting: Literal["hang.first", "hang.least", "hang.factor"]
    value: float


class Peers:
    """The facts about all ranks on which the timeout of each rank depends; made once for all of them."""

    def __init__(self, views: Iterable[RankView]):
        self.none_waits = True
        self.longest: dict[str, float] = {}  # phase -> the longest stay of any rank

        for view in views:
            self.none_waits = self.none_waits and not view.phase_info.waits
            for phase, seconds in view.longest.items():
                if seconds > self.longest.get(phase, 0.0):
                    self.longest[phase] = seconds


def raised_timeout(view: RankView, peers: Peers, config: HangConfig, timeouts_reached: int) -> Timeout:
    """Return the timeout of this rank: `timeout_of`, or more.

    It is raised if the rank is visibly at work, because one long batch is not a hang, and if earlier attempts have
    reached a timeout.
    """
    timeout = timeout_of(view, peers, config)

    # Work that can be seen, or that all ranks do at once, gets more time.
    if _is_busy(view) or peers.none_waits:
        timeout = max(timeout, Timeout(BUSY_FACTOR * config.least, "hang.least", config.least))

    # Each earlier attempt that reached a timeout raises it, but never above the timeout of a phase without a history.
    raised = min(timeout.seconds * raise_factor(timeouts_reached), config.first)
    return timeout._replace(seconds=max(timeout.seconds, raised))


def raise_factor(timeouts_reached: int) -> float:
    """Return by how much all timeouts are multiplied after so many attempts that have reached one."""
    return RAISE_FACTOR ** min(timeouts_reached, MAX_RAISES)


def _is_busy(view: RankView) -> bool:
    """Return whether the process of a rank runs or waits for a disk, in a phase in which it waits for no other rank."""
    return not view.phase_info.waits and view.state in ("R", "D")


def _has_history(view: RankView) -> bool:
    """Return whether earlier visits say how long this phase takes."""
    return view.phase_info.duration != "unpredictable" and view.steps_here > 0 and bool(view.longest.get(view.phase))


def timeout_of(view: RankView, peers: Peers, config: HangConfig) -> Timeout:
    """Return how many seconds this rank may stay in its phase, and the setting that this comes from."""
    if not _has_history(view):
        return Timeout(config.first, "hang.first", config.first)

    # In a collective this rank also waits for everything that the other ranks do before they enter it.
    steady = view.phase_info.duration == "steady"
    phases = {view.phase} | BEFORE_ALL_REDUCE if steady else {view.phase}
    longest = max(peers.longest.get(phase, 0.0) for phase in phases)

    least = config.least * (1.0 if steady else IO_FACTOR)
    learnt = config.factor * longest
    if learnt > least:
        return Timeout(learnt, "hang.factor", config.factor)

    return Timeout(least, "hang.least", config.least)


def awaited_ranks(views: list[RankView]) -> list[int]:
    """Return the ranks for which the others wait: ranks that do not wait themselves, or are at an earlier step."""
    # Usually the rank that holds up the others is not in a collective, or in one of an earlier step.
    newest_step = max(view.step for view in views)
    awaited = [view.rank for view in views if not view.phase_info.waits or view.step < newest_step]
    if awaited:
        return awaited

    # All of them wait: name the smallest group in a different collective, if there is exactly one.
    waits = Counter((view.phase, view.detail) for view in views)
    fewest = min(waits.values())
    if len(waits) == 1 or list(waits.values()).count(fewest) > 1:
        return []

    return [view.rank for view in views if waits[view.phase, view.detail] == fewest]
