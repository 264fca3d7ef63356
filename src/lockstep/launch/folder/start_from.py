"""Where a run starts: from its beginning, or from a checkpoint.

Rank 0 decides once, when it opens the run folder (`choose_start`); everybody else asks `RunFolder.start_from`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lockstep.launch.folder.checkpoint_names import step_in
from lockstep.launch.folder.run_dir import GOING_BACK, is_checkpoint, run_of


@dataclass(frozen=True)
class Beginning:
    """A new run."""


@dataclass(frozen=True)
class Newest:
    """The newest valid checkpoint in this run's folder. If there is none, what --resume named, or the beginning."""

    otherwise: Path | None = None  # what --resume named: a checkpoint, or another run


@dataclass(frozen=True)
class Named:
    """What --resume names, outside this run's folder: a checkpoint, or a run, whose newest valid checkpoint is used."""

    path: Path


@dataclass(frozen=True)
class GoBack:
    """A checkpoint of this run that --resume names. Later ones are set aside once it is loaded."""

    path: Path


StartFrom = Beginning | Newest | Named | GoBack


def choose_start(resume: str, run_dir: Path, attempt: int) -> StartFrom:
    """Return where this attempt starts. `resume` is the setting: never, auto, a run or a checkpoint.

    Raise a UserError if it names neither a run nor a checkpoint.
    """
    if resume in ("auto", "never"):
        # A restart continues the run, even if that was a new one at first.
        return Newest() if attempt > 0 or resume == "auto" else Beginning()

    named = Path(resume)
    in_this_run = run_of(named).resolve() == run_dir.resolve()
    if in_this_run and not is_checkpoint(named):
        return Newest()

    # If the attempt before this one died before it could set the later checkpoints aside, they are still the newest.
    if in_this_run and (attempt == 0 or going_back_mark(run_dir).exists()):
        return GoBack(named)

    # A restart goes on from what this run has saved since.
    return Newest(otherwise=named) if attempt > 0 else Named(named)


def step_to_go_back_to(resume: str, run_dir: Path) -> int | None:
    """Return the step of the earlier checkpoint of this run that --resume names; None if it names none."""
    start = choose_start(resume, run_dir, attempt=0)
    return step_in(start.path.resolve().name) if isinstance(start, GoBack) else None


def going_back_mark(run_dir: Path) -> Path:
    """Return the file that exists until the newest checkpoint is the one that --resume named, or follows it."""
    return run_dir / GOING_BACK


# ---- from rank 0 to the others ----


def to_json(start: StartFrom) -> list[Any]:
    return [type(start).__name__, {name: path and str(path) for name, path in vars(start).items()}]


def from_json(encoded: list[Any]) -> StartFrom:
    kinds = {kind.__name__: kind for kind in get_args(StartFrom)}
    name, paths = encoded
    return kinds[name](**{field: path and Path(path) for field, path in paths.items()})
