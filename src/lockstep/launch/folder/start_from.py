"""Where a run starts: from its beginning, or from a checkpoint.

Rank 0 decides once, when it opens the run folder (`choose_start`); everybody else asks `RunFolder.start_from`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lockstep.launch import records
from lockstep.launch.folder.locks import hold
from lockstep.launch.folder.resize import remove_old_requests
from lockstep.launch.folder.run_dir import GOING_BACK, is_checkpoint, run_of

Found = TypeVar("Found", covariant=True)


class Finder(Protocol[Found]):
    """What looks for checkpoints: `Resumer` of lockstep.checkpoint, for example."""

    def find_newest(self) -> Found | None:
        """Find the newest valid checkpoint of this run."""

    def find_named(self, path: Path) -> Found:
        """Find what --resume names."""


@dataclass(frozen=True)
class StartFrom:
    """Where a run starts: one of the four kinds below."""

    @property
    def earlier(self) -> str | None:
        """The name of the checkpoint of this run to which it goes back, perhaps step-N.rewound; None if to none."""
        return None

    def will_load(self, has_checkpoint: Callable[[], bool]) -> bool:
        """Return whether `find` will find something. `has_checkpoint`: whether this run has a checkpoint."""
        return True

    def find(self, finder: Finder[Found]) -> Found | None:
        """Return the checkpoint to load; None if the run starts from its beginning."""
        raise NotImplementedError


@dataclass(frozen=True)
class StartNew(StartFrom):
    """A new run."""

    def will_load(self, has_checkpoint: Callable[[], bool]) -> bool:
        return False

    def find(self, finder: Finder[Found]) -> Found | None:
        return None


@dataclass(frozen=True)
class ResumeNewest(StartFrom):
    """The newest valid checkpoint in this run's folder. If there is none, what --resume named, or the beginning."""

    otherwise: Path | None = None  # what --resume named: a checkpoint, or another run

    def will_load(self, has_checkpoint: Callable[[], bool]) -> bool:
        return self.otherwise is not None or has_checkpoint()

    def find(self, finder: Finder[Found]) -> Found | None:
        newest = finder.find_newest()
        if newest is None and self.otherwise:
            return finder.find_named(self.otherwise)

        return newest


@dataclass(frozen=True)
class ResumeNamed(StartFrom):
    """What --resume names, outside this run's folder: a checkpoint, or a run, whose newest valid checkpoint is used."""

    path: Path

    def find(self, finder: Finder[Found]) -> Found | None:
        return finder.find_named(self.path)


@dataclass(frozen=True)
class ResumeEarlier(StartFrom):
    """A checkpoint of this run that --resume names. Later ones are set aside once it is loaded."""

    path: Path

    @property
    def earlier(self) -> str | None:
        return self.path.resolve().name

    def find(self, finder: Finder[Found]) -> Found | None:
        return finder.find_named(self.path)


def choose_start(resume: str, run_dir: Path, attempt: int) -> StartFrom:
    """Return where this attempt starts. `resume` is the setting: never, auto, a run or a checkpoint.

    Raise a UserError if it names neither a run nor a checkpoint.
    """
    if resume in ("auto", "never"):
        # A restart continues the run, even if that was a new one at first.
        return ResumeNewest() if attempt > 0 or resume == "auto" else StartNew()

    named = Path(resume)
    goes_back = attempt == 0 or going_back_mark(run_dir).exists()

    # By now `checkpoint.keep` may have had it deleted. It is needed only as long as this run has saved nothing.
    if not goes_back and not named.exists():
        return ResumeNewest(otherwise=named)

    in_this_run = run_of(named).resolve() == run_dir.resolve()
    if in_this_run and not is_checkpoint(named):
        return ResumeNewest()

    # If the attempt before this one died before it could set the later checkpoints aside, they are still the newest.
    if in_this_run and goes_back:
        return ResumeEarlier(named)

    # A restart goes on from what this run has saved since.
    return ResumeNewest(otherwise=named) if attempt > 0 else ResumeNamed(named)


def checkpoint_to_go_back_to(resume: str, run_dir: Path) -> str | None:
    """Return the name of the checkpoint of this run that --resume names; None if it names none.

    `resume` and `run_dir`: as in `choose_start`.
    """
    return choose_start(resume, run_dir, attempt=0).earlier


def going_back_mark(run_dir: Path) -> Path:
    """Return the file that exists until the newest checkpoint is the one that --resume named, or follows it."""
    return run_dir / GOING_BACK


@contextmanager
def hold_for_new_job(run: Path, goes_back_to: str | None) -> Iterator[None]:
    """Hold the folder for a job that begins there: nothing that an earlier job has left counts for it.

    `goes_back_to`: see `mark_going_back`.
    """
    # The lock comes first: it raises if another job holds the folder, whose files must stay.
    with hold(run):
        remove_old_requests(run)
        mark_going_back(run, goes_back_to)
        yield


def mark_going_back(run_dir: Path, checkpoint: str | None) -> None:
    """Have a new job go back to the checkpoint of this name, even if its first attempt ends before rank 0 can.

    None: it goes back to none, whatever an earlier job had in mind.
    """
    mark = going_back_mark(run_dir)
    if checkpoint is None:
        mark.unlink(missing_ok=True)
    else:
        records.write(mark, checkpoint)


# ---- from rank 0 to the others ----


def to_json(start: StartFrom) -> list[Any]:
    return [type(start).__name__, {name: path and str(path) for name, path in vars(start).items()}]


def from_json(encoded: list[Any]) -> StartFrom:
    kinds = {kind.__name__: kind for kind in (StartNew, ResumeNewest, ResumeNamed, ResumeEarlier)}
    name, paths = encoded
    return kinds[name](**{field: path and Path(path) for field, path in paths.items()})
