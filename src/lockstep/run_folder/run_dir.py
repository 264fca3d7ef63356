"""The folder of a run: how it is chosen, recognised and prepared, and how its settings are read.

This module imports no torch: the launcher uses it before any rank exists.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from lockstep import files
from lockstep.config import yaml_dialect
from lockstep.errors import UserError
from lockstep.files import typed_json
from lockstep.run_folder.checkpoint_names import LATEST, OWNER
from lockstep.run_folder.names import (
    CHECKPOINTS,
    CONFIG,
    LOGS,
    METRICS,
    PROFILE,
    SAMPLES,
    SOURCES,
    SUMMARY,
    is_written,
)
from lockstep.run_folder.paths import run_of
from lockstep.runtime.environments.launcher import TORCHRUN_ID, TORCHRUN_RESTARTS

# The largest settings or plan file of a run, in bytes.
LARGEST_SETTINGS = 2**26

# The folders in which a run writes, and to which names there. The contents of ASSETS belong to the task.
WRITTEN_IN: dict[str, Callable[[str], bool]] = {
    "": is_written,
    **dict.fromkeys((LOGS, SAMPLES, PROFILE), lambda name: True),
    CHECKPOINTS: lambda name: name in (LATEST, OWNER) or name.startswith("step-"),
}


def new_run_dir(name: str, make: bool = False, parent: Path = Path("runs")) -> Path:
    """Return a folder that does not exist yet, runs/NAME-TIME. `make`: make it, so that no other start gets it."""
    first = parent / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    for path in itertools.chain([first], others):
        if path.exists():
            continue

        # A folder that cannot be made is refused later, in words.
        try:
            if make:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
        except FileExistsError:
            continue
        except OSError:
            pass

        return path

    raise AssertionError("there are always more numbers")


def choose_run_dir(asked: str | None, resume: str, name: str, make: bool = True) -> Path:
    """Return the run folder: the folder that was asked for, the folder of the resumed run, or a new folder.

    `make`: a new folder is made at once, so that several runs that start in the same second get different ones.
    """
    if asked:
        return Path(asked)

    # A requeued job would begin at step 0 in a new folder, every time.
    if resume == "auto":
        unfinished = newest_unfinished(name)
        newest = f", or run_dir={unfinished}, the newest one that has not ended" if unfinished else ""
        raise UserError(
            "resume=auto needs run_dir",
            "without run_dir every run gets a new folder",
            f"add run_dir=FOLDER, the same each time{newest}",
        )

    # Under torchrun a restart must choose the same name again.
    if (torchrun_id := os.environ.get(TORCHRUN_ID, "none")) != "none":
        return Path("runs") / f"{name}-{torchrun_id}"

    if int(os.environ.get(TORCHRUN_RESTARTS, "0")):
        raise UserError(
            "a run that torchrun has restarted cannot be resumed without run_dir",
            "the default folder has a new name every time",
            "set run_dir=FOLDER, or give torchrun --rdzv-id",
        )

    return new_run_dir(name, make) if resume == "never" else run_of(Path(resume))


def refuse_another_run(run_dir: Path, resume: str) -> None:
    """Raise a UserError if a new run would write into the folder of an earlier one."""
    if resume == "never" and holds_a_run(run_dir):
        raise UserError(
            f"run_dir={run_dir} already holds a run",
            "metrics or checkpoints of that run",
            "add --resume auto to resume it; or set another run_dir (without one, every run gets its own folder)",
        )


def newest_unfinished(name: str) -> Path | None:
    """Return the most recently written run folder of this name that has no summary."""
    # Only names that `new_run_dir` gives: the names of other tasks may begin with the same word.
    ours = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?")
    runs = [path.parent for path in Path("runs").glob(f"{name}-*/{METRICS}") if ours.fullmatch(path.parent.name)]
    unfinished = [run for run in runs if not (run / SUMMARY).exists()]

    return max(unfinished, key=lambda run: (run / METRICS).stat().st_mtime, default=None)


def holds_a_run(run_dir: Path) -> bool:
    """Return whether a run has left something there. One that was refused before its first step leaves nothing."""
    metrics, checkpoints = run_dir / METRICS, run_dir / CHECKPOINTS
    has_metrics = metrics.exists() and (not metrics.is_file() or metrics.stat().st_size > 0)
    return has_metrics or (checkpoints.exists() and (not checkpoints.is_dir() or any(checkpoints.iterdir())))


def prepare(run_dir: Path) -> None:
    """Make the folder and check that it can be written to, and that it holds no links, pipes or devices."""
    _refuse_detours(run_dir)
    try:
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)

        # Permissions say nothing about full or read-only disks, so a file is written.
        probe = run_dir / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise not_writable(run_dir, error) from error


def _refuse_detours(run_dir: Path) -> None:
    """Raise a UserError if something that Lockstep would write to is a link, a pipe or a device."""
    for folder, is_ours in WRITTEN_IN.items():
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(run_dir / folder) as entries:
            for entry in entries:
                # Files and folders are fine, and so are names that Lockstep never writes to.
                is_plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                if is_plain or not is_ours(entry.name):
                    continue

                path = Path(folder) / entry.name
                target = f" -> {os.readlink(entry.path)}" if entry.is_symlink() else ""
                raise UserError(
                    f"run_dir={run_dir}: Lockstep would write through {path}, which is not a file",
                    f"{'a symbolic link' if target else 'a pipe or a device'}{target}",
                    f"remove {entry.path}; to keep a run on another disk, let run_dir itself name a folder there",
                )


def not_writable(run_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"run_dir={run_dir} cannot be written to",
        f"{error.strerror}: {error.filename or run_dir}",
        "set run_dir=FOLDER, one that you may write to",
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a .yaml or .json file of a run. Raise OSError or ValueError if it holds anything else."""
    text = files.read_bytes(path, most=LARGEST_SETTINGS).decode()
    try:
        values = typed_json.load_json(text) if path.suffix == ".json" else yaml_dialect.load(text, aliases=False)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(getattr(error, "problem", None) or str(error)) from None

    if not isinstance(values, dict):
        raise ValueError(f"a mapping was expected, a {type(values).__name__} was found")

    return typed_json.not_too_deep(values)


def stored(run_dir: Path, name: str) -> dict[str, Any]:
    """Return the mapping in the file `name` of a run, {} without such a file. Raise a UserError if it is not valid."""
    try:
        return read_mapping(run_dir / name)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        settings = " and ".join(dict.fromkeys([name, CONFIG, SOURCES]))
        fix = f"restore it, or remove {settings} there, and give the settings again"
        raise UserError(f"the file {name} of the run {run_dir} cannot be read", f"{why}", fix) from None
