"""Opens and writes the run folder, which holds everything that a run leaves behind.

`report` reads it back; the package `run_folder` chooses and locks it.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.config import Resolved, RunConfig, to_yaml
from lockstep.errors import UserError
from lockstep.observe.formats import finite
from lockstep.run_folder.locks import lock
from lockstep.run_folder.names import CHECKPOINTS, CONFIG, PLAN, SOURCES, SUMMARY
from lockstep.run_folder.run_dir import choose_run_dir, holds_a_run, not_writable, prepare, refuse_another_run
from lockstep.run_folder.start_from import StartFrom, choose_start, going_back_mark, mark_going_back
from lockstep.runtime.context import Runtime
from lockstep.runtime.environments.launcher import ATTEMPT, TORCHRUN_RESTARTS, from_launcher


@dataclass
class RunFolder:
    """The folder of a run, and where the run starts from."""

    path: Path
    shown: str  # the path as the user typed it
    start_from: StartFrom
    attempt: int  # how often the launcher restarted this run
    token: str  # distinguishes this attempt from an earlier one that may still be writing
    lock: Any = None  # held open by rank 0

    def as_shown(self, path: str | Path) -> str:
        """Return a path as the user would write it; paths in this folder begin with `shown`."""
        path = Path(path)
        inside = path.is_relative_to(self.path)
        return str(Path(self.shown) / path.relative_to(self.path) if inside else path)

    def end_going_back(self) -> None:
        """Let later attempts start from the newest checkpoint again (see `GOING_BACK`)."""
        # A disk that is out of reach must not end the run. The next save tries again.
        with suppress(OSError):
            going_back_mark(self.path).unlink(missing_ok=True)

    def release_lock(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None


def open_run_dir(config: RunConfig, name: str, runtime: Runtime) -> RunFolder:
    """Choose the folder on rank 0, whose clock gives its default name, and check that all ranks see it. Collective."""
    folder: RunFolder | None = None

    def open_on_rank0() -> dict[str, Any]:
        nonlocal folder
        folder = _open(config, name)
        # As JSON, and without the lock, which rank 0 keeps.
        return vars(folder) | {"path": str(folder.path), "start_from": vars(folder.start_from), "lock": None}

    agreed = runtime.collectives.run_on_rank0(open_on_rank0)
    if folder is None:
        parsed = {"path": Path(agreed["path"]), "start_from": StartFrom(**agreed["start_from"])}
        folder = RunFolder(**agreed | parsed)

    # Rank 0 has made a file in the folder, which a rank on another file system does not see.
    blind = runtime.collectives.all_gather_json(not _visibility_probe(folder).exists())
    if runtime.is_main:
        _visibility_probe(folder).unlink()

    if any(blind):
        raise UserError(
            f"rank {blind.index(True)} does not see the files of rank 0 in run_dir={folder.path}",
            "",
            "set run_dir=FOLDER on a file system that all machines share",
        )

    return folder


def _open(config: RunConfig, name: str) -> RunFolder:
    attempt = int(from_launcher(ATTEMPT) or os.environ.get(TORCHRUN_RESTARTS, 0))
    shown = choose_run_dir(config.run_dir, config.resume, name)

    # The user's code may change the working folder.
    path = Path(os.path.abspath(shown))

    # A restarted run belongs in its folder, whatever it holds by now.
    if attempt == 0:
        refuse_another_run(shown, config.resume)

    # A run that starts from another one has no checkpoints yet.
    start_from = choose_start(config.resume, path, attempt)
    has_own = start_from.newest or start_from.goes_back
    if start_from.named and not has_own and holds_a_run(path):
        raise UserError(
            f"--resume {config.resume} cannot be used with run_dir={shown}: that folder already holds another run",
            "",
            f"set another run_dir; or --resume {shown} to resume the run that is there",
        )

    folder = RunFolder(path, str(shown), start_from, attempt, token=secrets.token_hex(4))
    _create(folder)
    return folder


def _create(folder: RunFolder) -> None:
    path = folder.path

    try:
        prepare(path)
        (path / CHECKPOINTS).mkdir(exist_ok=True)
        folder.lock = lock(path)

        # An attempt that was killed early has left its file behind.
        for old in path.glob(".seen-*"):
            old.unlink()

        _visibility_probe(folder).touch()

        # The launcher has done this, too, if there is one.
        mark_going_back(path, folder.start_from.goes_back_to)
    except OSError as error:
        raise not_writable(path, error) from error


def _visibility_probe(folder: RunFolder) -> Path:
    """Return the file that rank 0 creates, to check that every rank sees its folder."""
    return folder.path / f".seen-{folder.token}"


def write_head(run_dir: Path, resolved: Resolved, plan: dict[str, Any]) -> None:
    """Write the settings and the plan, which are known before the first step."""
    # Each in one piece: after a kill, --resume reads the settings of the run from these files.
    _replace(run_dir / CONFIG, to_yaml(resolved.config))
    _replace(run_dir / SOURCES, json.dumps(resolved.sources, indent=2))
    _replace(run_dir / PLAN, json.dumps(plan, indent=2))

    # A summary from before a resume is out of date.
    (run_dir / SUMMARY).unlink(missing_ok=True)


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    _replace(run_dir / SUMMARY, json.dumps(finite(summary), indent=2))


def _replace(path: Path, text: str) -> None:
    # Only rank 0 writes here, so the next run replaces a temporary file that a killed one has left.
    with files.replacing(path) as temporary:
        temporary.write_text(text)
