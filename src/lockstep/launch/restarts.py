"""Whether to try again after a failure, and with how many ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch import watchdog
from lockstep.launch.failure import HANG, NODE, SMALLER, Failure

HOUR_S = 3600.0
TIMES_IN_A_ROW = 3  # a rank that fails so often without progress is left out, if the job may shrink


@dataclass(frozen=True)
class Settings:
    """What the task's own configuration says, once rank 0 has read it."""

    limits: watchdog.Limits = field(default_factory=watchdog.Limits)
    restart_hangs: bool = True
    per_hour: int = 10
    grace: float = 600.0  # seconds to save and leave

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Settings:
        hangs, restart = values.get("hang", {}), values.get("restart", {})
        limits = {name: float(hangs[name]) for name in ("first", "least", "factor") if name in hangs}
        return Settings(
            limits=watchdog.Limits(**limits),
            restart_hangs=hangs.get("action", "restart") == "restart",
            per_hour=int(restart.get("per_hour", 10)),
            grace=float(restart.get("grace", 600.0)),
        )


@dataclass(frozen=True)
class Situation:
    """What is known at the moment of a failure."""

    began_at: int | None  # the newest checkpoint when the round began
    saved: int | None  # and now
    asked: str | None  # the signal that told the job to leave
    too_few_nodes: str | None


class Restarts:
    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[float] = deque()  # when
        self._culprit: tuple[object, int | None] = (None, None)  # the last one, and the newest checkpoint then
        self._in_a_row = 0

    def refusal(self, failure: Failure, now: float, settings: Settings, situation: Situation) -> str | None:
        """Why the job ends here; None: go on."""
        while self._recent and now - self._recent[0] > HOUR_S:
            self._recent.popleft()
        if failure.for_user:
            return "the program would say the same again"
        if situation.asked:
            return f"the job was asked to leave ({situation.asked})"
        if situation.too_few_nodes:
            return situation.too_few_nodes
        if failure.kind == SMALLER:
            return None  # micro_batch=auto asked for it, and it comes to an end: the sizes only go down
        if failure.kind == HANG and not settings.restart_hangs:
            return "hang.action is stop"
        if failure.from_python and situation.saved == situation.began_at:
            return "no checkpoint was saved since the last start, so the same error would come again"
        if settings.per_hour == 0:
            return "restart.per_hour is 0"
        if len(self._recent) >= settings.per_hour:
            return f"{len(self._recent)} restarts within the last hour, which is the limit"
        return None

    def note(self, failure: Failure, place: object, saved: int | None, now: float) -> bool:
        """One more restart. True: the rank at this place keeps failing without progress, and should be left out."""
        self.total += 1
        if failure.kind == SMALLER:
            return False
        self._recent.append(now)
        self._in_a_row = self._in_a_row + 1 if self._culprit == (place, saved) else 1
        self._culprit = (place, saved)
        if self._in_a_row < TIMES_IN_A_ROW or failure.kind == NODE:
            return False
        self._in_a_row = 0
        return True

    def count(self, failure: Failure, settings: Settings) -> str:
        if failure.kind == SMALLER:
            return "not counted as a restart"
        return f"restart {len(self._recent)} of {settings.per_hour} in an hour"
