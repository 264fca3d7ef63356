"""The state of the training loop in a checkpoint: what the engine must know to continue where the saved run was.

To add a field, fill it in `Run._loop_state` and use it where the run continues; CONTRIBUTING says where that is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LoopState:
    """The state of the loop in a checkpoint. A field that an older checkpoint lacks gets its default."""

    evaluation_due: bool = False  # the evaluation of this step was interrupted; the resumed run evaluates first
    interval: dict[str, Any] | None = None  # sums since the last log line, from `Recorder.interval_state`
    seconds: float = 0.0  # elapsed seconds of the run at the save
    early_stop: dict[str, Any] | None = None  # the best evaluation so far, from `EarlyStop.state_dict`
    stop: dict[str, Any] | None = None  # a stop that the user's code requested: its reason, and whether it is done

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> LoopState:
        """Return the state in a checkpoint, without fields of other versions that this one does not know."""
        return cls(**{field.name: saved[field.name] for field in fields(cls) if field.name in saved})
