"""Suspicion: whether a job stands still, judged by the heartbeats of all its ranks at one moment.

Each phase has its own limit, learnt from how long the phase took before. As long as one rank is within its own limit
there is no alarm, because every other rank may be waiting for it. A suspended (SIGSTOP) or dead process is always an
alarm; both count as `halted`.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from lockstep.config.schema import HangConfig
from lockstep.launch import records
from lockstep.runtime import heartbeat

# What the ranks may do before they enter a collective in which others wait already.
BEFORE_EXCHANGE = {name for name, phase in heartbeat.PHASES.items() if phase.before_exchange}

# Minimum limit, in multiples of `hang.least`, for phases that read or write files.
IO_FACTOR = 6.0

# Minimum limit, in multiples of `hang.least`, for a rank busy with CPU or disk, or for every rank if none waits.
BUSY_FACTOR = 12.0

# Seconds a process must stay halted before it is suspected: it may continue, or its exit may be reported soon.
HALTED_S = 3.0

# How much longer a rank may take at a place where an earlier attempt was ended as a hang, for each such attempt.
RAISE_FACTOR = 4.0

# Minimum, in multiples of `hang.least`, that a rank without a history is given to react to a stop request.
STOP_FACTOR = 2.0

# A place where ranks stood still, as (step, phase), and how many attempts ended there.
Places = Mapping[tuple[int | None, str | None], int]


# ---- one rank ----


@dataclass(frozen=True, kw_only=True)
class RankView(heartbeat.View):
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
    def finished(self) -> bool:
        return self.state in ("Z", "") and self.phase == "end"

    @property
    def traits(self) -> heartbeat.Phase:
        # Another node may send anything.
        return heartbeat.PHASES.get(self.phase, heartbeat.Phase())


def view_of(rank: int, host: str, pid: int, folder: Path) -> RankView | None:
    """Read a rank's heartbeat and process state. Returns None for a process that is gone and never had a heartbeat."""
    # The process's name, in parentheses, may hold spaces. Nothing follows if there is no such process.
    stat = records.read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    view = heartbeat.read(folder / f"heartbeat-{rank}")
    if view is None and not stat:
        return None

    # A process without a heartbeat counts as starting, from the moment when it was forked.
    if view is None:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = max(0.0, uptime - int(stat[19]) / os.sysconf("SC_CLK_TCK"))
        view = heartbeat.View(beats=0, age=age, step=0, steps_done=0, phase="start", detail="")

    return RankView(rank=rank, host=host, pid=pid, state=stat[0] if stat else "", **vars(view))


# ---- all ranks at one moment ----


@dataclass(frozen=True)
class Suspicion:
    """A job that seems to hang."""

    reason: str
    awaited: list[int]  # the ranks that the others wait for; none if all wait at the same point
    views: dict[int, RankView]  # by rank
    remedy: str = ""  # the setting that raises the limit
    within_limit: bool = False  # only an inquiry: no failure without proof

    @property
    def halted(self) -> bool:
        return any(self.views[rank].halted for rank in self.awaited)


def suspect(views: list[RankView], limits: HangConfig, places: Places = MappingProxyType({})) -> Suspicion | None:
    """Return a suspicion if the job as a whole stands still. `views` are all ranks of the job, on all nodes.

    At `places` an earlier attempt was ended: the limit is higher there.
    """
    working = [view for view in views if not view.finished]
    by_rank = {view.rank: view for view in working}

    # In a debugger: a person is looking at the job already.
    if any(view.state == "t" for view in working):
        return None

    # A halted process is the reason by itself, whatever the others do.
    if halted := [view for view in working if view.halted and view.halted_s > HALTED_S]:
        what = "suspended by a signal" if halted[0].state == "T" else "gone"
        verb = "is" if len(halted) == 1 else "are"
        reason = f"{len(halted)} of {len(working)} ranks {verb} {what}"
        return Suspicion(reason, [view.rank for view in halted], by_rank)

    # One rank within its limit is enough: the others may be waiting for it.
    rank_limits = {view.rank: raised_limit(view, working, limits, places) for view in working}
    if not working or any(view.age <= rank_limits[view.rank] for view in working):
        return None

    youngest = min(view.age for view in working)
    slowest = max(working, key=lambda view: rank_limits[view.rank])
    setting = setting_of(slowest, working, limits)
    reason = f"no rank has advanced for {youngest:.1f} s (limit {rank_limits[slowest.rank]:.1f} s, by {setting})"
    remedy = f"if this is slow work and no hang: {setting}={2 * getattr(limits, setting.removeprefix('hang.')):g}"

    return Suspicion(reason, awaited_ranks(working), by_rank, remedy)


def raised_limit(view: RankView, views: list[RankView], limits: HangConfig, places: Places) -> float:
    """Return how many seconds this rank may stay in its phase, here: a limit that was too short is not repeated."""
    limit = busy_limit(view, views, limits)
    times = places.get((view.step, view.phase), 0)
    return max(limit, min(limit * RAISE_FACTOR**times, limits.first))


def busy_limit(view: RankView, views: list[RankView], limits: HangConfig) -> float:
    """Return `limit_of` this rank, or more if it visibly works: one long batch is not a hang."""
    limit = limit_of(view, views, limits)
    none_waits = not any(other.traits.waits for other in views)

    return max(limit, BUSY_FACTOR * limits.least) if _is_busy(view) or none_waits else limit


def _is_busy(view: RankView) -> bool:
    return not view.traits.waits and view.state in ("R", "D")


def stop_limit(view: RankView, views: list[RankView], limits: HangConfig) -> float:
    """Return how many seconds this rank may stand still after the job was asked to stop, if it is not to be killed."""
    if view.traits.saves:
        return math.inf

    # Before its first step ends, a rank has nothing to save.
    limit = STOP_FACTOR * limits.least
    if not view.steps_done:
        return limit

    # `hang.first` is for work that may take long. A rank that works on is worth waiting for, one that sleeps is not.
    if _has_history(view):
        limit = limit_of(view, views, limits)
    else:
        limit = max(limit, limits.factor * view.longest.get(view.phase, 0.0))

    return max(limit, BUSY_FACTOR * limits.least) if _is_busy(view) else limit


def setting_of(view: RankView, views: list[RankView], limits: HangConfig) -> str:
    """Return the setting that gave this rank its limit."""
    if not _has_history(view):
        return "hang.first"

    # The limit that this rank would have without a history.
    unlearnt = limit_of(view, [replace(other, longest={view.phase: 1e-9}) for other in views], limits)
    learnt = busy_limit(view, views, limits) > max(unlearnt, BUSY_FACTOR * limits.least)
    return "hang.factor" if learnt else "hang.least"


def _has_history(view: RankView) -> bool:
    """Whether earlier visits say how long this phase takes."""
    return view.traits.duration != "unpredictable" and view.steps_done > 0 and bool(view.longest.get(view.phase))


def limit_of(view: RankView, views: list[RankView], limits: HangConfig) -> float:
    """Return how many seconds this rank may stay in its phase."""
    if not _has_history(view):
        return limits.first

    # A collective waits for whatever the other ranks still do before they enter it.
    steady = view.traits.duration == "steady"
    phases = {view.phase} | BEFORE_EXCHANGE if steady else {view.phase}
    longest = max(other.longest.get(phase, 0.0) for other in views for phase in phases)

    return max(limits.least * (1.0 if steady else IO_FACTOR), limits.factor * longest)


def awaited_ranks(views: list[RankView]) -> list[int]:
    """Return the ranks for which the others wait: those that do not wait themselves, or are behind."""
    # Usually the culprit is not in a collective, or in one of an earlier step.
    newest = max(view.step for view in views)
    if awaited := [view.rank for view in views if not view.traits.waits or view.step < newest]:
        return awaited

    # All of them wait: blame the smallest group in a different collective, if there is exactly one.
    waits = Counter((view.phase, view.detail) for view in views)
    fewest = min(waits.values())
    if len(waits) == 1 or list(waits.values()).count(fewest) > 1:
        return []

    return [view.rank for view in views if waits[view.phase, view.detail] == fewest]
