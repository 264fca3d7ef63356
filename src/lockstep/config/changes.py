"""Which settings differ between a saved run and this one."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.config.schema import KEYS, RunConfig
from lockstep.config.settings import flatten, typed, under_new_names

# Settings that may change on resume without being reported. The last one may follow the number of ranks.
NOT_COMPARED = ("run_dir", "resume", "log.progress", "ddp.find_unused_parameters")


class Change(NamedTuple):
    """A setting, or a fact about the platform, that differs from the one that was saved."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def settings_as_text(config: RunConfig) -> dict[str, str]:
    """Return all settings by key, as a user would type them."""
    return {key: typed(value) for key, value in flatten(config).items()}


def config_changes(saved: dict[str, str], config: RunConfig) -> list[Change]:
    """Return the settings that differ. `saved` is what `settings_as_text` returned when the run was saved."""
    saved = under_new_names(saved)
    now = settings_as_text(config)
    changes = []

    for key in {**saved, **now}:
        # A key that the older version did not have counts as its default.
        before = saved.get(key, typed(KEYS[key].default) if key in KEYS else "not set")
        after = now.get(key, "not set")
        if key not in NOT_COMPARED and before != after:
            changes.append(Change(key, before, after))

    return changes
