"""Watching over the ranks of a round: their signs of life, and on suspicion a look inside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lockstep.launch import flight, hang
from lockstep.launch.failure import Failure
from lockstep.launch.messages import Stacks


class Vigil:
    def __init__(self, limits: hang.Limits):
        self._watch = hang.Watch(limits)
        self._views: dict[int, list[hang.RankView]] = {}  # by node
        self._suspicion: hang.Suspicion | None = None
        self._told = False
        self._stacks: dict[int, str] = {}
        self._collectives: dict[int, list[dict[str, Any]]] = {}

    def set_limits(self, limits: hang.Limits) -> None:
        self._watch.limits = limits

    def see(self, node: int, views: list[dict[str, Any]]) -> None:
        self._views[node] = [hang.RankView.from_json(view) for view in views]

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
        view = min(views, key=lambda view: (view.phase in hang.WAITING, view.rank))
        limit = max(hang.limit_of(view, views, self._watch.limits) for view in views)
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
        return hang.explain(self._suspicion, self._stacks, self._differences())

    def _has_moved(self, suspicion: hang.Suspicion) -> bool:
        """Some rank goes on after all: it was slow, or the question itself has woken it."""
        beats = {view.rank: view.beats for node in self._views.values() for view in node}
        halted = any(suspicion.view(rank).halted for rank in suspicion.odd)
        return not halted and any(beats.get(view.rank, view.beats) != view.beats for view in suspicion.views)

    def _differences(self) -> list[str]:
        assert self._suspicion is not None
        if len(self._collectives) < len(self._suspicion.views):  # a stopped rank does not answer: nobody can compare
            return []
        try:
            return flight.analyse(self._collectives)
        except (KeyError, TypeError, ValueError):  # a torch that records otherwise: the stacks must do
            return []
