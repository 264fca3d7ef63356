"""The watchdog: notice within seconds that no rank advances, and explain which rank the others wait for, and where.

Ranks publish their step and phase (`lockstep.runtime.heartbeat`); launchers read them, and the coordinating one judges.
Each phase has its own limit, learnt from how long the phase took before. As long as one rank is within its own limit
there is no alarm, except for a stopped or dead process: all others may rightly be waiting for that one.

The parts, from the bottom up: `view_of` reads one rank, `judge` looks at all ranks at one moment, `HangDetector` adds
what must be remembered between two looks, and `Watchdog` is all of it for one attempt, including the stacks that are
collected on suspicion.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.launch import flight_recorder
from lockstep.launch.failure import HANG, Failure
from lockstep.launch.protocol import Stacks
from lockstep.launch.stacks import Frame, group, line_of, main_thread
from lockstep.runtime import heartbeat

# Phases in which a rank waits for the others: it is never the reason for a hang there.
WAITING = ("join", "exchange", "agree")

# Phases of every step, which take about as long each time.
STEADY = ("compute", "exchange", "update", "agree")

# Phases without a history in this process, and user code, which may do something long once in a while.
UNKNOWN = ("start", "join", "build", "load", "compile", "end", "yours")

# Phases that are neither steady nor unknown read and write files: their limit is at least this many times `hang.least`.
IO_FACTOR = 6.0

# The same for a rank that uses the processor or a disk, and for all ranks while none waits for another.
BUSY_FACTOR = 12.0

# For how long a process must be seen stopped or dead. It may be stopped for a moment, or its exit be reported soon.
STOPPED_S = 3.0

# How long a rank that compiles is left alone, before it is asked again.
COMPILING_S = 10.0

# A launcher that did not look for this long was stopped or starved itself, and perhaps so were its ranks.
AWAY_S = 3.0

# In any thread: on a GPU the backward pass is compiled by a thread of torch. A compiled model that runs has no such
# frame.
_COMPILING = re.compile(r'/torch/_dynamo/convert_frame\.py"|/torch/_inductor/compile_fx\.py", line \d+ in \w*compile')

# How many ranks are described in a message.
MAX_RANKS_NAMED = 8

# The letters of /proc/PID/stat.
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "Z": "dead", "": "gone"}


@dataclass(frozen=True)
class Limits:
    """Seconds without a heartbeat (`hang.first`, `hang.least`), and `hang.factor`."""

    # For a phase that has not been seen before: compiling, connecting, reading for the first time.
    first: float = 900.0

    # For a phase that has been seen: `factor` times the longest stay, and never less than `least`.
    factor: float = 5.0
    least: float = 5.0


# One rank


@dataclass(frozen=True)
class RankView:
    """One rank as its launcher sees it."""

    rank: int
    host: str
    pid: int

    # The letter in /proc/PID/stat; "" when there is no such process.
    state: str

    # The fields of its heartbeat; `age` is in seconds since the last one.
    beats: int
    age: float
    step: int
    steps: int
    phase: str
    detail: str
    longest: dict[str, float] = field(default_factory=dict)

    # Seconds for which a `HangDetector` has seen it stopped or dead.
    stopped: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RankView:
        """Return the view. Raises ValueError unless `values` is what `to_json` makes: it comes from another machine."""
        # The types are those of the annotations above, where every int is a float, too.
        number = (int, float)
        types = {"int": int, "str": str, "float": number, "dict[str, float]": dict}
        wanted = {spec.name: types[str(spec.type)] for spec in dataclasses.fields(RankView)}
        if values.keys() != wanted.keys() or not all(isinstance(values[name], wanted[name]) for name in wanted):
            raise ValueError(f"not a view of a rank: {values}")

        if not all(isinstance(seconds, number) for seconds in values["longest"].values()):
            raise ValueError(f"not a view of a rank: {values['longest']}")

        return RankView(**values)

    @property
    def halted(self) -> bool:
        """Whether the process is stopped, dead or gone."""
        return self.state in ("T", "Z", "")

    @property
    def finished(self) -> bool:
        return self.state in ("Z", "") and self.phase == "end"


def view_of(rank: int, host: str, pid: int, folder: Path) -> RankView | None:
    """Read a rank's heartbeat and process state. Returns None for a process that is gone and never had a heartbeat."""
    # A process without a heartbeat has not come that far: it counts as starting, since it was forked.
    state = _state(pid)
    seen = heartbeat.read(folder / f"heartbeat-{rank}")
    if seen is None and not state:
        return None

    if seen is None:
        age = _seconds_since_start(pid)
        seen = heartbeat.View(beats=0, age=age, step=0, steps=0, phase="start", detail="")

    return RankView(rank=rank, host=host, pid=pid, state=state, **dataclasses.asdict(seen))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may hold spaces; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _state(pid: int) -> str:
    return (_stat(pid) or [""])[0]


def _seconds_since_start(pid: int) -> float:
    fields = _stat(pid)
    if not fields:
        return 0.0

    uptime = float(Path("/proc/uptime").read_text().split()[0])

    return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


# All ranks at one moment


@dataclass(frozen=True)
class Suspicion:
    """A job that seems to hang."""

    reason: str

    # The ranks that the others wait for; empty if all of them wait at the same point.
    odd: list[int]
    views: list[RankView]

    def view(self, rank: int) -> RankView:
        return next(view for view in self.views if view.rank == rank)


def judge(views: list[RankView], limits: Limits) -> Suspicion | None:
    """Return a suspicion if the job as a whole stands still. `views` are all ranks of the job, on all nodes."""
    working = [view for view in views if not view.finished]

    # In a debugger: a person is looking at the job already.
    if any(view.state == "t" for view in working):
        return None

    # A stopped or dead process is the reason by itself, whatever the others do.
    halted = [view for view in working if view.halted and view.stopped > STOPPED_S]
    if halted:
        what = "stopped by a signal" if halted[0].state == "T" else "gone"
        verb = "is" if len(halted) == 1 else "are"
        reason = f"{len(halted)} of {len(working)} ranks {verb} {what}"
        return Suspicion(reason, [view.rank for view in halted], working)

    # One rank within its limit is enough: the others may be waiting for it.
    if not working or any(view.age <= _allowed_seconds(view, working, limits) for view in working):
        return None

    last = min(working, key=lambda view: view.age)
    limit = max(_allowed_seconds(view, working, limits) for view in working)

    return Suspicion(f"no rank has advanced for {last.age:.1f} s (limit {limit:.1f} s)", odd_ranks(working), working)


def _allowed_seconds(view: RankView, views: list[RankView], limits: Limits) -> float:
    """Return the limit, or more for a rank that visibly works: one long batch is not a hang."""
    limit = limit_of(view, views, limits)
    none_waits = not any(other.phase in WAITING for other in views)
    busy = view.phase not in WAITING and view.state in ("R", "D")

    return max(limit, BUSY_FACTOR * limits.least) if busy or none_waits else limit


def limit_of(view: RankView, views: list[RankView], limits: Limits) -> float:
    """Return how many seconds this rank may stay in its phase."""
    if view.phase in UNKNOWN or view.steps == 0 or not view.longest.get(view.phase):
        return limits.first

    if view.phase in STEADY:
        # A collective waits for whatever the other ranks still do before they enter it.
        least, alike = limits.least, {view.phase, "compute", "data"}
    else:
        least, alike = IO_FACTOR * limits.least, {view.phase}

    longest = max(other.longest.get(phase, 0.0) for other in views for phase in alike)

    return max(least, limits.factor * longest)


def odd_ranks(views: list[RankView]) -> list[int]:
    """Return the ranks for which the others wait: those that do not wait themselves, or are behind."""
    # Usually the culprit is not in a collective, or in one of an earlier step.
    newest = max(view.step for view in views)
    odd = [view.rank for view in views if view.phase not in WAITING or view.step < newest]
    if odd:
        return odd

    # All of them wait: the others wait for the ranks in a collective of their own, if that is clear.
    waits = Counter((view.phase, view.detail) for view in views)
    fewest = min(waits.values())
    if len(waits) == 1 or list(waits.values()).count(fewest) > 1:
        return []

    return [view.rank for view in views if waits[view.phase, view.detail] == fewest]


def excuse(suspicion: Suspicion, stacks: dict[int, str], limits: Limits) -> str | None:
    """Return why this is not a hang after all, or None.

    Torch compiles again in the middle of training, for example for a batch of a new shape, and that takes far longer
    than a step. The limit is then that of the first time.
    """
    if any(suspicion.view(rank).halted for rank in suspicion.odd):
        return None

    for view in suspicion.views:
        if view.age <= limits.first and _COMPILING.search(stacks.get(view.rank, "")):
            return f"rank {view.rank} is compiling"

    return None


# The explanation


def explain(suspicion: Suspicion, stacks: dict[int, str], collectives: Sequence[str] = ()) -> Failure:
    """Return a failure that names first the rank that the others wait for, then where they wait, then `collectives`."""
    # If the phases do not show which rank the others wait for, the stacks may; or else the longest silence is named.
    groups = group(stacks)
    odd = suspicion.odd or _smallest(groups)
    culprit = suspicion.view(odd[0]) if odd else max(suspicion.views, key=lambda view: view.age)
    detail = [*_stacks_of(odd, suspicion, stacks), *_groups_of(groups, odd, suspicion), *collectives]

    return Failure(
        rank=culprit.rank,
        host=culprit.host,
        time=time.time(),
        kind=HANG,
        message=f"{suspicion.reason}; {_who(suspicion, odd)}",
        traceback="\n".join(detail),
        step=culprit.step,
        phase=culprit.phase,
    )


def _smallest(groups: list[tuple[tuple[Frame, ...], list[int]]]) -> list[int]:
    """Return the group that is smaller than all others; none if two are equally small."""
    if len(groups) > 1 and len(groups[0][1]) < len(groups[1][1]):
        return groups[0][1]
    return []


def _who(suspicion: Suspicion, odd: list[int]) -> str:
    if len(odd) == 1:
        view = suspicion.view(odd[0])
        return f"rank {view.rank} on {view.host} is the one the others wait for: {_describe(view)}"

    if not odd:
        return f"no rank stands out, all wait for each other: {_describe(suspicion.views[0])}"

    head = "the others wait for these" if len(odd) < len(suspicion.views) else "no rank is waiting for another"
    named = [suspicion.view(rank) for rank in odd[:MAX_RANKS_NAMED]]
    parts = [f"rank {view.rank} on {view.host}, {_describe(view)}" for view in named]
    if len(odd) > MAX_RANKS_NAMED:
        parts.append(f"{len(odd) - MAX_RANKS_NAMED} more")

    return f"{head}: {'; '.join(parts)}"


def _describe(view: RankView) -> str:
    detail = f" ({view.detail})" if view.detail else ""
    return f"step {view.step}, phase {view.phase}{detail}, process {STATES.get(view.state, view.state)}"


def _stacks_of(odd: list[int], suspicion: Suspicion, stacks: dict[int, str]) -> list[str]:
    lines = []
    for rank in odd[:MAX_RANKS_NAMED]:
        frames = main_thread(stacks.get(rank, ""))
        if frames:
            lines.append(f"rank {rank} is at: {line_of(frames)}")
            lines += [f"  {frame}" for frame in frames]
        elif suspicion.view(rank).state == "T":
            lines.append(f"rank {rank} is stopped and cannot show its stack; SIGCONT would let it continue")
        else:
            lines.append(f"rank {rank} did not show its stack")

    return lines


def _groups_of(groups: list[tuple[tuple[Frame, ...], list[int]]], odd: list[int], suspicion: Suspicion) -> list[str]:
    lines = []
    for frames, members in groups:
        ranks = [rank for rank in members if rank not in odd]
        if not ranks:
            continue

        phases = sorted({suspicion.view(rank).phase for rank in ranks})
        count = "1 rank waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
        named = flight_recorder.listed(ranks)
        lines.append(f"{count} at: {line_of(frames)} ({named}), phase {', '.join(phases)}")

    return lines


# Over time


class HangDetector:
    """`judge`, with what must be remembered between two looks. `look` is called about once a second."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()

        # Since when the launcher has looked without a long break, and when it looked last.
        self._watched_since = -math.inf
        self._last_look = -math.inf

        # No suspicion before this time: some rank was found compiling.
        self._quiet_until = -math.inf

        # Rank -> since when it was seen stopped or dead.
        self._halted: dict[int, float] = {}

    def look(self, views: list[RankView], now: float | None = None) -> Suspicion | None:
        now = time.monotonic() if now is None else now

        # Ranks are not blamed for time in which the launcher did not look.
        if now - self._last_look > AWAY_S:
            self._watched_since = now
            self._halted = {}

        self._last_look = now

        self._halted = {view.rank: self._halted.get(view.rank, now) for view in views if view.halted}
        if now < self._quiet_until:
            return None

        return judge([self._observed(view, now) for view in views], self.limits)

    def excused(self, suspicion: Suspicion, stacks: dict[int, str]) -> str | None:
        """Return the `excuse`; if there is one, no suspicion follows for a while."""
        reason = excuse(suspicion, stacks, self.limits)
        if reason:
            self._quiet_until = self._last_look + COMPILING_S

        return reason

    def _observed(self, view: RankView, now: float) -> RankView:
        """Count only the seconds for which this detector has watched."""
        stopped = now - self._halted.get(view.rank, now)
        return dataclasses.replace(view, age=min(view.age, now - self._watched_since), stopped=stopped)


class Watchdog:
    """Watches the ranks of one attempt: their heartbeats, and on suspicion their stacks and collectives."""

    def __init__(self, limits: Limits):
        self._detector = HangDetector(limits)

        # Node -> its ranks, as of its last heartbeat.
        self._views: dict[int, list[RankView]] = {}

        # Whether the screen says that no rank advances.
        self._warned = False

        # The present suspicion, and what was collected for it: rank -> stack, rank -> flight recorder's entries.
        self._suspicion: Suspicion | None = None
        self._stacks: dict[int, str] = {}
        self._collectives: dict[int, list[dict[str, Any]]] = {}

    def set_limits(self, limits: Limits) -> None:
        self._detector.limits = limits

    def update(self, node: int, views: list[dict[str, Any]]) -> None:
        """Take over the heartbeats of one node's ranks."""
        self._views[node] = [RankView.from_json(view) for view in views]

    @property
    def _all_views(self) -> list[RankView]:
        return [view for views in self._views.values() for view in views]

    def suspicious(self, living: Collection[int], now: float) -> bool:
        """Return whether to collect stacks. `living` are the ranks of all nodes that still run."""
        views = [view for view in self._all_views if view.rank in living]

        # Without a view of every rank nothing is certain: the missing one may be at work.
        if len(views) < len(living):
            return False

        self._suspicion = self._detector.look(views, now)
        self._stacks = {}
        self._collectives = {}

        return self._suspicion is not None

    def warning(self, age: float) -> str | None:
        """Return, once per attempt, a line for the screen when no rank has advanced for `age` seconds."""
        views = self._all_views
        if self._warned or not views or min(view.age for view in views) < age:
            return None

        self._warned = True

        # The rank to name is one that does not wait for others, if there is one.
        view = min(views, key=lambda view: (view.phase in WAITING, view.rank))
        limit = max(limit_of(view, views, self._detector.limits) for view in views)
        where = f"rank {view.rank} has been in phase {view.phase} of step {view.step} for {view.age:.0f} s"

        youngest = min(view.age for view in views)

        return f"no rank has advanced for {youngest:.0f} s: {where}; the limit is {limit:.0f} s"

    def learn(self, seen: Stacks) -> None:
        """Take over the stacks and collectives of one node's ranks."""
        self._stacks |= {int(rank): str(text) for rank, text in seen.stacks.items()}
        self._collectives |= {int(rank): entries for rank, entries in seen.collectives.items()}

    def verdict(self) -> Failure | None:
        """Return the failure, after stacks were collected; None if the ranks turn out to be busy."""
        assert self._suspicion is not None
        if self._has_moved(self._suspicion) or self._detector.excused(self._suspicion, self._stacks):
            return None

        return explain(self._suspicion, self._stacks, self._differences(self._suspicion))

    def _has_moved(self, suspicion: Suspicion) -> bool:
        """Whether some rank has advanced in the meantime: it was slow, or the signal itself woke it up."""
        beats = {view.rank: view.beats for view in self._all_views}
        halted = any(suspicion.view(rank).halted for rank in suspicion.odd)
        return not halted and any(beats.get(view.rank, view.beats) != view.beats for view in suspicion.views)

    def _differences(self, suspicion: Suspicion) -> list[str]:
        # A stopped rank does not answer, and then there is nothing to compare.
        if len(self._collectives) < len(suspicion.views):
            return []

        try:
            return flight_recorder.analyse(self._collectives)
        except (KeyError, TypeError, ValueError):  # a torch with another format: the stacks must do
            return []
