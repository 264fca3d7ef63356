"""Nobody advances: notice it within seconds, and say which rank the others wait for, and where it is.

Ranks publish their step and phase (`lockstep.runtime.heartbeat`); a launcher reads them and judges. Each phase has its
own limit,
learnt from how long the phase took before. As long as one rank is within its own limit there is no alarm, since all
others may rightly be waiting for that one.
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
from lockstep.launch.failure import Failure
from lockstep.launch.protocol import Stacks
from lockstep.launch.stacks import Frame, collect, group, line_of, main_thread
from lockstep.runtime import heartbeat

__all__ = ["Limits", "RankView", "Suspicion", "Watch", "collect", "excuse", "explain", "group", "judge", "view_of"]

WAITING = ("join", "exchange", "agree")  # phases in which a rank waits for the others
STEADY = ("compute", "exchange", "update", "agree")  # phases of every step, which take about as long each time
# Phases without a history in this process, and code of the user's own, which may do something long once in a while.
UNKNOWN = ("start", "join", "build", "load", "compile", "end", "yours")
PATIENT = 6.0  # times `least`, for the other phases: they read and write files
AT_WORK = 12.0  # times `least`, for a rank that uses the processor or a disk, or while no rank waits for another
STOPPED_S = 3.0  # a process may be stopped for a moment, or be dead before anybody has looked
COMPILING_S = 10.0  # how long a rank that compiles is left alone, before it is asked again
AWAY_S = 3.0  # a launcher that did not look for so long was stopped or starved itself, and so were perhaps its ranks
# In any thread: on a GPU the backward pass is compiled by a thread of torch. A compiled model that runs is not here.
_COMPILING = re.compile(r'/torch/_dynamo/convert_frame\.py"|/torch/_inductor/compile_fx\.py", line \d+ in \w*compile')
NAMED = 8  # ranks described in a message
STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "Z": "dead", "": "gone"}


@dataclass(frozen=True)
class Limits:
    """Seconds without a beat."""

    first: float = 900.0  # a phase that has not been seen before: compiling, connecting, reading for the first time
    least: float = 5.0
    factor: float = 5.0  # times the longest stay so far


@dataclass(frozen=True)
class RankView:
    """One rank as its launcher sees it."""

    rank: int
    host: str
    pid: int
    state: str  # the letter in /proc/PID/stat; "" when there is no such process
    beats: int
    age: float  # seconds since the last beat
    step: int
    steps: int
    phase: str
    place: str
    longest: dict[str, float] = field(default_factory=dict)
    stopped: float = 0.0  # seconds that a `Watch` has seen it stopped or dead

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> RankView:
        """Raises ValueError unless `values` is what `to_json` makes: it comes from another machine."""
        number = (int, float)
        types = {"int": int, "str": str, "float": number, "dict[str, float]": dict}
        wanted = {spec.name: types[str(spec.type)] for spec in dataclasses.fields(RankView)}
        if values.keys() != wanted.keys() or not all(isinstance(values[name], wanted[name]) for name in wanted):
            raise ValueError(f"no view of a rank: {values}")
        if not all(isinstance(seconds, number) for seconds in values["longest"].values()):
            raise ValueError(f"no view of a rank: {values['longest']}")
        return RankView(**values)

    @property
    def halted(self) -> bool:
        return self.state in ("T", "Z", "")


@dataclass(frozen=True)
class Suspicion:
    reason: str
    odd: list[int]  # the ranks that the others wait for; none if they all wait in the same place
    views: list[RankView]

    def view(self, rank: int) -> RankView:
        return next(view for view in self.views if view.rank == rank)


def view_of(rank: int, host: str, pid: int, folder: Path) -> RankView | None:
    """None: the process is gone, and never gave a sign of life."""
    state = _state(pid)
    seen = heartbeat.read(folder / f"heartbeat-{rank}")
    if seen is None and not state:
        return None
    seen = seen or heartbeat.View(beats=0, age=_seconds_since_start(pid), step=0, steps=0, phase="start", place="")
    return RankView(rank=rank, host=host, pid=pid, state=state, **dataclasses.asdict(seen))


class Watch:
    """What a judge must remember between two looks. Look about once a second."""

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._begin = self._last = self._quiet = -math.inf
        self._halted: dict[int, float] = {}  # since when

    def look(self, views: list[RankView], now: float | None = None) -> Suspicion | None:
        now = time.monotonic() if now is None else now
        if now - self._last > AWAY_S:
            self._begin, self._halted = now, {}  # nobody is blamed for time that nobody watched
        self._last = now
        self._halted = {view.rank: self._halted.get(view.rank, now) for view in views if view.halted}
        if now < self._quiet:
            return None
        return judge([self._seen(view, now) for view in views], self.limits)

    def excused(self, suspicion: Suspicion, stacks: dict[int, str]) -> str | None:
        """`excuse`, and then silence for a while."""
        reason = excuse(suspicion, stacks, self.limits)
        if reason:
            self._quiet = self._last + COMPILING_S
        return reason

    def _seen(self, view: RankView, now: float) -> RankView:
        stopped = now - self._halted.get(view.rank, now)
        return dataclasses.replace(view, age=min(view.age, now - self._begin), stopped=stopped)


def judge(views: list[RankView], limits: Limits) -> Suspicion | None:
    """Whether the job as a whole stands still. `views` are all ranks of the job, on all nodes."""
    working = [view for view in views if not (view.state in ("Z", "") and view.phase == "end")]  # those have finished
    if any(view.state == "t" for view in working):  # in a debugger
        return None
    if halted := [view for view in working if view.halted and view.stopped > STOPPED_S]:
        what = "stopped by a signal" if halted[0].state == "T" else "gone"
        return Suspicion(f"{len(halted)} of {len(working)} ranks: {what}", [view.rank for view in halted], working)
    if not working or any(view.age <= _patience(view, working, limits) for view in working):
        return None
    last = min(working, key=lambda view: view.age)
    limit = max(_patience(view, working, limits) for view in working)
    return Suspicion(f"no rank has advanced for {last.age:.1f} s (limit {limit:.1f} s)", odd_ranks(working), working)


def _patience(view: RankView, views: list[RankView], limits: Limits) -> float:
    """The limit, or more for a rank that visibly works: one long batch is no hang."""
    limit = limit_of(view, views, limits)
    nobody_waits = not any(other.phase in WAITING for other in views)
    busy = view.phase not in WAITING and view.state in ("R", "D")
    return max(limit, AT_WORK * limits.least) if busy or nobody_waits else limit


def limit_of(view: RankView, views: list[RankView], limits: Limits) -> float:
    """How long this rank may stay where it is."""
    if view.phase in UNKNOWN or view.steps == 0 or not view.longest.get(view.phase):
        return limits.first
    if view.phase in STEADY:
        least, alike = limits.least, {view.phase, "compute", "data"}  # a collective waits for what the others still do
    else:
        least, alike = PATIENT * limits.least, {view.phase}
    longest = max(other.longest.get(phase, 0.0) for other in views for phase in alike)
    return max(least, limits.factor * longest)


def odd_ranks(views: list[RankView]) -> list[int]:
    """The ranks for which the others wait: those that do not wait themselves, or are behind."""
    newest = max(view.step for view in views)
    odd = [view.rank for view in views if view.phase not in WAITING or view.step < newest]
    if odd:
        return odd
    places = Counter((view.phase, view.place) for view in views)
    fewest = min(places.values())
    if len(places) == 1 or list(places.values()).count(fewest) > 1:
        return []
    return [view.rank for view in views if places[view.phase, view.place] == fewest]


def excuse(suspicion: Suspicion, stacks: dict[int, str], limits: Limits) -> str | None:
    """Why this is no hang after all: torch compiles again in the middle of training, say for a batch of a new shape,
    and that takes far longer than a step. The limit is then that of the first time."""
    if any(suspicion.view(rank).halted for rank in suspicion.odd):
        return None
    for view in suspicion.views:
        if view.age <= limits.first and _COMPILING.search(stacks.get(view.rank, "")):
            return f"rank {view.rank} is compiling"
    return None


def explain(suspicion: Suspicion, stacks: dict[int, str], collectives: Sequence[str] = ()) -> Failure:
    """The odd rank first, then where the others wait, then what `flight_recorder.analyse` says."""
    groups = group(stacks)
    odd = suspicion.odd or _smallest(groups)
    culprit = suspicion.view(odd[0]) if odd else max(suspicion.views, key=lambda view: view.age)
    return Failure(
        rank=culprit.rank,
        host=culprit.host,
        time=time.time(),
        kind="hang",
        message=f"{suspicion.reason}; {_who(suspicion, odd)}",
        traceback="\n".join([*_stacks_of(odd, suspicion, stacks), *_groups_of(groups, odd, suspicion), *collectives]),
        step=culprit.step,
        phase=culprit.phase,
    )


def _smallest(groups: list[tuple[tuple[Frame, ...], list[int]]]) -> list[int]:
    """One group smaller than all others stands out; equal ones do not."""
    if len(groups) > 1 and len(groups[0][1]) < len(groups[1][1]):
        return groups[0][1]
    return []


def _who(suspicion: Suspicion, odd: list[int]) -> str:
    if len(odd) == 1:
        view = suspicion.view(odd[0])
        return f"rank {view.rank} on {view.host} is the odd one: {_describe(view)}"
    if not odd:
        return f"no rank stands out, all wait for each other: {_describe(suspicion.views[0])}"
    head = "the odd ones" if len(odd) < len(suspicion.views) else "every rank is busy by itself"
    told = [f"rank {rank} on {suspicion.view(rank).host}, {_describe(suspicion.view(rank))}" for rank in odd[:NAMED]]
    more = [f"{len(odd) - NAMED} more"] if len(odd) > NAMED else []
    return f"{head}: {'; '.join(told + more)}"


def _describe(view: RankView) -> str:
    place = f" ({view.place})" if view.place else ""
    return f"step {view.step}, phase {view.phase}{place}, process {STATES.get(view.state, view.state)}"


def _stacks_of(odd: list[int], suspicion: Suspicion, stacks: dict[int, str]) -> list[str]:
    lines = []
    for rank in odd[:NAMED]:
        frames = main_thread(stacks.get(rank, ""))
        if frames:
            lines.append(f"rank {rank} is at: {line_of(frames)}")
            lines += [f"  {frame}" for frame in frames]
        elif suspicion.view(rank).state == "T":
            lines.append(f"rank {rank} is stopped and cannot show its stack; SIGCONT would let it go on")
        else:
            lines.append(f"rank {rank} did not show its stack")
    return lines


def _groups_of(groups: list[tuple[tuple[Frame, ...], list[int]]], odd: list[int], suspicion: Suspicion) -> list[str]:
    lines = []
    for frames, members in groups:
        if ranks := [rank for rank in members if rank not in odd]:
            phases = sorted({suspicion.view(rank).phase for rank in ranks})
            count = "1 rank waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
            listed = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            lines.append(f"{count} at: {line_of(frames)} ({listed}), phase {', '.join(phases)}")
    return lines


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces; empty when there is no such process."""
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


# Watching over the ranks of a round: their signs of life, and on suspicion a look inside.


class Vigil:
    def __init__(self, limits: Limits):
        self._watch = Watch(limits)
        self._views: dict[int, list[RankView]] = {}  # by node
        self._suspicion: Suspicion | None = None
        self._told = False
        self._stacks: dict[int, str] = {}
        self._collectives: dict[int, list[dict[str, Any]]] = {}

    def set_limits(self, limits: Limits) -> None:
        self._watch.limits = limits

    def see(self, node: int, views: list[dict[str, Any]]) -> None:
        self._views[node] = [RankView.from_json(view) for view in views]

    def suspicious(self, living: Collection[int], now: float) -> bool:
        """Whether to look inside. Asked about once a second; `living` are the ranks of all nodes that still run."""
        views = [view for node in self._views.values() for view in node if view.rank in living]
        if len(views) < len(living):
            return False  # some have not been seen yet
        self._suspicion = self._watch.look(views, now)
        self._stacks, self._collectives = {}, {}
        return self._suspicion is not None

    def news(self, age: float) -> str | None:
        """Once: who has been where for so long that somebody in front of the screen would wonder."""
        views = [view for node in self._views.values() for view in node]
        if self._told or not views or min(view.age for view in views) < age:
            return None
        self._told = True
        view = min(views, key=lambda view: (view.phase in WAITING, view.rank))
        limit = max(limit_of(view, views, self._watch.limits) for view in views)
        where = f"rank {view.rank} has been in phase {view.phase} of step {view.step} for {view.age:.0f} s"
        return f"nothing has moved for a while: {where}; the limit is {limit:.0f} s"

    def learn(self, seen: Stacks) -> None:
        self._stacks |= {int(rank): str(text) for rank, text in seen.stacks.items()}
        self._collectives |= {int(rank): entries for rank, entries in seen.collectives.items()}

    def verdict(self) -> Failure | None:
        """After the look inside; None: they are busy after all."""
        assert self._suspicion is not None
        if self._has_moved(self._suspicion) or self._watch.excused(self._suspicion, self._stacks):
            return None
        return explain(self._suspicion, self._stacks, self._differences())

    def _has_moved(self, suspicion: Suspicion) -> bool:
        """Some rank goes on after all: it was slow, or the question itself has woken it."""
        beats = {view.rank: view.beats for node in self._views.values() for view in node}
        halted = any(suspicion.view(rank).halted for rank in suspicion.odd)
        return not halted and any(beats.get(view.rank, view.beats) != view.beats for view in suspicion.views)

    def _differences(self) -> list[str]:
        assert self._suspicion is not None
        if len(self._collectives) < len(self._suspicion.views):  # a stopped rank does not answer: nobody can compare
            return []
        try:
            return flight_recorder.analyse(self._collectives)
        except (KeyError, TypeError, ValueError):  # a torch that records otherwise: the stacks must do
            return []
