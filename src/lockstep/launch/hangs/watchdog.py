"""The watchdog: notice within seconds that no rank advances and explain which rank the others wait for, and where.

Ranks publish their step and phase (`lockstep.runtime.heartbeat`); launchers read them, and the coordinating one judges.
Each phase has its own limit, learnt from how long the phase took before. As long as one rank is within its own limit
there is no alarm, because every other rank may be waiting for it. A suspended (SIGSTOP) or dead process is always an
alarm; both count as `halted`.

From the bottom up: `view_of` reads one rank, `suspect` judges all ranks at one moment, and `Watchdog` does so once a
second for one attempt: it remembers what it needs in between, and the stacks that are collected on suspicion.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.config.schema import HangConfig
from lockstep.errors import plural
from lockstep.launch import records
from lockstep.launch.failure import HANG, Failure
from lockstep.launch.hangs import flight_recorder
from lockstep.launch.hangs.stacks import Frame, describe, group, line_of, loaders, main_thread
from lockstep.runtime import heartbeat

# What the ranks may do before they enter a collective in which others wait already.
BEFORE_EXCHANGE = {name for name, phase in heartbeat.PHASES.items() if phase.before_exchange}

# Minimum limit, in multiples of `hang.least`, for phases that read or write files.
IO_FACTOR = 6.0

# Minimum limit, in multiples of `hang.least`, for a rank busy with CPU or disk, or for every rank if none waits.
BUSY_FACTOR = 12.0

# Seconds a process must stay halted before it is suspected: it may continue, or its exit may be reported soon.
HALTED_S = 3.0

# How long a rank that compiles is left alone before it is asked again.
COMPILING_S = 10.0

# Seconds without progress before the ranks are asked where they are, whatever their limits.
INQUIRE_S = 45.0

# A launcher that did not look for this long was itself suspended or starved, and perhaps so were its ranks.
AWAY_S = 3.0

# In any thread: on a GPU a thread of torch compiles the backward pass. A compiled model no longer shows these frames.
_COMPILING = re.compile(r'/torch/_dynamo/convert_frame\.py"|/torch/_inductor/compile_fx\.py", line \d+ in \w*compile')

# How much longer a rank may take at a place where an earlier attempt was ended as a hang, for each such attempt.
RAISE_FACTOR = 4.0

# Minimum, in multiples of `hang.least`, that a rank without a history is given to react to a stop request.
STOP_FACTOR = 2.0

# How many ranks are described in a message.
MAX_RANKS_NAMED = 8

# A place where ranks stood still, as (step, phase), and how many attempts ended there.
Places = Mapping[tuple[int | None, str | None], int]

# The letters of /proc/PID/stat.
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "suspended", "Z": "dead", "": "gone"}


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


# ---- the explanation ----


@dataclass(frozen=True)
class Evidence:
    """What was collected on suspicion, and what it says."""

    stacks: dict[int, str] = field(default_factory=dict)  # by rank; "" for one that did not answer
    findings: flight_recorder.Findings = field(default_factory=flight_recorder.Findings)
    holders: list[int] = field(
        default_factory=list
    )  # ranks that show their stack, and run no Python: see `gil_holders`


def gil_holders(stacks: dict[int, str], collectives: Collection[int]) -> list[int]:
    """Return the ranks that showed a stack but did not list their collectives, if others did.

    Stacks are written by a signal handler in C, collectives by a thread of Python. A rank that does only the first
    holds the GIL in native code: whatever its phase, it waits for no other rank.
    """
    answered = [rank for rank, text in stacks.items() if text]
    holders = [rank for rank in answered if rank not in collectives]
    return holders if len(holders) < len(answered) else []


def ranks_ahead(suspicion: Suspicion, findings: flight_recorder.Findings) -> list[int]:
    """Return the ranks that entered more collectives than the others in fewer steps.

    If one rank calls a collective that the others do not, and its size fits, the others take it for their own next one:
    nothing fails, and this rank falls behind, although it is the one that does too much.
    """
    entered = findings.entered
    steps = {rank: view.step for rank, view in suspicion.views.items()}
    if not entered or entered.keys() != steps.keys():
        return []

    newest = max(steps.values())
    fewest = min(entered[rank] for rank in steps if steps[rank] == newest)
    least = fewest if findings.deadlock else fewest + 1
    return [rank for rank in steps if steps[rank] < newest and entered[rank] >= least]


def explain(suspicion: Suspicion, evidence: Evidence) -> Failure:
    """Return a failure that names the rank that the others wait for, then where they wait, in which collective."""
    groups = group(evidence.stacks)
    ahead = ranks_ahead(suspicion, evidence.findings)
    awaited = ahead or _awaited(suspicion, evidence, groups)
    culprit = suspicion.views[awaited[0]] if awaited else max(suspicion.views.values(), key=lambda view: view.age)
    detail = [
        *_stacks_of(awaited, suspicion, evidence.stacks),
        *(
            f"rank {rank} holds Python's lock (the GIL) in native code: it is not in a collective"
            for rank in evidence.holders
        ),
        *_groups_of(groups, awaited, suspicion),
        *evidence.findings.lines,
        *([suspicion.remedy] if suspicion.remedy else []),
    ]

    return Failure(
        rank=culprit.rank,
        host=culprit.host,
        time=time.time(),
        kind=HANG,
        message=f"{suspicion.reason}; {_who_is_ahead(ahead, suspicion, evidence) or _who(suspicion, awaited)}",
        traceback="\n".join(detail),
        step=culprit.step,
        phase=culprit.phase,
    )


def _awaited(suspicion: Suspicion, evidence: Evidence, groups: list[tuple[tuple[Frame, ...], list[int]]]) -> list[int]:
    """Return the ranks that the others wait for, by the best evidence there is."""
    # Of several ranks that seem to work, the one that certainly does.
    if awaited := suspicion.awaited:
        return [rank for rank in awaited if rank in evidence.holders] or awaited

    # If the phases do not show it, the collectives may, or else the stacks: the ranks in the smallest group, if one is
    # smaller than all others.
    one_is_smallest = len(groups) > 1 and len(groups[0][1]) < len(groups[1][1])
    return evidence.holders or evidence.findings.late or (groups[0][1] if one_is_smallest else [])


def _who_is_ahead(ahead: list[int], suspicion: Suspicion, evidence: Evidence) -> str:
    if not ahead:
        return ""

    entered = evidence.findings.entered
    others = max((view for view in suspicion.views.values() if view.rank not in ahead), key=lambda view: view.step)
    first = suspicion.views[ahead[0]]
    verb = "is" if len(ahead) == 1 else "are"
    counts = (
        f"{entered[first.rank]} collectives by step {first.step}, "
        f"rank {others.rank} {entered[others.rank]} by step {others.step}"
    )
    return f"{flight_recorder.listed(ahead)} {verb} ahead: {counts}. Look for a collective that not every rank calls"


def _who(suspicion: Suspicion, awaited: list[int]) -> str:
    if len(awaited) == 1:
        view = suspicion.views[awaited[0]]
        return f"the others are waiting for rank {view.rank} on {view.host} ({_describe(view)})"

    if not awaited:
        return f"cannot tell which rank is at fault, all are waiting: {_describe(next(iter(suspicion.views.values())))}"

    head = "the others wait for these" if len(awaited) < len(suspicion.views) else "no rank is waiting for another"
    named = [suspicion.views[rank] for rank in awaited[:MAX_RANKS_NAMED]]
    parts = [f"rank {view.rank} on {view.host}, {_describe(view)}" for view in named]
    if len(awaited) > MAX_RANKS_NAMED:
        parts.append(f"{len(awaited) - MAX_RANKS_NAMED} more")

    return f"{head}: {'; '.join(parts)}"


def _describe(view: RankView) -> str:
    detail = f" ({view.detail})" if view.detail else ""
    return f"step {view.step}, phase {view.phase}{detail}, process {STATES.get(view.state, view.state)}"


def _stacks_of(awaited: list[int], suspicion: Suspicion, stacks: dict[int, str]) -> list[str]:
    lines = []
    for rank in awaited[:MAX_RANKS_NAMED]:
        if frames := main_thread(stacks.get(rank, "")):
            lines += describe(frames, f"rank {rank} is ")
            lines += _loaders_of(rank, suspicion, stacks)
        elif suspicion.views[rank].state == "T":
            lines.append(f"rank {rank} is suspended and cannot show its stack; SIGCONT would let it continue")
        else:
            lines.append(f"rank {rank} did not show its stack")

    return lines


def _loaders_of(rank: int, suspicion: Suspicion, stacks: dict[int, str]) -> list[str]:
    """Return where the loader processes of a rank are, if it waits for its data."""
    # The first batches are read in the phase build.
    reads = any("/lockstep/data/" in frame.file for frame in main_thread(stacks[rank]))
    if suspicion.views[rank].phase != "data" and not reads:
        return []

    return [line for pid, frames in loaders(stacks[rank]).items() for line in describe(frames, f"loader {pid} is ")]


def _groups_of(
    groups: list[tuple[tuple[Frame, ...], list[int]]], awaited: list[int], suspicion: Suspicion
) -> list[str]:
    lines = []
    for frames, members in groups:
        if ranks := [rank for rank in members if rank not in awaited]:
            phases = sorted({suspicion.views[rank].phase for rank in ranks})
            where = f"{line_of(frames)} ({flight_recorder.listed(ranks)}), phase {', '.join(phases)}"
            lines.append(f"{plural(len(ranks), 'rank waits', 'ranks wait')} at: {where}")

    return lines


# ---- over time ----


class Watchdog:
    """Watches the ranks of one attempt: their heartbeats, and on suspicion their stacks and collectives."""

    def __init__(self, limits: HangConfig, places: Places = MappingProxyType({})):
        self.limits = limits

        # Where earlier attempts were ended as hanging.
        self._places = places

        # Node -> its ranks, as of its last heartbeat.
        self.views: dict[int, list[RankView]] = {}

        # Whether the screen says that no rank advances, and the beats at which the ranks were last asked about it.
        self._warned = False
        self._asked_at: dict[int, int] = {}

        # Start of the current unbroken watch, and time of the last look.
        self._watched_since = -math.inf
        self._last_look = -math.inf

        # No suspicion before this time: some rank was found compiling.
        self._quiet_until = -math.inf

        # Rank -> since when it was seen halted.
        self._halted: dict[int, float] = {}

        # The present suspicion, and what was collected for it: rank -> stack, rank -> flight recorder's entries.
        self._suspicion: Suspicion | None = None
        self.stacks: dict[int, str] = {}
        self.collectives: dict[int, list[dict[str, Any]]] = {}

    @property
    def _all_views(self) -> list[RankView]:
        return [view for views in self.views.values() for view in views]

    def look(self, running: Collection[int], now: float) -> Suspicion | None:
        """Judge the ranks that still run; called about once a second. After a suspicion, their stacks are collected."""
        views = [view for view in self._all_views if view.rank in running]

        # Without a view of every rank nothing is certain: the missing one may be at work.
        if len(views) < len(running):
            return None

        # Ranks are not blamed for time in which the launcher did not look.
        if now - self._last_look > AWAY_S:
            self._watched_since = now
            self._halted = {}

        self._last_look = now
        self._halted = {view.rank: self._halted.get(view.rank, now) for view in views if view.halted}
        watched = now - self._watched_since
        seen = [
            replace(view, age=min(view.age, watched), halted_s=now - self._halted.get(view.rank, now)) for view in views
        ]

        # What was collected for an earlier suspicion explains nothing about this one.
        self._suspicion = None
        if now >= self._quiet_until:
            self._suspicion = suspect(seen, self.limits, self._places) or self._inquiry(seen)

        self.stacks = {}
        self.collectives = {}

        return self._suspicion

    def _inquiry(self, views: list[RankView]) -> Suspicion | None:
        """Return a reason to ask where the ranks are, long before a limit is reached; once for each standstill."""
        beats = {view.rank: view.beats for view in views}
        working = [view for view in views if not view.finished]
        youngest = min((view.age for view in working), default=0.0)
        in_debugger = any(view.state == "t" for view in working)
        if youngest < INQUIRE_S or in_debugger or beats == self._asked_at:
            return None

        self._asked_at = beats

        # The rank to name is one that does not wait for others, if there is one.
        named = min(working, key=lambda view: (view.traits.waits, view.rank))
        slowest = max(working, key=lambda view: raised_limit(view, working, self.limits, self._places))
        limit = raised_limit(slowest, working, self.limits, self._places)
        where = f"rank {named.rank} has been in phase {named.phase} of step {named.step} for {named.age:.0f} s"
        setting = setting_of(slowest, working, self.limits)
        reason = f"no rank has advanced for {youngest:.0f} s: {where}; the limit is {limit:.0f} s, by {setting}"

        return Suspicion(reason, awaited_ranks(working), {view.rank: view for view in working}, within_limit=True)

    def remark(self) -> str | None:
        """Return, once per attempt, what to show of an inquiry that proved nothing: where the ranks are."""
        suspicion = self._suspicion
        if suspicion is None or not suspicion.within_limit or self._warned or self._moved(suspicion):
            return None

        self._warned = True
        where = explain(suspicion, self._evidence(suspicion)).traceback.splitlines()
        return "\n".join([suspicion.reason, *(f"  {line}" for line in where)])

    def stands_still(self, running: Collection[int], asked: float, now: float) -> list[RankView]:
        """Return the ranks if none of them moves, although the job was `asked` to stop at this time; else nothing."""
        views = [view for view in self._all_views if view.rank in running]
        patient = now - asked <= self.limits.least or len(views) < len(running)
        moving = any(view.age <= stop_limit(view, views, self.limits) for view in views)
        return [] if patient or moving else views

    def _moved(self, suspicion: Suspicion) -> bool:
        beats = {view.rank: view.beats for view in self._all_views}
        return any(beats.get(view.rank, view.beats) != view.beats for view in suspicion.views.values())

    @property
    def reached_a_limit(self) -> bool:
        """Whether the present suspicion is that of a limit: not a halted process, not a proof."""
        return self._suspicion is not None and bool(self._suspicion.remedy)

    def verdict(self) -> Failure | None:
        """Return the failure, after stacks were collected; None if the ranks turn out to be busy."""
        suspicion = self._suspicion
        assert suspicion is not None

        # Some rank may have advanced in the meantime: it was slow, or the signal itself woke it up.
        if (self._moved(suspicion) and not suspicion.halted) or self.excuse(suspicion, self.stacks):
            return None

        # Within their limits ranks may just be slow, unless they wait for each other in different collectives.
        evidence = self._evidence(suspicion)
        if not suspicion.within_limit:
            return explain(suspicion, evidence)

        if not (evidence.findings.deadlock or ranks_ahead(suspicion, evidence.findings)):
            return None

        youngest = min(view.age for view in suspicion.views.values())
        reason = f"no rank has advanced for {youngest:.0f} s, and none can: they wait in different collectives"
        return explain(replace(suspicion, reason=reason), evidence)

    def _evidence(self, suspicion: Suspicion) -> Evidence:
        # If torch changed its format, the stacks must do. A rank that did not answer cannot be compared.
        findings = flight_recorder.Findings()
        if len(self.collectives) >= len(suspicion.views):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                findings = flight_recorder.analyse(self.collectives)

        return Evidence(self.stacks, findings, gil_holders(self.stacks, self.collectives))

    def excuse(self, suspicion: Suspicion, stacks: dict[int, str]) -> bool:
        """Whether a rank is compiling, which is no hang. If so, no suspicion follows for a while.

        Torch compiles again in the middle of training, for example for a batch of a new shape, and that takes far
        longer than a step. `hang.first` then applies.
        """
        young = [view.rank for view in suspicion.views.values() if view.age <= self.limits.first]
        compiling = any(_COMPILING.search(stacks.get(rank, "")) for rank in young)
        if suspicion.halted or not compiling:
            return False

        self._quiet_until = self._last_look + COMPILING_S

        return True
