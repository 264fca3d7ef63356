"""What is not as it was when a checkpoint was written."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.config import RunConfig, flatten
from lockstep.config.leaves import typed
from lockstep.errors import UserError

NOT_COMPARED = ("run_dir", "resume", "log.progress")  # may change between two parts of a run without a word


class Change(NamedTuple):
    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def as_saved(config: RunConfig) -> dict[str, str]:
    """What a checkpoint keeps of it: every setting as one would type it."""
    return {key: typed(value) for key, value in flatten(config).items()}


def config_changes(saved: dict[str, str], config: RunConfig) -> list[Change]:
    now = as_saved(config)
    keys = [key for key in {**saved, **now} if key not in NOT_COMPARED and saved.get(key) != now.get(key)]
    return [Change(key, saved.get(key, "not set"), now.get(key, "not set")) for key in keys]


def check_lasting(settings: list[Change], lasting: set[str]) -> None:
    """The task said that its own state goes with these settings."""
    for key, before, now in settings:
        if key in lasting:
            raise UserError(
                f"to go on with {key}={now}",
                f"a run with {key}={before}, and the state that its task has saved goes with that",
                f"type {key}={before}, or start a new run from the exported weights",
            )
