"""The watchdog: notice within seconds that no rank advances and explain which rank the others wait for, and where.

Ranks publish their step and phase (`lockstep.runtime.heartbeat`); launchers read them, and the coordinating one judges.
`suspicion.suspect` judges all ranks at one moment. `Watchdog` calls it once a second during one attempt, and keeps what
it needs between calls. `HangCheck` collects the answers of the ranks on suspicion, from which `Watchdog` judges.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.config.sections import HangConfig
from lockstep.errors import plural
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.hangs import flight_recorder
from lockstep.launch.hangs.explanation import Evidence, explain, gil_holders, ranks_ahead
from lockstep.launch.hangs.suspicion import (
    Peers,
    RankView,
    Suspicion,
    awaited_ranks,
    raised_timeout,
    suspect,
)
from lockstep.launch.times import HEARTBEAT_S

# Seconds without progress after which the screen says where the ranks are, whatever their timeouts.
STALL_S = 45.0

# In any thread: on a GPU a thread of torch compiles the backward pass. A compiled model no longer shows these frames.
_COMPILING = re.compile(r'/torch/_dynamo/convert_frame\.py"|/torch/_inductor/compile_fx\.py", line \d+ in \w*compile')


@dataclass
class Answers:
    """What ranks have answered when they were asked where they are."""

    stacks: dict[int, str] = field(default_factory=dict)  # rank -> its stack
    collectives: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # rank -> its flight recorder's entries


class Watchdog:
    """Watches the heartbeats of the ranks of one attempt, and judges a suspicion by their answers."""

    def __init__(self, config: HangConfig):
        self._config = config

        # Node -> its ranks, as of its last heartbeat.
        self._views: dict[int, list[RankView]] = {}

        # The beats of all ranks at the last stall, and the time from which a stall is shown again.
        self._beats_at_stall: dict[int, int] = {}
        self._show_no_stall_until = -math.inf

        # Start of the current unbroken watch, and time of the last look.
        self._watched_since = -math.inf
        self._last_look = -math.inf

        # No suspicion before this time: some rank was found compiling, or saving.
        self._busy_until = -math.inf

        # Rank -> when it was first seen halted.
        self._halted: dict[int, float] = {}

    # ---- what the nodes send ----

    def configure(self, config: HangConfig) -> None:
        """Use the task's own settings, which are known once rank 0 has read its configuration."""
        self._config = config

    def note_views(self, node: int, views: list[RankView]) -> None:
        """Note the ranks of a node, from its heartbeat."""
        self._views[node] = views

    @property
    def _all_views(self) -> list[RankView]:
        """The views of all ranks, on all nodes."""
        return [view for views in self._views.values() for view in views]

    def last_view(self, rank: int) -> RankView | None:
        """Return the last view of a rank; None if there is none."""
        return next((view for view in self._all_views if view.rank == rank), None)

    # ---- suspicion and verdict ----

    def find_suspicion(self, running: Collection[int], now: float, timeouts_reached: int = 0) -> Suspicion | None:
        """Return a suspicion if the ranks that still run seem to hang: then their stacks are collected.

        Called about once a second. `timeouts_reached`: as in `suspect`.
        """
        views = [view for view in self._all_views if view.rank in running]

        # Without a view of every rank nothing is certain: a rank whose view is missing may be at work.
        if len(views) < len(running):
            return None

        # How long each rank has stalled, or was halted.
        self._note_gap(now)
        self._halted = {view.rank: self._halted.get(view.rank, now) for view in views if view.halted}
        aged = self._aged_views(views, now)

        if now < self._busy_until:
            return None

        return suspect(aged, self._config, timeouts_reached) or self._suspect_stall(aged, timeouts_reached)

    def _note_gap(self, now: float) -> None:
        """Begin a new watch if the launcher did not look for a while: ranks are not blamed for that time."""
        # It was halted or starved itself, and perhaps so were its ranks.
        if now - self._last_look > 3 * HEARTBEAT_S:
            self._watched_since = now
            self._halted = {}

        self._last_look = now

    def _aged_views(self, views: list[RankView], now: float) -> list[RankView]:
        """Return the views with the times that count: no rank can have stalled for longer than it was watched."""
        watched = now - self._watched_since
        aged = []

        for view in views:
            halted_s = now - self._halted.get(view.rank, now)
            aged.append(replace(view, age=min(view.age, watched), halted_s=halted_s))

        return aged

    def _suspect_stall(self, views: list[RankView], timeouts_reached: int) -> Suspicion | None:
        """Return a suspicion long before a timeout is reached, to show where the ranks are; once for each stall."""
        beats = {view.rank: view.beats for view in views}
        working = [view for view in views if not view.phase_info.after_run]
        youngest = min((view.age for view in working), default=0.0)
        in_debugger = any(view.state == "t" for view in working)

        # A rank advances, or is in a debugger, or this stall was reported before.
        if youngest < STALL_S or in_debugger or beats == self._beats_at_stall:
            return None

        self._beats_at_stall = beats

        # The rank to name is one that does not wait for others, if there is one.
        named = min(working, key=lambda view: (view.phase_info.waits, view.rank))
        peers = Peers(working)

        timeout = max(raised_timeout(view, peers, self._config, timeouts_reached) for view in working)
        where = f"rank {named.rank} has been in phase {named.phase} of step {named.step} for {named.age:.0f} s"
        applies = f"the timeout is {timeout.seconds:.0f} s, by {timeout.setting}"
        reason = f"no rank has advanced for {youngest:.0f} s: {where}; {applies}"

        return Suspicion("stall", reason, awaited_ranks(working), {view.rank: view for view in working})

    def take_stall_report(self, suspicion: Suspicion, answers: Answers) -> str | None:
        """Return where the ranks that stall are, for the screen; None if one has moved, or another was shown lately."""
        if suspicion.kind != "stall" or self._moved(suspicion):
            return None

        # Each step of a slow program may look like a stall, so one is shown every ten minutes.
        if self._last_look < self._show_no_stall_until:
            return None

        self._show_no_stall_until = self._last_look + 600.0
        where = explain(suspicion, _evidence(suspicion, answers)).traceback.splitlines()
        return "\n".join([suspicion.reason, *(f"  {line}" for line in where)])

    def nothing_to_save(self, running: Collection[int]) -> bool:
        """Return whether no rank that runs has ended a step of this attempt, and none is saving."""
        views = [view for view in self._all_views if view.rank in running]

        # Without a view of every rank nothing is certain.
        return len(views) == len(running) and not any(view.steps_here or view.phase_info.saves for view in views)

    def _moved(self, suspicion: Suspicion) -> bool:
        """Return whether a rank has sent another heartbeat since the suspicion."""
        beats = {view.rank: view.beats for view in self._all_views}
        return any(beats.get(view.rank, view.beats) != view.beats for view in suspicion.views.values())

    def verdict(self, suspicion: Suspicion, answers: Answers, saves_may_take_long: bool = False) -> Failure | None:
        """Return the failure, by the answers of the ranks; None if they turn out to be busy.

        `saves_may_take_long`: they were asked to save, and `restart.grace` is their timeout for that.
        """
        # Some rank may have advanced in the meantime: it was slow, or the signal itself woke it up.
        if self._moved(suspicion) and not suspicion.awaits_halted_rank:
            return None

        saves = saves_may_take_long and any(view.phase_info.saves for view in suspicion.views.values())
        if saves or self._is_compiling(suspicion, answers):
            self._busy_until = self._last_look + 10.0
            return None

        # Within their timeouts ranks may just be slow, unless they wait for each other in different collectives.
        evidence = _evidence(suspicion, answers)
        if suspicion.kind != "stall":
            return explain(suspicion, evidence)

        if not evidence.is_deadlock:
            return None

        youngest = min(view.age for view in suspicion.views.values())
        reason = f"no rank has advanced for {youngest:.0f} s, and none can: they wait in different collectives"
        return explain(replace(suspicion, reason=reason), evidence)

    def grace_exceeded(self, left: Mapping[int, str], within: str, answers: Answers) -> Failure:
        """Return the failure of ranks that were asked to save and exit, and have not.

        `left`: rank -> host. `within`: the time that they had, in words.
        """
        reason = f"{plural(len(left), 'rank')} did not exit within {within}"

        # Without a view of every rank it is not known which one holds up the others.
        views = [view for view in self._all_views if view.rank in left]
        if len(views) < len(left):
            first = min(left)
            return Failure.by_launcher(LauncherFailure.GRACE_EXCEEDED, reason, first, left[first])

        suspicion = Suspicion("grace exceeded", reason, awaited_ranks(views), {view.rank: view for view in views})
        return explain(suspicion, _evidence(suspicion, answers))

    def _is_compiling(self, suspicion: Suspicion, answers: Answers) -> bool:
        """Return whether a rank is compiling, which is not a hang.

        Torch compiles again in the middle of training, for example for a batch of a new shape, and that takes far
        longer than a step. `hang.first` then applies.
        """
        # After `hang.first` even a rank that compiles counts as hanging.
        young = [view.rank for view in suspicion.views.values() if view.age <= self._config.first]
        compiling = any(_COMPILING.search(answers.stacks.get(rank, "")) for rank in young)
        return compiling and not suspicion.awaits_halted_rank


def _evidence(suspicion: Suspicion, answers: Answers) -> Evidence:
    """Return the stacks, and what follows from the collectives if all ranks have sent theirs."""
    # A process whose run is closed answers, too, but is not part of the suspicion.
    stacks = {rank: text for rank, text in answers.stacks.items() if rank in suspicion.views}
    collectives = {rank: entered for rank, entered in answers.collectives.items() if rank in suspicion.views}

    # If torch has changed its format, only the stacks are used. A rank that did not answer cannot be compared.
    findings = flight_recorder.Findings()
    if len(collectives) == len(suspicion.views):
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            findings = flight_recorder.analyse(collectives)

    holders = gil_holders(stacks, collectives)
    return Evidence(stacks, findings, holders, ranks_ahead(suspicion, findings))
