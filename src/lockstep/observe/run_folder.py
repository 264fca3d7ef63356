"""Opens and writes the run folder, which holds everything that a run leaves behind.

`report` reads it back; `launch/folder` chooses and locks it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lockstep.config import Resolved, RunConfig, to_yaml
from lockstep.errors import UserError
from lockstep.launch.folder.locks import lock
from lockstep.launch.folder.run_dir import (
    GOING_BACK,
    choose_run_dir,
    holds_a_run,
    is_checkpoint,
    not_writable,
    prepare,
    refuse_another_run,
    run_of,
)
from lockstep.launch.records import replacing
from lockstep.observe.formats import finite
from lockstep.runtime.context import Runtime
from lockstep.runtime.environments.launcher import ATTEMPT, TORCHRUN_RESTARTS, from_launcher

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class RunFolder:
    """The folder of a run, and where the run starts from."""

    path: Path
    shown: str  # the path as the user typed it
    resume_from: Path | None  # a checkpoint, or another run
    resume_newest: bool  # whether to resume from the newest checkpoint in this folder, if it has one
    attempt: int  # how often the launcher restarted this run
    token: str  # distinguishes this attempt from an earlier one that may still be writing
    goes_back: bool = False  # whether `resume_from` is a checkpoint of this folder that the run has not loaded yet
    lock: Any = None  # held open by rank 0

    def as_shown(self, location: str) -> str:
        """Return a location as the user would write it; that of a file in this folder begins with `shown`."""
        path = Path(location)
        inside = path.is_relative_to(self.path)
        return str(Path(self.shown) / path.relative_to(self.path)) if inside else location

    def end_going_back(self) -> None:
        """Let later attempts start from the newest checkpoint, which is `resume_from` by now, or was saved after it."""
        # A disk that is out of reach must not end the run. The next save tries again.
        with suppress(OSError):
            _going_back(self.path).unlink(missing_ok=True)

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
        # As JSON: paths as text, and no lock, which rank 0 keeps.
        resume_from = folder.resume_from and str(folder.resume_from)
        return vars(folder) | {"path": str(folder.path), "resume_from": resume_from, "lock": None}

    agreed = runtime.collectives.run_on_rank0(open_on_rank0)
    if folder is None:
        resume_from = Path(agreed["resume_from"]) if agreed["resume_from"] else None
        folder = RunFolder(**agreed | {"path": Path(agreed["path"]), "resume_from": resume_from})

    # Rank 0 put a mark into the folder, which a rank on another file system does not see.
    blind = runtime.collectives.gather_json(not _mark(folder).exists())
    if runtime.is_main:
        _mark(folder).unlink()

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

    resume_from = None if config.resume in ("auto", "never") else Path(config.resume)

    # `run_of` raises if there is no run or checkpoint.
    resumes_here = resume_from is not None and run_of(resume_from).resolve() == path.resolve()
    if attempt == 0 and resume_from is not None and not resumes_here and holds_a_run(path):
        raise UserError(
            f"--resume {resume_from} cannot be used with run_dir={shown}: that folder already holds another run",
            "",
            f"set another run_dir; or --resume {shown} to resume the run that is there",
        )

    # Resuming a run in its own folder starts from its newest checkpoint, unless one is named. A restart starts from the
    # named one again only if the attempt before it died too early to set the later ones aside.
    names_checkpoint = resume_from is not None and is_checkpoint(resume_from)
    newest = resumes_here and not names_checkpoint
    goes_back = resumes_here and names_checkpoint and (attempt == 0 or _going_back(path).exists())
    folder = RunFolder(
        path,
        str(shown),
        resume_from=None if newest else resume_from,
        resume_newest=(attempt > 0 and not goes_back) or newest or config.resume == "auto",
        attempt=attempt,
        token=secrets.token_hex(4),
        goes_back=goes_back,
    )
    _create(folder)
    return folder


def _create(folder: RunFolder) -> None:
    path = folder.path
    try:
        prepare(path)
        (path / "checkpoints").mkdir(exist_ok=True)
        folder.lock = lock(path)

        # An attempt that was killed early left its mark behind.
        for old in path.glob(".seen-*"):
            old.unlink()

        _mark(folder).touch()

        # An earlier job may have ended before it had gone back.
        if folder.goes_back:
            _going_back(path).touch()
        else:
            _going_back(path).unlink(missing_ok=True)
    except OSError as error:
        raise not_writable(path, error) from error


def _mark(folder: RunFolder) -> Path:
    """Return the file that rank 0 creates, to check that every rank sees its folder."""
    return folder.path / f".seen-{folder.token}"


def _going_back(path: Path) -> Path:
    """Return the file that exists until the newest checkpoint is the one that --resume named, or follows it."""
    return path / GOING_BACK


def write_head(run_dir: Path, resolved: Resolved, plan: dict[str, Any]) -> None:
    """Write what is known before the first step."""
    (run_dir / "config.yaml").write_text(to_yaml(resolved.config))
    (run_dir / "config.sources.json").write_text(json.dumps(resolved.sources, indent=2))
    (run_dir / "plan.json").write_text(json.dumps(plan, indent=2))
    # A summary from before a resume is out of date.
    (run_dir / "summary.json").unlink(missing_ok=True)


def write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    (run_dir / "summary.json").write_text(json.dumps(finite(summary), indent=2))


def save_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Save weights under the model's own names, tied weights once. An older file is replaced atomically."""
    from safetensors import SafetensorError

    try:
        write_weights(path, weights, aliases)
    except (OSError, SafetensorError) as error:
        run_dir = path.parent
        raise UserError(
            f"the final weights cannot be written to {run_dir}: {error}",
            "",
            f"make room, then add --resume {run_dir} to the same command: it resumes from the last checkpoint",
        ) from error


def write_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Write a safetensors file, which is replaced as a whole or not at all. Its metadata map aliases to names.

    The same weights always make the same bytes: safetensors itself writes metadata in a random order.
    """
    from safetensors.torch import save_file

    with replacing(path, str(os.getpid())) as draft:
        # safetensors makes a file that only its owner can read; this one has the mode that the user's umask gives.
        draft.touch()
        mode = stat.S_IMODE(draft.stat().st_mode)
        save_file(weights, str(draft), metadata={**aliases, "format": "pt"})
        draft.chmod(mode)

        with draft.open("r+b") as file:
            _sort_metadata(file)

            # Without the fsync, a power failure after the rename could leave a file without its contents.
            os.fsync(file.fileno())


def _sort_metadata(file: BinaryIO) -> None:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))

    # Another order takes the same room; the format pads with spaces.
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(text) <= size, "the header would run into the data"
    file.seek(8)
    file.write(text.ljust(size))
    file.flush()
