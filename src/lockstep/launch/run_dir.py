"""Which folder a run lives in, and where it goes on from."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

MANIFEST = "manifest.json"


def new_run_dir(name: str) -> Path:
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def choose_run_dir(asked: str | None, resume: str, name: str) -> Path:
    """`auto` needs a folder by name: a job that is started again would begin at step 0 in a new one, every time."""
    if asked:
        return Path(asked)
    if resume == "auto":
        raise _nothing_to_find_again(newest_unfinished(name))
    if os.environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return Path("runs") / f"{name}-{os.environ['TORCHELASTIC_RUN_ID']}"  # torchrun's restarts must find it again
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        raise UserError(
            "to go on with a run that torchrun has started again",
            "no run_dir, and the default one has a new name every time",
            "type run_dir=FOLDER, or give torchrun --rdzv-id",
        )
    if resume == "never":
        return new_run_dir(name)
    return run_of(Path(resume))


def _nothing_to_find_again(unfinished: Path | None) -> UserError:
    newest = f", or run_dir={unfinished}, the newest one that has not ended" if unfinished else ""
    return UserError(
        "resume=auto without run_dir",
        "no folder to go on in: by default every run gets a new one",
        f"add run_dir=FOLDER, the same each time{newest}",
    )


def refuse_another_run(run: Path, resume: str) -> None:
    """Who does not ask to go on must not write into what an earlier run has left."""
    if resume == "never" and holds_a_run(run):
        raise UserError(
            f"run_dir={run}",
            "a folder that already holds a run",
            "add --resume auto to go on with it; or type another run_dir (without one, every run gets its own folder)",
        )


def newest_unfinished(name: str) -> Path | None:
    ours = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}(-\d+)?")
    runs = [path.parent for path in Path("runs").glob(f"{name}-*/metrics.jsonl") if ours.fullmatch(path.parent.name)]
    unfinished = [run for run in runs if not (run / "summary.json").exists()]
    return max(unfinished, key=lambda run: (run / "metrics.jsonl").stat().st_mtime, default=None)


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).exists()


def run_of(path: Path) -> Path:
    """The run folder that `path`, a run or one of its checkpoints, belongs to."""
    if is_checkpoint(path) and path.resolve().parent.name == "checkpoints":
        return path.resolve().parent.parent
    if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").exists():
        return path
    raise UserError(
        f"--resume {path}",
        "neither the folder of a run nor one of its checkpoints" if path.exists() else "no such folder",
        "type --resume RUN or --resume RUN/checkpoints/step-NNNNNNNN, where RUN is a run's folder; or leave it out",
    )


def prepare(run: Path) -> None:
    """Make the folder, and find out now whether one may write there."""
    try:
        (run / "logs").mkdir(parents=True, exist_ok=True)
        probe = run / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"run_dir={run}",
            f"{error.strerror}: {error.filename or run}",
            "type run_dir=FOLDER, one that you may write to",
        ) from error


def lock(run: Path, patience: float = 10.0) -> Any:
    """One run at a time in a folder: an open file, to be kept. The lock belongs to this process: however it dies, the
    lock is gone. None where the file system knows no locks; then only the owner's token guards the checkpoints."""
    file = (run / ".lock").open("a+")
    deadline = time.monotonic() + patience  # a predecessor that was killed lets go within moments
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise UserError(
                    f"run_dir={run}",
                    f"a process that trains there right now ({_holder(run)})",
                    "wait for it, stop it, or type another run_dir",
                ) from None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return None
    file.truncate(0)
    file.write(f"{os.uname().nodename} {os.getpid()}\n")
    file.flush()
    return file


def _holder(run: Path) -> str:
    host, _, pid = (run / ".lock").read_text().strip().partition(" ")
    return f"process {pid} on {host}" if pid else "unknown"


def latest(checkpoints: Path) -> Path | None:
    """The newest checkpoint, as the text file says that a commit moves forward last. Good enough for a message."""
    try:
        name = (checkpoints / "latest").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return checkpoints / name if re.fullmatch(r"step-\d+", name, re.ASCII) else None


def latest_step(checkpoints: Path) -> int | None:
    found = latest(checkpoints)
    return int(found.name.removeprefix("step-")) if found else None


def ask_for_size(run: Path, count: int) -> None:
    """Leave a note for the launcher of `run`: go on with `count` processes."""
    asked = f"lockstep resize {run} {count}"
    if not (run / ".lock").exists():
        raise UserError(asked, "no folder of a run", "type lockstep resize RUN N")
    if count < 1:
        raise UserError(asked, "no number of processes", "type 1 or more")
    try:
        free = lock(run, patience=0.0)
    except UserError:
        free = None  # somebody trains there, as they should
    if free is not None:
        free.close()
        raise UserError(asked, "a run that is not going on", f"go on with it: --nproc {count} --resume {run}")
    staged = run / ".resize.tmp"
    staged.write_text(f"{count}\n")
    staged.rename(run / "resize")


def holds_a_run(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()
