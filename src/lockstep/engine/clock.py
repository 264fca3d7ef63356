"""The clock of a run: how long it has taken, the time before a resume included."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunClock:
    """Counts the seconds of a run. Every checkpoint holds them."""

    started: float = field(default_factory=time.time)  # the start of this process, less the seconds before a resume

    @property
    def seconds(self) -> float:
        return time.time() - self.started

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started -= state.get("seconds", 0.0)
