"""Opens the folder of a run: rank 0 chooses and locks it, and all ranks check that they see the same folder.

This module imports no torch.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import RunConfig
from lockstep.errors import ExitCode, UserError, shell_word
from lockstep.run_folder.events import belongs_to_earlier_run, end_of_earlier_run
from lockstep.run_folder.locks import lock
from lockstep.run_folder.names import CHECKPOINTS
from lockstep.run_folder.run_dir import choose_run_dir, holds_a_run, not_writable, prepare, refuse_another_run
from lockstep.run_folder.start_from import StartFrom, choose_start, going_back_mark, mark_going_back
from lockstep.runtime.environments.launcher import ATTEMPT, TORCHRUN_RESTARTS, from_launcher

if TYPE_CHECKING:
    from lockstep.runtime.context import Runtime  # which imports torch


@dataclass
class RunFolder:
    """The folder of a run, and where the run starts from."""

    path: Path
    shown: str  # the path as the user typed it
    start_from: StartFrom
    attempt: int  # how often the launcher restarted this run
    token: str  # distinguishes this attempt from an earlier attempt that may still be writing
    earlier_end: int | None = None  # see `events.end_of_earlier_run`
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

    def is_left_alone(self, error: BaseException) -> bool:
        """Return whether the folder stays as it is after this error: a request was refused before it has begun."""
        refused = isinstance(error, UserError) and error.exit_code == ExitCode.REFUSED
        return refused and self.attempt == 0 and belongs_to_earlier_run(self.path, self.earlier_end)

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
            f"set another run_dir; or --resume {shell_word(shown)} to resume the run that is there",
        )

    folder = RunFolder(path, str(shown), start_from, attempt, secrets.token_hex(4), end_of_earlier_run(path))
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
