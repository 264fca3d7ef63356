"""Where a run starts: from its beginning, or from a checkpoint.

Rank 0 decides once, when it opens the run folder (`choose_start`). All later code reads `RunFolder.start_from`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep import files
from lockstep.run_folder.locks import hold
from lockstep.run_folder.names import GOING_BACK
from lockstep.run_folder.paths import read_path, run_of
from lockstep.run_folder.resize import remove_old_requests


@dataclass(frozen=True)
class StartFrom:
    """Where a run starts: from a checkpoint of its own, else from what --resume names, else from its beginning."""

    newest: bool = False  # from the newest valid checkpoint in this run's folder, if it has one
    named: str | None = None  # otherwise from this checkpoint, or from the newest valid one of this run; a full path
    goes_back: bool = False  # `named` is a checkpoint of this run: later ones are set aside once it is loaded

    @property
    def goes_back_to(self) -> str | None:
        """The name of the checkpoint to which the run goes back, perhaps step-N.rewound; None: to none."""
        return Path(self.named).resolve().name if self.named and self.goes_back else None

    def will_load(self, has_checkpoint: bool) -> bool:
        """Return whether a checkpoint will be loaded. `has_checkpoint`: whether this run has one."""
        return self.named is not None or (self.newest and has_checkpoint)


def choose_start(resume: str, run_dir: Path, attempt: int = 0) -> StartFrom:
    """Return where this attempt starts. Raise a UserError if `resume` names neither a run nor a checkpoint.

    resume                          first attempt           a restart
    never                           the beginning           the newest checkpoint of this run
    auto, or this run               the newest              the newest
    a checkpoint of this run        that one                that one, or the newest once the mark is gone
    another run, or one of its      that one                the newest, or that one if this run has none
    a path that is gone             refused                 the newest; an error if this run has none
    """
    if resume in ("auto", "never"):
        # A restart continues the run, even if that was a new one at first.
        return StartFrom(newest=attempt > 0 or resume == "auto")

    # The user's code may change the working folder before the checkpoint is read.
    named = Path(resume)
    full_path = str(named.absolute())

    # The first attempt goes back if a checkpoint of this run is named, and a restart only while the mark is there.
    may_go_back = attempt == 0 or going_back_mark(run_dir).exists()

    # `checkpoint.keep` may have deleted the named checkpoint by now. A restart needs it only if this run has saved
    # nothing.
    if not may_go_back and not named.exists():
        return StartFrom(newest=True, named=full_path)

    in_this_run = run_of(named).resolve() == run_dir.resolve()
    if in_this_run and read_path(named).name is None:
        return StartFrom(newest=True)

    # If the attempt before this one died before it could set the later checkpoints aside, they are still the newest.
    if in_this_run and may_go_back:
        return StartFrom(named=full_path, goes_back=True)

    # A restart goes on from what this run has saved since.
    return StartFrom(newest=attempt > 0, named=full_path)


def going_back_mark(run_dir: Path) -> Path:
    """Return the file that exists while a run goes back to one of its own checkpoints (`GOING_BACK`)."""
    return run_dir / GOING_BACK


@contextmanager
def hold_for_new_job(run_dir: Path, goes_back_to: str | None) -> Iterator[None]:
    """Lock the folder for a new job and remove what an earlier job left."""
    # The lock comes first: it raises if another job holds the folder, whose files must stay.
    with hold(run_dir):
        remove_old_requests(run_dir)
        mark_going_back(run_dir, goes_back_to)
        yield


def mark_going_back(run_dir: Path, checkpoint: str | None) -> None:
    """Have a job go back to the checkpoint of this name, in each of its attempts, until `RunFolder.end_going_back`.

    The launcher announces this checkpoint meanwhile. None: the job goes back to no checkpoint, whatever an earlier job
    did.
    """
    mark = going_back_mark(run_dir)
    if checkpoint is None:
        mark.unlink(missing_ok=True)
    else:
        files.write(mark, checkpoint)
