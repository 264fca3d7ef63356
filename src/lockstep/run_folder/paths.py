"""Interpret a path typed by the user: it names a run, or one of its checkpoints.

`--resume`, `init_from`, `lockstep ckpt` and `lockstep evaluate` all ask `read_path`. The folder of a run's checkpoints
means the run. This module imports no torch: the launcher uses it before any rank exists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError, nearest_name, shell_word
from lockstep.run_folder.checkpoint_names import MANIFEST, step_in
from lockstep.run_folder.names import CHECKPOINTS, CONFIG, LOCK, LOGS, METRICS, SOURCES


@dataclass(frozen=True)
class RunPath:
    """What a path means. Nothing of it needs to exist."""

    run: Path | None  # the folder of the run; None: a checkpoint that was copied elsewhere
    checkpoints: Path  # the folder in which the checkpoints are
    name: str | None = None  # of the one checkpoint that is meant; None: the run is meant


def read_path(path: Path) -> RunPath:
    """Return what `path` means. Any path that is not a checkpoint, or the folder of checkpoints, means a run."""
    # The folder may have been typed as ".", and the folder of the checkpoints may be a link to one with another name.
    # A link to a checkpoint may be anywhere.
    absolute = Path(os.path.abspath(path))
    here = absolute if path.name in ("", "..") else path
    resolved = path.resolve()

    for checkpoint, root in ((absolute, here.parent), (resolved, resolved.parent)):
        # A damaged checkpoint may have no manifest. One that was set aside is step-N.rewound or step-N.damaged.
        has_name = path.is_dir() and step_in(checkpoint.name.partition(".")[0]) is not None
        if checkpoint.parent.name == CHECKPOINTS and (has_name or _has_manifest(path)):
            return RunPath(checkpoint.parent.parent, root, checkpoint.name)

    if _has_manifest(path):
        return RunPath(None, here.parent, here.name)

    if absolute.name == CHECKPOINTS and path.is_dir() and not _has_begun(path):
        return RunPath(here.parent, here)

    return RunPath(path, path / CHECKPOINTS)


def run_of(path: Path) -> Path:
    """Return the folder of the run that --resume means. Raise a UserError if `path` means none."""
    meant = read_path(path)
    if meant.run is not None and (meant.name is not None or _has_begun(meant.run)):
        return meant.run

    # A run that was killed while it was starting.
    if is_run(path):
        raise UserError(
            f"--resume {path} cannot be used: that run has not begun to train, and has no checkpoint",
            "its locks and logs, and nothing that it has trained",
            f"start it there: {shell_word(f'run_dir={path}')} --resume auto, with the settings of the first command",
        )

    near = None if path.exists() else nearest_name(str(path), ["auto", "never"])
    instead = f"use --resume {near}; or " if near else ""
    raise UserError(
        f"--resume {path} names neither a run's folder nor one of its checkpoints",
        "a folder with other contents" if path.exists() else "no such folder",
        f"{instead}use --resume RUN or --resume RUN/checkpoints/step-NNNNNNNN, where RUN is a run's folder; "
        "or leave it out",
    )


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST).exists()


def _has_begun(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / METRICS).exists()


def is_run(folder: Path) -> bool:
    """Return whether Lockstep has made this folder for a run, even one that never began to train."""
    # Copies may lack the lock, as a hidden file.
    has_lock = (folder / LOCK).is_file() and (folder / LOGS).is_dir()
    return has_lock or ((folder / SOURCES).is_file() and (folder / CONFIG).is_file())


def check_is_run(folder: Path) -> None:
    """Raise a UserError unless Lockstep has made this folder for a run."""
    if not folder.is_dir() or not is_run(folder):
        found = "no such folder" if not folder.exists() else "a folder or file that no run of Lockstep made"
        raise UserError(f"{folder} is not the folder of a run", found, "name a run: lockstep runs lists them")
