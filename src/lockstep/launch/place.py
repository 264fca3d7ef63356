"""Which folder a run lives in, and where it goes on from."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lockstep.errors import UserError

MANIFEST = "manifest.json"


def new_run_dir(name: str) -> Path:
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


def choose_run_dir(asked: str | None, resume: str, name: str) -> Path:
    """`auto` without a folder: the newest run of this name that has not ended, or a new one."""
    if asked:
        return Path(asked)
    if resume == "never":
        return new_run_dir(name)
    if resume == "auto":
        return newest_unfinished(name) or new_run_dir(name)
    return run_of(Path(resume))


def newest_unfinished(name: str) -> Path | None:
    runs = [path.parent for path in Path("runs").glob(f"{name}-*/metrics.jsonl")]
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
        "type --resume RUN, --resume RUN/checkpoints/step-NNNNNNNN, or --resume auto",
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


def newest_checkpoint(run: Path) -> str | None:
    """As the text file says that a commit moves forward last."""
    try:
        return str(run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip())
    except OSError:
        return None


def ask_for_size(run: Path, count: int) -> None:
    """Leave a note for the launcher of `run`: go on with `count` processes."""
    run_of(run)
    if count < 1:
        raise UserError(f"lockstep resize {run} {count}", "no number of processes", "type 1 or more")
    staged = run / ".resize.tmp"
    staged.write_text(f"{count}\n")
    staged.rename(run / "resize")


def holds_a_run(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or (path / "checkpoints").exists()
