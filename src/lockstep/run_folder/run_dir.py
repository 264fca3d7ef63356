"""The folder of a run: how it is chosen and recognised, and its newest checkpoint.

This module imports no torch: the launcher uses it before any rank exists.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep import files
from lockstep.config import yaml_dialect
from lockstep.errors import UserError
from lockstep.files import typed_json
from lockstep.run_folder.checkpoint_names import LATEST, MANIFEST, OWNER, is_confirmation, is_draft, step_in
from lockstep.run_folder.names import (
    CHECKPOINTS,
    CONFIG,
    GOING_BACK,
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

# The folders in which a run writes, and to which names there. What is in ASSETS is the task's own.
WRITTEN_IN: dict[str, Callable[[str], bool]] = {
    "": is_written,
    **dict.fromkeys((LOGS, SAMPLES, PROFILE), lambda name: True),
    CHECKPOINTS: lambda name: name in (LATEST, OWNER) or name.startswith("step-"),
}


def new_run_dir(name: str, make: bool = False, parent: Path = Path("runs")) -> Path:
    """Return a folder that does not exist yet: runs/NAME-TIME. With `make` it is made: another start cannot get it."""
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
    """Return the run folder: the one that was asked for, that of the run that is resumed, or a new one.

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


def refuse_another_run(run: Path, resume: str) -> None:
    """Raise a UserError if a new run would write into the folder of an earlier one."""
    if resume == "never" and holds_a_run(run):
        raise UserError(
            f"run_dir={run} already holds a run",
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


def holds_a_run(path: Path) -> bool:
    """Return whether a run has left something there. One that was refused before its first step leaves nothing."""
    metrics, checkpoints = path / METRICS, path / CHECKPOINTS
    has_metrics = metrics.exists() and (not metrics.is_file() or metrics.stat().st_size > 0)
    return has_metrics or (checkpoints.exists() and (not checkpoints.is_dir() or any(checkpoints.iterdir())))


def prepare(run: Path) -> None:
    """Make the folder and check that it can be written to, and that it holds no links, pipes or devices."""
    _refuse_detours(run)
    try:
        (run / LOGS).mkdir(parents=True, exist_ok=True)

        # Permissions say nothing about full or read-only disks, so a file is written.
        probe = run / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise not_writable(run, error) from error


def _refuse_detours(run: Path) -> None:
    """Raise a UserError if something that Lockstep would write to is a link, a pipe or a device."""
    for folder, is_ours in WRITTEN_IN.items():
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(run / folder) as entries:
            for entry in entries:
                # Files and folders are fine, and so are names that Lockstep never writes to.
                is_plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                if is_plain or not is_ours(entry.name):
                    continue

                target = f" -> {os.readlink(entry.path)}" if entry.is_symlink() else ""
                raise UserError(
                    f"run_dir={run}: Lockstep would write through {Path(folder) / entry.name}, which is not a file",
                    f"{'a symbolic link' if target else 'a pipe or a device'}{target}",
                    f"remove {entry.path}; to keep a run on another disk, let run_dir itself name a folder there",
                )


def not_writable(run: Path, error: OSError) -> UserError:
    return UserError(
        f"run_dir={run} cannot be written to",
        f"{error.strerror}: {error.filename or run}",
        "set run_dir=FOLDER, one that you may write to",
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a .yaml or .json file of a run. Raises OSError or ValueError if it holds anything else."""
    text = files.read_bytes(path, most=LARGEST_SETTINGS).decode()
    try:
        values = typed_json.load_json(text) if path.suffix == ".json" else yaml_dialect.load(text, aliases=False)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(getattr(error, "problem", None) or str(error)) from None

    if not isinstance(values, dict):
        raise ValueError(f"a mapping was expected, a {type(values).__name__} was found")

    return typed_json.not_too_deep(values)


def stored(run: Path, name: str) -> dict[str, Any]:
    """Return the mapping in the file `name` of a run, {} without such a file. Raises a UserError if it is not valid."""
    try:
        return read_mapping(run / name)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        settings = " and ".join(dict.fromkeys([name, CONFIG, SOURCES]))
        fix = f"restore it, or remove {settings} there, and give the settings again"
        raise UserError(f"the file {name} of the run {run} cannot be read", f"{why}", fix) from None


# ---- its checkpoints ----


@dataclass(frozen=True)
class CheckpointFacts:
    """What the checkpoints of a run showed at one moment."""

    # The step of the newest committed checkpoint; while a run goes back to an earlier one, the step of that one.
    newest_step: int | None = None

    # How many ranks have confirmed each uncommitted save, and whether one of these saves has its manifest.
    confirmed: frozenset[int] = frozenset()
    has_manifest: bool = False

    def commit_is_near(self, ranks: int) -> bool:
        """Return whether all ranks have written a checkpoint that rank 0 has yet to commit, within milliseconds."""
        return self.has_manifest or ranks in self.confirmed


def read_checkpoint_facts(checkpoints: Path) -> CheckpointFacts:
    """Look at the checkpoints of a run. Raises OSError if that is not possible: then nothing is known about them."""
    names = folders_in(checkpoints)
    confirmed = set()
    has_manifest = False

    for name in filter(is_draft, names):
        # It may be renamed at this moment.
        with suppress(FileNotFoundError):
            inside = os.listdir(checkpoints / name)
            confirmed.add(sum(map(is_confirmation, inside)))
            has_manifest = has_manifest or MANIFEST in inside

    newest = _newest_of(checkpoints, names)
    return CheckpointFacts(step_in(newest) if newest else None, frozenset(confirmed), has_manifest)


def latest(checkpoints: Path) -> Path | None:
    """Return the newest committed checkpoint, or None; while a run goes back to an earlier one, that one.

    Its contents are not verified; `checkpoint.search` does that.
    """
    with suppress(OSError):
        newest = _newest_of(checkpoints, folders_in(checkpoints))
        return checkpoints / newest if newest else None

    return None


def latest_step(checkpoints: Path) -> int | None:
    checkpoint = latest(checkpoints)
    return step_in(checkpoint.name) if checkpoint else None


def folders_in(checkpoints: Path) -> list[str]:
    """Return the names of the folders in RUN/checkpoints, in any order. Raises OSError if they cannot be listed."""
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
    steps = {step: name for name in names if (step := step_in(name)) is not None}
    return steps[max(steps)] if steps else None
