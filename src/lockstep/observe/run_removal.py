"""The command `lockstep rm`: delete runs, or only their checkpoints, and nothing that Lockstep did not write.

A folder counts as a run only if it has the files of one. Nothing is followed out of the folder, and a run that is still
training is refused.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal as size_text

from lockstep.errors import UserError, plural, some_names
from lockstep.observe.run_list import facts_of, files_in
from lockstep.observe.sinks import SINKS
from lockstep.run_folder.locks import hold_idle
from lockstep.run_folder.names import CHECKPOINTS, LAUNCHER_LOCK, LOCK, WRITTEN
from lockstep.run_folder.paths import check_is_run

# What `lockstep rm` deletes. Other files stay where they are, such as files of a user's sink, whose class is not
# imported here.
OURS = (*WRITTEN, *(pattern for sink in SINKS.values() for pattern in sink.files))


@dataclass(frozen=True)
class Removal:
    """The files of one run that will be deleted, and the files that stay because Lockstep did not write them."""

    run: Path
    delete: list[Path]
    stays: list[str]
    bytes: int


def rm(
    runs: Sequence[Path],
    only_checkpoints: bool,
    dry_run: bool,
    confirm: Callable[[str], bool],
    delete_objects: Callable[[Path], None],
) -> tuple[list[str], int]:
    """Delete runs, after `confirm` has agreed. Return the lines to print, and the exit code.

    If any of the paths is no run, or is running, nothing is deleted at all. `delete_objects(run)` deletes what the
    run's checkpoints have outside its folder.
    """
    # Everything is checked before anything is deleted.
    planned = [_plan(run, only_checkpoints) for run in dict.fromkeys(runs)]
    what = "the checkpoints of " if only_checkpoints else ""
    total = size_text(sum(removal.bytes for removal in planned))

    if dry_run:
        return [f"would delete {what}{removal.run} ({size_text(removal.bytes)})" for removal in planned], 0

    names = ", ".join(f"{removal.run} ({facts_of(removal.run).state})" for removal in planned)
    if not confirm(f"delete {what}{plural(len(planned), 'run')}, {total}: {names}?"):
        return ["nothing was deleted"], 1

    lines = []
    for removal in planned:
        _delete(removal, whole=not only_checkpoints, delete_objects=delete_objects)
        lines.append(f"deleted {what}{removal.run}: {size_text(removal.bytes)} freed")

        if removal.stays:
            lines.append(f"  {removal.run} stays, with what Lockstep did not write: {some_names(removal.stays)}")

    return [*lines, f"{total} freed"] if len(planned) > 1 else lines, 0


def _plan(run: Path, only_checkpoints: bool) -> Removal:
    _refuse(run)

    patterns = (CHECKPOINTS,) if only_checkpoints else OURS
    entries = sorted(run.iterdir())

    # What Lockstep has not written stays, and so does the folder then.
    delete = [path for path in entries if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)]
    stays = [] if only_checkpoints else [path.name for path in entries if path not in delete]

    return Removal(run, delete, stays, sum(_size(path) for path in delete))


def _refuse(run: Path) -> None:
    """Raise a UserError unless `run` is the folder of a run that does not run."""
    if run.is_symlink():
        raise UserError(
            f"{run} is a symbolic link, which lockstep rm does not follow", f"{os.readlink(run)}", "name the folder"
        )

    check_is_run(run)
    if not os.access(run, os.W_OK | os.X_OK):
        raise UserError(
            f"{run} cannot be deleted", "this user may not write to it", "let the user who trained it do that"
        )

    if facts_of(run).state == "running":
        raise UserError(
            f"{run} is running, and a run that is running is not deleted",
            "a process holds its folder",
            "stop it first: Ctrl-C, or kill its launcher; it saves a checkpoint and ends",
        )


def _delete(removal: Removal, whole: bool, delete_objects: Callable[[Path], None]) -> None:
    try:
        # The locks go last: until then no run can begin here.
        with hold_idle(removal.run):
            delete_objects(removal.run)
            for path in sorted(removal.delete, key=lambda path: path.name.startswith(".")):
                _delete_entry(path)

            # `hold_idle` makes a lock that the run did not have, if it ran without a launcher.
            if whole:
                for name in (LAUNCHER_LOCK, LOCK):
                    (removal.run / name).unlink(missing_ok=True)

        if whole and not removal.stays:
            removal.run.rmdir()
    except OSError as error:
        raise UserError(
            f"{removal.run} could not be deleted as a whole", f"{error.strerror}: {error.filename}", "look there"
        ) from error


def _delete_entry(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    files = files_in(path) if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files)
