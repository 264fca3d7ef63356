"""What the folder of a run's checkpoints shows: which checkpoint is the newest, and whether a commit is near.

Their contents are not verified; `checkpoint.loading.search` does that. This module imports no torch: the launcher uses
it while the ranks train.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep import files
from lockstep.run_folder.checkpoint_names import MANIFEST, committed_names, is_confirmation, is_draft, step_in
from lockstep.run_folder.names import GOING_BACK


@dataclass(frozen=True)
class CheckpointFacts:
    """What the checkpoints of a run showed at one moment."""

    # The step of the newest committed checkpoint; while a run goes back to an earlier checkpoint, its step.
    newest_step: int | None = None

    # How many ranks have confirmed each uncommitted save, and whether one of these saves has its manifest.
    confirmed: frozenset[int] = frozenset()
    has_manifest: bool = False

    def commit_is_near(self, ranks: int) -> bool:
        """Return whether all ranks have written a checkpoint that rank 0 has yet to commit, within milliseconds."""
        return self.has_manifest or ranks in self.confirmed


def read_checkpoint_facts(checkpoints: Path) -> CheckpointFacts:
    """Look at the checkpoints of a run. Raise OSError if they cannot be listed: then nothing is known."""
    names = folders_in(checkpoints)
    confirmed = set()
    has_manifest = False

    for name in filter(is_draft, names):
        # The folder may be renamed at this moment.
        with suppress(FileNotFoundError):
            inside = os.listdir(checkpoints / name)
            confirmed.add(sum(map(is_confirmation, inside)))
            has_manifest = has_manifest or MANIFEST in inside

    newest = _newest_of(checkpoints, names)
    return CheckpointFacts(step_in(newest) if newest else None, frozenset(confirmed), has_manifest)


def newest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the newest committed checkpoint, or None; while a run goes back to an earlier one, the earlier one."""
    with suppress(OSError):
        newest = _newest_of(checkpoints, folders_in(checkpoints))
        return checkpoints / newest if newest else None

    return None


def folders_in(checkpoints: Path) -> list[str]:
    """Return the names of the folders in RUN/checkpoints, in any order. Raise OSError if they cannot be listed."""
    # Before the first save there is no such folder. Any other error must not look as if there were no checkpoints.
    # One scandir, because a stat call for each of 200,000 entries would take a second.
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(checkpoints) as entries:
        return [entry.name for entry in entries if entry.is_dir()]

    return []


def _newest_of(checkpoints: Path, names: list[str]) -> str | None:
    """Return the name of the newest committed checkpoint among `names`."""
    # A checkpoint that was set aside is never the newest, even while a run goes back to it.
    mark = checkpoints.parent / GOING_BACK
    if mark.exists():
        name = files.read(mark).strip()
        return name if step_in(name) is not None else None

    # LATEST is not asked: a commit updates it last, so after a kill it may name an older checkpoint.
    return next(iter(committed_names(names)), None)
